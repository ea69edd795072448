"""The process group: found or started, agreed upon, and given a transport."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroengine.comm.alarm_board import ranks_by_value
from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.comm.launched_ranks import has_peers
from zeroengine.comm.transports import shared_memory_file
from zeroengine.comm.transports.gloo import GlooTransport
from zeroengine.comm.transports.host_staged import HostStagedTransport
from zeroengine.comm.transports.nccl import NCCLTransport, RegisteredPool
from zeroengine.comm.transports.shared_memory import SharedMemoryTransport
from zeroengine.comm.transports.shared_memory_file import SharedMemory
from zeroengine.comm.transports.single_process import SingleProcessTransport
from zeroengine.comm.watchdog import Watchdog, host_name
from zeroengine.errors import DivergenceError, ZeroEngineError

T = TypeVar("T")
# The values, and the ranks of each, that a message about ranks that differ shows.
MAX_SHOWN = 3
# NCCL's own watchdog ends the process without saying which rank stalled. So it comes so many seconds after ours.
NCCL_EXTRA_TIMEOUT_S = 30.0


class Group:
    """The data-parallel ranks of one engine.

    Starts torch.distributed where nobody has: NCCL on CUDA, Gloo on CPU, and a group of one process where
    ``RANK`` and ``WORLD_SIZE`` are not set. ``join_launched_ranks`` sets them under mpirun and srun.

    Args:
        process_group: The ranks to partition over; None for the default group.
        device: The device that the model computes on.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            _start("nccl" if device.type == "cuda" else "gloo")
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.process_group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.device = device
        self._watchdog: Watchdog | None = None
        self._error_of_all_ranks: Exception | None = None
        self.backend = backend_of(group, device.type)
        # The check goes through the store. A collective would run into NCCL's own error, which is less clear.
        if self.backend == "nccl" and self.world_size > 1:
            store = dist.PrefixStore(f"zeroengine/gpus/{group.group_name}", dist.distributed_c10d._get_default_store())
            check_gpus(store, self.rank, self.world_size, str(torch.cuda.get_device_properties(device).uuid))

    def long_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Surround a wait for other ranks that may be long. See ``Watchdog.long_wait``; the transport starts one."""
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.long_wait(what)

    def all_gather_object(self, value: T, purpose: str = "of facts") -> list[T]:
        """Return every rank's ``value``, in rank order.

        Args:
            value: Anything that pickles.
            purpose: The purpose, such as "to save a checkpoint", for the message where a rank stalls.

        Raises:
            DivergenceError: Another rank has ended or cannot be reached.
        """
        # The fake backend has no peers. Its ranks are taken to pass what this one passes.
        if self.world_size == 1 or self.backend == "fake":
            return [value] * self.world_size
        values: list[T | None] = [None] * self.world_size
        try:
            with self.long_wait(f"exchange {purpose}"):
                dist.all_gather_object(values, value, group=self.process_group)
        except RuntimeError as error:
            raise DivergenceError(
                f"rank {self.rank} lost its peers: one has ended, or cannot be reached ({str(error).splitlines()[0]})"
            ) from error
        return values  # type: ignore[return-value]

    @contextlib.contextmanager
    def collective_errors(self, purpose: str, fact: T | None = None) -> Iterator[list[T]]:
        """Make an error of one rank an error of all ranks, each with the message of the first.

        Args:
            purpose: The purpose, such as "to save a checkpoint", for the other ranks' message.
            fact: Anything that pickles, for the other ranks.

        Yields:
            A list that holds every rank's ``fact``, in rank order, once the block has ended.
        """
        error: Exception | None = None
        report: tuple[type[ZeroEngineError], str] | None = None
        facts: list[T] = []
        try:
            yield facts
        except ZeroEngineError as raised:
            error, report = raised, (type(raised), str(raised))
        except Exception as raised:
            # The other ranks may lack the class of an error that is not zeroengine's own.
            error, report = raised, (ZeroEngineError, f"{type(raised).__name__}: {raised}")
        reports_and_facts = self.all_gather_object((report, fact), purpose)
        # The exchange comes first: a rank that raised before it would leave the others waiting.
        failures = ((rank, other) for rank, (other, _) in enumerate(reports_and_facts) if other is not None)
        for rank, other in failures:
            self._error_of_all_ranks = error or other[0](f"rank {rank} failed {purpose}: {other[1]}")
            raise self._error_of_all_ranks
        facts += [fact for _, fact in reports_and_facts]  # type: ignore[misc]

    def is_error_of_all_ranks(self, error: BaseException | None) -> bool:
        """Return whether ``collective_errors`` raised ``error`` last, so that every rank handles one now."""
        return error is not None and error is self._error_of_all_ranks

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy rank ``source``'s values to every rank, in place.

        Args:
            tensor: Contiguous, of any dtype.
            source: The rank whose values count.
        """
        if self.world_size > 1:
            with self.long_wait("broadcast"), self._on_backend_device(tensor) as values:
                # The backends know few dtypes. No arithmetic is done, so the bytes can travel instead.
                dist.broadcast(values.view(-1).view(torch.uint8), group_src=source, group=self.process_group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place. For rare use: a ``Transport`` is faster."""
        if self.world_size > 1:
            with self.long_wait("sum"), self._on_backend_device(tensor) as values:
                dist.all_reduce(values, group=self.process_group)

    @contextlib.contextmanager
    def _on_backend_device(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield memory that the backend reaches: the tensor, or a CPU copy for Gloo, which is copied back."""
        if self.backend != "gloo" or tensor.device.type == "cpu":
            yield tensor
            return
        values = tensor.cpu()
        yield values
        tensor.copy_(values)

    def transport(self, kind: str, timeout: float, registered: bool = False) -> Transport:
        """Return the fastest transport that all ranks can use.

        Args:
            kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
            timeout: Seconds after which a stalled operation is an error.
            registered: Whether NCCL is to register the memory that it moves.

        Raises:
            ZeroEngineError: ``shm`` (on CPUs) or registration was asked for and some rank cannot use it.
        """
        if self.world_size == 1:
            return SingleProcessTransport(self.device)
        if self.backend in ("nccl", "fake"):
            return self._nccl_transport(timeout, registered)
        if self.backend != "gloo":
            raise ZeroEngineError(
                f"torch.distributed runs with the backend {self.backend!r} for {self.device.type} tensors, and "
                'zeroengine trains with "nccl" on GPUs and "gloo" on CPUs: write one of these in init_process_group(), '
                "or leave that call out"
            )
        if self.device.type != "cpu":
            # Gloo moves host memory only, and shared memory is for tensors of the CPU.
            return HostStagedTransport(self._gloo_transport(timeout), self.device)
        if kind != "gloo":
            memory = self._shared_memory()
            # All ranks have compared their results, so all of them take shared memory or none does.
            if not isinstance(memory, str):
                return SharedMemoryTransport(memory, timeout)
            if kind == "shm":
                raise ZeroEngineError(f'comm.transport "shm" cannot be used: {memory}. Write "auto" or "gloo".')
        return self._gloo_transport(timeout)

    def _gloo_transport(self, timeout: float) -> GlooTransport:
        return GlooTransport(self.new_group(self.backend, timeout), self._start_watchdog(timeout), timeout)

    def _shared_memory(self) -> SharedMemory | str:
        """Return the ranks' memory files, or why some rank cannot use them: the same on all ranks."""
        addresses = self.all_gather_object(shared_memory_file.offer())
        memory = shared_memory_file.open_memory(self.rank, addresses)
        # A rank that cannot open a peer's memory must keep all others from using it.
        reasons = self.all_gather_object(memory if isinstance(memory, str) else None)
        return next((reason for reason in reasons if reason is not None), memory)

    def _nccl_transport(self, timeout: float, registered: bool) -> NCCLTransport:
        if self.backend == "fake":
            return NCCLTransport(self.process_group, self.process_group, self.device, self.backend, None)
        nccl_timeout = timeout + NCCL_EXTRA_TIMEOUT_S
        # Each channel has a communicator of its own. Operations of one communicator run in order, which would keep a
        # gather behind the reduce of another unit.
        gather, reduce = self.new_group(self.backend, nccl_timeout), self.new_group(self.backend, nccl_timeout)
        pools: dict[ChannelName, RegisteredPool] = {}
        if registered:
            for group in (gather, reduce):
                # NCCL makes the communicator at its first collective, and memory is registered with a communicator.
                dist.all_reduce(torch.zeros((), device=self.device), group=group)
            with self.collective_errors("to register memory with NCCL"):
                pools = {"gather": RegisteredPool(gather, self.device), "reduce": RegisteredPool(reduce, self.device)}
        return NCCLTransport(gather, reduce, self.device, self.backend, self._start_watchdog(timeout), pools)

    def new_group(self, backend: str, timeout: float | None = None) -> dist.ProcessGroup:
        """Return another process group of the same ranks.

        Args:
            backend: One of torch.distributed's.
            timeout: Seconds that its collectives may take; None for torch's default.
        """
        ranks = dist.get_process_group_ranks(self.process_group)
        # The ranks outside of a subset do not take part in this call, so torch must not wait for them.
        is_subset = len(ranks) < dist.get_world_size()
        own_groups: list[dist.ProcessGroup | None] = []
        if is_subset:
            # Ranks find one another by the group's name, which torch then makes of the ranks and of how many groups
            # this process belongs to. A rank in fewer groups joins groups of one until the new group is made.
            num_groups = len(dist.distributed_c10d._world.pg_names)
            for _ in range(self._agree_on_group_number(ranks, num_groups) - num_groups):
                own_groups.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
        limit = None if timeout is None else timedelta(seconds=timeout)
        group = dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=is_subset)
        for own_group in own_groups:
            dist.destroy_process_group(own_group)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _agree_on_group_number(self, ranks: Sequence[int], num_groups: int) -> int:
        """Return how many groups every rank is to belong to when the next group of ``ranks`` is made.

        A number is used once: a group of the same name that was destroyed has left its addresses in the store.
        """
        store = dist.PrefixStore("zeroengine/groups", dist.distributed_c10d._get_default_store())
        key = "_".join(map(str, ranks))
        # Adding 0 reads the counter, and makes it where there is none.
        last_number = store.add(key, 0) if self.rank == 0 else 0
        facts = self.all_gather_object((num_groups, last_number), "to make a process group")
        number = max(max(num, last + 1) for num, last in facts)
        if self.rank == 0:
            store.add(key, number - last_number)
        return number

    def _start_watchdog(self, timeout: float) -> Watchdog:
        names, hosts = zip(*self.all_gather_object((uuid.uuid4().hex, host_name())), strict=True)
        # The store is the default one, through a connection of its own where it can be cloned: a request of the
        # watchdog's thread must not wait behind one that torch makes. The random name of rank 0 keeps the keys of
        # several engines apart.
        store = dist.distributed_c10d._get_default_store()
        clone: Callable[[], dist.Store] = getattr(store, "clone", lambda: store)
        store = dist.PrefixStore(f"zeroengine/{names[0]}", clone())
        self._watchdog = Watchdog(store, self.rank, hosts, timeout)
        return self._watchdog


