"""The configuration's models. A field's docstring is its description in the JSON Schema and in the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from zeroengine.config import batch, sinks
from zeroengine.config.degrees import DegreesSection
from zeroengine.config.digests import Digests, Replay
from zeroengine.config.ema import Ema
from zeroengine.config.fields import AUTO, NULL, AboveZero, Between, Folder, NonNegative, Positive, Section
from zeroengine.config.local_steps import LocalStepsField
from zeroengine.config.monitor import Monitor, TraceSteps
from zeroengine.config.offload import ActivationCheckpointing, Aio
from zeroengine.config.optimizers import EIGHT_BIT_TYPES, OptimizerConfig
from zeroengine.config.precision import BF16, FLOATS, FP16, STATE_DTYPES, DataTypes, FloatName, TorchAutocast
from zeroengine.config.schedulers import NEEDED_PARAMS, SchedulerConfig
from zeroengine.config.skip_steps import SkipSteps
from zeroengine.config.snapshots import Snapshots
from zeroengine.config.source import ConfigSource, walk
from zeroengine.config.tensor_parallel import ExpertParallel, TensorParallel
from zeroengine.config.tiling import Tiling
from zeroengine.config.zero import ZeroOptimization
from zeroengine.errors import ConfigError
from zeroengine.utils.formats import parse_byte_size

# The default of the numbers that `Config.resolve` fills in. They are never None afterwards, and their types say so.
UNRESOLVED: Any = None
UNSCALED = (
    "the model's parameters are fp16 and fp16 is not enabled: the loss is not scaled, and small gradients vanish. "
    'Write "fp16": {"enabled": true}.'
)
# The loss scale is a part of each step, and replicas take their own.
SCALED_REPLICAS = (
    "local_steps and fp16 do not go together, because the loss scales of the replicas would differ; write "
    '"bf16": {"enabled": true} in place of fp16'
)

BatchSize = Annotated[int, Between(1, batch.MAX_BATCH)]


def _byte_size(value: Any) -> Any:
    return parse_byte_size(value) if isinstance(value, str) else value


MemoryLimit = Annotated[int, BeforeValidator(_byte_size, json_schema_input_type=int | str), Gt(0)] | None


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
    """Folder that `on_signal` and the end of a run by `skip_steps` save in, as for `save_checkpoint(directory)`."""

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
    Gloo between machines. Shared memory lies in huge pages (2 MiB) on Linux 6.1 and later, unless
    `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `deny`."""
    register_buffers: Annotated[bool, AUTO] = False
    """On GPUs with NCCL: keep the buffers of collectives in memory that NCCL registers, which leaves more of a GPU to
    the model where NVLink or the network can reduce by itself. Such memory serves nothing else once allocated."""


def _finite_or_never(value: Any) -> Any:
    """Return None for infinity, which accelerate writes as a steps_per_print that never prints."""
    return None if value == float("inf") else value


