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

from zeroengine.comm.interfaces import ChannelName, Transport
from zeroengine.comm.launched_ranks import has_peers
from zeroengine.comm.transports import shared_memory
from zeroengine.comm.transports.gloo import GlooTransport
from zeroengine.comm.transports.host_staged import StagedTransport
from zeroengine.comm.transports.nccl import NativeTransport
from zeroengine.comm.transports.nccl_memory_pool import RegisteredPool
from zeroengine.comm.transports.single_process import LocalTransport
from zeroengine.comm.watchdog import Watchdog, own_host
from zeroengine.errors import DivergenceError, ZeroEngineError

T = TypeVar("T")
SHOWN = 3  # values, and ranks of each, in a message about ranks that differ
LATER_S = 30.0  # by which NCCL's own watchdog, whose word is its process's last, comes after ours


class Group:
    """The data-parallel ranks of one engine.

    Starts torch.distributed where nobody has: NCCL on CUDA, Gloo on CPU, and a group of one process where
    ``RANK`` and ``WORLD_SIZE`` are not set. ``join_launched_ranks`` sets them under mpirun and srun.

    Args:
        process_group: the ranks to partition over; the default group where None.
        device: where the model computes.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        if not dist.is_initialized():
            _start(device)
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.process_group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.device = device
        self._watchdog: Watchdog | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.backend = backend_of(group, device.type)
        if self.backend == "nccl" and self.world_size > 1:
            store = dist.PrefixStore(f"zeroengine/gpus/{group.group_name}", dist.distributed_c10d._get_default_store())
            check_gpus(store, self.rank, self.world_size, str(torch.cuda.get_device_properties(device).uuid))

    def waiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around a wait for the other ranks that may be long, once there is a transport. See ``Watchdog.waiting``."""
        return contextlib.nullcontext() if self._watchdog is None else self._watchdog.waiting(what)

    def exchange(self, value: T, doing: str = "of facts") -> list[T]:
        """Every rank's ``value`` (picklable), in rank order. ``doing`` says what for, where a rank stalls."""
        if self.world_size == 1 or self.backend == "fake":
            return [value] * self.world_size
        values: list[T | None] = [None] * self.world_size
        try:
            with self.waiting(f"exchange {doing}"):
                dist.all_gather_object(values, value, group=self.process_group)
        except RuntimeError as error:
            raise DivergenceError(
                f"rank {self.rank} lost its peers: one has ended, or cannot be reached ({str(error).splitlines()[0]})"
            ) from error
        return values  # type: ignore[return-value]

    @contextlib.contextmanager
    def agreeing(self, doing: str, fact: T | None = None) -> Iterator[list[T]]:
        """An error on one rank is an error on all of them, each with the message of the first.

        Yields a list which afterwards holds every rank's ``fact`` (picklable), in rank order.
        """
        error: Exception | None = None
        facts: list[T] = []
        try:
            yield facts
        except Exception as caught:
            error = caught
        mine: tuple[type[ZeroEngineError], str] | None = None
        if error is not None:  # the other ranks may lack the class of an error that is not ours
            mine = (ZeroEngineError, f"{type(error).__name__}: {error}")
            if isinstance(error, ZeroEngineError):
                mine = (type(error), str(error))
        every = self.exchange((mine, fact), doing)
        if error is not None:
            raise error
        for rank, (other, _) in enumerate(every):
            if other is not None:
                raise other[0](f"rank {rank} failed {doing}: {other[1]}")
        facts += [fact for _, fact in every]  # type: ignore[misc]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Rank ``source``'s values on every rank, in place."""
        if self.world_size > 1:
            with self.waiting("broadcast"), self._reachable(tensor) as values:
                dist.broadcast(values, group_src=source, group=self.process_group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, in place. For rare use: a ``Transport`` is faster."""
        if self.world_size > 1:
            with self.waiting("sum"), self._reachable(tensor) as values:
                dist.all_reduce(values, group=self.process_group)

    @contextlib.contextmanager
    def _reachable(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor, or a copy of it where the backend reaches the CPU's memory alone, which is then taken over."""
        if self.backend != "gloo" or tensor.device.type == "cpu":
            yield tensor
            return
        values = tensor.cpu()
        yield values
        tensor.copy_(values)

    def like(self, backend: str) -> dist.ProcessGroup:
        """Another process group of the same ranks."""
        return self._new_group(backend, timeout=None)

    def transport(self, kind: str, timeout: float, registered: bool = False) -> Transport:
        """The fastest transport that all ranks can use.

        Args:
            kind: ``auto``, ``shm`` or ``gloo``: the configuration's ``comm.transport``.
            timeout: seconds after which a stalled operation is an error.
            registered: whether NCCL is to register the memory that it moves.

        Raises:
            ZeroEngineError: ``shm`` (on CPUs) or registration was asked for and some rank cannot use it.
        """
        if self.world_size == 1:
            return LocalTransport(self.device)
        if self.backend != "gloo":
            return self._native(timeout, registered)
        if self.device.type != "cpu":
            return StagedTransport(
                GlooTransport(self._new_group(self.backend, timeout), self._watch(timeout), timeout), self.device
            )
        if kind != "gloo":
            found = self._shared_memory(timeout)
            if not isinstance(found, str):
                return found
            if kind == "shm":
                raise ZeroEngineError(f'comm.transport "shm" cannot be used: {found}. Write "auto" or "gloo".')
        return GlooTransport(self._new_group(self.backend, timeout), self._watch(timeout), timeout)

    def _shared_memory(self, timeout: float) -> shared_memory.ShmTransport | str:
        addresses = self.exchange(shared_memory.offer())
        found = shared_memory.connect(self.rank, addresses, timeout)
        reasons = [r for r in self.exchange(found if isinstance(found, str) else None) if r is not None]
        return reasons[0] if reasons else found

    def _native(self, timeout: float, registered: bool = False) -> NativeTransport:
        if self.backend == "fake":
            return NativeTransport(self.process_group, self.process_group, self.device, self.backend, None)
        later = timeout + LATER_S
        gather, reduce = self._new_group(self.backend, later), self._new_group(self.backend, later)
        pools: dict[ChannelName, RegisteredPool] = {}
        if registered:
            for group in (gather, reduce):
                dist.all_reduce(torch.zeros((), device=self.device), group=group)  # NCCL connects when first used
            with self.agreeing("to register memory with NCCL"):
                pools = {"gather": RegisteredPool(gather, self.device), "reduce": RegisteredPool(reduce, self.device)}
        return NativeTransport(gather, reduce, self.device, self.backend, self._watch(timeout), pools)

    def _new_group(self, backend: str, timeout: float | None) -> dist.ProcessGroup:
        """Return another process group of the same ranks.

        Args:
            backend: of torch.distributed.
            timeout: of its collectives, in seconds; None for torch's.
        """
        ranks = dist.get_process_group_ranks(self.process_group)
        some = len(ranks) < dist.get_world_size()  # the others do not take part in the call
        alone: list[dist.ProcessGroup | None] = []
        if some:
            # Ranks find one another by the group's name, which torch then makes of the ranks and of how many groups
            # this process belongs to. Who belongs to fewer joins groups of its own alone until this one is made.
            num_groups = len(dist.distributed_c10d._world.pg_names)
            for _ in range(max(self.exchange(num_groups, "to make a process group")) - num_groups):
                alone.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
        limit = None if timeout is None else timedelta(seconds=timeout)
        group = dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=some)
        for other in alone:
            dist.destroy_process_group(other)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _watch(self, timeout: float) -> Watchdog:
        names, hosts = zip(*self.exchange((uuid.uuid4().hex, own_host())), strict=True)
        store = dist.distributed_c10d._get_default_store()
        clone: Callable[[], dist.Store] = getattr(store, "clone", lambda: store)
        store = dist.PrefixStore(f"zeroengine/{names[0]}", clone())
        self._watchdog = Watchdog(store, self.rank, hosts, timeout)
        return self._watchdog