def check_same(call: str, arguments: Sequence[Mapping[str, object]]) -> None:
    """Compare the arguments of a call that all ranks make together.

    Args:
        call: The call's name, for the message.
        arguments: The arguments by name, of each rank in rank order.

    Raises:
        DivergenceError: The ranks pass different arguments. Names the values and their ranks, on every rank.
    """
    differences = []
    for name in arguments[0]:
        # Values are compared by their text, since not all of them can be compared or hashed.
        ranks_with = ranks_by_value({rank: repr(row[name]) for rank, row in enumerate(arguments)})
        if len(ranks_with) > 1:
            values = (f"{value} on {_ranks(ranks)}" for value, ranks in list(ranks_with.items())[:MAX_SHOWN])
            differences.append(f"{name} is {' and '.join(values)}")
    if differences:
        raise DivergenceError(
            f"{call}: the ranks pass different arguments. {'. '.join(differences)}. Every rank must pass the same."
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_SHOWN]))
    more = f" and {len(ranks) - MAX_SHOWN} more" if len(ranks) > MAX_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def check_gpus(store: dist.Store, rank: int, world_size: int, gpu: str) -> None:
    """Check that each rank has a GPU of its own. NCCL's own error says so less clearly.

    Args:
        store: A store of this check alone.
        rank: This rank.
        world_size: The number of ranks.
        gpu: A name of this rank's GPU that is unique on its host, such as its UUID.

    Raises:
        ZeroEngineError: Two ranks share a GPU. Raised on every rank.
    """
    store.set(str(rank), f"{host_name() or socket.gethostname()} {gpu}")
    # ``get`` waits until the other rank has set its key.
    ranks_of_gpu = ranks_by_value({other: store.get(str(other)) for other in range(world_size)})
    shared = next((key for key, ranks in ranks_of_gpu.items() if len(ranks) > 1), None)
    if shared is not None:
        ranks = ranks_of_gpu[shared]
        host, _, name = shared.decode().partition(" ")
        raise ZeroEngineError(
            f"ranks {' and '.join(map(str, ranks[:2]))} have the same GPU ({name} on {host}): NCCL needs one for each. "
            "Start no more ranks on a node than it has GPUs (zero-launch --nproc), let each see its own "
            "(CUDA_VISIBLE_DEVICES, LOCAL_RANK), or start torch.distributed with Gloo to compute on CPUs."
        )


