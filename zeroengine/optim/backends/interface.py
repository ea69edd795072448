"""The protocol of an update backend, which updates the shards for the sharded optimizer.

There are two backends, of which `choose_backend` in `optim/choice.py` takes one:

    AsyncUpdate       the fused rule, issued without waiting for the norm; every state is on the device
    BlockingUpdate    after the host knows the norm: runs rules, each over the units of its algorithm

and these rules:

    FusedUpdate       Adam, AdamW, Lion, SGD and Adagrad by the fused kernels; states may be offloaded
    MuonUpdate        Muon: momentum on shards, the iteration on whole matrices at their owners; states may be offloaded
    ElementwiseUpdate any element-wise torch optimizer, run over parameters that are views of the shards
    WholeUpdate       any torch optimizer whose rule looks at one parameter at a time, run over whole ones at owners

[Note: How to add a fused optimizer]
Take RMSprop as an example.

1. The kernel. Write its formula as a struct in `csrc/rules.h`, which the kernels for CPU and GPU share, with
   `is_signed`, which of its moments may be negative: `square_avg` may not. Give it a number in `ze_rule`
   (`csrc/zeroengine.h`), a row in `updates_of` (`csrc/cpu/update.inl.h`) and a case in `csrc/cuda/update.cu`. What
   `ze_update_args` lacks goes there; then raise the versions of the interfaces. An element's result may depend on
   nothing but that element's values, the arguments and its index, or the losses would differ between stages. All dtypes
   of gradients, moments, masters and averages come with the template.
2. The binding. Add the rule to `RULES` (`ops/update_arrays.py`): its number, and its moments by the names that they
   have in the torch optimizer's state, so that checkpoints stay interchangeable, each with its sign as in the kernel,
   `{"square_avg": False}`. Everything else takes the names and the signs from this row. Its formula in torch goes to
   `ops/_fallback.py`. The tests to extend are in `tests/ops`: the formula in float64, and the same bits on each
   instruction set. They decode moments of 8 bits by the signs of the row, so they fail where the kernel has others.
3. The choice. Add a `FusedRule` to `optim/fused_rules.py`: the row, and the settings of a group. The test to extend is
   `tests/optim/test_fused_rules.py`, with the torch optimizer, whose state has the names and the signs.

Offload, precision of moments, norm, clipping, loss scaling, checkpoints, memory reports and plans follow. The test to
extend is in `tests/distributed/test_optimizers.py`: the losses are those of the torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.monitor.timer import Timer
from zeroengine.offload.pipeline import Pipeline
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_reduction import StepReduction
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit import Unit
from zeroengine.utils.torch_internals import profiler_enabled

T = TypeVar("T")
# By name: the dtype, and the shape of a state for the whole parameter; None for a state with a value per element.
StateKeys = dict[str, tuple[torch.dtype, tuple[int, ...] | None]]


class SpanState(NamedTuple):
    """The optimizer's state of one span of a shard, by name.

    Attributes:
        elements: States with a value for each element: 1-D views of the span's length. A moment of 8 bits is uint8.
        numbers: All other states, such as step counts: copies in their own shape. An item of a list has the name of the
            list and its place, such as "GG.0".
        scales: Of moments of 8 bits: views with a value for each block of the span, whose first element begins one.
    """

    elements: dict[str, torch.Tensor]
    numbers: dict[str, torch.Tensor]
    scales: Mapping[str, torch.Tensor] = MappingProxyType({})

    def read(self, key: str) -> torch.Tensor:
        """Return the values of a state with a value for each element: a view, or a copy of what is in 8 bits."""
        for tensor in self._tensors(key):
            populate(tensor)
        if key not in self.scales:
            return self.elements[key]
        return ops.decode_moment(self.elements[key], self.scales[key], is_signed=ops.MOMENT_SIGNS[key])

    def write(self, key: str, values: torch.Tensor) -> None:
        """Replace the values of a state with a value for each element."""
        for tensor in self._tensors(key):
            populate(tensor, write=True)
        if key in self.scales:
            values = values.to(self.scales[key]).contiguous()
            ops.encode_moment(values, self.elements[key], self.scales[key], is_signed=ops.MOMENT_SIGNS[key])
        else:
            self.elements[key].copy_(values)

    def copy_raw(self, key: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Replace a state with a value for each element by one of the same format. ``scales``: those of its blocks."""
        sources = [values] if scales is None else [values, scales]
        for target, source in zip(self._tensors(key), sources, strict=True):
            populate(target, write=True)
            target.copy_(source)

    def _tensors(self, key: str) -> list[torch.Tensor]:
        # They may be mapped from a file. See "SIGBUS" in ``disk/mapped_memory.py``.
        return [tensors[key] for tensors in (self.elements, self.scales) if key in tensors]


