"""A unit on one rank: its full buffer, its shard, and its parameters, which are views of the full buffer.

[Note: Where a unit's values are]
Parameter degree 1, not offloaded: the full buffer always has memory, and is also the shard. With an optimizer degree
above 1 each rank updates a slice of it; otherwise every rank updates all of it.

    full buffer   | updated by rank 0 | updated by rank 1 | ...      parameters are views of it

Parameter degree above 1, or an offloaded shard: the shard has memory of its own, and the full buffer has memory from
``start_gather`` to ``free_full_buffer``. At other times a parameter's data is a placeholder: one NaN, expanded with
stride 0 to the parameter's shape. Its class is also swapped, so that a use of its values is noticed.

    RELEASED --start_gather--> GATHERING --finish_gather--> GATHERED --mark_released--> RELEASED
                                   ^                            |
                                   +-- start_gather_of_update --+   (a unit that is never released)
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from zeroengine import ops
from zeroengine.comm.interfaces import Buffer, Transport
from zeroengine.comm.packing import is_quantizable
from zeroengine.comm.quantized_transport import GATHER_BITS, QuantizedGather, rounded
from zeroengine.deferred_init.parameter import swap_data, take_trace
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.interfaces import OffloadStore
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.unit_layout import layout_of_unit
from zeroengine.runtime.gathered_writes import GatheredWrites
from zeroengine.runtime.released_parameter import Resolver, is_released_parameter, mark_gathered, mark_released
from zeroengine.utils.own_storage import with_own_storage
from zeroengine.utils.work import Work


class GatherState(enum.Enum):
    """Whether a unit's parameters hold their values. See the note above."""

    RELEASED = "released"  # a use of a parameter needs a gather first
    GATHERING = "gathering"  # the all-gather is in progress; values may be stale or absent
    GATHERED = "gathered"  # parameters hold their values


