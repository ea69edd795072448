"""The choice of a transport: the fastest one that all ranks of a group can use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeroengine.comm.alarm_board import ranks_by_value
from zeroengine.comm.group import Group
from zeroengine.comm.host_layout import layout_of
from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.comm.transports import shared_memory_file
from zeroengine.comm.transports.gloo import GlooTransport
from zeroengine.comm.transports.host_staged import HostStagedTransport
from zeroengine.comm.transports.nccl import NCCLTransport, RegisteredPool
from zeroengine.comm.transports.shared_memory import SharedMemoryTransport
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.comm.transports.two_level import TwoLevelTransport
from zeroengine.errors import ZeroEngineError

# NCCL's own watchdog ends the process without saying which rank stalled, so it waits longer than zeroengine's.
NCCL_EXTRA_TIMEOUT_S = 30.0


def open_transport(group: Group, kind: str, timeout: float, registered: bool = False) -> Transport:
    """Open the fastest transport that all ranks of ``group`` can use. A collective.

    Args:
        group: The ranks.
        kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
        timeout: Seconds after which a stalled operation is an error.
        registered: Whether NCCL is to register the memory that it moves.

    Raises:
        ZeroEngineError: ``shm`` (on CPUs) or registration was asked for and some rank cannot use it.
    """
    if group.world_size == 1:
        return SingleProcessTransport(group.device)
    if group.backend in ("nccl", "fake"):
        return open_nccl(group, timeout, registered)
    if group.backend != "gloo":
        raise ZeroEngineError(
            f"torch.distributed runs with the backend {group.backend!r} for {group.device.type} tensors, and "
            'zeroengine trains with "nccl" on GPUs and "gloo" on CPUs: write one of these in init_process_group(), '
            "or leave that call out"
        )
    if group.device.type != "cpu":
        # Gloo and shared memory move host memory only.
        return HostStagedTransport(_open_gloo(group, timeout), group.device)
    if kind != "gloo":
        hosts = _hosts(group)
        # Ranks of one host share memory. Of several hosts, those of each do, if all have equally many.
        layout = layout_of(hosts, group.rank) if kind == "auto" else None
        ranks = next(ranks for ranks in hosts if group.rank in ranks) if layout else range(group.world_size)
        memory = _open_shared_memory(group, ranks)
        if not isinstance(memory, str):
            if layout is not None:
                sockets, watchdog = group.new_group(group.backend, timeout), group.start_watchdog(timeout)
                return TwoLevelTransport(memory, layout, sockets, watchdog, timeout)
            group.surround_long_waits(memory.long_wait)
            return SharedMemoryTransport(memory, timeout)
        if kind == "shm":
            raise ZeroEngineError(f'comm.transport "shm" cannot be used: {memory}. Write "auto" or "gloo".')
    return _open_gloo(group, timeout)


def _open_gloo(group: Group, timeout: float) -> GlooTransport:
    hosts = _hosts(group)
    return GlooTransport(group.new_group(group.backend, timeout), group.start_watchdog(timeout), timeout, hosts)


def _hosts(group: Group) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks. A collective."""
    identities = group.all_gather_object(shared_memory_file.host_identity())
    return list(ranks_by_value(dict(enumerate(identities))).values())


def _open_shared_memory(group: Group, ranks: Sequence[int]) -> SharedMemory | str:
    """Return the memory files of ``ranks``, or the reason why some rank cannot use them: the same on all ranks."""
    addresses = group.all_gather_object(shared_memory_file.offer())
    shared = [addresses[rank] for rank in ranks]
    numbers = [group.numbers[rank] for rank in ranks]
    memory = shared_memory_file.open_memory(group.rank - ranks[0], shared, numbers)
    # If one rank cannot open a peer's memory, no rank may use shared memory.
    reasons = group.all_gather_object(memory if isinstance(memory, str) else None)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None and not isinstance(memory, str):
        memory.close()
    return memory if reason is None else reason


def open_nccl(group: Group, timeout: float, registered: bool) -> NCCLTransport:
    """Open the transport over NCCL, or over the backend that tests use in its place. See ``open_transport``."""
    if group.backend == "fake":
        return NCCLTransport(group.process_group, group.process_group, group.device, group.backend, None)
    nccl_timeout = timeout + NCCL_EXTRA_TIMEOUT_S
    # Each channel has a communicator of its own. Operations of one communicator run in order, which would keep a gather
    # behind the reduce of another unit.
    gather, reduce = group.new_group(group.backend, nccl_timeout), group.new_group(group.backend, nccl_timeout)
    pools: dict[ChannelName, RegisteredPool] = {}
    if registered:
        for channel_group in (gather, reduce):
            # Memory is registered with a communicator, which NCCL makes at the first collective.
            dist.all_reduce(torch.zeros((), device=group.device), group=channel_group)
        with group.collective_errors("to register memory with NCCL"):
            pools = {"gather": RegisteredPool(gather, group.device), "reduce": RegisteredPool(reduce, group.device)}
    return NCCLTransport(
        gather, reduce, group.device, group.backend, group.start_watchdog(timeout), pools, nccl_timeout
    )
