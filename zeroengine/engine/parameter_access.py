"""Public functions that read and write one parameter's gradient, optimizer state and master weights as a whole.

Every function here is a collective: call it on every rank, with the same parameter. An error on one rank is an error on
all ranks, and then nothing has changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeroengine.disk.mapped_memory import populate
from zeroengine.engine.gathered import owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the mean gradient of ``param`` over the ranks, from the backwards of this step so far, before clipping.

    It is what ``param.grad`` would be without partitioning and with each loss divided by
    ``gradient_accumulation_steps``. Call it on every rank, between ``backward`` and ``engine.step``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Returns:
        A copy of the parameter's shape on the engine's device, in fp32 or in the parameter's dtype where that is wider;
        None where no rank has a gradient.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or is frozen, or a backward is under way.
    """
    located = LocatedParameter(param)
    reducer, unit_grads = located.parts.reducer, located.shard.unit_grads if located.shard is not None else None
    local_gradient = None if unit_grads is None else reducer.unreduced_gradient(unit_grads, located.index)
    # These facts are local, and a rank may have no gradient where others have one. All ranks learn of all of them, so
    # that they decide alike whether to exchange anything.
    has_gradient = local_gradient is not None or (unit_grads is not None and unit_grads.has_grad[located.index])
    with located.same_call("full_gradient", has_gradient) as has_gradient_by_rank:
        shard = located.trainable_shard()
        reducer.check_backward_ended()
    # A reduce may still be writing into the shard that is read below.
    reducer.wait_reduces()
    if not any(has_gradient_by_rank):
        return None
    # A gradient may be in two places: earlier micro-steps in the reduced shard, later ones in this rank's own buffers.
    gradient = located.expand(located.owned_parts(shard.gradient) if shard.unit_grads.launched_in_step else ())
    if local_gradient is not None:
        gradient += local_gradient
    located.parts.group.all_reduce(gradient)
    return gradient / located.parts.step_runner.divisor()


def set_full_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value that ``full_gradient`` returns by rank 0's ``value``. Later backwards of the step add to it.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: Of the parameter's shape, in any floating dtype, on any device.

    Raises:
        ZeroEngineError: As for ``full_gradient``, or ``value`` has another shape.
    """
    located = LocatedParameter(param)
    parts = located.parts
    with located.same_call("set_full_gradient"):
        shard = located.trainable_shard()
        value = located.checked_copy(value)
        # These checks are local, so they run where an error of one rank reaches every rank.
        parts.reducer.check_backward_ended()
    parts.reducer.wait_reduces()
    parts.group.broadcast(value)
    # The engine keeps sums rather than means, so the value is multiplied by the divisor of the update.
    summed = value * parts.step_runner.divisor()
    if shard.unit_grads.launched_in_step:
        located.write(shard.gradient, summed)
    parts.reducer.replace_gradient(shard.unit_grads, located.index, summed)


def full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return the optimizer state ``key`` of ``param``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state: ``exp_avg``, ``exp_avg_sq``, ``step``, ...

    Returns:
        A copy of the parameter's shape, in fp32 or in the parameter's dtype where that is wider; 0-d for a number.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine or is frozen, or the optimizer keeps no such state. Most states
            begin with the first step.
    """
    located = LocatedParameter(param)
    shard, shape, holder = located.find_state("full_optimizer_state", key)
    values = located.parts.optimizer.state_values(shard, located.index, key)
    if shape is None:
        # The state has a value for each element, so each rank adds its part of them.
        state = located.expand(values)
    else:
        # A state such as a step count is one value, which several ranks may hold. One holder sends it, and the others
        # add zeros.
        state = located.zeros(shape)
        if located.parts.group.rank == holder:
            state.copy_(values[0][1])
    located.parts.group.all_reduce(state)
    return state


