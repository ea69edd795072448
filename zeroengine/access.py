"""Whole values of a partitioned state, read and written from outside: parameters, gradients, optimizer state.

For looking and for surgery. Every function here is a collective: call it on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from .comm import Group, Transport
from .errors import ZeroEngineError
from .optim import ShardedOptimizer, UnitStates
from .partition import FlatLayout, ParamSlot
from .runtime import Gatherer, Reducer, Unit, owner_of


class Access:
    """What an engine lends to ``gathered`` and to the functions below.

    Args:
        divisor: gives what the summed gradient is to be divided by for the mean.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        group: Group,
        transport: Transport,
        gatherer: Gatherer,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        divisor: Callable[[], float],
    ) -> None:
        self.gatherer = gatherer
        self._units, self._group, self._transport = units, group, transport
        self._reducer, self._divisor = reducer, divisor
        self._optimizer = optimizer

    # -- for `gathered` ---------------------------------------------------------------------------

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        wanted = {id(param) for param in params}
        return [unit for unit in self._units if any(id(param) in wanted for param in unit.params)]

    def first_to_write(self, changed: Sequence[bool]) -> list[int]:
        flags = torch.zeros(len(changed), self._group.world_size, dtype=torch.float64)
        flags[:, self._group.rank] = torch.tensor(changed, dtype=torch.float64)
        flat = self._transport.all_reduce_scalars(flags.flatten().to(self._group.device), "gathered")
        return [next((rank for rank, flag in enumerate(row) if flag), -1) for row in flat.view_as(flags).tolist()]

    def take_over(self, unit: Unit, writer: int) -> None:
        self._group.broadcast(unit.full, writer)
        unit.take_from_full()
        for states in self._optimizer.units:
            if states.unit is unit:
                states.reload_master()

    # -- one parameter's values -------------------------------------------------------------------

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        states, slot = self._place(param)
        index = states.unit.layout.slots.index(slot)
        self._reducer.settle()
        part, summed = self._reducer.so_far(states.grads, index)
        if summed:  # this rank's shard of the sum
            degree = states.unit.degrees.optimizer
            whole = self._whole(states.unit.layout, slot, states.gradient, degree)
        else:  # this rank's own gradient
            whole = part if part is not None else torch.zeros(slot.shape, device=self._group.device)
            whole = whole.double() if whole.dtype is torch.float64 else whole.float()
            self._group.all_reduce(whole)
        used = torch.tensor([float(part is not None)], device=self._group.device)
        self._group.all_reduce(used)
        return whole / self._divisor() if used.item() else None

    def set_gradient(self, param: nn.Parameter, value: torch.Tensor) -> None:
        states, slot = self._place(param)
        value = self._agreed(slot, value) * self._divisor()
        self._reducer.settle()
        if not self._reducer.is_reduced(states.grads):
            raise ZeroEngineError(
                f"set_full_gradient({slot.name}): its gradient is not reduced yet. Call it between the last backward "
                "of a step and engine.step()."
            )
        for where, part in self._owned(states, slot, value):
            states.gradient[where].copy_(part)
        states.grads.used[states.unit.layout.slots.index(slot)] = True

    def optimizer_state(self, param: nn.Parameter, key: str) -> torch.Tensor:
        states, slot = self._place(param)
        values = self._optimizer.values(states, slot, key)
        self._check_key(states, slot, key)
        part = torch.zeros_like(states.master)
        for where, value in values:
            part[where] = value.flatten().to(part.dtype)
        whole = self._whole(states.unit.layout, slot, part, states.unit.degrees.optimizer)
        scalar = torch.tensor([float(any(v.dim() == 0 for _, v in values))], device=self._group.device)
        self._group.all_reduce(scalar)
        return whole.flatten()[0] if scalar.item() else whole

    def set_optimizer_state(self, param: nn.Parameter, key: str, value: torch.Tensor) -> None:
        states, slot = self._place(param)
        self._check_key(states, slot, key)
        scalar = value.dim() == 0
        value = self._agreed(slot, value.expand(slot.shape) if scalar else value)
        self._optimizer.set_values(states, slot, key, list(self._owned(states, slot, value)))

    def _check_key(self, states: UnitStates, slot: ParamSlot, key: str) -> None:
        mine = self._optimizer.keys(states, slot)
        known = sorted({name for names in self._group.exchange(mine) for name in names})
        if key not in known:
            raise ZeroEngineError(
                f"the optimizer keeps no state {key!r} of {slot.name}; it keeps: {', '.join(known) or 'nothing yet'}"
            )

    def master(self, param: nn.Parameter) -> torch.Tensor:
        unit, slot = self._unit(param)
        states = self._states(unit)
        if states is not None:
            return self._whole(unit.layout, slot, states.master, unit.degrees.optimizer)
        self.gatherer.hold(unit)  # frozen: there is none but itself
        value = param.detach().float() if param.is_floating_point() else param.detach().clone()
        value = value.clone() if value.data_ptr() == param.data_ptr() else value
        self.gatherer.let_go(unit)
        return value

    def set_master(self, param: nn.Parameter, value: torch.Tensor) -> None:
        unit, slot = self._unit(param)
        value = self._agreed(slot, value)
        states = self._states(unit)
        if states is not None:
            for where, part in self._owned(states, slot, value):
                states.master[where].copy_(part)
        self.gatherer.hold(unit)  # and what everybody computes with
        with torch.no_grad():
            param.copy_(value)
        unit.take_from_full()
        self.gatherer.let_go(unit)

    # -- between whole values and shards ----------------------------------------------------------

    def _unit(self, param: nn.Parameter) -> tuple[Unit, ParamSlot]:
        (unit,) = self.units_of([param])
        index = next(i for i, p in enumerate(unit.params) if p is param)
        return unit, unit.layout.slots[index]

    def _states(self, unit: Unit) -> UnitStates | None:
        return next((states for states in self._optimizer.units if states.unit is unit), None)

    def _place(self, param: nn.Parameter) -> tuple[UnitStates, ParamSlot]:
        unit, slot = self._unit(param)
        states = self._states(unit)
        if states is None:
            raise ZeroEngineError(f"parameter {slot.name} is frozen: it has no gradient and no optimizer state")
        return states, slot

    def _whole(self, layout: FlatLayout, slot: ParamSlot, part: torch.Tensor, degree: int) -> torch.Tensor:
        """A parameter's values from every rank's shard ``part``, at least fp32, of the parameter's shape."""
        dtype = part.dtype if part.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
        value = torch.zeros(slot.numel, dtype=dtype, device=part.device)
        if self._group.rank < degree:  # these ranks hold each shard once
            index = layout.slots.index(slot)
            for span in layout.spans(self._group.rank, degree):
                if span.slot == index:
                    mine = part[span.shard_offset : span.shard_offset + span.numel]
                    value[span.param_offset : span.param_offset + span.numel].copy_(mine)
        self._group.all_reduce(value)
        return value.view(slot.shape)

    def _owned(self, states: UnitStates, slot: ParamSlot, value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Where ``value`` lies in this rank's optimizer shard, and the part of it that does."""
        layout, flat = states.unit.layout, value.flatten()
        index = layout.slots.index(slot)
        for span in layout.spans(self._group.rank, states.unit.degrees.optimizer):
            if span.slot == index:
                where = slice(span.shard_offset, span.shard_offset + span.numel)
                yield where, flat[span.param_offset : span.param_offset + span.numel]

    def _agreed(self, slot: ParamSlot, value: torch.Tensor) -> torch.Tensor:
        """Rank 0's value on every rank."""
        if tuple(value.shape) != slot.shape:
            raise ZeroEngineError(
                f"parameter {slot.name} has shape {slot.shape}, the value given has {tuple(value.shape)}"
            )
        wide = value.dtype in (torch.float64, torch.complex64, torch.complex128)
        value = value.detach().to(self._group.device, value.dtype if wide else torch.float32).clone()
        self._group.broadcast(value)
        return value


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient of ``param`` over ranks and micro-steps since the last step, before clipping.

    Call it on every rank, between ``backward`` and ``engine.step``.

    Returns:
        A copy of the parameter's shape, fp32 (or wider, as the parameter is), on the engine's device; None where no
        rank has a gradient.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or is frozen.
    """
    return _access(param).gradient(param)


def set_full_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces what ``full_gradient`` gives by rank 0's ``value``, for the next ``engine.step``.

    Raises:
        ZeroEngineError: another shape, or the step's last backward is still to come.
    """
    _access(param).set_gradient(param, value)


def full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """What the optimizer keeps of ``param`` under ``key``: ``exp_avg``, ``exp_avg_sq``, ``step``, ...

    Returns:
        A copy of the parameter's shape, fp32, or 0-d for a number.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine or is frozen, or the optimizer keeps no such thing.
    """
    return _access(param).optimizer_state(param, key)


def set_full_optimizer_state(param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Replaces what ``full_optimizer_state`` gives by rank 0's ``value``.

    Raises:
        ZeroEngineError: another shape, or the optimizer keeps no such thing.
    """
    _access(param).set_optimizer_state(param, key, value)


def full_master(param: nn.Parameter) -> torch.Tensor:
    """The fp32 master of ``param``, or its own values where there is none. A copy of the parameter's shape."""
    return _access(param).master(param)


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Rank 0's ``value`` becomes the master of ``param``, and, rounded, the parameter.

    Raises:
        ZeroEngineError: another shape.
    """
    _access(param).set_master(param, value)


def _access(param: nn.Parameter) -> Access:
    owner = owner_of(param) if isinstance(param, nn.Parameter) else None
    if not isinstance(owner, Access):
        raise ZeroEngineError(
            "this takes a parameter of a model that was passed to zeroengine.initialize(), such as "
            "engine.module.head.weight"
        )
    return owner