def check_same(call: str, arguments: Sequence[Mapping[str, object]]) -> None:
    """Compare what the ranks pass to a call that all of them make together.

    Args:
        call: its name, for the message.
        arguments: by name, of each rank in rank order.

    Raises:
        DivergenceError: on every rank that has these ``arguments``, naming the values and their ranks.
    """
    differences = []
    for name in arguments[0]:
        ranks_with: dict[str, list[int]] = {}
        for rank, given in enumerate(arguments):
            ranks_with.setdefault(repr(given[name]), []).append(rank)
        if len(ranks_with) > 1:
            values = (f"{value} on {_ranks(ranks)}" for value, ranks in list(ranks_with.items())[:SHOWN])
            differences.append(f"{name} is {' and '.join(values)}")
    if differences:
        raise DivergenceError(
            f"{call}: the ranks pass different arguments. {'. '.join(differences)}. Every rank must pass the same."
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def check_gpus(store: dist.Store, rank: int, world_size: int, gpu: str) -> None:
    """Whether each rank has a GPU of its own, before NCCL is asked, which says so less clearly.

    Args:
        gpu: what this rank's GPU is called, the same on all ranks.

    Raises:
        ZeroEngineError: on every rank, where two share one.
    """
    store.set(str(rank), f"{own_host() or socket.gethostname()} {gpu}")
    ranks_on: dict[str, list[int]] = {}
    for other in range(world_size):
        ranks_on.setdefault(store.get(str(other)).decode(), []).append(other)
    shared = {where: ranks for where, ranks in ranks_on.items() if len(ranks) > 1}
    if shared:
        where, ranks = next(iter(shared.items()))
        host, _, name = where.partition(" ")
        raise ZeroEngineError(
            f"ranks {' and '.join(map(str, ranks[:2]))} have the same GPU ({name} on {host}): NCCL needs one for each. "
            "Start no more ranks on a node than it has GPUs (zero-launch --nproc), let each see its own "
            "(CUDA_VISIBLE_DEVICES, LOCAL_RANK), or start torch.distributed with Gloo to compute on CPUs."
        )


def as_process_group(given: object) -> dist.ProcessGroup | None:
    """Return the process group that ``given`` stands for, or None for all ranks.

    Args:
        given: a process group, a ``DeviceMesh`` of one dimension, or None.

    Raises:
        ZeroEngineError: it is something else, or this rank does not belong to it.
    """
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    outside = "process_group: this rank is not one of its ranks. Call initialize() on those alone."
    if isinstance(given, dist.DeviceMesh):
        if given.ndim > 1:
            names = given.mesh_dim_names
            sizes = dict(zip(names, given.shape, strict=True)) if names else tuple(given.shape)
            example = f"process_group=mesh[{names[0]!r}]" if names else "process_group=mesh.get_group(0)"
            raise ZeroEngineError(
                f"process_group: found a DeviceMesh of {given.ndim} dimensions, {sizes}. Pass the one of the "
                f"data-parallel ranks, such as {example}"
            )
        if given.get_coordinate() is None:
            raise ZeroEngineError(outside)
        return given.get_group()
    if given == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() gives to the other ranks
        raise ZeroEngineError(outside)
    raise ZeroEngineError(
        f"process_group: found {given!r}. Pass a process group, such as torch.distributed.new_group([0, 1]), or a "
        "DeviceMesh of one dimension"
    )


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str:
    """The backend that serves tensors of that device: a group may have one for each (``cpu:gloo,cuda:nccl``)."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return dict(pairs).get(device_type, dist.get_backend(group))


def default_device() -> torch.device:
    """This rank's GPU where there are any (by ``LOCAL_RANK``, else torch's current one), otherwise the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    index = torch.cuda.current_device() if local_rank is None else int(local_rank) % torch.cuda.device_count()
    return torch.device("cuda", index)


def _start(device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if has_peers():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if backend == "gloo":
        atexit.register(_stop)  # its threads must not outlive the interpreter


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
