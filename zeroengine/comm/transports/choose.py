"""The choice of a transport: the fastest one that all ranks of a group can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zeroengine.comm.alarm_board import ranks_by_value
from zeroengine.comm.group import Group
from zeroengine.comm.host_layout import HostLayout, layout_of
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.transport_traits import TransportTraits
from zeroengine.comm.transports import shared_memory_file
from zeroengine.comm.transports.gloo import GlooTransport
from zeroengine.comm.transports.host_staged import HostStagedTransport
from zeroengine.comm.transports.nccl import FakeTransport, NCCLTransport
from zeroengine.comm.transports.registered_memory import RegisteredMemory
from zeroengine.comm.transports.shared_memory import SharedMemoryTransport
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.comm.transports.two_level import TwoLevelTransport
from zeroengine.config.model import Comm
from zeroengine.errors import ZeroEngineError

# NCCL's own watchdog ends the process without saying which rank stalled, so it waits longer than zeroengine's.
NCCL_EXTRA_TIMEOUT_S = 30.0


# The classes of all transports, by the names that ``memory.state_bytes.RankTopology`` takes.
TRANSPORTS: dict[str, type[TransportTraits]] = {
    transport.name: transport
    for transport in (
        *(SharedMemoryTransport, GlooTransport, TwoLevelTransport),
        *(NCCLTransport, FakeTransport, SingleProcessTransport),
    )
}


def expected_transport(device: str, kind: str, num_hosts: int, ranks_per_host: int) -> type[TransportTraits]:
    """Return the class that ``open_transport`` opens where ranks that can share memory do.

    Args:
        device: The kind of device that the model computes on.
        kind: The configuration's ``comm.transport``.
        num_hosts: The number of hosts.
        ranks_per_host: The ranks of each.
    """
    if num_hosts * ranks_per_host == 1:
        return SingleProcessTransport
    if device == "cuda":
        return NCCLTransport
    return _between_cpus(kind, HostLayout(0, num_hosts, ranks_per_host).ranks_by_host())


def _between_cpus(kind: str, hosts: Sequence[Sequence[int]]) -> type[TransportTraits]:
    if kind == "gloo":
        return GlooTransport
    if len(hosts) == 1:
        return SharedMemoryTransport
    # The ranks of each host share memory, if all hosts have equally many.
    return TwoLevelTransport if layout_of(hosts, 0) else GlooTransport


def open_transport(group: Group, kind: str, timeout: float, register_buffers: bool = False) -> Transport:
    """Open the fastest transport that all ranks of ``group`` can use. A collective.

    Args:
        group: The ranks.
        kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
        timeout: Seconds after which a stalled operation is an error.
        register_buffers: The configuration's ``comm.register_buffers``.

    Raises:
        ZeroEngineError: ``shm`` was asked for on CPUs, and some rank cannot use it.
    """
    if group.world_size == 1:
        return SingleProcessTransport(group.device)
    if group.backend in ("nccl", "fake"):
        return open_nccl(group, timeout, register_buffers)
    if group.backend != "gloo":
        raise ZeroEngineError(
            f"torch.distributed runs with the backend {group.backend!r} for {group.device.type} tensors, and "
            'zeroengine trains with "nccl" on GPUs and "gloo" on CPUs: write one of these in init_process_group(), '
            "or leave that call out"
        )
    if group.device.type != "cpu":
        # Gloo and shared memory move host memory only.
        return HostStagedTransport(_open_gloo(group, _hosts(group), timeout), group.device)
    hosts = _hosts(group)
    chosen = SharedMemoryTransport if kind == "shm" else _between_cpus(kind, hosts)
    if chosen is GlooTransport:
        return _open_gloo(group, hosts, timeout)
    layout = layout_of(hosts, group.rank) if chosen is TwoLevelTransport else None
    memory = _open_shared_memory(group, range(group.world_size) if layout is None else hosts[layout.host])
    if isinstance(memory, str):
        if kind == "shm":
            raise ZeroEngineError(f'comm.transport "shm" cannot be used: {memory}. Write "auto" or "gloo".')
        return _open_gloo(group, hosts, timeout)
    if layout is not None:
        sockets, watchdog = group.new_group(group.backend, timeout), group.start_watchdog(timeout)
        return TwoLevelTransport(memory, layout, sockets, watchdog, timeout)
    group.surround_long_waits(memory.long_wait)
    return SharedMemoryTransport(memory, timeout)


def unused_keys(comm: Comm, transport: Transport, device: torch.device) -> Iterator[str]:
    """Yield a sentence for each key of ``comm`` that has no effect on this transport."""
    if comm.transport == "shm" and device.type != "cpu":
        yield 'comm.transport "shm" has no effect: it is for ranks that compute on CPUs'
    if comm.register_buffers and not transport.registers_memory:
        reason = "this NCCL or GPU has no such memory" if transport.name == "nccl" else "it is for ranks over NCCL"
        yield f"comm.register_buffers has no effect: {reason}"


def _open_gloo(group: Group, hosts: Sequence[Sequence[int]], timeout: float) -> GlooTransport:
    return GlooTransport(group.new_group(group.backend, timeout), group.start_watchdog(timeout), timeout, hosts)


def _hosts(group: Group) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks. A collective."""
    identities = group.all_gather_object(shared_memory_file.host_identity(), "of hosts")
    return list(ranks_by_value(dict(enumerate(identities))).values())


def _open_shared_memory(group: Group, ranks: Sequence[int]) -> SharedMemory | str:
    """Return the memory files of ``ranks``, or the reason why some rank cannot use them: the same on all ranks."""
    addresses = group.all_gather_object(shared_memory_file.offer(), "of memory files")
    shared = [addresses[rank] for rank in ranks]
    numbers = [group.numbers[rank] for rank in ranks]
    memory = shared_memory_file.open_memory(group.rank - ranks[0], shared, numbers, group.divergence)
    # If one rank cannot open a peer's memory, no rank may use shared memory.
    own_reason = memory if isinstance(memory, str) else None
    reasons = group.all_gather_object(own_reason, "to open shared memory")
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None and not isinstance(memory, str):
        memory.close()
    return memory if reason is None else reason


def open_nccl(group: Group, timeout: float, register_buffers: bool = False) -> NCCLTransport:
    """Open the transport over NCCL, or over the backend that tests use in its place. See ``open_transport``."""
    if group.backend == "fake":
        return FakeTransport(group.process_group, group.process_group, group.device, None)
    nccl_timeout = timeout + NCCL_EXTRA_TIMEOUT_S
    # It also surrounds the first collectives of the communicators, which connect the GPUs.
    watchdog = group.start_watchdog(timeout)
    # Each channel has a communicator of its own. Operations of one communicator run in order, which would keep a gather
    # behind the reduce of another unit.
    gather, reduce = group.new_group(group.backend, nccl_timeout), group.new_group(group.backend, nccl_timeout)
    memory = None
    if register_buffers:
        # Ranks with different buffers work together, but all are to have the same notice.
        supported = group.all_gather_object(RegisteredMemory.is_supported(gather, group.device), "of memory for NCCL")
        memory = RegisteredMemory([gather, reduce], group.device) if all(supported) else None
    return NCCLTransport(gather, reduce, group.device, watchdog, nccl_timeout, memory)
