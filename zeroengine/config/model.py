"""The configuration's models. Each field's docstring is its description in the JSON Schema and in the docs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from zeroengine.config import batch
from zeroengine.config.fields import AUTO, NULL, WHOLE, AboveZero, Auto, Count, Folder, NonNegative, Positive, Section
from zeroengine.config.offload import Aio, OffloadOptimizer, OffloadParam
from zeroengine.config.optimizers import OptimizerConfig
from zeroengine.config.schedulers import SchedulerConfig

UNRESOLVED: Any = None  # of a number that `resolve` fills in
UNSCALED = (
    "the model's parameters are fp16 and fp16 is not enabled: the loss is not scaled, and small gradients vanish. "
    'Write "fp16": {"enabled": true}.'
)

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LONG = {"fp32": ("float32", "float"), "bf16": ("bfloat16",), "fp16": ("float16", "half")}
SPELLINGS = {f"{torch_}{long}": name for name, longs in _LONG.items() for long in longs for torch_ in ("", "torch.")}


def _spelled(*names: str) -> BeforeValidator:
    """Takes DeepSpeed's longer spellings too."""
    every: Any = (*names, *(long for long, name in SPELLINGS.items() if name in names))
    return BeforeValidator(
        lambda value: SPELLINGS.get(value, value) if isinstance(value, str) else value,
        json_schema_input_type=Literal[every],
    )


FloatName = Annotated[Literal["fp32", "bf16", "fp16"], _spelled("fp32", "bf16", "fp16")]
BatchSize = Annotated[int, Ge(1), Le(batch.MAX_BATCH), WHOLE]
LowName = Annotated[Literal["bf16", "fp16"], _spelled("bf16", "fp16")]


class ZeroOptimization(Section):
    """What is partitioned over the ranks, and how its communication is cut and overlapped."""

    stage: Annotated[int, Ge(0), Le(3), WHOLE] = 0
    """0: nothing is partitioned. 1: the optimizer state. 2: and the gradients. 3: and the parameters."""
    reduce_bucket_size: Annotated[Positive | None, AUTO] = None
    """Elements reduced by one collective, at most. "auto": as many as the largest unit has."""
    overlap_comm: Annotated[bool, AUTO] = True
    """Communicate while computing."""
    prefetch_bucket_size: Annotated[Count, AUTO] = 50_000_000
    """Elements gathered ahead of use, at most, or one unit. 0: gather each unit when it is needed."""
    param_persistence_threshold: Annotated[Count, AUTO] = 100_000
    """Units with at most this many elements stay gathered at stage 3."""
    max_live_parameters: Annotated[Count, AUTO] = 1_000_000_000
    """Elements gathered at one time at stage 3, at most; a unit in use is always gathered."""
    offload_optimizer: Annotated[OffloadOptimizer, NULL] = OffloadOptimizer()
    """Where the optimizer's states live."""
    offload_param: Annotated[OffloadParam, NULL] = OffloadParam()
    """Where the parameter shards live, at stage 3."""

    @model_validator(mode="after")
    def _partitioned_parameters(self) -> ZeroOptimization:
        if self.offload_param.device != "none" and self.stage != 3:
            raise ValueError(
                f"offload_param needs parameters that are released between uses, and stage {self.stage} keeps them "
                'whole; write "stage": 3, or offload the optimizer alone'
            )
        return self


class BF16(Section):
    """bfloat16 mixed precision: compute and communicate in bf16, update an fp32 master."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in bf16. "auto": true where the model's own parameters are bf16 and no other precision is enabled."""


class FP16(Section):
    """float16 mixed precision: compute and communicate in fp16 with a scaled loss, update an fp32 master."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in fp16. "auto": true where the model's own parameters are fp16 and no other precision is enabled."""
    loss_scale: Annotated[NonNegative, AUTO] = 0.0
    """Static loss scale; 0: dynamic."""
    initial_scale_power: Annotated[Count, Le(126), AUTO] = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Annotated[Positive, AUTO] = 1000
    """Steps without overflow after which the next one doubles the scale."""
    hysteresis: Annotated[Positive, AUTO] = 2
    """The first overflow to halve the scale is the how-manieth; counted anew when the scale doubles."""
    consecutive_hysteresis: bool = False
    """Count the hysteresis anew at every step without overflow, too."""
    min_loss_scale: Annotated[AboveZero, AUTO] = 1.0
    """The smallest dynamic scale. An overflow there ends the run with an error."""


class TorchAutocast(Section):
    """torch.autocast around the forward: parameters, gradients and their reduction stay in their own dtype."""

    enabled: Annotated[bool, AUTO] = False
    """Run the model under torch.autocast."""
    dtype: Annotated[LowName, AUTO] = "bf16"
    """What autocast computes in. fp16 scales the loss, as the `fp16` section says."""