def as_process_group(value: object) -> dist.ProcessGroup | None:
    """Return the process group that ``value`` stands for, or None for all ranks.

    Args:
        value: A process group, a ``DeviceMesh`` of one dimension, or None.

    Raises:
        ZeroEngineError: It is something else, or this rank does not belong to it.
    """
    if value is None or isinstance(value, dist.ProcessGroup):
        return value
    outside = "process_group: this rank is not one of its ranks. Call initialize() on those alone."
    if isinstance(value, dist.DeviceMesh):
        if value.ndim > 1:
            names = value.mesh_dim_names
            sizes = dict(zip(names, value.shape, strict=True)) if names else tuple(value.shape)
            example = f"process_group=mesh[{names[0]!r}]" if names else "process_group=mesh.get_group(0)"
            raise ZeroEngineError(
                f"process_group: found a DeviceMesh of {value.ndim} dimensions, {sizes}. Pass the one of the "
                f"data-parallel ranks, such as {example}"
            )
        if value.get_coordinate() is None:
            raise ZeroEngineError(outside)
        return value.get_group()
    # ``new_group`` returns this to the ranks that are not in the group.
    if value == dist.GroupMember.NON_GROUP_MEMBER:
        raise ZeroEngineError(outside)
    raise ZeroEngineError(
        f"process_group: found {value!r}. Pass a process group, such as torch.distributed.new_group([0, 1]), or a "
        "DeviceMesh of one dimension"
    )


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str:
    """Return the backend for tensors of that device: a group may have one for each (``cpu:gloo,cuda:nccl``)."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return dict(pairs).get(device_type, dist.get_backend(group))


def default_device() -> torch.device:
    """Return this rank's GPU if there is any (by ``LOCAL_RANK``, else torch's current one), otherwise the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    # Each rank may see one GPU alone (CUDA_VISIBLE_DEVICES), so the number is taken modulo the GPUs that are visible.
    index = torch.cuda.current_device() if local_rank is None else int(local_rank) % torch.cuda.device_count()
    return torch.device("cuda", index)


def _start(backend: str) -> None:
    if has_peers():
        dist.init_process_group(backend)
    else:
        # A store in memory opens no port, so that several single processes of a machine do not collide.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if backend == "gloo":
        # Gloo's threads must not outlive the interpreter.
        atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