def set_full_optimizer_state(param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Replace the value that ``full_optimizer_state`` returns by rank 0's ``value``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state.
        value: Of the state's shape.

    Raises:
        ZeroEngineError: As for ``full_optimizer_state``, or ``value`` has another shape.
    """
    located = LocatedParameter(param)
    shard, shape, _ = located.find_state("set_full_optimizer_state", key)
    with located.same_call("set_full_optimizer_state"):
        value = located.checked_copy(value, shape)
    located.parts.group.broadcast(value)
    # Each rank received the whole value and keeps only the part that it owns.
    located.parts.optimizer.set_state_values(shard, located.index, key, value)


def full_master(param: nn.Parameter) -> torch.Tensor:
    """Return the fp32 master weights of ``param``, or a copy of its values where it has none; of its shape.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine.
    """
    located = LocatedParameter(param)
    with located.same_call("full_master"):
        pass
    shard, gatherer = located.shard, located.parts.gatherer
    # A frozen unit has no shard on any rank, so all ranks take the same branch.
    if shard is None:
        # A frozen parameter has no master apart from itself.
        gatherer.pin(located.unit)
        value = located.zeros(param.shape).copy_(param.detach())
        gatherer.unpin(located.unit)
        return value
    # Values that the user wrote into the model reach the master first, or this would return the old ones.
    if shard.may_be_written:
        shard.reload_master()
    value = located.expand(located.owned_parts(shard.master))
    located.parts.group.all_reduce(value)
    return value


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights of ``param`` by rank 0's ``value``, and the parameter by the same, rounded.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: Of the parameter's shape.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or ``value`` has another shape.
    """
    located = LocatedParameter(param)
    unit, gatherer = located.unit, located.parts.gatherer
    with located.same_call("set_full_master"):
        value = located.checked_copy(value)
    located.parts.group.broadcast(value)
    gatherer.pin(unit)
    if located.shard is not None:
        located.write(located.shard.master, value)
    with torch.no_grad():
        # All ranks compute with the value in the parameter's dtype, rounded once from the master.
        param.copy_(value)
    unit.copy_full_to_shard()
    # A parameter that was built without values has some now, and the forward may use it.
    unit.unset_params.discard(located.slot.name)
    gatherer.unpin(unit)


class LocatedParameter:
    """One parameter, its place in its unit, and what this rank's shards hold of it.

    Attributes:
        parts: The parts of the engine that the parameter belongs to.
        unit: The unit that holds it.
        index: Its place among the unit's parameters.
        slot: Its place in the unit's flat buffer.
        shard: What the optimizer keeps of the unit on this rank; None where the unit is frozen.

    Raises:
        ZeroEngineError: The parameter belongs to no engine.
    """

    def __init__(self, param: nn.Parameter) -> None:
        owner = owner_of(param) if isinstance(param, nn.Parameter) else None
        if owner is None:
            raise ZeroEngineError(
                "this takes a parameter of a model that was passed to zeroengine.initialize(), such as "
                "engine.module.head.weight"
            )
        self.parts = owner.parts
        (self.unit,) = owner.units_of([param])
        # A tensor compares element by element, so the parameter is found by identity.
        self.index = next(index for index, candidate in enumerate(self.unit.params) if candidate is param)
        self.slot = self.unit.layout.slots[self.index]
        self.shard = next((shard for shard in self.parts.optimizer.shards if shard.unit is self.unit), None)

    @contextlib.contextmanager
    def same_call(self, call: str, fact: Any = None) -> Iterator[list[Any]]:
        """Raise on every rank what is raised inside on any, or where ranks make different calls. A collective.

        Args:
            call: The public function that was called.
            fact: Is collected from every rank.

        Yields:
            A list that holds the ranks' facts, in rank order, once the ``with`` has ended.
        """
        call = f"{call} of {self.slot.name}"
        facts: list[Any] = []
        with self.parts.group.collective_errors(f"in {call}", (call, fact)) as calls_by_rank:
            yield facts
        # Ranks with different calls would exchange tensors of different shapes next and hang or mix up values.
        if any(other_call != call for other_call, _ in calls_by_rank):
            calls = ", ".join(f"rank {rank}: {other_call}" for rank, (other_call, _) in enumerate(calls_by_rank))
            raise ZeroEngineError(f"every rank is to make the same call of the same parameter, found {calls}")
        facts += [fact for _, fact in calls_by_rank]

    def find_state(self, call: str, key: str) -> tuple[OptimizerShard, tuple[int, ...] | None, int]:
        """Find the optimizer state ``key``. A collective.

        Returns:
            The shard of the optimizer's states, the shape of the state (None for a value of each element; see
            ``ShardedOptimizer.state_shapes``), and the lowest rank that holds some of it.
        """
        # A rank without elements of the parameter has no states of it, and learns their names from the others.
        own_shapes = {} if self.shard is None else self.parts.optimizer.state_shapes(self.shard, self.index)
        with self.same_call(f"{call} {key!r}", own_shapes) as shapes_by_rank:
            shard = self.trainable_shard()
        holders = [rank for rank, shapes in enumerate(shapes_by_rank) if key in shapes]
        if not holders:
            known = sorted({name for shapes in shapes_by_rank for name in shapes})
            raise ZeroEngineError(
                f"the optimizer keeps no state {key!r} of {self.slot.name}; it keeps: "
                f"{', '.join(known) or 'nothing yet'}"
            )
        shape = shapes_by_rank[holders[0]][key]
        # Such a state is computed from one shard. Different shards have different values, and no rule would join them.
        if shape is not None and math.prod(shape) > 1 and self.unit.degrees.optimizer > 1:
            raise ZeroEngineError(
                f"the optimizer's state {key!r} of {self.slot.name} {self.slot.shape} has shape {shape} on a shard: "
                "neither a number nor a value of each element, so there is no whole of it"
            )
        return shard, shape, holders[0]

    def trainable_shard(self) -> OptimizerShard:
        """Return the optimizer's shard.

        Raises:
            ZeroEngineError: The parameter is frozen.
        """
        if self.shard is None:
            raise ZeroEngineError(f"parameter {self.slot.name} is frozen: it has no gradient and no optimizer state")
        return self.shard

    @property
    def _exchange_dtype(self) -> torch.dtype:
        """The dtype in which values of the parameter are exchanged: at least fp32 for floating ones."""
        # Masters and moments are fp32 where the parameter is bf16 or fp16, and must not be rounded on the way.
        dtype = self.unit.dtype
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeros on the device, in the dtype in which values are exchanged."""
        return torch.zeros(shape, dtype=self._exchange_dtype, device=self.parts.group.device)

    def checked_copy(self, value: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a contiguous copy of ``value`` on the device, in the dtype in which values are exchanged.

        Args:
            value: What the user passed.
            shape: The shape that it must have; that of the parameter where None.
        """
        name, shape = self.slot.name, self.slot.shape if shape is None else shape
        if not isinstance(value, torch.Tensor):
            raise ZeroEngineError(f"{name}: the value is to be a tensor of shape {shape}, found {value!r:.100}")
        if tuple(value.shape) != shape:
            raise ZeroEngineError(f"{name}: the value is to have shape {shape}, the one given has {tuple(value.shape)}")
        # The copy keeps the user's tensor apart from the broadcast, which writes into its argument on other ranks.
        return self.zeros(shape).copy_(value.detach())

    def owned_parts(self, shard: torch.Tensor, *, write: bool = False) -> Iterator[tuple[ShardSpan, torch.Tensor]]:
        """Yield what ``shard`` (1-D, partitioned by the optimizer's degree) holds of the parameter, as views.

        Args:
            shard: Of the gradient or the master weights.
            write: Whether the caller writes to what is yielded.
        """
        for span in self.unit.layout.spans(self.unit.rank, self.unit.degrees.optimizer):
            if span.param_index == self.index:
                # The shard may be a mapped file. If the disk fails this raises, where a use would end the process.
                populate(shard[span.shard_slice], write=write)
                yield span, shard[span.shard_slice]

    def write(self, shard: torch.Tensor, value: torch.Tensor) -> None:
        """Write the part of ``value`` that this rank owns, which may be none, to ``shard``, as of ``owned_parts``."""
        for span, target in self.owned_parts(shard, write=True):
            target.copy_(value.view(-1)[span.param_slice])

    def expand(self, owned_parts: Iterable[tuple[ShardSpan, torch.Tensor]]) -> torch.Tensor:
        """Return a tensor of the parameter's shape with ``owned_parts``, and zeros elsewhere.

        Summed over the ranks it is the whole parameter's values.
        """
        whole = self.zeros(self.slot.shape)
        # With an optimizer degree below the world size several ranks hold each shard. Only the first of them counts, or
        # the sum would hold the values several times.
        if self.unit.rank < self.unit.degrees.optimizer:
            for span, values in owned_parts:
                whole.view(-1)[span.param_slice] = values.flatten()
        return whole