class DataTypes(Section):
    """Dtypes beside those of parameters and computation."""

    grad_accum_dtype: Annotated[FloatName | None, AUTO] = None
    """Gradients accumulate in it. "auto": the compute dtype where gradient_accumulation_steps is 1, else fp32."""
    buffer_dtype: Annotated[FloatName | None, AUTO] = None
    """Floating buffers of the model are cast to it. null: each keeps its own."""


class Checkpoint(Section):
    """How checkpoints are saved."""

    keep: Annotated[Positive | None, AUTO] = None
    """The newest checkpoints that stay in a folder; null: all of them."""
    async_save: Annotated[bool, AUTO] = False
    """Training goes on while a copy in CPU memory is written; the next save, or the exit, waits for it."""
    on_signal: Annotated[Literal["SIGUSR1", "SIGUSR2"] | None, AUTO] = None
    """Where a rank gets this signal all ranks save in `directory`, after the same step, about a second or two steps
    later, and end with exit code 75. null: the signal is left to the script."""
    directory: Annotated[Folder | None, AUTO] = None
    """The folder that `on_signal` saves in, as `save_checkpoint(directory)` takes it."""

    @model_validator(mode="after")
    def _has_a_folder(self) -> Checkpoint:
        if self.on_signal and not self.directory:
            raise ValueError('on_signal needs a folder to save in; write "directory": "runs/a" beside it')
        return self


class Comm(Section):
    """How ranks talk."""

    timeout_seconds: Annotated[float, Gt(0), Le(1e9)] = 600.0
    """Seconds after which a stalled collective is an error that names the unit and the ranks."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """On CPU: shared memory between the ranks of one machine, or Gloo. "auto": shared memory where it can be had."""
    register_buffers: Literal[False, True, "symmetric"] = False
    """On NCCL: memory for collectives is registered, in pools of its own, so that NCCL moves it without copies.
    "symmetric": as memory that lies alike on all ranks, for NCCL's symmetric kernels."""


def _finite_or_never(value: Any) -> Any:
    """accelerate writes an infinite steps_per_print for never."""
    return None if value == float("inf") else value


