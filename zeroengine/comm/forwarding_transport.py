"""A transport around another one."""

from __future__ import annotations

import torch

from zeroengine.comm.group import Group
from zeroengine.comm.interfaces import Buffer, Channel, PackedSums, Transport
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.partition.degrees import Degrees


class ForwardingTransport(TransportTraits):
    """Does what another transport does. See ``interfaces.Transport``.

    A subclass replaces the channels and the methods in which it differs. Each member of ``Transport`` is written out
    here, so that a reader finds it and mypy checks it. ``staged_numel`` is asked of classes that are in
    ``transports.choose.TRANSPORTS``, which no wrapper is.

    Args:
        inner: The other transport. It has chosen its channels already (``open_groups``).
        reduce: The channel that gradients are summed on. None: that of ``inner``.
    """

    def __init__(self, inner: Transport, reduce: Channel | None = None) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.gather: Channel = inner.gather
        self.reduce: Channel = inner.reduce if reduce is None else reduce
        self.exchange: Channel = inner.exchange
        self.packed_sums: PackedSums | None = inner.packed_sums
        self.name = inner.name
        self.has_peers = inner.has_peers
        self.overlaps = inner.overlaps
        self.runs_on_streams = inner.runs_on_streams
        self.reduces_by_levels = inner.reduces_by_levels
        self.adds_by_host = inner.adds_by_host
        self.sums_in_place = inner.sums_in_place
        self.keeps_memory = inner.keeps_memory
        self.shares_pages = inner.shares_pages
        self.registers_memory = inner.registers_memory
        self.shard_align_bytes = inner.shard_align_bytes
        self.ranks_per_host = inner.ranks_per_host

    def open_groups(self, degrees: tuple[Degrees, ...], group: Group, exchanging: tuple[int, ...] = ()) -> Transport:
        """See ``TransportTraits``."""
        opened = self._inner.open_groups(degrees, group, exchanging)
        assert opened is self._inner, "what chooses its channels by degrees is wrapped once it has"
        return self

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """See ``interfaces.Transport``."""
        return self._inner.empty(numel, dtype, sent=sent)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """See ``interfaces.Transport``."""
        return self._inner.buffer(numel, dtype, copied=copied)

    def staging_bytes(self) -> int:
        """See ``TransportTraits``."""
        return self._inner.staging_bytes()

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``interfaces.Transport``."""
        return self._inner.all_reduce_scalars(values, label)

    def progress(self) -> None:
        """See ``TransportTraits``."""
        self._inner.progress()

    def check_order(self) -> None:
        """See ``TransportTraits``."""
        self._inner.check_order()

    def fence(self) -> None:
        """See ``TransportTraits``."""
        self._inner.fence()

    def reclaim(self) -> None:
        """See ``TransportTraits``."""
        self._inner.reclaim()

    def close(self) -> None:
        """See ``interfaces.Transport``."""
        self._inner.close()
