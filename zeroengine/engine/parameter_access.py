"""Public functions that read and write one parameter's whole gradient, optimizer state and master weights.

Every function here is a collective: call it on every rank, with the same parameter. If one rank raises, all ranks
raise, and nothing has changed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.disk.mapped_memory import populate
from zeroengine.engine.gathered import owner_of
from zeroengine.engine.split_models import assemble
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan
from zeroengine.partition.slices import slice_of, whole_shape
from zeroengine.runtime.dtensors import local_tensor


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the mean gradient of ``param`` over the ranks, from the backwards of this step so far, before clipping.

    It equals ``param.grad`` without partitioning and with each loss divided by ``gradient_accumulation_steps``. Call it
    on every rank, between ``backward`` and ``engine.step``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Returns:
        A copy of the parameter's shape on the engine's device, in fp32 or in the parameter's dtype if that is wider;
        None if no rank has a gradient.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or is frozen, or a backward is in progress.
    """
    located = LocatedParameter(param, "full_gradient()", ("gradients",))
    reducer, unit_grads = located.parts.passes.reducer, located.shard.unit_grads if located.shard is not None else None
    # Inside a backward ``grad`` is autograd's, and the check below raises.
    if not located.parts.passes.backward.in_progress:
        reducer.take_assigned_gradients()
    local_gradient = None if unit_grads is None else reducer.unreduced_gradient(unit_grads, located.index)
    # One rank may have a gradient and another none. All ranks learn which ranks have one, so that all of them take the
    # same branch below.
    has_gradient = local_gradient is not None or (unit_grads is not None and unit_grads.has_grad[located.index])
    with located.same_call("full_gradient", has_gradient) as has_gradient_by_rank:
        shard = located.trainable_shard()
        located.parts.passes.backward.check_ended()
    # A reduce may still be writing into the shard that is read below.
    reducer.launcher.wait()
    if not any(has_gradient_by_rank):
        return None
    # A gradient may be in two places: earlier micro-steps in the reduced shard, later ones on this rank, unreduced.
    gradient = located.expand(located.owned_parts(shard.gradient) if shard.unit_grads.launched_in_step else ())
    if local_gradient is not None:
        gradient += local_gradient
    located.data_group.all_reduce(gradient, "of a gradient")
    gradient = located.whole(gradient) / reducer.divisor()
    if reducer.losses.is_weighted:
        weights = reducer.losses.weights(gradient.device)
        located.data_group.all_reduce(weights, "of the weights of losses")
        gradient /= weights
    return gradient


def set_full_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value that ``full_gradient`` returns by rank 0's ``value``. Later backwards of the step add to it.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: A tensor of the parameter's shape, in any floating-point dtype, on any device.

    Raises:
        ZeroEngineError: As for ``full_gradient``, or ``value`` has another shape.
    """
    located = LocatedParameter(param, "set_full_gradient()", ("gradients",))
    parts = located.parts
    with located.same_call("set_full_gradient"):
        shard = located.trainable_shard()
        value = located.checked_copy(value)
        parts.passes.backward.check_ended()
        parts.loop.clipping.check_not_clipped("set_full_gradient()")
    parts.passes.reducer.launcher.wait()
    parts.passes.reducer.take_assigned_gradients()
    parts.ranks.group.broadcast(value, "of a gradient")
    value = located.own_slice(value)
    share = float(located.unit.rank == 0)
    parts.passes.reducer.replace_gradient(shard.unit_grads, located.index, value, share)


def full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return the optimizer state ``key`` of ``param``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state: ``exp_avg``, ``exp_avg_sq``, ``step``, ...

    Returns:
        A copy of the parameter's shape, in fp32 or in the parameter's dtype if that is wider; 0-d for a number.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine or is frozen, or the optimizer keeps no such state. Most states
            begin with the first step.
    """
    located = LocatedParameter(param, "full_optimizer_state()", ("moments",))
    shard, shape, holder = located.find_state("full_optimizer_state", key)
    values = located.parts.states.optimizer.state_values(shard, located.index, key)
    if shape is None:
        # The state has a value for each element, so each rank contributes its part.
        state = located.expand(values)
    else:
        # A state such as a step count is one value, which several ranks may hold. One of them contributes it, and the
        # others contribute zeros.
        state = located.zeros(shape)
        # A replica that has taken no step yet has no state, and gives zeros.
        if values and located.unit.rank == holder:
            state.copy_(values[0][1])
    located.data_group.all_reduce(state, "of an optimizer state")
    return located.whole(state) if shape is None else state


