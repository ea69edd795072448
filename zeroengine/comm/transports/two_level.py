"""The transport between CPU ranks of several hosts: shared memory within each host, and Gloo between the hosts.

Each byte goes to another host once per host, and not once per rank. A rank exchanges only with its *counterparts*, the
ranks of the same number within their hosts, and shares what arrives with the other ranks of its host.

[Note: Steps]
A gather sends the shard to the counterparts, and the ranks of the host share what arrived. A reduce first adds slices
of the host's ranks; each sum goes to the counterpart that has the slice, and is added there in the order of hosts. If
ranks of a host have the same slice, each adds a part of it, and they share the parts. ``TwoLevelWork`` takes the steps;
``two_level_sum`` says what hosts exchange for a sum: values as they are added, or packets (``interfaces.PackedSums``).

[Note: Order]
Ranks of a host must post what they share in the same order, though it may arrive in any order. So the steps of a
channel's operations are taken in the order of issue, but for the first: a sum is sent to other hosts as soon as it is
complete. What came from other hosts is posted on shared-memory channels of its own, so that the first steps of later
operations need not wait for it.

[Note: Progress]
Gloo's threads move bytes between hosts while the rank computes. The steps in shared memory are taken whenever this rank
issues an operation or waits, and at each gradient of a backward, because the link between hosts is idle until a sum
within the host is sent.

[Note: Degrees]
These steps need degrees that divide the number of ranks on a host, or are multiples of it. With any other degree
(``Degrees`` of 2 where hosts have 3 ranks) all operations go directly between ranks over Gloo, with the same bits.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.group import Group
from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.interfaces import Buffer, Channel, PackedSums, PagedBuffer, Transport
from zeroengine.comm.rank_order_sum import sum_in_rank_order
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports.gloo import GlooChannel, GlooTransport
from zeroengine.comm.transports.shared_memory import SharedMemoryTransport
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.transports.two_level_channel import TwoLevelChannel
from zeroengine.comm.watchdog import Watchdog
from zeroengine.partition.degrees import Degrees
from zeroengine.utils.process_groups import destroy_group

log = logging.getLogger("zeroengine")


class TwoLevelTransport(TransportTraits):
    """See ``interfaces.Transport``.

    Args:
        memory: The memory files of this host's ranks.
        layout: The hosts.
        group: All ranks.
        watchdog: Reports stalls.
        timeout: Seconds after which a stalled operation is an error.
    """

    name = "two-level"
    overlaps = True
    adds_by_host = True
    keeps_memory = True
    shard_align_bytes = SharedMemoryTransport.shard_align_bytes

    @classmethod
    def staged_numel(cls, world_size: int, slice_numel: int, *, by_host: bool) -> int:
        """Return the elements that arrive from all ranks, or where each host adds first, those of parts of a sum."""
        if not by_host:
            return GlooTransport.staged_numel(world_size, slice_numel, by_host=False)
        # A rank holds a part of its host's sum, that which arrives, and that which its host shares. Each is at most
        # half of the sum, because a host has two ranks or more.
        return 3 * -(-world_size * slice_numel // 2)

    def __init__(
        self, memory: SharedMemory, layout: HostLayout, group: dist.ProcessGroup, watchdog: Watchdog, timeout: float
    ) -> None:
        self.rank, self.world_size = layout.rank, layout.world_size
        self.ranks_per_host = layout.ranks_per_host
        self._memory, self._layout, self._group, self._watchdog = memory, layout, group, watchdog
        self._local = local = SharedMemoryTransport(memory, timeout, self.progress, watchdog.report)
        limit, hosts = timedelta(seconds=timeout), layout.ranks_by_host()
        self._direct = [GlooChannel(name, group, watchdog, limit, hosts) for name in ("gather", "reduce", "exchange")]
        self._two_level = [
            TwoLevelChannel(layout, memory, within, of_other_hosts, between, watchdog, self.progress)
            for within, of_other_hosts, between in zip(
                (local.gather, local.reduce), local.of_other_hosts, self._direct[:2], strict=True
            )
        ]
        self.gather: Channel = self._two_level[0]
        self.reduce: Channel = self._two_level[1]
        self.packed_sums: PackedSums | None = self._two_level[1]
        self.exchange: Channel = local.exchange

    def progress(self) -> None:
        """Take the steps of both channels that peers are ready for."""
        for channel in self._two_level:
            channel.progress()

    def open_groups(self, degrees: tuple[Degrees, ...], group: Group, exchanging: tuple[int, ...] = ()) -> Transport:
        """Choose the way of all operations. See "Degrees" above."""
        if {rank // self._layout.ranks_per_host for rank in exchanging} - {self._layout.host}:
            self.exchange = self._direct[2]
            self._direct[2].progress_others = self.progress
        unfit = self._layout.unfit(degrees)
        if not unfit:
            return self
        if self.rank == 0:
            log.warning(
                "degrees of %s straddle hosts of %d ranks, so each rank sends to each other rank. Degrees that divide "
                "%d, or are multiples of it, send %d times fewer bytes between hosts.",
                *(" and ".join(map(str, unfit)), self._layout.ranks_per_host),
                *(self._layout.ranks_per_host, self._layout.ranks_per_host),
            )
        direct = ForwardingTransport(self, self._direct[1])
        direct.gather, direct.packed_sums = self._direct[0], None
        return direct

    def empty(self, numel: int, dtype: torch.dtype, *, sent: bool = True) -> torch.Tensor:
        """Return memory of this rank's file if operations send from it, else torch's own."""
        return self._local.empty(numel, dtype, sent=sent)

    def buffer(self, numel: int, dtype: torch.dtype, *, copied: bool = False) -> Buffer:
        """Return a buffer that shards of this host are mapped into, or one that all are copied into."""
        return PagedBuffer(numel, dtype) if copied else self._memory.mapped_buffer(numel, dtype, writable=True)

    def staging_bytes(self) -> int:
        """Return the bytes of the memory between the hosts and the buffers of the engine."""
        by_host, direct = (sum(c.staging_bytes() for c in channels) for channels in (self._two_level, self._direct))
        return by_host + direct

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Gather the vectors of this host's ranks, exchange them with the counterparts, and add all in rank order."""
        layout = self._layout
        self._drain()
        # Adding zeros to a value does not change it, so this sum is the list of the host's vectors.
        rows = torch.zeros(layout.ranks_per_host, values.numel(), dtype=values.dtype, device="cpu")
        rows[layout.local] = values
        own = self._local.all_reduce_scalars(rows.flatten(), label)
        arrived = own.new_empty(layout.num_hosts, own.numel())
        arrived[layout.host] = own
        counterparts = layout.counterparts
        received = dict(zip(counterparts, arrived, strict=True))
        self._direct[1].exchange("numbers", label, dict.fromkeys(counterparts, own), received).wait_host()
        out = torch.empty_like(values)
        sum_in_rank_order(out, list(arrived.flatten().chunk(self.world_size)), accumulate=False)
        return out

    def fence(self) -> None:
        """Return when no peer of this host reads this rank's memory, and everything was sent."""
        self._drain()
        self._local.fence()

    def reclaim(self) -> None:
        """Free the pages of this rank's file that no tensor is in any more."""
        self._local.reclaim()

    def _drain(self) -> None:
        for channel in self._two_level:
            channel.drain()

    def close(self) -> None:
        """Close the memory files, and end the watchdog and the process group."""
        self._local.close()
        self._watchdog.close()
        destroy_group(self._group)
