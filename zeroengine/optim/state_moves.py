"""Move the optimizer's states of a model from one partitioning to another, from rank to rank.

One unit is moved at a time, and its earlier states are freed, so a rank holds at most one unit's whole values of one
state beyond the larger partitioning. Where a rank's new shard lies inside of its earlier one, nothing travels. Where
the two are the same and on the device, the memory stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.optim.backends.interface import SpanState, StateKeys
from zeroengine.optim.backends.moment_state import MomentState, moments_dtype, scales_name
from zeroengine.optim.optimizer_shard import AVERAGE, MASTER, zero_state
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit


@dataclass
class EarlierStates:
    """The optimizer's states of one unit on this rank, before a change.

    Attributes:
        unit: The unit, with its layout and degrees before the change.
        store: Where its states are; None: on the device.
        values: States with a value for each element of the optimizer shard, by name: the masters, if the unit has any,
            the average, and moments.
        scales: The scales of the moments of 8 bits, by the name of the moment.
        steps: The step count of each parameter, where the states are moments.
        by_parameter: The states of spans, by the index of the parameter, where the rule keeps them by parameter.
        is_whole: Whether these spans are whole parameters at their owners.
    """

    unit: Unit
    store: OffloadStore | None
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: list[int] | None = None
    by_parameter: dict[int, tuple[ShardSpan, SpanState]] = field(default_factory=dict)
    is_whole: bool = False

    def facts(self) -> dict[int, tuple[StateKeys, dict[str, torch.Tensor]]]:
        """Return, by the index of the parameter, what ``ShardState.create`` and ``ShardState.set_numbers`` take."""
        return {
            index: (
                {key: (values.dtype, None) for key, values in state.elements.items()}
                | {key: (value.dtype, tuple(value.shape)) for key, value in state.numbers.items()},
                state.numbers,
            )
            for index, (_, state) in self.by_parameter.items()
            if state.elements or state.numbers
        }


def earlier_states(optimizer: ShardedOptimizer) -> list[EarlierStates]:
    """Return the states of all shards of an optimizer, in order. They hold the tensors, and not the optimizer."""
    optimizer.backend.await_step_counts()
    result = []
    for shard in optimizer.shards:
        own, state = EarlierStates(shard.unit, shard.store), optimizer.backend.state_of(shard)
        if shard.unit.has_master:
            own.values[MASTER] = shard.master
        if shard.average is not None:
            own.values[AVERAGE] = shard.average
        if isinstance(state, MomentState):
            own.values |= zip(state.names, state.moments[shard.index], strict=True)
            if scales := state.scales[shard.index]:
                own.scales |= zip(state.names, scales, strict=True)
            own.steps = state.steps_of(shard)
        else:
            own.by_parameter = {span.param_index: (span, state.of(shard, span)) for span in state.spans(shard)}
            own.is_whole = state.is_whole(shard)
        result.append(own)
    return result


class StateMoves:
    """Moves the states of units to the shards that a change has made. All ranks call its methods together.

    Args:
        states: The states before the change, of every trainable unit, in order.
        transport: Moves bytes between the ranks that the states are partitioned over.
        group: These ranks.
    """

    def __init__(self, states: Sequence[EarlierStates], transport: Transport, group: Group) -> None:
        self._transport, self._group = transport, group
        # Where each parameter was, and its index there.
        self._places = {param: (own, index) for own in states for index, param in enumerate(own.unit.params)}
        # The parameters that are to be moved yet, by the unit before the change.
        self._num_left = {id(own): len(own.unit.params) for own in states}
        # Memory that shards are sent from, by dtype.
        self._sent: dict[torch.dtype, torch.Tensor] = {}

    def move(self, unit: Unit, store: OffloadStore | None) -> None:
        """Move the states with a value for each element into ``unit.moved_states``, and free the earlier ones.

        Args:
            unit: A trainable unit after the change.
            store: Where its states are to be; None: on the device.
        """
        # A change of the moments' precision may cut the model into other units.
        sources: dict[int, _Source] = {}
        for index, param in enumerate(unit.params):
            earlier, earlier_index = self._places[param]
            sources.setdefault(id(earlier), _Source(earlier, {})).indices[index] = earlier_index
        master_dtype = torch.float32 if unit.has_master else unit.dtype
        dtype, block = moments_dtype(unit.algorithm, master_dtype), unit.algorithm.block
        for name in dict.fromkeys(name for source in sources.values() for name in source.states.values):
            if name == MASTER and unit.has_master:
                self._move(list(sources.values()), unit, store, name, torch.float32, 1)
            elif name == AVERAGE:
                average_dtype = next(iter(sources.values())).states.values[name].dtype
                self._move(list(sources.values()), unit, store, name, average_dtype, 1)
            elif name != MASTER:
                self._move(list(sources.values()), unit, store, name, dtype, block)
        for number, source in sources.items():
            self._num_left[number] -= len(source.indices)
            if not self._num_left[number]:
                source.states.values.clear()
                source.states.scales.clear()

    def _move(
        self,
        sources: Sequence[_Source],
        unit: Unit,
        store: OffloadStore | None,
        name: str,
        dtype: torch.dtype,
        block: int,
    ) -> None:
        first = sources[0].states
        if len(sources) == 1 and store is None and _has_format(first, name, dtype, block):
            earlier = {name: first.values[name]}
            if name in first.scales:
                earlier[scales_name(name)] = first.scales[name]
            if first.store is None and _has_same_shard(first.unit, unit):
                unit.moved_states |= earlier
                return
            # What is gathered is the new shard, and is not copied.
            if (
                unit.degrees.optimizer == 1
                and _has_same_offsets(first.unit, unit)
                and not _lies_inside(first.unit, unit)
            ):
                unit.moved_states |= {key: self._covering(own, first.unit, unit)[0] for key, own in earlier.items()}
                return
        numel = unit.layout.shard_numel(unit.degrees.optimizer)
        moved = {name: zero_state(unit, store, numel, dtype)}
        if block > 1:
            moved[scales_name(name)] = zero_state(unit, store, numel // block, torch.float32)
        for source in sources:
            self._fill(source, unit, name, block, *moved.values())
        if store is not None:
            store.evict(*moved.values())
        unit.moved_states |= moved

    def _fill(
        self,
        source: _Source,
        unit: Unit,
        name: str,
        block: int,
        target: torch.Tensor,
        target_scales: torch.Tensor | None = None,
    ) -> None:
        """Write the values of a state of the parameters that ``unit`` has of ``source``. A collective."""
        earlier, old_block = source.states, source.states.unit.algorithm.block
        # Every rank gathers in the same order.
        values, first = self._covering(earlier.values[name], earlier.unit, unit)
        scales = None
        if name in earlier.scales:
            scales, _ = self._covering(earlier.scales[name], earlier.unit, unit)
        keeps_format = _has_format(earlier, name, target.dtype, block)
        for span in unit.layout.spans(unit.rank, unit.degrees.optimizer):
            if span.param_index not in source.indices:
                continue
            slot = earlier.unit.layout.slots[source.indices[span.param_index]]
            start, stop = span.shard_offset, span.shard_offset + span.numel
            of_span = {} if target_scales is None else {name: target_scales[start // block : -(-stop // block)]}
            state, start = SpanState({name: target[start:stop]}, {}, of_span), slot.offset + span.param_offset - first
            # A span may begin within a block of the earlier format.
            skipped = 0 if scales is None else span.param_offset % old_block
            part = values[start - skipped : start + span.numel]
            blocks = None if scales is None else scales[(start - skipped) // old_block :][: -(-len(part) // old_block)]
            if keeps_format:
                state.copy_raw(name, part, blocks)
            elif blocks is None:
                state.write(name, part)
            else:
                decoded = ops.decode_moment(part.contiguous(), blocks, is_signed=ops.MOMENT_SIGNS[name])
                state.write(name, decoded[skipped:])

    def _covering(self, shard: torch.Tensor, old: Unit, new: Unit) -> tuple[torch.Tensor, int]:
        """Return values of the flat buffer that contain those of this rank's new shard, and the first element's index.

        Args:
            shard: This rank's earlier shard, 1-D, with a value for each element or for each block.
            old: The unit before the change.
            new: The unit after it.
        """
        populate(shard)
        degree = old.degrees.optimizer
        if _lies_inside(old, new):
            return shard, old.layout.shard_range(old.rank, degree)[0]
        sent = self._sent.get(shard.dtype)
        if sent is None or sent.numel() < shard.numel():
            sent = self._sent[shard.dtype] = self._transport.empty(shard.numel(), shard.dtype)
        sent = sent[: shard.numel()].copy_(shard)
        whole = torch.empty(degree * shard.numel(), dtype=shard.dtype, device=self._group.device)
        ranks = old.degrees.owners(old.rank, degree)
        self._transport.gather.all_gather(whole, sent, new.name, ranks).wait_stream()
        # The next shard is sent from the same memory.
        self._transport.fence()
        return whole, 0

    def finish(self, optimizer: ShardedOptimizer) -> None:
        """Give the optimizer over the new shards the step counts, and the states that rules keep by parameter."""
        for shard in optimizer.shards:
            state = optimizer.backend.state_of(shard)
            if isinstance(state, MomentState):
                places = [self._places[param] for param in shard.unit.params]
                state.set_steps(shard, [own.steps[index] for own, index in places if own.steps is not None])
        states = list({id(own): own for own, _ in self._places.values()}.values())
        if any(own.steps is None for own in states):
            self._move_by_parameter(optimizer, states)
        self._places.clear()

    def _move_by_parameter(self, optimizer: ShardedOptimizer, states: Sequence[EarlierStates]) -> None:
        facts_by_rank = self._group.all_gather_object([own.facts() for own in states], "of the optimizer's states")
        facts: dict[tuple[int, int], tuple[StateKeys, dict[str, torch.Tensor]]] = {}
        for facts_of_rank in facts_by_rank:
            for own, facts_of_unit in zip(states, facts_of_rank, strict=True):
                facts |= {(id(own), index): fact for index, fact in facts_of_unit.items()}
        for shard in optimizer.shards:
            state = optimizer.backend.state_of(shard)
            spans = {span.param_index: span for span in state.spans(shard)}
            for index, param in enumerate(shard.unit.params):
                earlier, earlier_index = self._places[param]
                span = spans.get(index)
                # Before its first step a parameter has no state.
                keys, numbers = facts.get((id(earlier), earlier_index), ({}, {}))
                if span is not None and keys:
                    state.create(shard, span, keys)
                for key in sorted(key for key, (_, shape) in keys.items() if shape is None):
                    values = self._whole_values(earlier, earlier_index, key, keys[key][0])
                    if span is not None:
                        state.of(shard, span).write(key, values[span.param_slice])
                if span is not None and keys:
                    state.set_numbers(shard, span, numbers)
                earlier.by_parameter.pop(earlier_index, None)

    def _whole_values(self, earlier: EarlierStates, index: int, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return all values of a state of a parameter, 1-D. A collective, unless every rank has them."""
        unit, own = earlier.unit, earlier.by_parameter.get(index)
        slot, degree = unit.layout.slots[index], unit.degrees.optimizer
        if degree == 1 and not earlier.is_whole and own is not None:
            return own[1].elements[key].reshape(-1)
        # A sum in which one rank has each value and the others have zeros is exact.
        whole = torch.zeros(slot.numel, dtype=torch.promote_types(dtype, torch.float32), device=self._group.device)
        # Where several ranks hold each shard, those of the first one count. Every owner is the only one.
        if own is not None and (earlier.is_whole or unit.rank < degree):
            whole[own[0].param_slice] = own[1].elements[key].reshape(-1).to(whole)
        self._group.all_reduce(whole, f"of {key} of {slot.name}")
        return whole


class _Source(NamedTuple):
    """Parameters that a unit has of an earlier one: by their index in the unit, that in the earlier one."""

    states: EarlierStates
    indices: dict[int, int]


def _has_format(states: EarlierStates, name: str, dtype: torch.dtype, block: int) -> bool:
    """Return whether a state has this dtype, and scales for blocks of so many elements (1: none)."""
    own_block = states.unit.algorithm.block if name in states.scales else 1
    return states.values[name].dtype is dtype and own_block == block


def _has_same_offsets(old: Unit, new: Unit) -> bool:
    return old.layout.slots == new.layout.slots and old.layout.numel == new.layout.numel


def _lies_inside(old: Unit, new: Unit) -> bool:
    """Return whether each rank's new optimizer shard lies inside of its earlier one."""
    before, after = _levels_of_shards(old), _levels_of_shards(new)
    return old.degrees.optimizer == 1 or (_has_same_offsets(old, new) and before == after[: len(before)])


def _has_same_shard(old: Unit, new: Unit) -> bool:
    return _levels_of_shards(old) == _levels_of_shards(new) and _has_same_offsets(old, new)


def _levels_of_shards(unit: Unit) -> tuple[int, ...]:
    return unit.degrees.levels_to(unit.degrees.optimizer)