def _lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


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
    before it; their gradients are summed, and only the mean over ranks is taken."""
    gradient_clipping: Annotated[NonNegative, AUTO] = 0.0
    """Largest global norm of the gradient. 0: no clipping."""
    optimizer: OptimizerConfig | None = None
    """The optimizer, if none is passed to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule, if none is passed to `initialize`."""
    sequence_parallel_size: Annotated[Positive, AUTO] = 1
    """Number of consecutive ranks that share each sample, and have a part of its tokens each. States are partitioned
    over all ranks as without it. 1: every rank has samples of its own."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is partitioned, and how its communication is divided and overlapped."""
    tensor_parallel: Annotated[TensorParallel, NULL] = TensorParallel()
    """Layers that are split over ranks."""
    expert_parallel: Annotated[ExpertParallel, NULL] = ExpertParallel()
    """Experts that are split over ranks."""
    local_steps: LocalStepsField = None
    """Replicas that take steps of their own and are averaged after some of them. null: every step is one of all
    ranks."""
    ema: Annotated[Ema | None, NULL] = None
    """A moving average of the weights, for evaluation and export. null: none is kept."""
    skip_steps: Annotated[SkipSteps | None, NULL] = None
    """Steps that change nothing because their loss or gradient norm is far from the usual. null: none is skipped so."""
    bf16: BF16 = BF16()
    """bfloat16 mixed precision."""
    fp16: FP16 = FP16()
    """float16 mixed precision with loss scaling."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """torch.autocast around the forward."""
    keep_fp32_modules: Annotated[list[str] | None, AUTO] = None
    """Patterns of module or class names, such as "*norm*" or "LayerNorm", that keep fp32 under bf16 or fp16. BatchNorm
    always keeps it, for its running statistics, unless buffer_dtype casts them."""
    keep_dtype: Annotated[list[str] | None, AUTO] = None
    """Patterns of names of parameters and buffers, such as "*.packed" or "*.router.weight", that keep their own dtype
    under bf16 or fp16. Bytes that are packed in floats, as of 4-bit weights, mean nothing in another dtype."""
    communication_data_type: Annotated[FloatName | None, AUTO] = None
    """Dtype that gradients are reduced in. "auto": the compute dtype, or that of accumulated unsharded gradients."""
    data_types: DataTypes = DataTypes()
    """Dtypes beside those of parameters and computation."""
    optimizer_state_dtype: Annotated[Literal["fp32", "bf16", "int8"] | None, AUTO] = None
    """Dtype of the moments of Adam, AdamW, Lion, SGD and Adagrad, rounded stochastically if it is not fp32. bf16 saves
    4 of Adam's 8 bytes a parameter. int8 keeps 8 bits for each element and a scale for each block of 256, and saves 6
    of them, where a parameter has 4,096 elements or more and is no embedding. null: what the optimizer's type says,
    else fp32."""
    check_grad_overflow: Annotated[bool, AUTO] = True
    """In bf16 and fp32: skip a step whose gradient is not finite. false: update with it, as plain PyTorch does."""
    check_parameter_writes: Annotated[bool, AUTO] = False
    """For debugging: find what is written into parameters through `.data`, which leaves no other trace, by digests of
    all values in each forward, backward and step."""
    prescale_gradients: Annotated[bool, AUTO] = False
    """Divide gradients by the number of ranks before the sum instead of after it, so that fp16 sums overflow less."""
    gradient_predivide_factor: Annotated[AboveZero, AUTO] = 1.0
    """Without prescale_gradients: divide by this factor before the sum, and by the ranks over this factor after it."""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower_case), NULL] = "mean"
    """What the gradients of the ranks become: their mean, or their sum, where the loss of each rank is divided by a
    number of all ranks already. Micro-steps are averaged in both. Losses with a weight have a mean of their own."""
    managed_gradient_accumulation: Annotated[bool, NULL] = True
    """Whether `step()` counts micro-steps, and updates in the last one. false: every `step()` updates, after any number
    of backwards, and the mean is over `gradient_accumulation_steps` even so."""
    steps_per_print: Annotated[Positive | None, BeforeValidator(_finite_or_never), AUTO] = None
    """Number of steps between two lines of progress on rank 0: the loss, the learning rates, the norm of the gradient
    and the steps per second. null: none are printed."""
    dump_state: bool = False
    """Print the resolved configuration on rank 0 at the start."""
    memory_check: Annotated[Literal["error", "warn", "off"], AUTO] = "error"
    """What `initialize` does where states, buffers and gathered units will not fit into free memory: refuse, warn, or
    nothing."""
    on_out_of_memory: Annotated[Literal["raise", "lower"], AUTO] = "raise"
    """What a forward or a backward does for which a rank has too little memory: raise, or let all ranks go on with the
    next setting that takes less (a higher stage, then offload), and take the step again, with the same numbers. It
    costs a message of all ranks a micro-step."""
    memory_limit: Annotated[MemoryLimit, NULL] = None
    """The most resident memory of a rank's process on a CPU, such as "2GB". Above it a forward raises the error of a
    full memory. null: no limit."""
    units: list[str] | None = None
    """Patterns of module names, such as "layers.*". Each module that matches is one unit. What another pattern matches
    inside of it is a unit of its own: ["layers.*", "layers.*.experts.*"]. null: units are chosen automatically."""
    tiling: Annotated[Tiling, NULL] = Tiling()
    """Losses and MLPs that compute a part of the tokens at a time."""
    checkpoint: Checkpoint = Checkpoint()
    """How checkpoints are saved."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """Where activation checkpoints keep their inputs."""
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
    digests: Annotated[Digests, NULL] = Digests()
    """Digests of the states, which show where two runs differ, and where a replica does."""
    replay: Annotated[Replay, NULL] = Replay()
    """What zero-replay needs to take a step again."""
    snapshots: Annotated[Snapshots, NULL] = Snapshots()
    """Copies of the states in the memory of hosts, from which a run goes on when a host is lost."""

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
    def state_dtype(self) -> torch.dtype:
        """The dtype of the moments of parameters that are not too small for it: fp32, bf16, or uint8 for 8 bits."""
        return STATE_DTYPES[next(filter(None, self._state_dtypes().values()), "fp32")]

    @property
    def has_low_masters(self) -> bool:
        """Whether parameters in bf16 or fp16 are updated themselves, without fp32 master weights."""
        in_bf16 = self.bf16.enabled and self.bf16.bf16_master_weights_and_grads
        return bool(in_bf16 or (self.fp16.enabled and self.fp16.fp16_master_weights_and_grads))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that torch.autocast computes in, or None where it is off."""
        return FLOATS[self.torch_autocast.dtype] if self.torch_autocast.enabled else None

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The dtype that the bf16, fp16 and torch_autocast sections let modules compute in; "fp32" where none does."""
        if self.torch_autocast.enabled:
            return self.torch_autocast.dtype
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be fp16 in backward, so that the loss is scaled."""
        # bf16 has the exponent range of fp32, so only fp16 gradients need a scale.
        return self.precision == "fp16"

    @property
    def manual_accumulation(self) -> bool:
        """Whether the caller ends each step, after any number of backwards."""
        return self.gradient_accumulation_steps == batch.MANUAL or not self.managed_gradient_accumulation

    @property
    def micro_steps_in_mean(self) -> int:
        """The number of micro-steps that the gradient is the mean of: 1 where that is "manual". Needs `resolve`."""
        steps = self.gradient_accumulation_steps
        return 1 if steps == batch.MANUAL else int(steps)

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
            return torch.float32 if several and not self.has_low_masters else dtype
        return FLOATS[name]

    def with_manual_accumulation(self) -> Config:
        """Return the configuration for a framework that ends each step, and divides the loss itself."""
        return self.model_copy(update={"gradient_accumulation_steps": batch.MANUAL, "train_batch_size": None})

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

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that get the same batches, by this configuration alone: a model may be split already."""
        return max(self.sequence_parallel_size, self.tensor_parallel.autotp_size, 1)

    def resolve(
        self,
        *,
        world_size: int,
        model_dtype: torch.dtype | None = None,
        ranks_per_node: int | None = None,
        shard_ranks: int | None = None,
        ranks_per_model: int | None = None,
    ) -> Config:
        """Return the configuration with the batch sizes, the precision and the degrees filled in.

        Args:
            world_size: The number of ranks.
            model_dtype: The dtype of the model's parameters, which decides `"enabled": "auto"` of bf16 and fp16.
            ranks_per_node: The number of ranks of each machine. None: the degree "node" stays.
            shard_ranks: The number of ranks that a mesh for hybrid sharding partitions over. None: there is none.
            ranks_per_model: The number of ranks that hold one model together, each group of which counts as one rank.
                None: `tensor_parallel.autotp_size`.

        Raises:
            ConfigError: The batch sizes contradict one another, degrees do not divide the ranks, there are not several
                replicas for `local_steps`, or the schedule lacks a number that nothing filled in.
        """
        self._check_schedule()
        if ranks_per_model is None:
            ranks_per_model = max(self.tensor_parallel.autotp_size, 1)
            if world_size % ranks_per_model:
                raise ConfigError(
                    f"{self._source}: tensor_parallel.autotp_size is {ranks_per_model}, and the number of ranks, "
                    f"{world_size}, is no multiple of it"
                )
        world_size //= ranks_per_model
        sizes = batch.resolve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=world_size,
            group_size=self.sequence_parallel_size,
            ranks_per_model=ranks_per_model,
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
        zero, local_steps, of_what = self.zero_optimization, self.local_steps, ""
        try:
            if local_steps is not None:
                local_steps = local_steps.over(world_size, ranks_per_node, zero.degrees, shard_ranks)
                if isinstance(local_steps.replica_ranks, int):
                    world_size, of_what = local_steps.replica_ranks, " of a replica (local_steps)"
            degrees = zero.degrees and zero.degrees.over(world_size, ranks_per_node, of_what)
            if shard_ranks is not None:
                degrees = DegreesSection.of_mesh(degrees, zero.stage, shard_ranks)
        except ValueError as error:
            raise ConfigError(f"{self._source}: {error}") from None
        zero = zero.model_copy(update={"degrees": degrees})
        resolved = self.model_copy(
            update={**sizes, "bf16": bf16, "fp16": fp16, "zero_optimization": zero, "local_steps": local_steps}
        )
        # The model's dtype may have enabled fp16.
        if local_steps is not None and resolved.scales_loss:
            raise ConfigError(f"{self._source}: {SCALED_REPLICAS}")
        # The model may be fp16 on purpose, so this is a notice and no error. It is given once.
        if model_dtype is torch.float16 and not resolved._enabled() and UNSCALED not in self._notices:
            resolved._notices = (*self._notices, UNSCALED)
        steps = resolved.gradient_accumulation_steps
        notices = (self._resolved_autos_notice(resolved), resolved.coarse_sums_notice(steps))
        resolved._notices = (*resolved._notices, *(text for text in notices if text and text not in self._notices))
        return resolved

    def _resolved_autos_notice(self, resolved: Config) -> str | None:
        """Return what stands for the batch sizes and precisions that are "auto" and that nothing has filled in."""
        written = {} if self._written is None else self._written.tree
        paths = [path for path, value in walk(written) if value == "auto"]
        if not paths:
            # The planner resolves thousands of configurations.
            return None
        values, before = dict(walk(resolved.to_dict())), dict(walk(self.to_dict()))
        autos = [
            f"{'.'.join(path)} = {json.dumps(values[path])}"
            for path in paths
            if before.get(path, 0) is None and values[path] is not None
        ]
        return f'"auto" stands for {", ".join(autos)}.' if autos else None

    def coarse_sums_notice(self, micro_steps: int | str) -> str | None:
        """Return what is lost where the gradients of so many micro-steps add up in 16 bits; None where they do not."""
        dtype = self.accumulation_dtype(self.low_precision or torch.float32)
        if dtype is torch.float32 or micro_steps == 1:
            return None
        # Each addition rounds to this part of the sum, so that many equal gradients are the most that a sum can have.
        parts = round(2 / torch.finfo(dtype).eps)
        name = next(name for name, low in FLOATS.items() if low is dtype)
        lost = f"each addition may lose 1/{parts} of the sum"
        if not isinstance(micro_steps, str):
            lost += f", {micro_steps} of them up to {min(1, (micro_steps - 1) / parts):.1%}"
        return (
            f"the gradients of micro-steps add up in {name}, and {lost}. "
            'Write "data_types": {"grad_accum_dtype": "fp32"} to add in fp32.'
        )

    def replica_ranks(self, world_size: int) -> int:
        """Return the number of ranks that hold every state once: those of a replica, or all. Needs `resolve`."""
        return world_size if self.local_steps is None else int(self.local_steps.replica_ranks or world_size)

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
        # Each of these precisions decides by itself which dtype a module computes in. Parameters without fp32 masters
        # have 16 bits as in plain PyTorch, where autocast of that dtype computes some operations in fp32.
        is_pure = self.has_low_masters and self.autocast_dtype in (None, self.low_precision)
        if len(names := [name for name in self._enabled() if name != "torch_autocast" or not is_pure]) > 1:
            raise ValueError(
                f"{' and '.join(names)} are enabled, and one of bf16, fp16 and torch_autocast can be; write "
                f'"{names[-1]}": {{"enabled": false}}'
            )
        if self.gradient_accumulation_steps == batch.MANUAL and self.train_batch_size is not None:
            raise ValueError(batch.manual_with_train(self.train_batch_size))
        if self.local_steps is not None and self.scales_loss:
            raise ValueError(SCALED_REPLICAS)
        if self.local_steps is not None and self.sequence_parallel_size > 1:
            raise ValueError(
                "local_steps and sequence_parallel_size do not go together, because the ranks of a sample take every "
                'step together; write "local_steps": null, or "sequence_parallel_size": 1'
            )
        if self.local_steps is not None and self.ema is not None:
            raise ValueError(
                "local_steps and ema do not go together, because replicas would have different averages between "
                'rounds; write "ema": null, or "local_steps": null'
            )
        if self.local_steps is not None and self.skip_steps is not None:
            raise ValueError(
                "local_steps and skip_steps do not go together, because replicas would skip different steps; write "
                '"skip_steps": null, or "local_steps": null'
            )
        named = {name: dtype for name, dtype in self._state_dtypes().items() if dtype is not None}
        if len(set(named.values())) > 1:
            raise ValueError(f"{' and '.join(named)} name different dtypes of moments; write one of them")
        return self

    def without_optimizer(self) -> Config:
        """Return the configuration for an optimizer that was made of its section, whose type may name a state dtype."""
        named = next(filter(None, self._state_dtypes().values()), None)
        states = {} if named is None else {"optimizer_state_dtype": named}
        return self.model_copy(update={"optimizer": None, **states})

    def _state_dtypes(self) -> dict[str, str | None]:
        """Return the dtype of moments that each key names."""
        has_eight_bits = self.optimizer is not None and self.optimizer.type in EIGHT_BIT_TYPES
        return {
            "optimizer_state_dtype": self.optimizer_state_dtype,
            "optimizer.type": "int8" if has_eight_bits else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the values as JSON types, from which `load` makes an equal configuration."""
        return self.model_dump(mode="json")

    def describe(self) -> str:
        """Return a table of every value, for people to read."""
        leaves = ((path, value) for path, value in walk(self.to_dict()) if not isinstance(value, dict) or not value)
        rows = [(".".join(path), value) for path, value in leaves]
        width = max(len(path) for path, _ in rows)
        return "\n".join([f"{self._source}:", *(f"  {path:<{width}}  {json.dumps(value)}" for path, value in rows)])
