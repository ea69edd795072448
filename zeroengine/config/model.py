"""The configuration's models. Each field's docstring is its description in the JSON Schema and in the docs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, Field, PrivateAttr

from zeroengine.config import batch
from zeroengine.config.fields import AUTO, WHOLE, Auto, Count, NonNegative, Positive, Section
from zeroengine.config.optimizers import OptimizerConfig
from zeroengine.config.schedulers import SchedulerConfig

UNRESOLVED: Any = None  # of a number that `resolve` fills in


class ZeroOptimization(Section):
    """What is partitioned over the ranks, and how its communication is cut and overlapped."""

    stage: Annotated[int, Ge(0), Le(3), WHOLE] = 0
    """0: nothing is partitioned. 1: the optimizer state. 2: and the gradients. 3: and the parameters."""
    reduce_bucket_size: Annotated[Positive | None, AUTO] = None
    """Elements reduced by one collective, at most. "auto": as many as the largest unit has."""
    overlap_comm: Annotated[bool, AUTO] = True
    """Communicate while computing."""
    prefetch_bucket_size: Annotated[Count, AUTO] = 50_000_000
    """Elements gathered ahead of use, at most. 0: gather each unit when it is needed."""
    param_persistence_threshold: Annotated[Count, AUTO] = 100_000
    """Units with at most this many elements stay gathered at stage 3."""
    max_live_parameters: Annotated[Count, AUTO] = 1_000_000_000
    """Elements gathered at one time at stage 3, at most; a unit in use is always gathered."""


class BF16(Section):
    """bfloat16 mixed precision: compute and communicate in bf16, update an fp32 master."""

    enabled: Annotated[bool | None, Auto(None)] = False
    """Train in bf16. "auto": true where the model's own parameters are bf16."""


class FP16(Section):
    """float16 mixed precision with loss scaling. Not available yet: `enabled` must be false."""

    enabled: Annotated[bool, AUTO] = False
    """Train in fp16. "auto": false."""
    loss_scale: Annotated[NonNegative, AUTO] = 0.0
    """Static loss scale; 0: dynamic."""
    initial_scale_power: Annotated[Count, AUTO] = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Annotated[Positive, AUTO] = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Annotated[Positive, AUTO] = 2
    """Overflows before the scale halves."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis at every step without overflow."""
    min_loss_scale: Annotated[NonNegative, AUTO] = 1.0
    """The smallest dynamic scale."""


class Comm(Section):
    """How ranks talk."""

    timeout_seconds: Annotated[float, Gt(0)] = 600.0
    """Seconds after which a stalled collective is an error that names the unit and the ranks."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """On CPU: shared memory between the ranks of one machine, or Gloo. "auto": shared memory where it can be had."""


def _finite_or_never(value: Any) -> Any:
    """accelerate writes an infinite steps_per_print for never."""
    return None if value == float("inf") else value


class Config(Section):
    """A whole configuration. `resolve` gives the values that depend on the world size and the model."""

    schema_url: Annotated[str | None, Field(alias="$schema", exclude=True)] = None
    """The JSON Schema that editors check the file with, such as "./schema.json"."""
    train_batch_size: Annotated[Positive, AUTO] = UNRESOLVED
    """Samples per step over all ranks: micro-batch size x accumulation x ranks."""
    train_micro_batch_size_per_gpu: Annotated[Positive, AUTO] = UNRESOLVED
    """Samples per micro-step and rank (a rank is a GPU or, on CPU, a process). 1 where nothing else tells."""
    gradient_accumulation_steps: Annotated[Positive, AUTO] = UNRESOLVED
    """Micro-steps per step. 1 where nothing else tells."""
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
    """float16 mixed precision; not available yet."""
    steps_per_print: Annotated[Positive | None, BeforeValidator(_finite_or_never), AUTO] = None
    """Rank 0 prints its progress every so many steps; null: never."""
    dump_state: bool = False
    """Print the resolved configuration on rank 0 at start."""
    units: list[str] | None = None
    """Patterns of module names, such as "layers.*"; each module that matches is one unit. null: cut by rule."""
    comm: Comm = Comm()
    """How ranks talk."""

    _notices: tuple[str, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="the configuration")

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know and is no error: keys without effect here, and what "auto" became."""
        return self._notices

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return torch.bfloat16 if self.bf16.enabled else torch.float32

    def resolve(self, *, world_size: int, model_dtype: torch.dtype | None = None) -> Config:
        """Give the configuration with the batch sizes and bf16 filled in; raise ConfigError where they contradict.

        `model_dtype` is that of the model's parameters, and decides `"bf16": {"enabled": "auto"}`.
        """
        sizes = batch.resolve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size=world_size,
            source=self._source,
        )
        enabled = model_dtype is torch.bfloat16 if self.bf16.enabled is None else self.bf16.enabled
        return self.model_copy(update={**sizes, "bf16": self.bf16.model_copy(update={"enabled": enabled})})

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
