"""The configuration's models. A field's docstring is its description in the JSON Schema and in the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from zeroengine.config import batch, sinks
from zeroengine.config.degrees import DegreesSection
from zeroengine.config.fields import AUTO, NULL, AboveZero, Auto, Between, Count, Folder, NonNegative, Positive, Section
from zeroengine.config.monitor import Monitor, TraceSteps
from zeroengine.config.offload import Aio, OffloadOptimizer, OffloadParam
from zeroengine.config.optimizers import OptimizerConfig
from zeroengine.config.schedulers import NEEDED_PARAMS, SchedulerConfig
from zeroengine.config.source import ConfigSource, walk
from zeroengine.errors import ConfigError

# The default of the numbers that `Config.resolve` fills in. They are never None afterwards, and their types say so.
UNRESOLVED: Any = None
UNSCALED = (
    "the model's parameters are fp16 and fp16 is not enabled: the loss is not scaled, and small gradients vanish. "
    'Write "fp16": {"enabled": true}.'
)

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LONG_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
SPELLINGS = {f"{prefix}{long}": name for long, name in _LONG_NAMES.items() for prefix in ("", "torch.")}


def _spelled(*names: str) -> BeforeValidator:
    """Return a validator that also accepts DeepSpeed's longer spellings of these dtypes."""
    # DeepSpeed accepts several names of one dtype, and only one of them is kept.
    spellings: Any = (*names, *(long for long, name in SPELLINGS.items() if name in names))
    return BeforeValidator(
        lambda value: SPELLINGS.get(value, value) if isinstance(value, str) else value,
        json_schema_input_type=Literal[spellings],
    )


FloatName = Annotated[Literal["fp32", "bf16", "fp16"], _spelled("fp32", "bf16", "fp16")]
BatchSize = Annotated[int, Between(1, batch.MAX_BATCH)]
LowName = Annotated[Literal["bf16", "fp16"], _spelled("bf16", "fp16")]


class LoCo(Section):
    """Error feedback of quantized gradients (LoCo, arXiv 2407.04480). What packing a rank's gradients loses is kept, as
    bf16, and added to its next gradients."""

    err_beta: Annotated[float, Ge(0), Lt(1), AUTO] = 0.8
    """The part of the kept error that stays at each reduce; the rest comes from the latest error."""
    reset_T: Annotated[Positive, AUTO] = 1024
    """Number of reduces of a unit after which its error restarts from zero."""


