"""Whole values of a partitioned state, read and written from outside: parameters, gradients, optimizer state.

For looking and for surgery. Every function here is a collective: call it on every rank, of the same parameter.
What is wrong on one rank is an error on all of them, and then nothing has changed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.engine.accumulation import Accumulation
from zeroengine.engine.gathered import owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.runtime.backward_tracker import BackwardTracker
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.reducer import Reducer
from zeroengine.runtime.unit import Unit

log = logging.getLogger("zeroengine")


class FullValues:
    """Serves ``gathered``, ``Engine.full_state_dict`` and the functions below.

    Args:
        divisor: Returns what the summed gradient is to be divided by for the mean.
        accumulation: Says whether gradients have come since the last call of ``step``.
        backward: Ends a plain backward that is over.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        group: Group,
        transport: Transport,
        gatherer: Gatherer,
        reducer: Reducer,
        optimizer: ShardedOptimizer,
        writes: OutsideWrites,
        divisor: Callable[[], float],
        accumulation: Accumulation,
        backward: BackwardTracker,
    ) -> None:
        self._backward = backward
        self.gatherer = gatherer
        self._model, self._units, self._group, self._transport = model, units, group, transport
        self._reducer, self._divisor = reducer, divisor
        self._optimizer, self._writes, self._accumulation = optimizer, writes, accumulation
        self._warned = False

    # -- for `gathered` ---------------------------------------------------------------------------

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        self._backward.end_if_over()  # what it has left to reduce comes before what the caller is about to exchange
        wanted = {id(param) for param in params}
        return [unit for unit in self._units if any(id(param) in wanted for param in unit.params)]

    def first_to_write(self, changed: Sequence[bool]) -> list[int]:
        flags = torch.zeros(len(changed), self._group.world_size, dtype=torch.float64, device="cpu")
        flags[:, self._group.rank] = torch.tensor(changed, dtype=torch.float64, device="cpu")
        flat = self._transport.all_reduce_scalars(flags.flatten().to(self._group.device), "gathered")
        return [next((rank for rank, flag in enumerate(row) if flag), -1) for row in flat.view_as(flags).tolist()]

    def take_over(self, unit: Unit, writer: int) -> None:
        self._group.broadcast(unit.full_buffer, writer)
        torch.autograd.graph.increment_version(unit.params)
        unit.copy_full_to_shard()
        unit.unset_params.clear()
        self._writes.remember(unit)
        for states in self._optimizer.units:
            if states.unit is unit:
                states.reload_master()

    def note_gradient_read(self) -> None:
        has_gradients = self._accumulation.has_new_gradients or self._backward.in_progress
        if self._warned or not has_gradients or torch._C._current_graph_task_id() >= 0:
            return
        self._warned = True
        if self._group.rank == 0:
            log.warning(
                "`grad` of a parameter was read between backward() and step(), and it is None: gradients are reduced "
                "into buffers of the engine. torch.nn.utils.clip_grad_norm_ clips nothing here: call "
                "engine.clip_grad_norm_(max_norm), or write gradient_clipping in the configuration. "
                "zeroengine.full_gradient(param) gives the gradient."
            )

    # -- the whole model --------------------------------------------------------------------------

    def state_dict(self, rank0_only: bool) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and persistent buffers. See ``Engine.full_state_dict``. A collective."""
        returns_values = self._group.rank == 0 or not rank0_only
        values: dict[nn.Parameter, torch.Tensor] = {}
        # One unit after another, so that a rank that returns nothing never holds more than one.
        for unit in self._units:
            self.gatherer.pin(unit)
            if returns_values:
                values |= {param: param.detach().to("cpu", copy=True) for param in unit.params}
            self.gatherer.unpin(unit)
        if not returns_values:
            return {}
        state: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            state |= {f"{dot}{name}": values[p] for name, p in module._parameters.items() if p is not None}
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    state[f"{dot}{name}"] = buffer.detach().to("cpu", copy=True)
        return state

    # -- one parameter's values -------------------------------------------------------------------

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        self._backward.end_if_over()
        unit, index = self._unit(param)
        states = self._states(unit)
        mine = self._reducer.unreduced_gradient(states.grads, index) if states is not None else None
        used = mine is not None or (states is not None and states.grads.has_grad[index])
        with self._agreeing("full_gradient", unit, index, used) as used_on:
            states = self._trainable(unit, index)
            self._reducer.check_backward_ended()
        self._reducer.wait_reduces()
        if not any(used_on):
            return None
        whole = self._part(unit, index, states.gradient if states.grads.is_reduced else None)
        if mine is not None:
            whole += mine
        self._group.all_reduce(whole)
        return whole / self._divisor()

    def set_gradient(self, param: nn.Parameter, value: torch.Tensor) -> None:
        self._backward.end_if_over()
        unit, index = self._unit(param)
        with self._agreeing("set_full_gradient", unit, index):
            states = self._trainable(unit, index)
            value = self._fitting(unit, index, value)
            self._reducer.check_backward_ended()
        self._reducer.wait_reduces()
        self._group.broadcast(value)
        self._reducer.replace_gradient(states.grads, index, value * self._divisor())

    def optimizer_state(self, param: nn.Parameter, key: str) -> torch.Tensor:
        unit, index = self._unit(param)
        states, shape, holder = self._kept("full_optimizer_state", unit, index, key)
        values = self._optimizer.values(states, unit.layout.slots[index], key)
        if shape is None:  # a value of each element
            part = torch.zeros_like(states.master)
            for where, value in values:
                part[where] = value.flatten().to(part.dtype)
            whole = self._part(unit, index, part)
        else:
            whole = torch.zeros(shape, dtype=_wide(unit.dtype), device=self._group.device)
            if self._group.rank == holder:
                whole.copy_(values[0][1])
        self._group.all_reduce(whole)
        return whole

    def set_optimizer_state(self, param: nn.Parameter, key: str, value: torch.Tensor) -> None:
        unit, index = self._unit(param)
        states, shape, _ = self._kept("set_full_optimizer_state", unit, index, key)
        with self._agreeing("set_full_optimizer_state", unit, index):
            value = self._fitting(unit, index, value, shape)
        self._group.broadcast(value)
        if shape is None:
            part = torch.zeros_like(states.master)
            for where, values in self._owned(unit, index, value):
                part[where] = values
            value = part
        self._optimizer.set_values(states, unit.layout.slots[index], key, value)

    def _kept(self, call: str, unit: Unit, index: int, key: str) -> tuple[OptimizerShard, tuple[int, ...] | None, int]:
        """Whose state it is, its shape (see ``ShardedOptimizer.shapes``), and the lowest rank that has some of it."""
        mine, slot = self._states(unit), unit.layout.slots[index]
        fact = self._optimizer.shapes(mine, slot) if mine is not None else {}
        with self._agreeing(f"{call} {key!r}", unit, index, fact) as shapes_on:
            states = self._trainable(unit, index)
        holders = [rank for rank, shapes in enumerate(shapes_on) if key in shapes]
        if not holders:
            known = sorted({name for shapes in shapes_on for name in shapes})
            raise ZeroEngineError(
                f"the optimizer keeps no state {key!r} of {slot.name}; it keeps: {', '.join(known) or 'nothing yet'}"
            )
        shape = shapes_on[holders[0]][key]
        if shape is not None and math.prod(shape) > 1 and unit.degrees.optimizer > 1:
            raise ZeroEngineError(
                f"the optimizer's state {key!r} of {slot.name} {slot.shape} has shape {shape} on a shard: neither a "
                "number nor a value of each element, so there is no whole of it"
            )
        return states, shape, holders[0]

    def master(self, param: nn.Parameter) -> torch.Tensor:
        unit, index = self._unit(param)
        with self._agreeing("full_master", unit, index):
            states = self._states(unit)
        if states is not None:
            if states.may_be_written:
                states.reload_master()
            whole = self._part(unit, index, states.master)
            self._group.all_reduce(whole)
            return whole
        self.gatherer.pin(unit)  # frozen: there is none but itself
        value = param.detach().to(_wide(unit.dtype), copy=True)
        self.gatherer.unpin(unit)
        return value

    def set_master(self, param: nn.Parameter, value: torch.Tensor) -> None:
        unit, index = self._unit(param)
        with self._agreeing("set_full_master", unit, index):
            value = self._fitting(unit, index, value)
        self._group.broadcast(value)
        states = self._states(unit)
        self.gatherer.pin(unit)
        if states is not None:
            for where, part in self._owned(unit, index, value):
                populate(states.master[where], write=True)
                states.master[where].copy_(part)
        with torch.no_grad():
            param.copy_(value)  # what everybody computes with
        unit.copy_full_to_shard()
        unit.unset_params.discard(unit.layout.slots[index].name)
        self.gatherer.unpin(unit)

    # -- agreement --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _agreeing(self, call: str, unit: Unit, index: int, fact: Any = None) -> Iterator[list[Any]]:
        """For checks, as ``Group.agreeing``; and every rank is to make the same call."""
        call = f"{call} of {unit.layout.slots[index].name}"
        facts: list[Any] = []
        with self._group.agreeing(f"in {call}", (call, fact)) as every:
            yield facts
        if any(other != call for other, _ in every):
            calls = ", ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(every))
            raise ZeroEngineError(f"every rank is to make the same call of the same parameter, found {calls}")
        facts += [fact for _, fact in every]

    def _unit(self, param: nn.Parameter) -> tuple[Unit, int]:
        (unit,) = self.units_of([param])
        return unit, next(i for i, p in enumerate(unit.params) if p is param)

    def _states(self, unit: Unit) -> OptimizerShard | None:
        return next((states for states in self._optimizer.units if states.unit is unit), None)

    def _trainable(self, unit: Unit, index: int) -> OptimizerShard:
        states = self._states(unit)
        if states is None:
            name = unit.layout.slots[index].name
            raise ZeroEngineError(f"parameter {name} is frozen: it has no gradient and no optimizer state")
        return states

    def _fitting(
        self, unit: Unit, index: int, value: torch.Tensor, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A copy of ``value`` on the device, in the dtype to send it in.

        Args:
            shape: what it is to have; the parameter's where None.
        """
        slot = unit.layout.slots[index]
        shape = slot.shape if shape is None else shape
        if not isinstance(value, torch.Tensor):
            raise ZeroEngineError(f"{slot.name}: the value is to be a tensor of shape {shape}, found {value!r:.100}")
        if tuple(value.shape) != shape:
            raise ZeroEngineError(
                f"{slot.name}: the value is to have shape {shape}, the one given has {tuple(value.shape)}"
            )
        return value.detach().to(self._group.device, _wide(unit.dtype), copy=True).contiguous()

    # -- between whole values and shards ----------------------------------------------------------

    def _part(self, unit: Unit, index: int, shard: torch.Tensor | None) -> torch.Tensor:
        """What this rank adds to a whole parameter's values, of its shape, where shards are of the optimizer's degree.

        The ranks' parts sum to the whole; None adds nothing.
        """
        slot = unit.layout.slots[index]
        value = torch.zeros(slot.shape, dtype=_wide(unit.dtype), device=self._group.device)
        if shard is not None and self._group.rank < unit.degrees.optimizer:  # these hold each shard once
            for where, part in self._owned(unit, index, value):
                populate(shard[where])
                part.copy_(shard[where])
        return value

    def _owned(self, unit: Unit, index: int, value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Where ``value`` (contiguous) lies in this rank's optimizer shard, and the part of it that does."""
        flat = value.view(-1)
        for span in unit.layout.spans(self._group.rank, unit.degrees.optimizer):
            if span.param_index == index:
                where = slice(span.shard_offset, span.shard_offset + span.numel)
                yield where, flat[span.param_offset : span.param_offset + span.numel]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are looked at in: fp32 for lower ones, else their own."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype


def full_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient of ``param`` over the ranks, as far as this step's backwards have come, before clipping.

    It is what ``param.grad`` would be without partitioning and with each loss divided by
    ``gradient_accumulation_steps``. Call it on every rank, between ``backward`` and ``engine.step``.

    Returns:
        A copy of the parameter's shape, fp32 (or wider, as the parameter is), on the engine's device; None where no
        rank has a gradient.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or is frozen, or a backward is under way.
    """
    return _owner(param).gradient(param)


def set_full_gradient(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replaces what ``full_gradient`` gives by rank 0's ``value``. Later backwards of the step add to it.

    Raises:
        ZeroEngineError: as ``full_gradient``, or ``value`` has another shape.
    """
    _owner(param).set_gradient(param, value)


def full_optimizer_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """What the optimizer keeps of ``param`` under ``key``: ``exp_avg``, ``exp_avg_sq``, ``step``, ...

    Returns:
        A copy of the parameter's shape, fp32 (or wider, as the parameter is), or 0-d for a number.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine or is frozen, or the optimizer keeps no such thing (yet: most
            begin with the first step).
    """
    return _owner(param).optimizer_state(param, key)


def set_full_optimizer_state(param: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Replaces what ``full_optimizer_state`` gives by rank 0's ``value``.

    Raises:
        ZeroEngineError: as ``full_optimizer_state``, or ``value`` has another shape.
    """
    _owner(param).set_optimizer_state(param, key, value)


def full_master(param: nn.Parameter) -> torch.Tensor:
    """The fp32 master of ``param``, or a copy of its own values where there is none. Of the parameter's shape."""
    return _owner(param).master(param)


def set_full_master(param: nn.Parameter, value: torch.Tensor) -> None:
    """Rank 0's ``value`` becomes the master of ``param``, and, rounded, the parameter.

    Raises:
        ZeroEngineError: ``param`` belongs to no engine, or ``value`` has another shape.
    """
    _owner(param).set_master(param, value)


def _owner(param: nn.Parameter) -> FullValues:
    owner = owner_of(param) if isinstance(param, nn.Parameter) else None
    if not isinstance(owner, FullValues):
        raise ZeroEngineError(
            "this takes a parameter of a model that was passed to zeroengine.initialize(), such as "
            "engine.module.head.weight"
        )
    return owner
