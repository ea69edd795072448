"""The protocol of an update backend, which updates the shards for the sharded optimizer.

There are two backends, of which `choose_backend` in `optim/choice.py` takes one:

    AsyncAdam         Adam and AdamW, issued without waiting for the norm; every state is on the device
    BlockingUpdate    after the host knows the norm: runs rules, each over the units of its algorithm

and these rules:

    AdamUpdate        Adam and AdamW by the fused kernel; states may be offloaded
    MuonUpdate        Muon: momentum on shards, the iteration on whole matrices at their owners; states may be offloaded
    ElementwiseUpdate any element-wise torch optimizer, run over parameters that are views of the shards
    WholeUpdate       any torch optimizer whose rule looks at one parameter at a time, run over whole ones at owners

[Note: How to add a fused optimizer]
Take Lion in C++ as an example. Today `optim/lion.py` runs through `ElementwiseUpdate`, in several passes over memory.

1. The kernel. Declare `ze_lion_args` (lr, beta1, beta2, weight_decay, grad_scale, reload_written) and `ze_lion` in
   `csrc/zeroengine.h`, with the arrays of `ze_adam` except `exp_avg_sq`, and raise `ZE_ABI_VERSION`. Write the update
   of one block as a template in `csrc/cpu/kernels.inl.h`, which is compiled once for each instruction set. Add its
   functions to the table in `csrc/cpu/kernels.h`, and model `csrc/cpu/lion.cpp` on `csrc/cpu/adam.cpp`: it checks
   the dtype codes and splits the range over the threads. An element's result may depend on nothing but that element's
   values, the arguments and its index, or the losses would differ between stages. `setup.py` compiles every source in
   the folder. A CUDA kernel goes into `csrc/cuda/lion.cu`, declared as `ze_cuda_lion` in `csrc/zeroengine_cuda.h`.
2. The binding. Raise `ABI_VERSION` and add the argument structure and the signature in `ops/_library.py` (for CUDA in
   `ops/_cuda_library.py`). Write `ops/lion.py` with `lion_step(param, grad, exp_avg, *, lr, ...,
   low_precision_param=None)` on the model of `ops/adam.py`: it checks the tensors and calls CUDA, the CPU library, or
   a function of the same name in `ops/_fallback.py`. Export it from `ops/__init__.py`, and test it in `tests/ops`
   against the formula in float64.
3. The state. `MomentState` (`backends/moment_state.py`) keeps one moment, "exp_avg". Its names are those of the torch
   optimizer's `state`, so checkpoints stay interchangeable.
4. The rule. Write `backends/lion_update.py` with the methods of `UpdateRule`. `update` calls `lion_step` for each
   segment of each shard, and `publish_update` after each shard. Offloaded states come to the kernel by `Pipeline`, as
   in `AdamUpdate`.
5. The choice. Return the class from `rule_of` in `optim/choice.py` where every master is fp32 and the `step` of the
   optimizer is that of `optim.lion.Lion`, as `has_adam_rule` finds it for Adam (the factory may have made a subclass).
   Norm, clipping, loss scaling, checkpoints, `full_optimizer_state` and memory reports use this protocol alone. With
   offload, add the rule to `OFFLOADABLE` and its name to the messages in `optim/choice.py`, and the number of its
   moments to `NUM_MOMENTS` in `offload/placement_plan.py`. The test to extend is in
   `tests/distributed/test_optimizers.py`: the losses are those of the torch optimizer.
6. The plan. `predict_optimizer` in `plan/bytes/optimizer_bytes.py` counts the rule's `num_moments`, for padding as
   well. The tests to extend are in `tests/plan/test_state_bytes.py`: the predicted states are those of
   `engine.memory()`, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.monitor.timer import Timer
from zeroengine.offload.pipeline import Pipeline
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_reduction import StepReduction
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit import Unit

T = TypeVar("T")
# By name: the dtype, and the shape of a state for the whole parameter; None for a state with a value per element.
StateKeys = dict[str, tuple[torch.dtype, tuple[int, ...] | None]]


class SpanState(NamedTuple):
    """The optimizer's state of one span of a shard, by name.

    Attributes:
        elements: States with a value for each element: 1-D views of the span's length.
        numbers: All other states, such as step counts: copies in their own shape. An item of a list has the name of the
            list and its place, such as "GG.0".
    """

    elements: dict[str, torch.Tensor]
    numbers: dict[str, torch.Tensor]


class ShardState(Protocol):
    """The state that an optimizer keeps of each span of its shards."""

    def keys(self, shard: OptimizerShard) -> frozenset[str] | None:
        """Return the names of all states of a parameter that has any. None: the optimizer decides while it runs."""

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
        publish_update: Called with a unit right after the update of its shard.
        moments_dtype: The dtype of Adam's moments.
        pipeline: Brings offloaded states to the update. None: no state needs it.
        timer: Times the updates.
    """

    base_optimizer: torch.optim.Optimizer
    shards: Sequence[OptimizerShard]
    reduction: StepReduction
    writes: OutsideWrites
    transport: Transport
    publish_update: Callable[[Unit], None]
    moments_dtype: torch.dtype
    pipeline: Pipeline | None
    timer: Timer

    @cached_property
    def group_of_param(self) -> Mapping[torch.Tensor, int]:
        """The index of each parameter's group."""
        return {p: i for i, group in enumerate(self.base_optimizer.param_groups) for p in group["params"]}


class UpdateRule(Protocol):
    """Updates some of this rank's shards by one algorithm, and keeps their optimizer state.

    Attributes:
        num_moments: The states with a value per element of a shard, padding included; None: what the caller's
            optimizer keeps of each parameter.
        exchange_bytes: See ``UpdateBackend``.
    """

    num_moments: ClassVar[int | None]
    exchange_bytes: int

    def __init__(self, parts: BackendParts) -> None:
        """Allocate the state of every shard of ``parts``."""

    @property
    def state(self) -> ShardState:
        """The optimizer's state by spans."""

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """Update every shard, calling ``publish_update`` after each one. All ranks call it.

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
        """Compute the norm, clip, and update every shard, calling ``publish_update`` after each one. A collective.

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
