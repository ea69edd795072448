"""Read and write whole values of partitioned states: parameters, gradients, optimizer state, master weights.

Every method of ``FullValues`` that moves values is a collective. An error on one rank is an error on all ranks, and
then nothing has changed.
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
        model: The module that was passed to ``initialize``.
        units: All units of the engine.
        group: The ranks of the engine.
        transport: Adds up flags over the ranks.
        gatherer: Gathers whole units.
        reducer: Owns the gradients.
        optimizer: Owns master weights and optimizer states.
        outside_writes: Is told of values that were written on purpose.
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
        outside_writes: OutsideWrites,
        divisor: Callable[[], float],
        accumulation: Accumulation,
        backward: BackwardTracker,
    ) -> None:
        self.gatherer = gatherer
        self._model, self._units, self._group, self._transport = model, units, group, transport
        self._reducer, self._optimizer, self._outside_writes = reducer, optimizer, outside_writes
        self._divisor, self._accumulation, self._backward = divisor, accumulation, backward
        self._warned_of_missing_gradient = False

    # -- for `gathered` ---------------------------------------------------------------------------

    def units_of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """Return the units that hold any of ``params``, in the order of registration."""
        # Reductions that are left of the last backward are launched first. A rank that launched them after the caller's
        # exchange would meet another collective of its peers.
        self._backward.end_if_over()
        param_ids = {id(param) for param in params}
        return [unit for unit in self._units if any(id(param) in param_ids for param in unit.params)]

    def first_writers(self, changed: Sequence[bool]) -> list[int]:
        """Return for each flag the lowest rank that raised it, or -1. A collective."""
        # Each rank raises its flags in its own column, so one sum shows every rank's flags to all.
        flags = torch.zeros(len(changed), self._group.world_size, dtype=torch.float64, device="cpu")
        flags[:, self._group.rank] = torch.tensor(changed, dtype=torch.float64, device="cpu")
        flat = self._transport.all_reduce_scalars(flags.flatten().to(self._group.device), "gathered")
        return [next((rank for rank, flag in enumerate(row) if flag), -1) for row in flat.view_as(flags).tolist()]

    def apply_writes(self, unit: Unit, writer: int) -> None:
        """Give all ranks the values of ``unit`` that rank ``writer`` holds, masters included. A collective."""
        # Whole values travel, since the writer is the only rank that holds them all.
        self._group.broadcast(unit.full_buffer, writer)
        # Autograd then refuses a backward through a graph that saved the old values.
        torch.autograd.graph.increment_version(unit.params)
        unit.copy_full_to_shard()
        unit.unset_params.clear()
        # These values are the same on every rank now, so the next comparison must not take them for a divergence.
        self._outside_writes.reset_baseline(unit)
        shard = self._optimizer_shard(unit)
        if shard is not None:
            shard.reload_master()

    def note_gradient_read(self) -> None:
        """Warn once where ``grad`` of a parameter is read between ``backward`` and ``step``, for it is None."""
        has_gradients = self._accumulation.has_new_gradients or self._backward.in_progress
        # torch itself reads `grad` while a backward accumulates it, and this is no mistake of the user.
        is_inside_backward = torch._C._current_graph_task_id() >= 0
        if self._warned_of_missing_gradient or not has_gradients or is_inside_backward:
            return
        self._warned_of_missing_gradient = True
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
        # Duplicates are kept, for `model.state_dict()` lists a tied parameter under each of its names.
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
        """Return the mean gradient of ``param``. See ``full_gradient``."""
        self._backward.end_if_over()
        unit, index = self._locate(param)
        shard = self._optimizer_shard(unit)
        local_gradient = None if shard is None else self._reducer.unreduced_gradient(shard.grads, index)
        # These facts are local, and a rank may have no gradient where others have one. All ranks learn of all of them,
        # so that they decide alike whether to exchange anything.
        has_gradient = local_gradient is not None or (shard is not None and shard.grads.has_grad[index])
        with self._same_call("full_gradient", unit, index, has_gradient) as has_gradient_by_rank:
            shard = self._trainable_shard(unit, index)
            self._reducer.check_backward_ended()
        # A reduce may still be writing into the shard that is read below.
        self._reducer.wait_reduces()
        if not any(has_gradient_by_rank):
            return None
        # A gradient may be in two places: earlier micro-steps in the reduced shard, later ones in this rank's own
        # buffers.
        gradient = self._expand_shard(unit, index, shard.gradient if shard.grads.is_reduced else None)
        if local_gradient is not None:
            gradient += local_gradient
        self._group.all_reduce(gradient)
        return gradient / self._divisor()

    def set_gradient(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the mean gradient of ``param``. See ``set_full_gradient``."""
        self._backward.end_if_over()
        unit, index = self._locate(param)
        with self._same_call("set_full_gradient", unit, index):
            shard = self._trainable_shard(unit, index)
            value = self._checked_copy(unit, index, value)
            # These checks are local, so they run where an error of one rank reaches every rank.
            self._reducer.check_backward_ended()
        self._reducer.wait_reduces()
        self._group.broadcast(value)
        # The engine keeps sums rather than means, so the value is multiplied by the divisor of the update.
        self._reducer.replace_gradient(shard.grads, index, value * self._divisor())

    def optimizer_state(self, param: nn.Parameter, key: str) -> torch.Tensor:
        """Return the state ``key`` of ``param``. See ``full_optimizer_state``."""
        unit, index = self._locate(param)
        shard, shape, holder = self._find_state("full_optimizer_state", unit, index, key)
        values = self._optimizer.state_values(shard, index, key)
        if shape is None:
            # The state has a value for each element, so each rank adds its part of them.
            shard_values = torch.zeros_like(shard.master)
            for shard_range, value in values:
                shard_values[shard_range] = value.flatten().to(shard_values.dtype)
            state = self._expand_shard(unit, index, shard_values)
        else:
            # A state such as a step count is one value, which several ranks may hold. One holder sends it, and the
            # others add zeros.
            state = torch.zeros(shape, dtype=_exchange_dtype(unit.dtype), device=self._group.device)
            if self._group.rank == holder:
                state.copy_(values[0][1])
        self._group.all_reduce(state)
        return state

    def set_optimizer_state(self, param: nn.Parameter, key: str, value: torch.Tensor) -> None:
        """Replace the state ``key`` of ``param``. See ``set_full_optimizer_state``."""
        unit, index = self._locate(param)
        shard, shape, _ = self._find_state("set_full_optimizer_state", unit, index, key)
        with self._same_call("set_full_optimizer_state", unit, index):
            value = self._checked_copy(unit, index, value, shape)
        self._group.broadcast(value)
        # Each rank received the whole value and keeps only the part that it owns.
        if shape is None:
            shard_values = torch.zeros_like(shard.master)
            for shard_range, owned_values in self._owned_parts(unit, index, value):
                shard_values[shard_range] = owned_values
            value = shard_values
        self._optimizer.set_state_values(shard, index, key, value)

    def _find_state(
        self, call: str, unit: Unit, index: int, key: str
    ) -> tuple[OptimizerShard, tuple[int, ...] | None, int]:
        """Find the state ``key`` of a parameter.

        Returns:
            The shard of the optimizer's states, the shape of the state (None for a value of each element; see
            ``ShardedOptimizer.state_shapes``), and the lowest rank that holds some of it.
        """
        own_shard, slot = self._optimizer_shard(unit), unit.layout.slots[index]
        # A rank without elements of the parameter has no states of it, and learns their names from the others.
        own_shapes = {} if own_shard is None else self._optimizer.state_shapes(own_shard, index)
        with self._same_call(f"{call} {key!r}", unit, index, own_shapes) as shapes_by_rank:
            shard = self._trainable_shard(unit, index)
        holders = [rank for rank, shapes in enumerate(shapes_by_rank) if key in shapes]
        if not holders:
            known = sorted({name for shapes in shapes_by_rank for name in shapes})
            raise ZeroEngineError(
                f"the optimizer keeps no state {key!r} of {slot.name}; it keeps: {', '.join(known) or 'nothing yet'}"
            )
        shape = shapes_by_rank[holders[0]][key]
        # Such a state is computed from one shard. Different shards have different values, and no rule would join them.
        if shape is not None and math.prod(shape) > 1 and unit.degrees.optimizer > 1:
            raise ZeroEngineError(
                f"the optimizer's state {key!r} of {slot.name} {slot.shape} has shape {shape} on a shard: neither a "
                "number nor a value of each element, so there is no whole of it"
            )
        return shard, shape, holders[0]

    def master(self, param: nn.Parameter) -> torch.Tensor:
        """Return the master weights of ``param``. See ``full_master``."""
        unit, index = self._locate(param)
        with self._same_call("full_master", unit, index):
            shard = self._optimizer_shard(unit)
        # A frozen unit has no shard on any rank, so all ranks take the same branch.
        if shard is not None:
            # Values that the user wrote into the model reach the master first, or this would return the old ones.
            if shard.may_be_written:
                shard.reload_master()
            value = self._expand_shard(unit, index, shard.master)
            self._group.all_reduce(value)
            return value
        # A frozen parameter has no master apart from itself.
        self.gatherer.pin(unit)
        value = param.detach().to(_exchange_dtype(unit.dtype), copy=True)
        self.gatherer.unpin(unit)
        return value

    def set_master(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replace the master weights of ``param``. See ``set_full_master``."""
        unit, index = self._locate(param)
        with self._same_call("set_full_master", unit, index):
            value = self._checked_copy(unit, index, value)
        self._group.broadcast(value)
        shard = self._optimizer_shard(unit)
        self.gatherer.pin(unit)
        if shard is not None:
            for shard_range, owned_values in self._owned_parts(unit, index, value):
                # The disk is asked for the pages first, where it can report a failure as an error.
                populate(shard.master[shard_range], write=True)
                shard.master[shard_range].copy_(owned_values)
        with torch.no_grad():
            # All ranks compute with the value in the parameter's dtype, rounded once from the master.
            param.copy_(value)
        unit.copy_full_to_shard()
        # A parameter that was built without values has some now, and the forward may use it.
        unit.unset_params.discard(unit.layout.slots[index].name)
        self.gatherer.unpin(unit)

    # -- checks -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _same_call(self, call: str, unit: Unit, index: int, fact: Any = None) -> Iterator[list[Any]]:
        """Raise on every rank what is raised inside on any, or where ranks make different calls. A collective.

        Args:
            call: The public function that was called.
            unit: The unit of the parameter that it was called with.
            index: The parameter's place in the unit.
            fact: Is collected from every rank.

        Yields:
            A list that holds the ranks' facts, in rank order, once the ``with`` has ended.
        """
        call = f"{call} of {unit.layout.slots[index].name}"
        facts: list[Any] = []
        with self._group.collective_errors(f"in {call}", (call, fact)) as calls_by_rank:
            yield facts
        # Ranks with different calls would exchange tensors of different shapes next and hang or mix up values.
        if any(other_call != call for other_call, _ in calls_by_rank):
            calls = ", ".join(f"rank {rank}: {other_call}" for rank, (other_call, _) in enumerate(calls_by_rank))
            raise ZeroEngineError(f"every rank is to make the same call of the same parameter, found {calls}")
        facts += [fact for _, fact in calls_by_rank]

    def _locate(self, param: nn.Parameter) -> tuple[Unit, int]:
        """Return the unit of ``param`` and its place among the unit's parameters."""
        (unit,) = self.units_of([param])
        # A tensor compares element by element, so the parameter is found by identity.
        return unit, next(index for index, candidate in enumerate(unit.params) if candidate is param)

    def _optimizer_shard(self, unit: Unit) -> OptimizerShard | None:
        """Return what the optimizer keeps of ``unit``; None where the unit is frozen."""
        return next((shard for shard in self._optimizer.shards if shard.unit is unit), None)

    def _trainable_shard(self, unit: Unit, index: int) -> OptimizerShard:
        shard = self._optimizer_shard(unit)
        if shard is None:
            name = unit.layout.slots[index].name
            raise ZeroEngineError(f"parameter {name} is frozen: it has no gradient and no optimizer state")
        return shard

    def _checked_copy(
        self, unit: Unit, index: int, value: torch.Tensor, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return a copy of ``value`` on the device, in the dtype in which it is sent.

        Args:
            unit: The unit of the parameter.
            index: The parameter's place in the unit.
            value: What the user passed.
            shape: The shape that it must have; that of the parameter where None.
        """
        slot = unit.layout.slots[index]
        shape = slot.shape if shape is None else shape
        if not isinstance(value, torch.Tensor):
            raise ZeroEngineError(f"{slot.name}: the value is to be a tensor of shape {shape}, found {value!r:.100}")
        if tuple(value.shape) != shape:
            raise ZeroEngineError(
                f"{slot.name}: the value is to have shape {shape}, the one given has {tuple(value.shape)}"
            )
        # The copy keeps the user's tensor apart from the broadcast, which writes into its argument on other ranks.
        return value.detach().to(self._group.device, _exchange_dtype(unit.dtype), copy=True).contiguous()

    # -- between whole values and shards ----------------------------------------------------------

    def _expand_shard(self, unit: Unit, index: int, shard: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of a parameter's shape with this rank's values from ``shard``, and zeros elsewhere.

        Summed over the ranks it is the whole parameter's values. Where ``shard`` is None it is all zeros.

        Args:
            unit: The unit of the parameter.
            index: The parameter's place in the unit.
            shard: 1-D, partitioned by the optimizer's degree.
        """
        slot = unit.layout.slots[index]
        value = torch.zeros(slot.shape, dtype=_exchange_dtype(unit.dtype), device=self._group.device)
        # With an optimizer degree below the world size several ranks hold each shard. Only the first of them counts, or
        # the sum would hold the values several times.
        if shard is not None and self._group.rank < unit.degrees.optimizer:
            for shard_range, owned_part in self._owned_parts(unit, index, value):
                populate(shard[shard_range])
                owned_part.copy_(shard[shard_range])
        return value

    def _owned_parts(self, unit: Unit, index: int, value: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the ranges of this rank's optimizer shard that hold a parameter, each with that part of ``value``.

        Args:
            unit: The unit of the parameter.
            index: The parameter's place in the unit.
            value: Contiguous, of the parameter's shape. What is yielded are views of it.
        """
        flat = value.view(-1)
        for span in unit.layout.spans(self._group.rank, unit.degrees.optimizer):
            if span.param_index == index:
                shard_range = slice(span.shard_offset, span.shard_offset + span.numel)
                yield shard_range, flat[span.param_offset : span.param_offset + span.numel]


def _exchange_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are exchanged: at least fp32 for floating ones."""
    # Masters and moments are fp32 where the parameter is bf16 or fp16, and must not be rounded on the way.
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point or dtype.is_complex else dtype
