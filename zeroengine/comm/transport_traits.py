"""What a transport states of itself: what the engine and the plan decide by, in place of its name."""

from __future__ import annotations

from typing import Any, Protocol

from zeroengine.comm.group import Group
from zeroengine.partition.degrees import Degrees


class TransportTraits(Protocol):
    """The traits of the class of a transport, which inherits these values and writes those that differ.

    The plan asks the class, because no transport is open yet. ``transports.choose.TRANSPORTS`` has all classes by name.

    Attributes:
        name: The transport's name in messages.
        has_peers: Whether operations exchange anything with other ranks.
        overlaps: Whether issued operations proceed while this rank computes.
        runs_on_streams: Whether operations run on the streams of the device, so that events show when each ends.
        reduces_by_levels: Whether a sum goes level by level (``partition.degrees.Degrees``), which sends fewer bytes
            between machines. Otherwise each rank reads its slice of every other rank.
        adds_by_host: Whether the ranks of a host add their values before any go to other hosts, with degrees that fit
            the hosts (``HostLayout.unfit``).
        sums_in_place: Whether a sum is cast for the target and added to it without memory for the sum alone.
        keeps_memory: Whether memory of ``empty`` that operations send from is never freed: callers use it again.
        shares_pages: Whether full buffers show the memory of other ranks, and take none of their own.
        registers_memory: Whether buffers lie in memory that NCCL has registered.
        shard_align_bytes: A shard's length in bytes should be a multiple of this. 1: any length will do.
        ranks_per_host: The number of ranks that share memory with this one, itself included; 1 if it is not used.
    """

    name: str
    has_peers: bool = True
    overlaps: bool = False
    runs_on_streams: bool = False
    reduces_by_levels: bool = False
    adds_by_host: bool = False
    sums_in_place: bool = True
    keeps_memory: bool = False
    shares_pages: bool = False
    registers_memory: bool = False
    shard_align_bytes: int = 1
    ranks_per_host: int = 1

    @classmethod
    def staged_numel(cls, world_size: int, slice_numel: int, *, by_host: bool) -> int:
        """Return the most elements of memory that one sum passes through, and that is kept for the next sums.

        Args:
            world_size: The number of ranks, two or more.
            slice_numel: The elements of each rank's slice.
            by_host: Whether the ranks of each host add their values first. See ``adds_by_host``.
        """
        return 0

    def open_groups(self, degrees: tuple[Degrees, ...], group: Group, exchanging: tuple[int, ...] = ()) -> Any:
        """Return this transport, or another ``interfaces.Transport`` around it, for operations among some of the ranks.

        It prepares them. A collective.

        What it returned before, for other degrees, goes on as it was.

        Args:
            degrees: The degrees that units have, in the same order on every rank.
            group: All ranks.
            exchanging: The consecutive ranks that share a sample with this one, on the channel ``exchange``.
        """
        # Ranks exchange with one another directly.
        return self

    def staging_bytes(self) -> int:
        """Return the bytes of memory that operations pass through and that is kept for the next ones."""
        return 0

    def progress(self) -> None:
        """Take the steps of operations under way that peers are ready for, without waiting.

        The reducer calls it at each gradient, so that a sum goes to other hosts while the backward computes.
        """
        # Threads or the device move the bytes, or steps taken later take no more time.
        return

    def check_order(self) -> None:
        """Wait for the comparison of the ranks' orders that the last ``all_reduce_scalars`` started, if any.

        Raises:
            DivergenceError: The ranks have run different operations.
        """
        # Operations are compared when they are executed, or those that differ do not match and stall.
        return

    def fence(self) -> None:
        """Return when no rank reads this rank's memory any more. Every rank calls it at the same place."""
        # No rank reads the memory of another.
        return

    def reclaim(self) -> None:
        """Give memory of ``empty`` whose tensors are gone back to the system. No rank may read it any more."""
        # The memory is torch's, which goes with its tensor.
        return