def set_full_optimizer_state(param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Replace the value that ``full_optimizer_state`` returns by rank 0's ``value``.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        key: The optimizer's name of the state.
        value: A tensor of the state's shape.

    Raises:
        ZeroEngineError: As for ``full_optimizer_state``, or ``value`` has another shape.
    """
    located = LocatedParameter(param, "set_full_optimizer_state()", ("moments",))
    shard, shape, _ = located.find_state("set_full_optimizer_state", key)
    with located.same_call("set_full_optimizer_state"):
        value = located.checked_copy(value, shape)
    located.parts.ranks.group.broadcast(value, "of an optimizer state")
    # Each rank received the whole value, and keeps only its part.
    located.set_state_values(shard, key, located.own_slice(value) if shape is None else value)


def full_master(param: nn.Parameter) -> torch.Tensor:
    """Return the fp32 master weights of ``param`` in its shape, or a copy of its values if it has none.

    Args:
        param: A parameter of the model that was passed to ``initialize``.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine.
    """
    located = LocatedParameter(param, "full_master()", ("parameters", "masters"))
    with located.same_call("full_master", bool(located.unit.writes.values)) as is_written_by_rank:
        located.check_has_weights("full_master()")
    shard, gatherer = located.shard, located.parts.passes.gatherer
    # A frozen unit has no optimizer shard on any rank, so all ranks take the same branch.
    if shard is None:
        gatherer.pin(located.unit)
        value = located.zeros(located.slot.shape).copy_(local_tensor(param).detach())
        gatherer.unpin(located.unit)
        return located.whole(value)
    # Values that the user wrote into the model are copied into the master first.
    if any(is_written_by_rank):
        located.parts.passes.outside_writes.compare()
        located.parts.states.optimizer.reduction.move_writes()
    if shard.may_be_written:
        shard.reload_master()
    value = located.expand(located.owned_parts(shard.master))
    located.data_group.all_reduce(value, "of master weights")
    return located.whole(value)


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights of ``param`` by rank 0's ``value``, and the parameter by the rounded value.

    Args:
        param: A parameter of the model that was passed to ``initialize``.
        value: A tensor of the parameter's shape.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or ``value`` has another shape.
    """
    located = LocatedParameter(param, "set_full_master()", ("parameters", "masters", "averages"))
    unit, gatherer = located.unit, located.parts.passes.gatherer
    with located.same_call("set_full_master"):
        located.check_has_weights("set_full_master()")
        value = located.checked_copy(value)
    located.parts.ranks.group.broadcast(value, "of master weights")
    value = located.own_slice(value)
    gatherer.pin(unit)
    if located.shard is not None:
        # A rank may own no part of the parameter.
        for span, master in located.owned_parts(located.shard.master, write=True):
            master.copy_(value.view(-1)[span.param_slice])
    with torch.no_grad():
        local_tensor(param).copy_(value)
    torch.autograd.graph.increment_version(param)
    unit.copy_full_to_shard()
    unit.forget_writes([located.index])
    # A parameter that was built without values has values now.
    unit.originals.unset.discard(located.slot.name)
    gatherer.unpin(unit)
    located.parts.states.note_new_masters(unit, [located.slot.name])


class MissingStateError(ZeroEngineError):
    """The optimizer keeps no state of that name."""


class LocatedParameter:
    """One parameter, its place in its unit, and the part of it in this rank's shards.

    Attributes:
        engine: The engine that the parameter belongs to.
        parts: The parts of the engine.
        unit: The unit that holds it.
        index: Its index among the unit's parameters.
        slot: Its place in the unit's flat buffer.
        shard: The unit's shard in the optimizer on this rank; None if the unit is frozen.

    Args:
        param: The parameter.
        call: The public call, for an error.
        required: The states that it reads or writes. See ``StateOffloader.check_resident``.

    Raises:
        ZeroEngineError: The parameter belongs to no engine, or one of ``required`` is offloaded.
    """

    def __init__(self, param: nn.Parameter, call: str = "", required: Sequence[str] = ()) -> None:
        owner = owner_of(param) if isinstance(param, nn.Parameter) else None
        if owner is None:
            raise ZeroEngineError(
                "this takes a parameter of a model that was passed to zeroengine.initialize(), such as "
                "engine.module.head.weight"
            )
        self.engine, self.parts = owner.engine(), owner.parts
        # States are offloaded on all ranks or on none, so this is no collective.
        self.parts.loop.state_offloader.check_resident(call, required)
        (self.unit,) = owner.units_of([param])
        # Equality would compare the elements of tensors, so the parameter is found by identity.
        self.index = next(index for index, candidate in enumerate(self.unit.params) if candidate is param)
        if self.unit.is_gathered:
            self.unit.adopt_replaced_data(self.index)
        self.slot = self.unit.layout.slots[self.index]
        self.shard = next((shard for shard in self.parts.states.optimizer.shards if shard.unit is self.unit), None)

    @contextlib.contextmanager
    def same_call(self, call: str, fact: Any = None) -> Iterator[list[Any]]:
        """Raise on every rank if any rank raises inside, or if ranks make different calls. A collective.

        Args:
            call: The public function that was called.
            fact: A fact about this rank, for all ranks.

        Yields:
            A list that receives the facts of all ranks, in rank order, when the ``with`` ends.
        """
        call = f"{call} of {self.slot.name}"
        self.parts.passes.gatherer.check_no_stream(call)
        with self.parts.ranks.group.collective_errors(f"in {call}", fact) as facts:
            yield facts

    def set_state_values(self, shard: OptimizerShard, key: str, value: torch.Tensor) -> None:
        """Replace this rank's elements of an optimizer state by those of ``value``, which is whole."""
        self.parts.passes.gatherer.await_state_reads()
        self.parts.states.optimizer.set_state_values(shard, self.index, key, value)

    def find_state(self, call: str, key: str) -> tuple[OptimizerShard, tuple[int, ...] | None, int]:
        """Find the optimizer state ``key``. A collective.

        Returns:
            The optimizer's shard, the shape of the state (None for a value of each element; see
            ``ShardedOptimizer.state_shapes``), and the lowest rank in ``data_group`` that holds a part of it.
        """
        # A rank without elements of the parameter has no states of it, and gets their names from the others.
        own_shapes: dict[str, tuple[int, ...] | None] = {}
        with self.same_call(f"{call} {key!r}", own_shapes) as shapes_by_rank:
            shard = self.trainable_shard()
            own_shapes.update(self.parts.states.optimizer.state_shapes(shard, self.index))
        holders = [rank for rank, shapes in enumerate(shapes_by_rank) if key in shapes]
        if not holders:
            known = sorted({name for shapes in shapes_by_rank for name in shapes})
            raise MissingStateError(
                f"the optimizer keeps no state {key!r} of {self.slot.name}; it keeps: "
                f"{', '.join(known) or 'nothing yet'}"
            )
        shape, numbers = shapes_by_rank[holders[0]][key], self.data_group.numbers
        holder = next((index for index, rank in enumerate(numbers) if rank in holders), 0)
        # Such a state may be computed from one shard. Other shards have other values, and no rule combines them.
        is_whole = self.unit.degrees.optimizer == 1 or self.parts.states.optimizer.state_of(shard).is_whole(shard)
        if shape is not None and math.prod(shape) > 1 and not is_whole:
            raise ZeroEngineError(
                f"the optimizer's state {key!r} of {self.slot.name} {self.slot.shape} has shape {shape} on a shard: "
                "neither a number nor a value of each element, so there is no whole of it"
            )
        return shard, shape, holder

    def trainable_shard(self) -> OptimizerShard:
        """Return the optimizer's shard.

        Raises:
            ZeroEngineError: The parameter is frozen.
        """
        if self.shard is None:
            raise ZeroEngineError(f"parameter {self.slot.name} is frozen: it has no gradient and no optimizer state")
        return self.shard

    def check_has_weights(self, call: str) -> None:
        """Check that the model computes with its weights. See ``Gatherer.check_has_weights``."""
        self.parts.passes.gatherer.check_has_weights(call)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeros on the device, in the dtype in which values are exchanged: floating-point ones at least fp32."""
        dtype = self.unit.dtype
        if dtype.is_floating_point or dtype.is_complex:
            # Masters and moments of bf16 and fp16 parameters are fp32, and must not be rounded.
            dtype = torch.promote_types(dtype, torch.float32)
        return torch.zeros(shape, dtype=dtype, device=self.parts.ranks.group.device)

    def checked_copy(self, value: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a contiguous copy of ``value`` on the device, in the dtype in which values are exchanged.

        Args:
            value: The argument that the user passed.
            shape: The shape that it must have. None: the shape of the parameter.
        """
        name, shape = self.slot.name, self.shape if shape is None else shape
        if not isinstance(value, torch.Tensor):
            raise ZeroEngineError(f"{name}: the value is to be a tensor of shape {shape}, found {value!r:.100}")
        if tuple(value.shape) != shape:
            raise ZeroEngineError(f"{name}: the value is to have shape {shape}, the one given has {tuple(value.shape)}")
        # The value is copied, because the broadcast writes into its argument on other ranks.
        return self.zeros(shape).copy_(value.detach())

    def owned_parts(self, shard: torch.Tensor, *, write: bool = False) -> Iterator[tuple[ShardSpan, torch.Tensor]]:
        """Yield the parts of the parameter in ``shard``, as views.

        Args:
            shard: A shard at the optimizer degree, 1-D, of the gradient or the master weights.
            write: Whether the caller writes to the views.
        """
        for span in self.unit.layout.spans(self.unit.rank, self.unit.degrees.optimizer):
            if span.param_index == self.index:
                # The shard may be a mapped file. If the disk fails this raises, whereas a use would end the process.
                populate(shard[span.shard_slice], write=write)
                yield span, shard[span.shard_slice]

    @property
    def data_group(self) -> Group:
        """The ranks that the parameter is partitioned over."""
        return self.parts.ranks.data_group(self.unit)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter, whose slice alone may be on this rank."""
        return whole_shape(self.unit.params[self.index])

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of the whole parameter, from this rank's slice. A collective of the model group."""
        return assemble(self.parts.ranks, self.unit, self.index, values)

    def own_slice(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a value of the whole parameter."""
        part = slice_of(self.unit.params[self.index])
        return value if part is None else part.cut(value)

    def expand(self, owned_parts: Iterable[tuple[ShardSpan, torch.Tensor]]) -> torch.Tensor:
        """Return a tensor of the parameter's shape with ``owned_parts``, and zeros elsewhere.

        The sum over ranks has the values of the whole parameter.
        """
        values_of_rank = self.zeros(self.slot.shape)
        # With an optimizer degree below the world size several ranks hold each shard, and the sum must have it once.
        if self.unit.rank < self.unit.degrees.optimizer:
            for span, values in owned_parts:
                values_of_rank.view(-1)[span.param_slice] = values.flatten()
        return values_of_rank
