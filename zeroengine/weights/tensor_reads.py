"""Read whole tensors, or rows of them, out of an engine, for all ranks or for one.

[Note: Two ways to read]
Where every rank wants the values, a unit is gathered, and stays gathered until the next one is read. Where one rank
wants them, each rank sends it the part of its own shard that lies in what is read, and receives nothing. Where each
rank wants other rows of a tensor, all exchange parts of their shards in this way.

[Note: Split parameters]
A rank gathers its slice of a unit, whoever wants the values. The ranks of a model group then put slices together, some
elements at a time: each fills in its own, and a sum gives all of them to all. So a rank needs the memory of its slice
of a unit, and of these elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice

import torch

from zeroengine.checkpoint.entries import StateEntry
from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Slices, Transport
from zeroengine.partition.boxes import boxes_of_run
from zeroengine.partition.slices import pieces_of_slice, whole_shape
from zeroengine.runtime.dtensors import local_tensor
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import round_up
from zeroengine.weights.conversion import BoxValues, TensorConversion
from zeroengine.weights.postponed_errors import postponed
from zeroengine.weights.selection import Converted, OutgoingTensor, Slot, StoredValue

# So many elements of a split parameter are put together at a time.
CHUNK = 1 << 22


def gather_run(entry: StateEntry, start: int, stop: int, ranks: Group, device: torch.device) -> torch.Tensor:
    """Return the elements [start, stop) of a flattened tensor, from what each rank has of them. A collective.

    Args:
        entry: What this rank has of the tensor. Each element is on one rank.
        start: The first element.
        stop: The end of the elements.
        ranks: The ranks.
        device: That of the result.
    """
    values = torch.zeros(stop - start, dtype=entry.dtype, device=device)
    entry.copy_run(values, start)
    # The bits of each element are those of 0 on the other ranks.
    ranks.all_reduce(values.view(torch.uint8), "of slices")
    return values


class TensorReads:
    """Reads tensors of one engine. Every method is a collective: all ranks read the same, or equally many rows each.

    Args:
        gatherer: Gathers units.
        transport: Moves bytes between the ranks that the parameters are partitioned over.
        numbers: The engine's numbers of these ranks.
        model_group: Returns the ranks that hold a unit together whose parameters are split.
        stored: What conversions take, by name.
        device: Where conversions compute.
        receiver: The engine's number of the only rank that gets values. None: all may get them.
        receives: Whether this rank gets values.
        in_pieces: Whether a read of some rows is that of the next piece of the tensor on the next rank.

    Attributes:
        errors: The error of a conversion on this rank, such as an adapter that cannot be merged.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        transport: Transport,
        numbers: Sequence[int],
        model_group: Callable[[Unit], Group],
        stored: Mapping[str, StoredValue],
        device: torch.device,
        receiver: int | None = None,
        *,
        receives: bool,
        in_pieces: bool = False,
    ) -> None:
        self._gatherer, self._transport, self._stored, self._device = gatherer, transport, stored, device
        self._model_group, self._only_receiver = model_group, receiver
        # Other ranks with the same parameters send them to a receiver that is not one of these.
        self._sends = receiver is None or receiver in numbers
        is_peer = receiver is not None and self._sends and transport.world_size > 1
        self._receiver = numbers.index(receiver) if is_peer else None
        self._receives, self._in_pieces = receives, in_pieces
        self._pinned: Unit | None = None
        # The part of a conversion that was computed last, and its results.
        self._part: tuple[TensorConversion, int] | None = None
        self._results: dict[str, BoxValues] = {}
        self._inputs = torch.empty(0, dtype=torch.uint8, device=device)
        self.errors: list[Exception] = []

    def raise_error(self) -> None:
        """Raise the error of a conversion on this rank, whose results are missing. Every rank calls it at one time."""
        if self.errors:
            raise self.errors[0]

    def read(self, target: torch.Tensor | None, tensor: OutgoingTensor, start: int, stop: int) -> None:
        """Copy the elements [start, stop) of a flattened tensor into ``target``, and cast them.

        Page-locked memory is filled when the current stream has come so far.

        Args:
            target: 1-D, contiguous. None on a rank that gets no values.
            tensor: The tensor.
            start, stop: These are whole rows of the tensor.
        """
        if not isinstance(tensor.source, Converted):
            is_piece = self._in_pieces and stop - start < tensor.spec.numel
            self._read_stored(target, tensor.source, start, stop, is_piece=is_piece)
            return
        group, name = tensor.source
        for box in boxes_of_run(tensor.spec.shape, start, stop):
            for part in group.parts_of(name, box):
                self._convert(group, part)
                if target is None or self.errors:
                    continue
                # A part is the whole tensor or a row of it.
                part_box, values = self._results[name]
                first, last = max(start, part_box.start), min(stop, part_box.start + part_box.numel)
                own = values.reshape(-1)[first - part_box.start : last - part_box.start]
                target[first - start : last - start].copy_(own, non_blocking=True)

    def close(self) -> None:
        """Release what is gathered."""
        self._part, self._results = None, {}
        self._pin(None)

    def _pin(self, unit: Unit | None) -> None:
        if unit is self._pinned:
            return
        # One unit at a time is gathered.
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._gatherer.unpin(pinned)
        if unit is not None:
            self._gatherer.pin(unit)
            self._pinned = unit

    def _convert(self, group: TensorConversion, part: int) -> None:
        if self._part == (group, part):
            return
        # The last part is freed before the next one is computed.
        self._part, self._results = None, {}
        values = []
        boxes = [(self._stored[name], box) for name, box in group.boxes(part)]
        dtypes = [source.unit.dtype if isinstance(source, Slot) else source.value.dtype for source, _ in boxes]
        sizes = [round_up(box.numel * dtype.itemsize, 64) for (_, box), dtype in zip(boxes, dtypes, strict=True)]
        # All parts use one memory. The heap would keep what is freed between blocks that live on.
        if self._receives and self._inputs.numel() < sum(sizes):
            self._inputs = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        places = self._inputs[: sum(sizes)].split(sizes) if self._receives else [None] * len(sizes)
        for (source, box), dtype, place in zip(boxes, dtypes, places, strict=True):
            target = None if place is None else place.view(dtype)[: box.numel]
            self._read_stored(target, source, box.start, box.start + box.numel)
            if target is not None:
                values.append(target.view(box.sizes))
        self._part = group, part
        if self._receives and not self.errors:
            # The other ranks go on to read.
            with postponed(self.errors):
                self._results = group.convert(part, values)

    def _read_stored(
        self, target: torch.Tensor | None, source: StoredValue, start: int, stop: int, *, is_piece: bool = False
    ) -> None:
        if not isinstance(source, Slot):
            if target is not None:
                target.copy_(source.value.detach().reshape(-1)[start:stop])
            return
        unit, slot = source.unit, source.unit.layout.slots[source.param_index]
        if unit.is_split:
            self._read_slices(target, source, start, stop)
            return
        if not self._sends:
            return
        if is_piece:
            pieces = [(i, i + stop - start) for i in range(slot.offset, slot.end, stop - start)]
            self._exchange(target, unit, list(islice(cycle(pieces), self._transport.world_size)))
            return
        if self._receiver is not None and unit.is_releasable:
            ranges = [(0, 0)] * self._transport.world_size
            ranges[self._receiver] = start + slot.offset, stop + slot.offset
            self._exchange(target, unit, ranges)
            return
        if self._receiver is None:
            self._pin(unit)
        if target is not None:
            # User code may have given the parameter other memory.
            values = local_tensor(unit.params[source.param_index]).detach().reshape(-1)[start:stop]
            target.copy_(values, non_blocking=True)

    def _read_slices(self, target: torch.Tensor | None, source: Slot, start: int, stop: int) -> None:
        """Put the elements [start, stop) of a split parameter together. See "Split parameters" above."""
        unit, ranks = source.unit, self._model_group(source.unit)
        self._pin(unit)
        if self._only_receiver is not None and self._only_receiver not in ranks.numbers:
            return
        param = unit.params[source.param_index]
        values = local_tensor(param).detach().reshape(-1)
        entry = StateEntry(whole_shape(param), unit.dtype, pieces_of_slice(param, 0, values))
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            chunk = gather_run(entry, first, last, ranks, self._device)
            if target is not None:
                target[first - start : last - start].copy_(chunk, non_blocking=True)

    def _exchange(self, target: torch.Tensor | None, unit: Unit, ranges: Sequence[tuple[int, int]]) -> None:
        """Send each rank the elements [start, stop) of a unit's flat buffer that ``ranges`` has for it.

        Args:
            target: As of ``read``.
            unit: The unit.
            ranges: By rank. Those of the ranks that share the buffer ascend, without gaps, or one rank alone has one.
        """
        own, degree = self._transport.rank, unit.degrees.parameters
        shard_numel = unit.layout.shard_numel(degree)
        sizes = [[0] * len(ranges) for _ in ranges]
        for receiver, (start, stop) in enumerate(ranges):
            # The shards of these ranks are the whole buffer, in their order.
            owners = unit.degrees.owners(receiver, degree)
            for index in range(start // shard_numel, -(-stop // shard_numel)):
                first = index * shard_numel
                sizes[owners[index]][receiver] = min(stop, first + shard_numel) - max(start, first)
        base, _ = unit.layout.shard_range(own, degree)
        first_sent = min((start for (start, _), numel in zip(ranges, sizes[own], strict=True) if numel), default=base)
        first_sent, num_sent = max(first_sent - base, 0), sum(sizes[own])
        part = slice(first_sent, first_sent + num_sent)
        owners = unit.degrees.owners(own, degree)
        received_sizes = [row[own] for row in sizes]
        # Slices arrive in the order of ranks, which that of shards differs from where units have other degrees.
        is_ordered = list(owners) == sorted(owners)
        # Without a cast the values arrive where they belong.
        is_direct = is_ordered and target is not None and (target.dtype, target.device) == (unit.dtype, self._device)
        received = target if is_direct else torch.empty(sum(received_sizes), dtype=unit.dtype, device=self._device)
        assert received is not None
        slices = Slices(sizes=tuple(map(tuple, sizes)))
        if unit.offloaded_shards is not None and num_sent:
            work = unit.offloaded_shards.all_to_all(received, unit.shard, part, unit.name, slices)
        else:
            sent = unit.shard[part] if num_sent else torch.empty(0, dtype=unit.dtype, device=self._device)
            work = self._transport.gather.all_to_all(received, sent, unit.name, slices)
        work.wait_stream()
        if target is not None and not is_direct:
            parts = received.split(received_sizes)
            target.copy_(received if is_ordered else torch.cat([parts[rank] for rank in owners]), non_blocking=True)
