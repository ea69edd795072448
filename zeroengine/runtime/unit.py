"""A unit on one rank: its full buffer, its shard, and its parameters, which are views of the full buffer.

[Note: Where a unit's values are]
Parameter degree 1, not offloaded: the full buffer always has memory, and is also the shard. With an optimizer degree
above 1 each rank updates a slice of it; otherwise every rank updates all of it.

    full buffer   | updated by rank 0 | updated by rank 1 | ...      parameters are views of it

Parameter degree above 1, or an offloaded shard: the shard has memory of its own, and the full buffer has memory from
``start_gather`` to ``FullBuffer.free``. At other times a parameter's data is a placeholder: one NaN, expanded with
stride 0 to the parameter's shape. Its class is also swapped, so that a use of its values is noticed.

    RELEASED --start_gather--> GATHERING --finish_gather--> GATHERED --mark_released--> RELEASED
                                   ^                            |
                                   +-- start_gather_of_update --+   (a unit that is never released)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zeroengine import ops
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS, QuantizedGather, rounded
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.unit_layout import layout_of_unit
from zeroengine.runtime.full_buffer import FullBuffer
from zeroengine.runtime.gathered_writes import GatheredWrites
from zeroengine.runtime.original_parameters import OriginalParameters, is_frozen_and_unset
from zeroengine.runtime.released_parameter import Resolver, mark_released
from zeroengine.runtime.secondary_shard import SecondaryShard
from zeroengine.schedule.residency import GatherState
from zeroengine.utils.torch_internals import DisableTorchFunctionSubclass
from zeroengine.utils.work import Work


class Unit:
    """The parameters of one unit on one rank.

    Building a unit copies the parameters into the full buffer, cast to the unit's dtype, and makes them views of it.
    The model's own memory is freed on the way. Parameters from ``meta_init`` get their values here. If the unit is
    releasable, its full buffer has no memory afterwards, and the caller must call ``mark_released`` next.

    Args:
        holders: The ranks that have the same values of the parameters. Those of the first one count. None: all of them
            agree already, and what initial masters are is known elsewhere, as in a change of the partitioning.
        all_ranks: The ranks of the engine.
        offloaded_shards: The store of the shard. None: it is on the device.
        master_store: The store of ``initial_master``. None: it is on the device.
        quantized: Gathers the parameters for use, inexactly. None, or a dtype that cannot be quantized: the transport
            gathers them exactly.
        checks_writes: See ``GatheredWrites``.

    Attributes:
        number: The unit's index among all units.
        modules: The modules whose forward needs this unit.
        is_releasable: Whether the full buffer is released between uses.
        root: The module that holds all of its parameters, if there is one.
        is_split: Whether each rank of a model group has another part of its parameters.
        expert_ranks: As of ``UnitPlan``.
        full_buffer: The memory of the whole parameters.
        secondary: This rank's shard of the second copy of the parameters; None: there is none.
        shard: 1-D, the elements that this rank owns at the parameter degree.
        initial_master: The fp32 values of this rank's optimizer shard, from before they were rounded to the unit's
            dtype. None if nothing was rounded, and once the optimizer has taken them.
        moved_states: States of this rank's optimizer shard from before a change of the partitioning, by name, until the
            optimizer has taken them. See ``optim.state_moves``.
        originals: What the parameters were before ``initialize``, which ``restore_parameters`` makes of them again.
        writes: What user code wrote into the parameters while they were gathered, if the unit is releasable.
    """

    def __init__(
        self,
        number: int,
        plan: UnitPlan,
        degrees: Degrees,
        transport: Transport,
        holders: Group | None,
        all_ranks: Group,
        offloaded_shards: OffloadedShards | None = None,
        master_store: OffloadStore | None = None,
        quantized: QuantizedGather | None = None,
        checks_writes: bool = False,
    ) -> None:
        self.number = number
        self.name, self.dtype, self.trainable = plan.name, plan.dtype, plan.trainable
        self.has_master, self.modules, self.root = plan.has_master, plan.modules, plan.root
        self.is_split, self.expert_ranks = plan.is_split, plan.expert_ranks
        self.algorithm = plan.algorithm
        self.params: tuple[nn.Parameter, ...] = tuple(param for _, param in plan.params)
        self.rank, self.degrees = transport.rank, degrees
        self.layout = layout_of_unit(plan, degrees, transport.world_size, transport.shard_align_bytes)
        self.state = GatherState.GATHERED
        self.gather_work: Work | None = None
        # The all-gather, in progress, of the updated optimizer shards into the parameter shard.
        self._update_work: Work | None = None
        # The ranks whose parameter shards are the full buffer, and whose optimizer shards are the parameter shard.
        self._gather_ranks = degrees.owners(transport.rank, degrees.parameters)
        self._update_ranks = degrees.owners(transport.rank, degrees.optimizer, degrees.parameters)
        self.secondary: SecondaryShard | None = None
        self.offloaded_shards = offloaded_shards
        self.is_releasable = degrees.parameters > 1 or offloaded_shards is not None
        self._quantized = quantized if is_quantizable(plan.dtype) else None
        # Whether the values that the parameters have, or are receiving, are those of the shards.
        self.has_exact_values = True
        self._transport = transport
        is_unset = is_frozen_and_unset(plan)
        shard: torch.Tensor | None = None
        # The full buffer of a releasable unit comes and goes. The shard stays, so it is allocated first, and the full
        # buffer then leaves no holes.
        if self.is_releasable:
            numel = self.layout.shard_numel(degrees.parameters)
            if offloaded_shards is None:
                shard = transport.empty(numel, self.dtype)
                if degrees.secondary:
                    again = degrees.secondary_owners(self.rank)
                    self.secondary = SecondaryShard(self.numel, self.dtype, again, transport)
            else:
                shard = offloaded_shards.store.empty(numel, self.dtype, allocated=not is_unset)
        self.full_buffer = FullBuffer(
            self.params,
            self.layout,
            self.dtype,
            transport,
            is_releasable=self.is_releasable,
            copied=offloaded_shards is not None or self.is_quantized,
        )
        self.originals = OriginalParameters(self.params, self.layout)
        self.initial_master = self._load(holders, all_ranks, master_store)
        self.moved_states: dict[str, torch.Tensor] = {}
        self.shard = self.full_buffer.tensor if shard is None else shard
        # A new shard in a store is zeros already, and takes no room as long as nothing is written to it.
        if offloaded_shards is None or not is_unset:
            self.copy_full_to_shard()
        names = [slot.name for slot in self.layout.slots]
        self.writes = GatheredWrites(self.params, names, checks_writes, observes_data=self.is_releasable)
        self.full_buffer.note_required_gradients()
        if self.is_releasable:
            self.full_buffer.free()
            self.state = GatherState.RELEASED

    def _load(self, holders: Group | None, all_ranks: Group, master_store: OffloadStore | None) -> torch.Tensor | None:
        """Move the model's values into the full buffer. If that rounds them, return this rank's fp32 master."""
        full = self.full_buffer.tensor
        # Wider values pass through an fp32 buffer, from which the master is copied before they are rounded.
        if holders is None or not self.restores_from_master:
            self.originals.move_to(self.full_buffer, full, self.name, holders, all_ranks)
            return None
        initial = torch.zeros_like(full, dtype=torch.float32)
        self.originals.move_to(self.full_buffer, initial, self.name, holders, all_ranks)
        full.copy_(initial)
        start, stop = self.layout.shard_range(self.rank, self.degrees.optimizer)
        if master_store is None:
            # A slice would keep the fp32 values of the whole unit alive.
            return initial[start:stop].clone()
        master = master_store.empty(stop - start, torch.float32)
        master_store.fill(master, initial[start:stop])
        return master

    @property
    def numel(self) -> int:
        """The elements of the full buffer, padding included."""
        return self.layout.numel

    @property
    def is_released(self) -> bool:
        """Whether a use of the parameters needs a gather first."""
        return self.state is GatherState.RELEASED

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters hold their values."""
        return self.state is GatherState.GATHERED

    @property
    def gets_gradients(self) -> bool:
        """Whether a backward computes gradients of its parameters. All of them may be frozen at the moment."""
        # The class of a released parameter would look at what is asked of it.
        with DisableTorchFunctionSubclass():
            return self.trainable and any(param.requires_grad for param in self.params)

    def shard_of_degree(self, degree: int) -> torch.Tensor:
        """Return the part of the parameters that this rank owns at ``degree``: a 1-D view of ``shard``."""
        start, stop = self.layout.shard_range(self.rank, degree)
        base, _ = self.layout.shard_range(self.rank, self.degrees.parameters)
        return self.shard[start - base : stop - base]

    @property
    def is_quantized(self) -> bool:
        """Whether gathers for use are inexact."""
        return self._quantized is not None

    def start_gather(self, exact: bool = False) -> None:
        """Launch the all-gather of the full buffer. The parameters stay placeholders until ``finish_gather``.

        Args:
            exact: Whether the exact values of the shards are needed, even if gathers for use are quantized.
        """
        # Peers read this rank's shard from here on.
        if self._update_work is not None:
            self.wait_for_update()
        if self.full_buffer.has_memory:
            self.collect_writes()
        self.full_buffer.allocate()
        self.state = GatherState.GATHERING
        self.has_exact_values = exact or self._quantized is None
        quantized = None if exact else self._quantized
        shard, ranks = self.shard, self._gather_ranks
        if self.secondary is not None and self._gathers_from_secondary(exact):
            # The second copy holds what was gathered from the shards, so it is gathered as it is.
            shard, ranks, quantized = self.secondary.tensor, self.secondary.ranks, None
        full = self.full_buffer.tensor
        if self.offloaded_shards is not None:
            self.gather_work = self.offloaded_shards.all_gather(full, shard, self.name, ranks, quantized)
        else:
            self.gather_work = (quantized or self._transport.gather).all_gather(full, shard, self.name, ranks)

    def _gathers_from_secondary(self, exact: bool) -> bool:
        is_current = self.secondary is not None and self.secondary.is_current
        return is_current and not (exact and self.is_quantized)

    def gathered_bytes(self) -> int:
        """Return the bytes of the full buffer now, and of ``writes``; 0 if the buffer is the shard."""
        return self.full_buffer.held_bytes + self.writes.nbytes if self.is_releasable else 0

    def finish_gather(self) -> None:
        """Wait for ``gather_work`` (``Work.wait_stream``), and make the parameters views of the full buffer."""
        assert self.gather_work is not None
        self.gather_work.wait_stream()
        self.full_buffer.show()
        if self.is_releasable:
            self.writes.begin(self.full_buffer.views)
        self.state, self.gather_work = GatherState.GATHERED, None
        if self.secondary is not None and not self.secondary.is_current:
            if not (self.is_quantized and self.has_exact_values):
                self.secondary.fill(self.full_buffer.tensor)

    def bytes_to_gather(self, exact: bool = False) -> int:
        """Return the bytes that the next gather brings to this rank."""
        if self._gathers_from_secondary(exact):
            return received_bytes(self, self.degrees.secondary)
        count, numel = self.degrees.parameters, self.layout.shard_numel(self.degrees.parameters)
        is_packed = self.is_quantized and not exact
        size = ops.packet_bytes(numel, GATHER_BITS) if is_packed else numel * self.dtype.itemsize
        return (count - 1) * size

    def forget_secondary(self) -> None:
        """Gather from the parameter shards next, because they change. Call it on every rank."""
        if self.secondary is not None:
            self.secondary.is_current = False

    def start_gather_of_update(self, resolver: Resolver) -> None:
        """Launch the all-gather of the updated optimizer shards. A use of a parameter calls ``resolver`` first."""
        shard = self.shard_of_degree(self.degrees.optimizer)
        if self.is_releasable:
            # The unit is released, and the next gather of the full buffer waits for this.
            self._update_work = self._transport.gather.all_gather(self.shard, shard, self.name, self._update_ranks)
            return
        self.full_buffer.hide(resolver)
        self.state = GatherState.GATHERING
        self.gather_work = self._transport.gather.all_gather(
            self.full_buffer.tensor, shard, self.name, self._update_ranks
        )

    def wait_for_update(self) -> None:
        """Order the current stream behind the all-gather of updated optimizer shards into ``shard``."""
        if self._update_work is not None:
            self._update_work.wait_stream()
            self._update_work = None

    def mark_released(self, resolver: Resolver) -> None:
        """Let every use of a parameter call ``resolver`` first. ``FullBuffer.free`` frees the memory."""
        if self.state is GatherState.GATHERED:
            self.collect_writes()
            self.writes.collect_replaced(self.full_buffer.views, self.full_buffer.targets)
        mark_released(*self.params, resolver=resolver)
        self.state, self.gather_work = GatherState.RELEASED, None

    def collect_writes(self) -> None:
        """Note what user code has written into the full buffer, if it has memory."""
        # A released unit's buffer has memory as long as other tensors alias it. Writes to those count as well.
        if self.full_buffer.has_memory:
            self.writes.collect(self.full_buffer.views)

    def forget_writes(self, indices: Iterable[int]) -> None:
        """Note that all ranks have the values that were written to these parameters, and took them into their shards.

        Args:
            indices: The parameters whose kept values are outdated, too.
        """
        for index in indices:
            self.writes.values.pop(index, None)
        self.writes.restart()

    def move_writes_to_shard(self) -> bool:
        """Write into this rank's shard what user code wrote. No rank may compute with the unit's parameters meanwhile.

        Returns:
            Whether there was something to write.
        """
        values = self.writes.values
        if not values:
            return False
        self.forget_secondary()
        if self.offloaded_shards is not None:
            self.offloaded_shards.discard_prefetched()
        # What quantized gathers showed of this rank's shard.
        gathered = None
        if self._quantized is not None:
            populate(self.shard)
            gathered = rounded(self.shard.to(self.full_buffer.tensor.device))
        for span in self.layout.spans(self.rank, self.degrees.parameters):
            if span.param_index in values:
                target, written = self.shard[span.shard_slice], values[span.param_index].view(-1)[span.param_slice]
                if gathered is not None:
                    # Rounded elements that nobody wrote stay exact.
                    written = torch.where(written == gathered[span.shard_slice], target.to(written.device), written)
                if self.offloaded_shards is None:
                    target.copy_(written)
                else:
                    self.offloaded_shards.store.fill(target, written)
        self.forget_writes(list(values))
        return True

    def replace_full_buffer(self) -> None:
        """Leave the memory of a released unit's full buffer to the tensors that alias it, and take a new buffer."""
        self.collect_writes()
        self.full_buffer.replace()

    # -- the end of the engine --------------------------------------------------------------------

    @property
    def restores_from_master(self) -> bool:
        """Whether ``restore_parameters`` needs the master's values, because a parameter had another dtype before."""
        return self.has_master and any(d is not self.dtype for d in self.originals.dtypes)

    def gather_whole(self) -> None:
        """Return with the values of all parameters in the full buffer, for ``restore_parameters``. A collective."""
        if self.gather_work is not None:
            self.gather_work.wait_stream()
        # A rank may have the values already, if other tensors alias its full buffer for example. All ranks gather, so
        # that they agree on every collective.
        if self.is_releasable:
            self.start_gather(exact=True)
            assert self.gather_work is not None
            self.gather_work.wait_stream()

    def restore_parameters(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Make the parameters ordinary ones, with their own memory and original dtypes, and free the unit's memory.

        Args:
            values: The value of each parameter. None: the values in the full buffer.
        """
        self.originals.restore(self.full_buffer.views if values is None else values)
        self.drop_memory()

    def drop_memory(self) -> None:
        """Own no memory any more. The parameters have other memory, or have lost their values."""
        self.full_buffer.drop()
        self.writes.values.clear()
        self.shard = self.full_buffer.tensor
        self.initial_master = self.gather_work = self.secondary = None

    def abandon_parameters(self, resolver: Resolver) -> None:
        """Leave the parameters without values: every use of one calls ``resolver``, which raises."""
        self.writes.values.clear()
        self.full_buffer.hide(resolver)

    def adopt_replaced_data(self, index: int) -> bool:
        """Take over the values of a gathered parameter whose ``data`` was replaced by a tensor of the same kind.

        Returns:
            Whether it was replaced so. It may be of another shape, dtype or device.
        """
        target, view = self.full_buffer.targets[index], self.full_buffer.views[index]
        with DisableTorchFunctionSubclass(), torch.no_grad():
            facts = (target.shape, target.dtype, target.device)
            if target.data_ptr() == view.data_ptr() or facts != (view.shape, view.dtype, view.device):
                return False
            view.copy_(target.detach())
            target.data = view
        # Ranks compare what was written.
        torch.autograd.graph.increment_version(self.params[index])
        return True

    def check_parameters(self) -> None:
        """Take over replaced data, and check that the parameters are still what ``initialize`` made of them.

        Raises:
            ZeroEngineError: A parameter has another shape, dtype or device.
        """
        buffer, is_gathered = self.full_buffer, self.is_gathered
        if not (is_gathered or self.writes.reshaped):
            return
        for index, (target, view, slot) in enumerate(zip(buffer.targets, buffer.views, self.layout.slots, strict=True)):
            is_replaced = is_gathered and target.data_ptr() != view.data_ptr()
            if index in self.writes.reshaped or (is_replaced and not self.adopt_replaced_data(index)):
                raise ZeroEngineError(
                    f"parameter {slot.name} was given another shape, dtype or device after initialize(), by .to(), "
                    ".half(), `.data =` or the like: no update would reach it. Convert the model before initialize(), "
                    "and write values inside `with zeroengine.gathered(module_or_params):`."
                )

    def copy_full_to_shard(self) -> None:
        """Update this rank's shard after a write to the full buffer."""
        if not self.is_releasable:
            return
        self.forget_secondary()
        start, stop = self.layout.shard_range(self.rank, self.degrees.parameters)
        if self.offloaded_shards is None:
            self.shard.copy_(self.full_buffer.tensor[start:stop])
        else:
            self.offloaded_shards.fill(self.shard, self.full_buffer.tensor[start:stop])


def received_bytes(unit: Unit, degree: int, within: int = 1) -> int:
    """Return the bytes that an all-gather of shards at ``degree`` into one at ``within`` brings to this rank."""
    full: int = unit.full_buffer.tensor.nbytes
    return full // within - full // degree