class Config(Section):
    """A whole configuration. `resolve` gives the values that depend on the world size and the model."""

    schema_url: Annotated[str | None, Field(alias="$schema", exclude=True)] = None
    """The JSON Schema that editors check the file with, such as "./schema.json"."""
    train_batch_size: Annotated[BatchSize, AUTO] = UNRESOLVED
    """Samples per step over all ranks: micro-batch size x accumulation x ranks."""
    train_micro_batch_size_per_gpu: Annotated[BatchSize, AUTO] = UNRESOLVED
    """Samples per micro-step and rank (a rank is a GPU or, on CPU, a process). 1 where nothing else tells."""
    gradient_accumulation_steps: Annotated[BatchSize | Literal["manual"], AUTO] = UNRESOLVED
    """Micro-steps per step. 1 where nothing else tells. "manual": a step has as many backwards as come before it; their
    gradients add up in fp32, and only the mean over ranks is taken."""
    gradient_clipping: Annotated[NonNegative, AUTO] = 0.0
    """Largest global norm of the gradient; 0: no clipping."""
    optimizer: OptimizerConfig | None = None
    """The optimizer, where none is passed to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule, where none is passed to `initialize`."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is partitioned, and how its communication is cut and overlapped."""
    bf16: BF16 = BF16()
    """bfloat16 mixed precision."""
    fp16: FP16 = FP16()
    """float16 mixed precision with loss scaling."""
    torch_autocast: TorchAutocast = TorchAutocast()
    """torch.autocast around the forward."""
    keep_fp32_modules: Annotated[list[str] | None, AUTO] = None
    """Patterns of module or class names, such as "*norm*" or "LayerNorm", that keep fp32 under bf16 or fp16. BatchNorm
    always does, for its running statistics, unless buffer_dtype lowers them."""
    communication_data_type: Annotated[FloatName | None, AUTO] = None
    """Gradients are reduced in it. "auto": the compute dtype; where whole gradients accumulate, the dtype of those."""
    data_types: DataTypes = DataTypes()
    """Dtypes beside those of parameters and computation."""
    optimizer_state_dtype: Annotated[Literal["fp32", "bf16"], AUTO] = "fp32"
    """Adam's moments are kept in it. bf16 is rounded stochastically and takes 4 bytes a parameter less."""
    check_grad_overflow: Annotated[bool, AUTO] = True
    """In bf16 and fp32: skip a step whose gradient is not finite. false: update with it, as plain PyTorch does."""
    prescale_gradients: Annotated[bool, AUTO] = False
    """Divide gradients by the number of ranks before they are summed, not after, so that fp16 sums overflow later."""
    gradient_predivide_factor: Annotated[AboveZero, AUTO] = 1.0
    """Without prescale_gradients: divide by this before the sum, and by the rest of the number of ranks after it."""
    steps_per_print: Annotated[Positive | None, BeforeValidator(_finite_or_never), AUTO] = None
    """Rank 0 prints its progress every so many steps; null: never."""
    dump_state: bool = False
    """Print the resolved configuration on rank 0 at start."""
    units: list[str] | None = None
    """Patterns of module names, such as "layers.*"; each module that matches is one unit. null: cut by rule."""
    checkpoint: Checkpoint = Checkpoint()
    """How checkpoints are saved."""
    comm: Comm = Comm()
    """How ranks talk."""
    aio: Aio = Aio()
    """How files on NVMe are read and written."""

    _notices: tuple[str, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="the configuration")

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know and is no error: keys without effect here, and what "auto" became."""
        return self._notices

    @property
    def low_precision(self) -> torch.dtype | None:
        """bf16 or fp16 where parameters take it, with an fp32 master; None where they keep their own dtype."""
        return torch.bfloat16 if self.bf16.enabled else torch.float16 if self.fp16.enabled else None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return FLOATS[self.torch_autocast.dtype] if self.torch_autocast.enabled else None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be fp16 on their way, and the loss is scaled for them."""
        return torch.float16 in (self.low_precision, self.autocast_dtype)

    @property
    def manual_accumulation(self) -> bool:
        """Whether the caller ends each step, after any number of backwards."""
        return self.gradient_accumulation_steps == batch.MANUAL

    @property
    def micro_steps_in_mean(self) -> int:
        """How many micro-steps the gradient is the mean of: 1 in manual accumulation. Once resolved."""
        return 1 if self.manual_accumulation else int(self.gradient_accumulation_steps)

    def predivide(self, world_size: int) -> float:
        """What gradients are divided by before they are summed over ranks."""
        return float(world_size) if self.prescale_gradients else self.gradient_predivide_factor

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """What gradients of parameters of ``dtype`` are reduced in; None: whatever costs no cast."""
        name = self.communication_data_type
        return FLOATS[name] if name is not None and dtype in FLOATS.values() else None

    def accumulation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of parameters of ``dtype`` accumulate in. Once resolved."""
        if dtype not in FLOATS.values():
            return dtype
        name = self.data_types.grad_accum_dtype
        if name is None:
            several = self.manual_accumulation or self.micro_steps_in_mean > 1
            return torch.float32 if several else dtype
        return FLOATS[name]

    def resolve(self, *, world_size: int, model_dtype: torch.dtype | None = None) -> Config:
        """Give the configuration with the batch sizes and precision filled in; raise ConfigError where they contradict.

        `model_dtype` is that of the model's parameters, and decides `"enabled": "auto"` of bf16 and fp16.
        """
        sizes = batch.resolve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=world_size,
            source=self._source,
        )
        model_decides = not self._enabled()
        bf16, fp16 = (
            section.model_copy(update={"enabled": model_decides and model_dtype is dtype})
            if section.enabled is None
            else section
            for section, dtype in ((self.bf16, torch.bfloat16), (self.fp16, torch.float16))
        )
        resolved = self.model_copy(update={**sizes, "bf16": bf16, "fp16": fp16})
        if model_dtype is torch.float16 and not resolved._enabled() and UNSCALED not in self._notices:
            resolved._notices = (*self._notices, UNSCALED)
        return resolved

    def _enabled(self) -> list[str]:
        return [name for name in ("bf16", "fp16", "torch_autocast") if getattr(self, name).enabled]

    @model_validator(mode="after")
    def _agrees(self) -> Config:
        if contradictions := list(self._contradictions()):
            raise ValueError("; and ".join(contradictions))
        return self

    def _contradictions(self) -> Iterator[str]:
        """What no world size makes right."""
        if len(names := self._enabled()) > 1:
            yield (
                f"{' and '.join(names)} are enabled, and one of bf16, fp16 and torch_autocast can be; write "
                f'"{names[-1]}": {{"enabled": false}}'
            )
        if self.gradient_accumulation_steps == batch.MANUAL and self.train_batch_size is not None:
            yield batch.manual_with_train(self.train_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types. `load` takes them back."""
        return self.model_dump(mode="json")

    def fingerprint(self) -> str:
        """A short hash of the values: equal on two ranks exactly where `to_dict` is."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def diff(self, other: Mapping[str, Any]) -> list[str]:
        """The key paths at which `other`, a `to_dict` of another rank, differs."""
        mine, theirs = dict(_leaves(self.to_dict())), dict(_leaves(other))
        return [path for path in sorted(mine | theirs) if mine.get(path, ...) != theirs.get(path, ...)]

    def describe(self) -> str:
        """A table of every value, for people."""
        rows = list(_leaves(self.to_dict()))
        width = max(len(path) for path, _ in rows)
        return "\n".join([f"{self._source}:", *(f"  {path:<{width}}  {json.dumps(value)}" for path, value in rows)])


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