class ShardState(Protocol):
    """The state that an optimizer keeps of each span of its shards."""

    def keys(self, shard: OptimizerShard) -> frozenset[str] | None:
        """Return the names of the states that a checkpoint must have of a parameter if it has any.

        None: the optimizer decides while it runs.
        """

    def spans(self, shard: OptimizerShard) -> Iterable[ShardSpan]:
        """Return the spans whose states this rank keeps: those of its shard, or the parameters that it owns."""

    def is_whole(self, shard: OptimizerShard) -> bool:
        """Return whether ``spans`` are whole parameters at their owners, and not the parts in the shard."""

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """Return the state of a span, or of part of one, of this rank's shard."""

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """Create the states ``keys`` of a whole span, and no others, so that values can be loaded into them."""

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """Set states of a span that are numbers."""

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """Reset the state of a span to its value before the first step."""

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """Return every tensor that holds state of a shard. Where it lives is the shard's ``store``."""

    def whole_shard_tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """Return the states that are 1-D tensors of the shard's length; none if states are kept by parameter."""


@dataclass(frozen=True)
class BackendParts:
    """The parts that a backend works with.

    Attributes:
        base_optimizer: The caller's optimizer. Its class says how to update, and its ``param_groups`` hold the
            hyperparameters, which may change between steps.
        shards: The optimizer shard of every trainable unit, in the order of registration.
        reduction: Sums norms and flags over the ranks.
        writes: Knows which parameters were written from outside.
        transport: Moves bytes between the ranks.
        publish_updates: Called with units, in order, right after the updates of their shards.
        pipeline: Brings offloaded states to the update. None: no state needs it.
        timer: Times the updates.
        between: Moves bytes between the ranks of this rank's model group; None: no parameter is split over them.
    """

    base_optimizer: torch.optim.Optimizer
    shards: Sequence[OptimizerShard]
    reduction: StepReduction
    writes: OutsideWrites
    transport: Transport
    publish_updates: Callable[[Sequence[Unit]], None]
    pipeline: Pipeline | None
    timer: Timer
    between: Transport | None = None

    @cached_property
    def group_of_param(self) -> Mapping[torch.Tensor, int]:
        """The index of each parameter's group."""
        return {p: i for i, group in enumerate(self.base_optimizer.param_groups) for p in group["params"]}

    def launches(self) -> Sequence[tuple[int, int]]:
        """Return ranges of ``shards``, in order. Those of a range can be updated together, and are published together.

        A shard that is not on the device is alone in its range. A unit whose update is all-gathered is the last one of
        its range, so that the all-gather overlaps the next update.
        """
        # Timers and profilers show the update of each unit.
        return self._single_launches if self.timer.enabled or profiler_enabled() else self._joint_launches

    @cached_property
    def _single_launches(self) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(self.shards))]

    @cached_property
    def _joint_launches(self) -> list[tuple[int, int]]:
        launches, is_open = list[tuple[int, int]](), False
        for i, shard in enumerate(self.shards):
            first = launches.pop()[0] if is_open and shard.on_device else i
            launches.append((first, i + 1))
            degrees = shard.unit.degrees
            is_open = shard.on_device and degrees.optimizer == degrees.parameters
        return launches


class UpdateRule(Protocol):
    """Updates some of this rank's shards by one algorithm, and keeps their optimizer state.

    Attributes:
        has_moments: Whether its states are the moments that ``UnitPlan.algorithm`` counts, of a shard with its padding,
            and not what the caller's optimizer keeps of each parameter.
        exchange_bytes: See ``UpdateBackend``.
    """

    has_moments: ClassVar[bool]
    exchange_bytes: int

    def __init__(self, parts: BackendParts) -> None:
        """Allocate the state of every shard of ``parts``."""

    @property
    def state(self) -> ShardState:
        """The optimizer's state by spans."""

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """Update every shard, calling ``publish_updates`` after it. All ranks call it.

        Args:
            factor: Multiplies the summed gradients.
            has_grad: For each unit of the model, by its index, and each of its parameters, whether any rank computed a
                gradient. A parameter without one keeps its value, state and step count, as in torch.
        """

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateBackend``."""


class UpdateBackend(Protocol):
    """Updates this rank's shards from their gradients, and keeps their optimizer state.

    Attributes:
        is_async: Whether ``step`` returns before its result is known.
        exchange_bytes: The bytes of the memory in which matrices travel to their owners, as far as it is kept.
    """

    is_async: ClassVar[bool]
    exchange_bytes: int

    def __init__(self, parts: BackendParts) -> None:
        """Allocate the state of every shard."""

    def state_of(self, shard: OptimizerShard) -> ShardState:
        """Return what keeps the state of a shard. Call ``await_step_counts`` before reading or setting its numbers."""

    def step(self, settings: StepSettings) -> StepResult:
        """Compute the norm, clip, and update every shard, calling ``publish_updates`` after it. A collective.

        A parameter that got no gradient on any rank keeps its value, state and step count, as in torch.

        Raises:
            DivergenceError: The ranks wrote different values into the parameters. Nothing has changed.
        """

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """Return what ``act`` returns of an optimizer of the caller's class over this rank's shards.

        Its parameters are views of the masters, which ``act`` may write, as it may write the state and the settings.
        Call ``await_step_counts`` before.

        Raises:
            ZeroEngineError: ``act`` gave a parameter a state that this backend cannot keep.
        """

    def await_step_counts(self) -> None:
        """Wait until the step counts in ``state`` include the last step.

        Raises:
            DivergenceError: The ranks wrote different values into the parameters before the last step.
        """
