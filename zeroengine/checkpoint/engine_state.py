"""The state of an engine that checkpoints and weight files read and write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint.entries import OPTIMIZER, SCALES, StateEntries, StateEntry
from zeroengine.checkpoint.saved_names import SavedNames
from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.placement import Placement
from zeroengine.ops import MOMENT_BLOCK
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.optim.master_weights import MasterWeights
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.outer_step import OuterStep
from zeroengine.optim.sharded_optimizer import ShardedOptimizer
from zeroengine.partition.boxes import Box, pieces_of_run
from zeroengine.partition.cut import plain_name
from zeroengine.partition.layout import ShardSpan
from zeroengine.partition.replicas import ReplicaLayout
from zeroengine.partition.slices import pieces_of_slice, whole_shape
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.state_dict_loads import StateDictLoad, changes_loads
from zeroengine.runtime.state_dict_reads import read_model_state
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed
from zeroengine.utils.torch_internals import buffers_of, non_persistent_buffers_of

log = logging.getLogger("zeroengine")

# The parameters that a warning names.
NUM_SHOWN = 5


@dataclass(frozen=True)
class EngineTensors:
    """The tensors of an engine by name, which checkpoints and weight files read and write.

    Methods that return entries take `once`: True puts each element on exactly one rank, as a save needs it; False gives
    all elements that this rank holds, as a load needs them.

    Attributes:
        replicas: Which ranks are in which replica of ``local_steps``. Replicas are equal when they are saved.
        outer_step: The outer step of ``local_steps``, whose momentum is saved.
        gatherer: Gathers units where the model's own code reads parameters, for its state dict.
        exact: What leaves the engine in its own dtype.
        slice_number: Returns the number of this rank's slices of a unit; 0 if it is not split.
    """

    module: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer
    outer_step: OuterStep | None
    gatherer: Gatherer
    group: Group
    replicas: ReplicaLayout
    exact: Collection[torch.Tensor]
    slice_number: Callable[[Unit], int]

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters, which may be released, and the persistent buffers by their own names."""
        own: dict[str, torch.Tensor] = {}
        for unit in self.units:
            own |= zip((slot.name for slot in unit.layout.slots), unit.params, strict=True)
        return own | dict(self._persistent_buffers())

    def saved_names(self) -> SavedNames:
        """Return the names that parameters and buffers have in checkpoints and weights. Call it on every rank."""
        state = read_model_state(self.module, self.units, self.gatherer)
        own_names = {tensor: name for name, tensor in self.own_tensors().items()}
        keys: dict[str, list[str]] = {}
        computed: dict[str, Any] = {}
        for raw_key, value in state.values.items():
            own = own_names.get(state.tensors[raw_key]) if raw_key in state.tensors else None
            if own is None:
                computed[plain_name(raw_key)] = value
            else:
                keys.setdefault(own, []).append(plain_name(raw_key))
        aliases = self._aliases() | {key: own for own, own_keys in keys.items() for key in own_keys}
        return SavedNames(state, keys, computed, aliases)

    def load_by_own_code(self, names: SavedNames, computed: Mapping[str, Any], where: str) -> None:
        """Give the model's own ``load_state_dict()`` the values that are no parameters or buffers.

        Parameters and buffers have their values already, and keep them. Call it on every rank.

        Args:
            names: The keys of the state dict.
            computed: The values by key.
            where: Where they come from, for messages.
        """
        if not computed and not changes_loads(self.module):
            return
        own = self.own_tensors()
        load = StateDictLoad(self.module, self.units, self.gatherer, own.values())
        # A hook may move any key, so all keys are present, in the order of the state dict.
        values = {key: load.stand_in(own[name]) for name, keys in names.keys.items() for key in keys} | dict(computed)
        keys = {raw_key: plain_name(raw_key) for raw_key in names.state.values}
        load.run(names.state.like({raw: values[key] for raw, key in keys.items() if key in values}), where)

    def _aliases(self) -> dict[str, str]:
        """Return the further own names of tied parameters and shared buffers, with the first name of each."""
        first_names: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for named_tensors in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in named_tensors(remove_duplicate=False):
                name = plain_name(name)
                first = first_names.setdefault(id(tensor), name)
                if first != name:
                    aliases[name] = first
        return aliases

    def trainable_names(self) -> set[str]:
        """Return the own names of the parameters that the optimizer updates."""
        return {slot.name for shard in self.optimizer.shards for slot in shard.unit.layout.slots}

    def frozen_names(self) -> list[str]:
        """Return the own names of the parameters that were frozen at ``initialize``."""
        return [slot.name for unit in self.units if not unit.trainable for slot in unit.layout.slots]

    def exact_names(self) -> set[str]:
        """Return the own names of what leaves the engine in its own dtype."""
        return {name for name, tensor in self.own_tensors().items() if tensor in self.exact}

    def warn_of_casts(self, stored: Mapping[str, torch.dtype], where: str) -> None:
        """Warn of frozen parameters that a load may round, or that keep their dtype and get values of another one.

        Args:
            stored: The dtypes of what is loaded, by own names.
            where: Where it comes from, for the message.
        """
        dtypes = {slot.name: unit.dtype for unit in self.units if not unit.trainable for slot in unit.layout.slots}
        exact = self.exact_names()
        cast = [
            f"{name} ({str(stored[name])[6:]} there, {str(own)[6:]} here)"
            for name, own in dtypes.items()
            if stored.get(name, own) != own and (name in exact or stored[name].itemsize >= own.itemsize)
        ]
        if cast and self.group.rank == 0:
            log.warning(
                "%s: frozen parameters are cast: %s. Weights may lose precision; bytes that are packed in floats, as "
                'of 4-bit weights, lose their meaning. Save and load them with one "keep_dtype".',
                where,
                listed(cast, NUM_SHOWN),
            )

    def computed_entries(self, names: SavedNames) -> StateEntries:
        """Return the tensors that the model's code computes for its state dict. Every rank has them."""
        tensors = {key: value.detach() for key, value in names.computed.items() if isinstance(value, torch.Tensor)}
        return {key: self._whole_entry(tensor, once=True) for key, tensor in tensors.items()}

    def model_entries(self, *, once: bool, frozen: bool = True) -> StateEntries:
        """Return the masters, persistent buffers and, where ``frozen``, the frozen parameters."""
        entries: StateEntries = {}
        shards = {shard.unit: shard for shard in self.optimizer.shards}
        for unit in self.units if frozen else shards:
            # A frozen unit has no master, so its own shard is stored. It may be cut by another degree than the masters.
            values, degree = unit.shard, unit.degrees.parameters
            if unit in shards:
                values, degree = shards[unit].master, unit.degrees.optimizer
            _add_unit(entries, unit, values, self._spans(unit, degree, once))
        for name, buffer in self._persistent_buffers():
            entries[name] = self._whole_entry(buffer.detach(), once)
        return entries

    def average_entries(self, *, once: bool) -> StateEntries:
        """Return the moving average of each parameter, if averages are kept, by the parameter's own name."""
        entries: StateEntries = {}
        for shard in self.optimizer.shards:
            if shard.average is not None:
                _add_unit(
                    entries, shard.unit, shard.average, self._spans(shard.unit, shard.unit.degrees.optimizer, once)
                )
        return entries

    def restart_averages(self, names: Collection[str]) -> None:
        """Let the averages of parameters, by their own names, restart from the masters."""
        for shard in self.optimizer.shards:
            for span in shard.spans():
                if shard.unit.layout.slots[span.param_index].name in names:
                    shard.restart_average(span.shard_slice)

    def _whole_entry(self, tensor: torch.Tensor, once: bool) -> StateEntry:
        # Every rank holds such a tensor in full, so one rank saves it. On a load every rank reads it.
        box = Box.whole(tensor.shape)
        return StateEntry(box.sizes, tensor.dtype, [] if once and self.group.rank != 0 else [(box, tensor)])

    def optimizer_entries(self, *, once: bool) -> StateEntries:
        """Return the optimizer's state of each parameter, by `optimizer.state.<parameter>.<key>`."""
        entries: StateEntries = {}
        for shard in self.optimizer.shards:
            shard_state = self.optimizer.state_of(shard)
            for span in self._state_spans(shard, once):
                slot, param = shard.unit.layout.slots[span.param_index], shard.unit.params[span.param_index]
                state = shard_state.of(shard, span)
                for key, value in state.elements.items():
                    name = f"{OPTIMIZER}{slot.name}.{key}"
                    entry = entries.setdefault(name, StateEntry(whole_shape(param), value.dtype))
                    entry.pieces += pieces_of_slice(param, span.param_offset, value[: span.numel])
                for key, value in state.scales.items():
                    shape = (-(-slot.numel // MOMENT_BLOCK),)
                    entry = entries.setdefault(f"{OPTIMIZER}{slot.name}.{key}{SCALES}", StateEntry(shape, value.dtype))
                    entry.pieces += pieces_of_run(shape, span.param_offset // MOMENT_BLOCK, value)
                # Every rank that has part of the parameter has its step. The rank with the first element saves it.
                saves = span.param_offset == 0 and not self.slice_number(shard.unit)
                for key, value in state.numbers.items() if not once or saves else ():
                    # A state of a whole parameter may have any shape. At degree 1 the ranks share the saving alone.
                    if value.numel() != 1 and span.numel < slot.numel and shard.unit.degrees.optimizer > 1:
                        raise ZeroEngineError(
                            f"state {key!r} of the optimizer has shape {tuple(value.shape)} for parameter {slot.name}: "
                            "a checkpoint takes states of the parameter's shape, and numbers"
                        )
                    # Some optimizers keep numbers in tensors of one element, whose dimensions are kept.
                    box = Box.whole(value.shape)
                    entries[f"{OPTIMIZER}{slot.name}.{key}"] = StateEntry(box.sizes, value.dtype, [(box, value)])
        return entries

    def outer_entries(self, *, once: bool) -> StateEntries:
        """Return the momentum of the outer step of each parameter, if there is any."""
        entries: StateEntries = {}
        for outer in self.outer_step.shards if self.outer_step is not None else ():
            if outer.state is None:
                continue
            slots, momentum = outer.shard.unit.layout.slots, outer.state.momentum
            # Every rank lists all names, also those of which it has no part.
            for slot in slots:
                entries[slot.name] = StateEntry(slot.shape, momentum.dtype)
            # The piece is this rank's alone within its replica, and the replicas are equal.
            own_range = self.replicas.share(0, momentum.numel()) if once else None
            for span, place in outer.spans(own_range):
                slot, run = slots[span.param_index], momentum[place.start :][: span.numel]
                entries[slot.name].pieces += pieces_of_run(slot.shape, span.param_offset, run)
        return entries

    def _spans(self, unit: Unit, degree: int, once: bool) -> Iterator[ShardSpan]:
        own_range = None
        if once:
            # Ranks that hold copies of one shard share the work of saving it, and so do replicas, unless these are of a
            # split model and have other slices.
            size = unit.expert_ranks or self.replicas.ranks_per_replica
            own_range = unit.layout.unreplicated_range(unit.rank, degree, size)
            own_range = own_range if unit.is_split else self.replicas.share(*own_range)
        return unit.layout.spans(unit.rank, degree, own_range)

    def _state_spans(self, shard: OptimizerShard, once: bool) -> Iterable[ShardSpan]:
        """Return the spans of a shard's unit whose optimizer state this rank saves, or holds."""
        state, unit = self.optimizer.state_of(shard), shard.unit
        if not state.is_whole(shard):
            return self._spans(unit, unit.degrees.optimizer, once)
        # Each copy of the states has an owner for each parameter, and the owners of the first copy save.
        is_copy = unit.rank >= unit.degrees.optimizer or (self.replicas.replica > 0 and not unit.is_split)
        return () if once and is_copy else state.spans(shard)

    def _persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that a state dict holds, each once."""
        yielded: set[int] = set()
        for prefix, module in self.module.named_modules():
            for name, buffer in buffers_of(module).items():
                # A buffer under several names is stored once, and the others are aliases.
                if buffer is not None and name not in non_persistent_buffers_of(module) and id(buffer) not in yielded:
                    yielded.add(id(buffer))
                    yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def _add_unit(entries: StateEntries, unit: Unit, values: torch.Tensor, spans: Iterable[ShardSpan]) -> None:
    """Add the parameters of a unit, of whose shard ``values`` are."""
    # Every rank lists all names, also those of which it has no part, so that all ranks match the same names.
    for param, slot in zip(unit.params, unit.layout.slots, strict=True):
        entries[slot.name] = StateEntry(whole_shape(param), values.dtype)
    for span in spans:
        name, param = unit.layout.slots[span.param_index].name, unit.params[span.param_index]
        entries[name].pieces += pieces_of_slice(param, span.param_offset, values[span.shard_slice])


@dataclass(frozen=True)
class EngineState:
    """All of an engine that a checkpoint holds, and what is needed to put it back.

    Attributes:
        schedule: The LR schedule, or None.
        counters: The engine's step counters by name.
        stateful: The user's registered objects, by name.
        placement: The states that live in CPU memory or on a disk. Reading them takes memory.
        master_weights: Makes every rank compute with masters that were written.
    """

    tensors: EngineTensors
    config: Config
    scaler: LossScaler
    schedule: Any
    counters: dict[str, int]
    stateful: Mapping[str, Any]
    placement: Placement
    master_weights: MasterWeights