class ZeroOptimization(Section):
    """What is partitioned over the ranks, and how its communication is divided and overlapped."""

    stage: Annotated[Annotated[int, Between(0, 3)] | Literal["auto"], Auto("auto", words=(), kept=("auto",))] = 0
    """0: nothing is partitioned. 1: the optimizer state. 2: gradients as well. 3: parameters as well. "auto": the
    lowest that fits into free memory; `initialize` says which."""
    degrees: Annotated[DegreesSection | None, NULL] = None
    """Hybrid sharding: the number of ranks that each state is partitioned over, in place of `stage`, which means all
    ranks. null: the stage decides."""
    reduce_bucket_size: Annotated[Positive | None, AUTO] = None
    """Units queue up to this many elements before they are reduced. "auto": as many elements as the largest unit."""
    overlap_comm: Annotated[bool, AUTO] = True
    """Communicate while computing."""
    prefetch_bucket_size: Annotated[Count, AUTO] = 50_000_000
    """Largest number of elements gathered ahead of their use; one unit may exceed it. 0: gather units when needed."""
    param_persistence_threshold: Annotated[Count, AUTO] = 100_000
    """Units with at most this many elements stay gathered at stage 3."""
    max_live_parameters: Annotated[Count, AUTO] = 1_000_000_000
    """Largest number of elements gathered at one time at stage 3. A unit in use is always gathered."""
    zero_quantized_weights: Annotated[bool, AUTO] = False
    """Inexact: at stage 3, gather parameters for forward and backward as integers of 8 bits with a scale for every 256
    (ZeRO++ qwZ). All ranks compute with the rounded values. Masters, checkpoints and `gathered` stay exact."""
    zero_quantized_nontrainable_weights: Annotated[bool, AUTO] = False
    """Inexact: the same for frozen parameters alone. Their shards stay exact, so memory is not saved."""
    zero_quantized_gradients: Annotated[bool, AUTO] = False
    """Inexact: exchange gradients as integers of `quantized_gradient_bits` with a scale for every 256 (ZeRO++ qgZ), and
    add them in fp32."""
    quantized_gradient_bits: Annotated[Literal[8, 4], AUTO] = 8
    """Bits of each integer that zero_quantized_gradients sends. 4 sends half the bytes, and loses far more."""
    zeropp_loco_param: LoCo | None = None
    """Inexact: error feedback of quantized gradients. It takes 2 bytes for every parameter on every rank. null: what
    quantization loses is lost."""
    offload_optimizer: Annotated[OffloadOptimizer, NULL] = OffloadOptimizer()
    """Where the optimizer's states live."""
    offload_param: Annotated[OffloadParam, NULL] = OffloadParam()
    """Where the parameter shards live, at stage 3."""

    @model_validator(mode="before")
    @classmethod
    def _derive_stage(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "stage" in data or not isinstance(data.get("degrees"), dict | DegreesSection):
            return data
        try:
            degrees = DegreesSection.model_validate(data["degrees"])
        except ValidationError:
            # The section itself reports what is wrong.
            return data
        return {**data, "stage": degrees.stage}

    @model_validator(mode="after")
    def _check_degrees(self) -> ZeroOptimization:
        if self.degrees is not None and self.stage != self.degrees.stage:
            partitioned = ("nothing", "the optimizer's state", "gradients too", "parameters too")[self.degrees.stage]
            raise ValueError(
                f"degrees (or DeepSpeed's mics_shard_size and zero_hpz_partition_size) partition {partitioned}, which "
                f"is stage {self.degrees.stage}, and stage is {self.stage!r}; leave stage out, or write "
                f"{self.degrees.stage}"
            )
        if self.degrees is not None and self.degrees.has_second_copy and self.offload_param.device != "none":
            raise ValueError(
                "degrees.secondary_parameters keeps a copy of the parameters in the device's memory, and offload_param "
                "moves them away; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_loco(self) -> ZeroOptimization:
        if self.zeropp_loco_param is not None and not self.zero_quantized_gradients:
            raise ValueError(
                "zeropp_loco_param is the error feedback of quantized gradients, and they are not quantized; write "
                '"zero_quantized_gradients": true, or leave it out'
            )
        return self

    @property
    def gradient_bits(self) -> int | None:
        """The bits of each integer that gradients travel as; None where they travel exactly."""
        return self.quantized_gradient_bits if self.zero_quantized_gradients else None

    def quantizes_gathers(self, trainable: bool) -> bool:
        """Return whether the parameters of a unit, all trainable or all frozen, are gathered inexactly."""
        return self.zero_quantized_weights or (self.zero_quantized_nontrainable_weights and not trainable)

    @property
    def degree_numbers(self) -> dict[str, int] | None:
        """The numbers of `partition.degrees.Degrees`, or None where the stage decides. Needs `resolve`."""
        degrees = self.degrees
        if degrees is None:
            return None
        return degrees.numbers

    @property
    def unit_degree_numbers(self) -> list[tuple[str, dict[str, int]]]:
        """The numbers of `partition.degrees.Degrees` of the units whose names match a pattern. Needs `resolve`."""
        return [(pattern, degrees.numbers) for pattern, degrees in (self.degrees.by_pattern() if self.degrees else [])]

    @model_validator(mode="after")
    def _check_offload(self) -> ZeroOptimization:
        # Whole parameters are needed throughout at lower stages, so there is nothing to move away.
        # With "auto" the choice is left to `initialize`.
        if self.offload_param.device not in ("none", "auto") and self.stage not in (3, "auto"):
            raise ValueError(
                f"offload_param needs parameters that are released between uses, and stage {self.stage} keeps them "
                'whole; write "stage": 3, or offload the optimizer alone'
            )
        return self


class BF16(Section):
    """bfloat16 mixed precision: compute and communicate in bf16, update fp32 master weights."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in bf16. "auto": true if the model's parameters are bf16 and no other precision is enabled."""


class FP16(Section):
    """float16 mixed precision: compute and communicate in fp16 with a scaled loss, update fp32 master weights."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in fp16. "auto": true if the model's parameters are fp16 and no other precision is enabled."""
    loss_scale: Annotated[NonNegative, AUTO] = 0.0
    """Static loss scale. 0: the scale is dynamic."""
    initial_scale_power: Annotated[int, Between(0, 126), AUTO] = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Annotated[Positive, AUTO] = 1000
    """Number of steps without overflow after which the next one doubles the scale."""
    hysteresis: Annotated[Positive, AUTO] = 2
    """The number of the first overflow that halves the scale; later ones halve it too. The count of overflows restarts
    when the scale doubles."""
    consecutive_hysteresis: bool = False
    """Restart the count of `hysteresis` at every step without overflow as well."""
    min_loss_scale: Annotated[AboveZero, AUTO] = 1.0
    """Smallest dynamic scale. An overflow at this scale is an error."""


class TorchAutocast(Section):
    """torch.autocast around the forward. Parameters, gradients and their reduction keep their own dtype."""

    enabled: Annotated[bool, AUTO] = False
    """Run the model under torch.autocast."""
    dtype: Annotated[LowName, AUTO] = "bf16"
    """Dtype that autocast computes in. With fp16 the loss is scaled as the `fp16` section says."""


class DataTypes(Section):
    """Dtypes beside those of parameters and computation."""

    grad_accum_dtype: Annotated[FloatName | None, AUTO] = None
    """Dtype that gradients accumulate in. "auto": the compute dtype if gradient_accumulation_steps is 1, else fp32."""
    buffer_dtype: Annotated[FloatName | None, AUTO] = None
    """Dtype that floating-point buffers of the model are cast to. null: buffers keep their dtypes."""


class Checkpoint(Section):
    """How checkpoints are saved."""

    keep: Annotated[Positive | None, AUTO] = None
    """Number of checkpoints that stay in a folder, the newest. null: all of them."""
    async_save: Annotated[bool, AUTO] = False
    """Continue training while a copy in CPU memory is written. The next save, or the exit, waits for it."""
    on_signal: Annotated[Literal["SIGUSR1", "SIGUSR2"] | None, AUTO] = None
    """When a rank receives this signal, all ranks save in `directory` after the same step, about a second or two steps
    later, and end with exit code 75. null: the signal is left to the script."""
    directory: Annotated[Folder | None, AUTO] = None
    """Folder that `on_signal` saves in, as for `save_checkpoint(directory)`."""

    @model_validator(mode="after")
    def _check_directory(self) -> Checkpoint:
        if self.on_signal and not self.directory:
            raise ValueError('on_signal needs a folder to save in; write "directory": "runs/a" beside it')
        return self


class Comm(Section):
    """How ranks communicate."""

    timeout_seconds: Annotated[float, Gt(0), Le(1e9)] = 600.0
    """Seconds after which a stalled collective is an error that names the unit and the ranks."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """On CPU: shared memory between the ranks of one machine, or Gloo. "auto": shared memory where it is available, and
    Gloo between machines."""
    register_buffers: Literal[False, True, "symmetric"] = False
    """On NCCL: take the memory of collectives from registered pools, so that NCCL needs no copies of its own.
    "symmetric" is an older value that means true."""


def _finite_or_never(value: Any) -> Any:
    """Return None for infinity, which accelerate writes as a steps_per_print that never prints."""
    return None if value == float("inf") else value


class Config(Section):
    """A configuration. `resolve` fills in the values that depend on the world size and the model."""

    schema_url: Annotated[str | None, Field(alias="$schema", exclude=True)] = None
    """The JSON Schema that editors check the file with, such as "./schema.json"."""
    train_batch_size: Annotated[BatchSize, AUTO] = UNRESOLVED
    """Samples per step over all ranks: micro-batch size x accumulation steps x ranks."""
    train_micro_batch_size_per_gpu: Annotated[BatchSize, AUTO] = UNRESOLVED
    """Samples per micro-step and rank. A rank is a GPU or, on CPU, a process. 1 if the other sizes do not decide."""
    gradient_accumulation_steps: Annotated[BatchSize | Literal["manual"], AUTO] = UNRESOLVED
    """Micro-steps per step. 1 if the other sizes do not decide. "manual": a step has as many backwards as the loop runs
    before it; their gradients are summed in fp32, and only the mean over ranks is taken."""
    gradient_clipping: Annotated[NonNegative, AUTO] = 0.0
    """Largest global norm of the gradient. 0: no clipping."""
    optimizer: OptimizerConfig | None = None
    """The optimizer, if none is passed to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule, if none is passed to `initialize`."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is partitioned, and how its communication is divided and overlapped."""
    bf16: BF16 = BF16()
    """bfloat16 mixed precision."""
    fp16: FP16 = FP16()
    """float16 mixed precision with loss scaling."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """torch.autocast around the forward."""
    keep_fp32_modules: Annotated[list[str] | None, AUTO] = None
    """Patterns of module or class names, such as "*norm*" or "LayerNorm", that keep fp32 under bf16 or fp16. BatchNorm
    always keeps it, for its running statistics, unless buffer_dtype casts them."""
    communication_data_type: Annotated[FloatName | None, AUTO] = None
    """Dtype that gradients are reduced in. "auto": the compute dtype, or that of accumulated unsharded gradients."""
    data_types: DataTypes = DataTypes()
    """Dtypes beside those of parameters and computation."""
    optimizer_state_dtype: Annotated[Literal["fp32", "bf16"], AUTO] = "fp32"
    """Dtype of Adam's moments. bf16 is rounded stochastically and saves 4 bytes per parameter."""
    check_grad_overflow: Annotated[bool, AUTO] = True
    """In bf16 and fp32: skip a step whose gradient is not finite. false: update with it, as plain PyTorch does."""
    prescale_gradients: Annotated[bool, AUTO] = False
    """Divide gradients by the number of ranks before the sum instead of after it, so that fp16 sums overflow less."""
    gradient_predivide_factor: Annotated[AboveZero, AUTO] = 1.0
    """Without prescale_gradients: divide by this factor before the sum, and by the ranks over this factor after it."""
    steps_per_print: Annotated[Positive | None, BeforeValidator(_finite_or_never), AUTO] = None
    """Number of steps between two lines of progress on rank 0. null: none are printed."""
    dump_state: bool = False
    """Print the resolved configuration on rank 0 at the start."""
    memory_check: Annotated[Literal["error", "warn", "off"], AUTO] = "error"
    """What `initialize` does where states, buffers and gathered units will not fit into free memory: refuse, warn, or
    nothing."""
    units: list[str] | None = None
    """Patterns of module names, such as "layers.*". Each module that matches is one unit. null: units are chosen
    automatically."""
    checkpoint: Checkpoint = Checkpoint()
    """How checkpoints are saved."""
    comm: Comm = Comm()
    """How ranks communicate."""
    aio: Aio = Aio()
    """How files on NVMe are read and written."""
    monitor: Monitor = Monitor()
    """What is recorded of each step."""
    trace: TraceSteps = TraceSteps()
    """Steps whose timeline is written."""
    tensorboard: Annotated[sinks.TensorBoard, NULL] = sinks.TensorBoard()
    """TensorBoard's event files."""
    csv_monitor: Annotated[sinks.CSVMonitor, NULL] = sinks.CSVMonitor()
    """CSV files."""
    wandb: Annotated[sinks.WeightsAndBiases, NULL] = sinks.WeightsAndBiases()
    """Weights & Biases."""
    comet: Annotated[sinks.Comet, NULL] = sinks.Comet()
    """Comet."""
    mlflow: Annotated[sinks.MLflow, NULL] = sinks.MLflow()
    """MLflow."""
    wall_clock_breakdown: Annotated[bool, AUTO] = False
    """Print where the time of a step went, every steps_per_print or 10 steps."""
    memory_breakdown: Annotated[bool, AUTO] = False
    """Print the bytes of every state, every steps_per_print or 10 steps."""
    timers: Annotated[sinks.Timers, NULL] = sinks.Timers()
    """Lines with the rate of training."""
    flops_profiler: Annotated[sinks.FlopsProfile, NULL] = sinks.FlopsProfile()
    """Parameters, FLOPs and time by module."""
    comms_logger: Annotated[sinks.CommsLogger, NULL] = sinks.CommsLogger()
    """Collectives by operation and unit."""

    _notices: tuple[str, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="the configuration")
    # `load` sets these two: the keys as they were written, and the function that fills in more and checks the result.
    _written: ConfigSource | None = PrivateAttr(default=None)
    _fill: Callable[[Config, ConfigSource, Mapping[str, Any], str, bool], Config] | None = PrivateAttr(default=None)

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences that the user should read: keys without effect here, and the values of "auto"."""
        return self._notices

    @property
    def low_precision(self) -> torch.dtype | None:
        """The dtype, bf16 or fp16, of parameters with fp32 master weights; None where parameters keep their dtype."""
        return torch.bfloat16 if self.bf16.enabled else torch.float16 if self.fp16.enabled else None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that torch.autocast computes in, or None where it is off."""
        return FLOATS[self.torch_autocast.dtype] if self.torch_autocast.enabled else None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be fp16 in backward, so that the loss is scaled."""
        # bf16 has the exponent range of fp32, so only fp16 gradients need a scale.
        return torch.float16 in (self.low_precision, self.autocast_dtype)

    @property
    def manual_accumulation(self) -> bool:
        """Whether the caller ends each step, after any number of backwards."""
        return self.gradient_accumulation_steps == batch.MANUAL

    @property
    def micro_steps_in_mean(self) -> int:
        """The number of micro-steps that the gradient is the mean of: 1 in manual accumulation. Needs `resolve`."""
        return 1 if self.manual_accumulation else int(self.gradient_accumulation_steps)

    def predivide(self, world_size: int) -> float:
        """Return the number that gradients are divided by before they are summed over `world_size` ranks."""
        return float(world_size) if self.prescale_gradients else self.gradient_predivide_factor

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype that gradients of parameters of `dtype` are reduced in; None: a dtype that needs no cast."""
        name = self.communication_data_type
        # Parameters of other dtypes, such as fp64, are left alone, since a cast would lose precision.
        return FLOATS[name] if name is not None and dtype in FLOATS.values() else None

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that gradients of parameters of `dtype` accumulate in. Needs `resolve`."""
        if dtype not in FLOATS.values():
            return dtype
        name = self.data_types.grad_accum_dtype
        if name is None:
            # Adding several micro-steps in 16 bits would lose small gradients.
            several = self.manual_accumulation or self.micro_steps_in_mean > 1
            return torch.float32 if several else dtype
        return FLOATS[name]

    def fill_auto(
        self, values: Mapping[str, Any], *, framework: str = "the framework", must_match: bool = True
    ) -> Config:
        """Return the configuration with the keys filled in that the file leaves to a framework.

        A key is filled in if it is `"auto"` or null in the file, or if it is absent and `"auto"` stands for its
        default. Keys of an optimizer or schedule that the file does not name are left out. Fill in before `resolve`.

        Args:
            values: Values by dotted key, such as `{"optimizer.params.lr": 3e-4, "bf16.enabled": True}`. None: the
                framework says nothing of the key. Second spellings of DeepSpeed are accepted.
            framework: The name that messages give to the origin of the values, such as "TrainingArguments".
            must_match: Whether a value in the file that differs is an error. False: it stays.

        Returns:
            A new configuration, checked as if the file had these values.

        Raises:
            ConfigError: A key is unknown, a value is wrong, or values in the file differ. The message lists all of
                them, with the values of both sides and what to write.
        """
        if self._written is None or self._fill is None:
            raise ConfigError("fill_auto needs a configuration that was loaded; write zeroengine.config.load(file).")
        return self._fill(self, self._written, values, framework, must_match)

    def resolve(
        self,
        *,
        world_size: int,
        model_dtype: torch.dtype | None = None,
        ranks_per_node: int | None = None,
        shard_ranks: int | None = None,
    ) -> Config:
        """Return the configuration with the batch sizes, the precision and the degrees filled in.

        Args:
            world_size: The number of ranks.
            model_dtype: The dtype of the model's parameters, which decides `"enabled": "auto"` of bf16 and fp16.
            ranks_per_node: The number of ranks of each machine. None: the degree "node" stays.
            shard_ranks: The number of ranks that a mesh for hybrid sharding partitions over. None: there is none.

        Raises:
            ConfigError: The batch sizes contradict one another, degrees do not divide the ranks, or the schedule lacks
                a number that nothing filled in.
        """
        self._check_schedule()
        sizes = batch.resolve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=world_size,
            source=self._source,
        )
        # An explicit precision wins over the dtype of the model's parameters.
        model_decides = not self._enabled()
        bf16, fp16 = (
            section.model_copy(update={"enabled": model_decides and model_dtype is dtype})
            if section.enabled is None
            else section
            for section, dtype in ((self.bf16, torch.bfloat16), (self.fp16, torch.float16))
        )
        zero = self.zero_optimization
        if zero.degrees is not None or shard_ranks is not None:
            try:
                degrees = zero.degrees and zero.degrees.over(world_size, ranks_per_node)
                if shard_ranks is not None:
                    degrees = DegreesSection.of_mesh(degrees, zero.stage, shard_ranks)
                zero = zero.model_copy(update={"degrees": degrees})
            except ValueError as error:
                raise ConfigError(f"{self._source}: zero_optimization: {error}") from None
        resolved = self.model_copy(update={**sizes, "bf16": bf16, "fp16": fp16, "zero_optimization": zero})
        # The model may be fp16 on purpose, so this is a notice and no error. It is given once.
        if model_dtype is torch.float16 and not resolved._enabled() and UNSCALED not in self._notices:
            resolved._notices = (*self._notices, UNSCALED)
        return resolved

    def _check_schedule(self) -> None:
        """Refuse "auto" where it has no default and no framework has filled in a value."""
        for name, value in self.scheduler.params.items() if self.scheduler is not None else ():
            if value is None and name in NEEDED_PARAMS:
                path = f"scheduler.params.{name}"
                label = self._written.label(tuple(path.split("."))) if self._written is not None else path
                raise ConfigError(
                    f'{self._source}: {label}: found "auto", which has no default here; write {NEEDED_PARAMS[name]}, '
                    f'or fill it in: config.fill_auto({{"{path}": ...}}).'
                )

    def _enabled(self) -> list[str]:
        return [name for name in ("bf16", "fp16", "torch_autocast") if getattr(self, name).enabled]

    @model_validator(mode="after")
    def _check_agreement(self) -> Config:
        contradictions = []
        # Each of these precisions decides by itself which dtype a module computes in.
        if len(names := self._enabled()) > 1:
            contradictions.append(
                f"{' and '.join(names)} are enabled, and one of bf16, fp16 and torch_autocast can be; write "
                f'"{names[-1]}": {{"enabled": false}}'
            )
        if self.gradient_accumulation_steps == batch.MANUAL and self.train_batch_size is not None:
            contradictions.append(batch.manual_with_train(self.train_batch_size))
        if contradictions:
            raise ValueError("; and ".join(contradictions))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON types, from which `load` makes an equal configuration."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """Return a table of every value, for people to read."""
        leaves = ((path, value) for path, value in walk(self.to_dict()) if not isinstance(value, dict) or not value)
        rows = [(".".join(path), value) for path, value in leaves]
        width = max(len(path) for path, _ in rows)
        return "\n".join([f"{self._source}:", *(f"  {path:<{width}}  {json.dumps(value)}" for path, value in rows)])