class Unit:
    """The parameters of one unit on one rank.

    Building a unit copies the parameters into the full buffer, cast to the unit's dtype, and makes them views of it.
    The model's own memory is freed on the way. Parameters from ``meta_init`` get their values here. If the unit is
    releasable, its full buffer has no memory afterwards, and the caller must call ``mark_released`` next.

    Args:
        broadcast: Overwrites a tensor with rank 0's values, on all ranks.
        offloaded_shards: The store of the shard. None: it is on the device.
        master_store: The store of ``initial_master``. None: it is on the device.
        quantized: Gathers the parameters for use, inexactly. None, or a dtype that cannot be quantized: the transport
            gathers them exactly.
        checks_writes: See ``GatheredWrites``.

    Attributes:
        modules: The modules whose forward needs this unit.
        root: The module that holds all of its parameters, if there is one.
        numel: The elements of the full buffer, padding included.
        full_buffer: 1-D, ``numel`` elements. Its storage stays the same for the life of the unit, unless other
            tensors alias it at a step (``replace_full_buffer``).
        shard: 1-D, the elements that this rank owns at the parameter degree.
        initial_master: The fp32 values of this rank's optimizer shard, from before they were rounded to the unit's
            dtype. None if nothing was rounded, and once the optimizer has taken them.
        original_dtypes: The parameters' dtypes before ``initialize``, which ``restore_parameters`` restores.
        original_formats: Likewise, their memory formats.
        unset_params: Names of parameters that are zeros until weights are loaded.
        writes: What user code wrote into the parameters while they were gathered, if the unit is releasable.
    """

    def __init__(
        self,
        plan: UnitPlan,
        degrees: Degrees,
        transport: Transport,
        broadcast: Callable[[torch.Tensor], None],
        offloaded_shards: OffloadedShards | None = None,
        master_store: OffloadStore | None = None,
        quantized: QuantizedGather | None = None,
        checks_writes: bool = False,
    ) -> None:
        self.name, self.dtype, self.trainable = plan.name, plan.dtype, plan.trainable
        self.is_mixed_precision = plan.is_mixed_precision
        self.original_dtypes = [param.dtype for _, param in plan.params]
        self.original_formats = [_memory_format(param) for _, param in plan.params]
        self.params: tuple[nn.Parameter, ...] = tuple(param for _, param in plan.params)
        self.modules, self.root = plan.modules, plan.root
        self.rank, self.degrees = transport.rank, degrees
        self.layout = layout_of_unit(plan, degrees, transport.world_size, transport.shard_align_bytes)
        self.numel = self.layout.numel
        self.state = GatherState.GATHERED
        self.gather_work: Work | None = None
        # The all-gather, in progress, of the updated optimizer shards into the parameter shard.
        self._update_work: Work | None = None
        # The ranks whose parameter shards are the full buffer, and whose optimizer shards are the parameter shard.
        self._gather_ranks = degrees.owners(transport.rank, degrees.parameters)
        self._update_ranks = degrees.owners(transport.rank, degrees.optimizer, degrees.parameters)
        # The second copy of the parameters: this rank's shard of it, and whether it holds the present values.
        self.secondary_shard: torch.Tensor | None = None
        self._secondary_is_current = False

        self.offloaded_shards = offloaded_shards
        self._quantized = quantized if is_quantizable(plan.dtype) else None
        # Whether the values that the parameters have, or are receiving, are those of the shards.
        self.has_exact_values = True
        self._buffer: Buffer | None = None
        self._transport = transport
        shard: torch.Tensor | None = None
        # The full buffer of a releasable unit comes and goes. The shard stays, so it is allocated first, and the full
        # buffer then leaves no holes.
        if self.is_releasable:
            numel = self.layout.shard_numel(degrees.parameters)
            if offloaded_shards is None:
                shard = transport.empty(numel, self.dtype, "gather")
                if degrees.secondary:
                    self.secondary_shard = transport.empty(self.numel // degrees.secondary, self.dtype, "gather")
            else:
                shard = offloaded_shards.store.empty(numel, self.dtype)
            self._allocate_buffer()
        else:
            self._set_full_buffer(transport.empty(self.numel, self.dtype, "gather"))
            ops.advise_huge_pages(self.full_buffer)
        self.full_buffer.zero_()
        self.unset_params: set[str] = set()
        self.initial_master = self._load(broadcast, master_store)
        self.shard = self.full_buffer if shard is None else shard
        self.copy_full_to_shard()
        self._placeholders = [placeholder_of(view) for view in self._views]
        self.writes = GatheredWrites(self.params, [slot.name for slot in self.layout.slots], checks_writes)
        self._required_grad = [param.requires_grad for param in self.params]
        # The storage's Python object, the full buffer, its views, and the parameters, which are views while
        # ``is_aliased`` compares with this. Measuring would also count what a thread of Gloo holds of the broadcast.
        self._num_own_tensors = 2 + len(self._views) + len(self.params)
        if self._buffer is not None:
            self.free_full_buffer()
            self.state = GatherState.RELEASED

    def _load(
        self, broadcast: Callable[[torch.Tensor], None], master_store: OffloadStore | None
    ) -> torch.Tensor | None:
        """Move the model's values into the full buffer. If that rounds them, return this rank's fp32 master."""
        # Wider values pass through an fp32 buffer, from which the master is copied before they are rounded.
        wide = self.trainable and self.is_mixed_precision and any(p.dtype is not self.dtype for p in self.params)
        initial = torch.zeros_like(self.full_buffer, dtype=torch.float32) if wide else self.full_buffer
        with torch.no_grad(), contextlib.ExitStack() as undo:
            targets = self.param_views_of(initial)
            for param, view, target, slot in zip(self.params, self._views, targets, self.layout.slots, strict=True):
                if not param.is_meta:
                    target.copy_(param.detach())
                    # If an error ends this constructor, the parameter has its own dtype and values again.
                    undo.callback(_set_data, param, target, param.dtype)
                    param.data = view
                    continue
                trace = take_trace(param)
                assert trace is not None
                if trace.is_unset:
                    self.unset_params.add(slot.name)
                # The other ranks receive rank 0's values below.
                if self.rank == 0:
                    trace.write(target)
                # A parameter on the meta device refuses ``data`` of another device.
                swap_data(param, view)
            broadcast(initial)
            undo.pop_all()
            if not wide:
                return None
            self.full_buffer.copy_(initial)
            start, stop = self.layout.shard_range(self.rank, self.degrees.optimizer)
            if master_store is None:
                # A slice would keep the fp32 values of the whole unit alive.
                return initial[start:stop].clone()
            master = master_store.empty(stop - start, torch.float32)
            master_store.fill(master, initial[start:stop])
            return master

    def _allocate_buffer(self) -> None:
        # What packets hold is written to the full buffer, so it cannot show the memory of other ranks.
        copied = self.offloaded_shards is not None or self.is_quantized
        self._buffer = self._transport.buffer(self.numel, self.dtype, copied=copied)
        self._set_full_buffer(self._buffer.tensor)

    def _set_full_buffer(self, full_buffer: torch.Tensor) -> None:
        self.full_buffer, self._views = full_buffer, self.param_views_of(full_buffer)
        # The views of a full buffer that is never freed need not share its storage object. torch.save and safetensors
        # then see parameters that share nothing, and write only the bytes of each.
        if not self.is_releasable:
            self._views = [with_own_storage(view) for view in self._views]
        # The address of the C++ storage object, whose owners ``is_aliased`` counts.
        self._storage: int = full_buffer.untyped_storage()._cdata

    def param_views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters as views into ``flat`` (1-D, of the flat layout), each in its shape."""
        return [flat[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots]

    @property
    def is_released(self) -> bool:
        """Whether a use of the parameters needs a gather first."""
        return self.state is GatherState.RELEASED

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters hold their values."""
        return self.state is GatherState.GATHERED

    @property
    def is_aliased(self) -> bool:
        """Whether something besides this unit may still read the full buffer, which must have memory now.

        Aliases are tensors that share the memory, such as ``weight.detach()`` and tensors that a graph has saved, and
        graphs that have saved a parameter itself, which would be a placeholder when backward reads it. A parameter that
        Python code holds is no alias, because its class notices every use.
        """
        if torch._C._storage_Use_Count(self._storage) > self._num_own_tensors:
            return True
        # In C++ the owners of a parameter are its Python object, the graph's node that accumulates its gradient (if it
        # has required a gradient since it was gathered), and every graph that has saved it.
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                param._use_count() > (2 if required and param.requires_grad else 1)  # type: ignore[attr-defined]
                for param, required in zip(self.params, self._required_grad, strict=True)
            )

    @property
    def gets_gradients(self) -> bool:
        """Whether a backward computes gradients of its parameters. All of them may be frozen at the moment."""
        return self.trainable and any(param.requires_grad for param in self.params)

    @property
    def is_releasable(self) -> bool:
        """Whether the full buffer is released between uses."""
        return self.degrees.parameters > 1 or self.offloaded_shards is not None

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
        assert self._buffer is not None
        # Peers read this rank's shard from here on.
        self.wait_for_update()
        self.collect_writes()
        self._buffer.allocate()
        self.state = GatherState.GATHERING
        self.has_exact_values = exact or self._quantized is None
        quantized = None if exact else self._quantized
        shard, ranks = self.shard, self._gather_ranks
        if self._gathers_from_secondary(exact):
            assert self.secondary_shard is not None
            # The second copy holds what was gathered from the shards, so it is gathered as it is.
            shard, ranks, quantized = self.secondary_shard, self.degrees.secondary_owners(self.rank), None
        if self.offloaded_shards is not None:
            work = self.offloaded_shards.all_gather(self.full_buffer, shard, self.name, ranks, quantized)
        else:
            work = (quantized or self._transport.gather).all_gather(self.full_buffer, shard, self.name, ranks)
        self.gather_work = work

    def _gathers_from_secondary(self, exact: bool) -> bool:
        is_current = self.secondary_shard is not None and self._secondary_is_current
        return is_current and not (exact and self.is_quantized)

    def gathered_bytes(self) -> int:
        """Return the bytes of the full buffer now, and of ``writes``; 0 if the buffer is the shard."""
        return 0 if self._buffer is None else self._buffer.nbytes() + self.writes.nbytes

    def finish_gather(self) -> None:
        """Make the parameters views of the full buffer, ready for use. The caller has awaited ``gather_work``."""
        for param, view in zip(self.params, self._views, strict=True):
            if is_released_parameter(param):
                mark_gathered(param)
                param.data = view
        self._required_grad = [param.requires_grad for param in self.params]
        if self.is_releasable:
            self.writes.begin(self._views)
        self.state, self.gather_work = GatherState.GATHERED, None
        keeps = not (self.is_quantized and self.has_exact_values)
        if self.secondary_shard is not None and not self._secondary_is_current and keeps:
            numel = self.secondary_shard.numel()
            first = self.rank % self.degrees.secondary * numel
            self.secondary_shard.copy_(self.full_buffer[first : first + numel])
            self._secondary_is_current = True

    def bytes_to_gather(self, exact: bool = False) -> int:
        """Return the bytes that the next gather brings to this rank."""
        if self._gathers_from_secondary(exact):
            return self.full_buffer.nbytes - self.full_buffer.nbytes // self.degrees.secondary
        count, numel = self.degrees.parameters, self.layout.shard_numel(self.degrees.parameters)
        is_packed = self.is_quantized and not exact
        size = ops.packet_bytes(numel, GATHER_BITS) if is_packed else numel * self.dtype.itemsize
        return (count - 1) * size

    def forget_secondary(self) -> None:
        """Gather from the parameter shards next, because they change. Call it on every rank."""
        self._secondary_is_current = False

    def free_secondary(self) -> None:
        """Free the memory of the second copy, if it can be given back. Call it on every rank."""
        self.forget_secondary()
        if self.secondary_shard is not None and self.secondary_shard.untyped_storage().resizable():
            self.secondary_shard.untyped_storage().resize_(0)

    def refill_secondary(self) -> None:
        """Give the second copy memory again after ``free_secondary``. The next gather fills it."""
        if self.secondary_shard is not None and not self.secondary_shard.untyped_storage().nbytes():
            self._transport.refill(self.secondary_shard, "gather")

    def start_gather_of_update(self, resolver: Resolver) -> None:
        """Launch the all-gather of the updated optimizer shards. A use of a parameter calls ``resolver`` first."""
        shard = self.shard_of_degree(self.degrees.optimizer)
        if self.is_releasable:
            # The unit is released, and the next gather of the full buffer waits for this.
            self._update_work = self._transport.gather.all_gather(self.shard, shard, self.name, self._update_ranks)
            return
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            # The released class would treat an assignment to ``data`` as a use, so it is swapped first.
            mark_gathered(param)
            param.data = placeholder
            mark_released(param, resolver)
        self.state = GatherState.GATHERING
        self.gather_work = self._transport.gather.all_gather(self.full_buffer, shard, self.name, self._update_ranks)

    def wait_for_update(self) -> None:
        """Order the current stream behind the all-gather of updated optimizer shards into ``shard``."""
        if self._update_work is not None:
            self._update_work.wait_stream()
            self._update_work = None

    def mark_released(self, resolver: Resolver) -> None:
        """Let every use of a parameter call ``resolver`` first. ``free_full_buffer`` frees the memory."""
        if self.is_gathered:
            self.collect_writes()
            self.writes.collect_replaced(self._views)
        for param in self.params:
            mark_released(param, resolver)
        self.state, self.gather_work = GatherState.RELEASED, None

    def collect_writes(self) -> None:
        """Note what user code has written into the full buffer, if it has memory."""
        # A released unit's buffer has memory as long as other tensors alias it. Writes to those count as well.
        if self._buffer is not None and self._buffer.nbytes():
            self.writes.collect(self._views)

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
        gathered = None if self._quantized is None else rounded(self.shard.to(self.full_buffer.device))
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

    def free_full_buffer(self) -> None:
        """Free the memory of a released unit's full buffer."""
        assert self._buffer is not None
        # A view of the full buffer would read freed memory, whereas a placeholder's NaN is noticed at once. The
        # parameters may have their released class now, which would treat the assignment as a use.
        with torch._C.DisableTorchFunctionSubclass():
            for param, placeholder in zip(self.params, self._placeholders, strict=True):
                param.data = placeholder
        self._buffer.free()

    def replace_full_buffer(self) -> None:
        """Leave the memory of a released unit's full buffer to the tensors that alias it, and allocate a new buffer."""
        assert self._buffer is not None
        self.collect_writes()
        # The buffer may be a view of other ranks' memory, which the aliases must not read.
        self._buffer.detach()
        self._allocate_buffer()
        self.free_full_buffer()

    # -- the end of the engine --------------------------------------------------------------------

    @property
    def restores_from_master(self) -> bool:
        """Whether ``restore_parameters`` needs the master's values, because a parameter had another dtype before."""
        return self.trainable and self.is_mixed_precision and any(d is not self.dtype for d in self.original_dtypes)

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

        Parameters that were built without values, and have none yet, become NaN.

        Args:
            values: The value of each parameter. None: the values in the full buffer.
        """
        values = self._views if values is None else values
        originals = zip(self.layout.slots, self.original_dtypes, self.original_formats, strict=True)
        for param, value, (slot, dtype, memory_format) in zip(self.params, values, originals, strict=True):
            mark_gathered(param)
            param.grad = None
            restored = value.to(dtype, copy=True, memory_format=memory_format)
            if slot.name in self.unset_params and restored.is_floating_point():
                # Zeros would be taken for values.
                restored.fill_(float("nan"))
            param.data = restored
        nothing = torch.empty(0, dtype=self.dtype, device=self.full_buffer.device)
        self._views, self._placeholders = [], []
        self.writes.values.clear()
        self.full_buffer = self.shard = nothing
        self.initial_master = self._buffer = self.gather_work = None

    def abandon_parameters(self, resolver: Resolver) -> None:
        """Leave the parameters without values: every use of one calls ``resolver``, which raises."""
        self.writes.values.clear()
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            mark_gathered(param)
            param.data = placeholder
            mark_released(param, resolver)

    def reattach_parameters(self) -> None:
        """Take ``abandon_parameters`` back, after the full buffer was given memory again."""
        # The old views still show the memory that the full buffer had before.
        self._set_full_buffer(self.full_buffer)
        for param, view in zip(self.params, self._views, strict=True):
            mark_gathered(param)
            param.data = view

    def check_parameters(self) -> None:
        """Check that the parameters are still what ``initialize`` made of them.

        Raises:
            ZeroEngineError: A parameter has other memory, which no update reaches, or is no longer frozen.
        """
        for index, (param, view, slot) in enumerate(zip(self.params, self._views, self.layout.slots, strict=True)):
            if index in self.writes.reshaped or (self.is_gathered and param.data_ptr() != view.data_ptr()):
                raise ZeroEngineError(
                    f"parameter {slot.name} was given other memory after initialize(), by .to(), .half(), `.data =` or "
                    "the like: no update would reach it. Convert the model before initialize(), and write values "
                    "inside `with zeroengine.gathered(module_or_params):`."
                )
            if not self.trainable and param.requires_grad:
                raise ZeroEngineError(
                    f"parameter {slot.name} was frozen at initialize() and requires a gradient now: it would not be "
                    "trained, because it has no master and no moments. Make it trainable before initialize(); after "
                    "that requires_grad may be switched off and on between steps."
                )

    def readopt_data(self) -> list[str]:
        """Copy in the values of parameters whose ``data`` was replaced, and make them views of the full buffer again.

        Returns:
            Descriptions of the parameters whose shape has changed. These lose what was assigned.
        """
        refusals = []
        for param, view, slot in zip(self.params, self._views, self.layout.slots, strict=True):
            if param.data_ptr() == view.data_ptr() and param.shape == view.shape:
                continue
            if param.shape == view.shape:
                view.copy_(param.detach())
            else:
                refusals.append(f"{slot.name} (from {tuple(view.shape)} to {tuple(param.shape)})")
            param.data = view
        return refusals

    def copy_full_to_shard(self) -> None:
        """Update this rank's shard after a write to the full buffer."""
        if not self.is_releasable:
            return
        self.forget_secondary()
        start, stop = self.layout.shard_range(self.rank, self.degrees.parameters)
        if self.offloaded_shards is None:
            self.shard.copy_(self.full_buffer[start:stop])
        else:
            self.offloaded_shards.fill(self.shard, self.full_buffer[start:stop])


def _memory_format(param: torch.Tensor) -> torch.memory_format:
    """Return the order of the dimensions of ``param`` in memory, as far as torch has a name for it."""
    if not param.is_contiguous():
        for dim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if param.dim() == dim and param.is_contiguous(memory_format=memory_format):
                return memory_format
    return torch.contiguous_format


def _set_data(param: nn.Parameter, values: torch.Tensor, dtype: torch.dtype) -> None:
    param.data = values.to(dtype, copy=True)


def placeholder_of(view: torch.Tensor) -> torch.Tensor:
    """Return a NaN (0 in integer dtypes), expanded with stride 0 to the shape of ``view``."""
    value = float("nan") if view.is_floating_point() or view.is_complex() else 0
    return torch.full((), value, dtype=view.dtype, device=view.device).expand(view.shape)
