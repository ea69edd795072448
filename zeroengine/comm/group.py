"""The process group: find or start it, and exchange facts and errors between its ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.comm.alarm_board import SAME_CALLS_ADVICE, ranks_by_value
from zeroengine.comm.divergence import Divergence, of_engine
from zeroengine.comm.exchange_label import (
    ATTACHED_BYTES,
    LABEL_BYTES,
    MAX_SHOWN,
    ExchangeLabel,
    check_labels,
    described,
)
from zeroengine.comm.host_layout import HostLayout
from zeroengine.comm.launched_ranks import has_peers
from zeroengine.comm.watchdog import Watchdog, host_name
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.utils.call_stack import public_call
from zeroengine.utils.process_finalizer import exits_with_error, finalize
from zeroengine.utils.process_groups import (
    all_gather_bytes,
    destroy_group,
    leave_to_threads,
    run_collective,
    start_all_gather_bytes,
)
from zeroengine.utils.torch_internals import default_store, high_priority_options, number_of_groups

T = TypeVar("T")
# A wait that a watchdog surrounds ends when a rank does not answer, not after a time.
PATIENCE = timedelta(days=30)

LongWait = Callable[[str], contextlib.AbstractContextManager[None]]


class Group:
    """The data-parallel ranks of one engine.

    Starts torch.distributed if it is not running: NCCL on CUDA, Gloo on CPU, and a group of one process if ``RANK`` and
    ``WORLD_SIZE`` are not set. ``join_launched_ranks`` sets them under mpirun and srun.

    Args:
        process_group: The ranks to partition over; None for the default group.
        device: The device that the model computes on.
        numbers: The engine's number of each rank, for messages. None: this is the engine's group of all ranks.
        divergence: That of the group that this one is a part of. None: a new one.

    Attributes:
        divergence: Whether the ranks have diverged.
        rank: This rank's number within the group.
        world_size: The number of ranks.
        numbers: The engine's number of each rank.
        is_collecting_errors: Whether a block of ``collective_errors`` is running, which tells the others of an error.
        num_errors: How many errors all ranks have raised together, from ``collective_errors`` or in different calls.
        has_peers: Whether other ranks answer. Those of torch's ``fake`` backend do not.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
        numbers: Sequence[int] | None = None,
        divergence: Divergence | None = None,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        start_torch_distributed(device)
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.process_group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.numbers = tuple(range(self.world_size)) if numbers is None else tuple(numbers)
        self.device = device
        self._long_wait: LongWait | None = None
        self.divergence = Divergence() if divergence is None else divergence
        self.divergence.listeners[group] = self._tell_peers
        # The watchdog of the group that this one is a part of.
        self._shared_watchdog: Watchdog | None = None
        self.is_collecting_errors, self.num_errors = False, 0
        self.backend = backend_of(group, device.type)
        self.has_peers = self.world_size > 1 and self.backend != "fake"
        # How long an exchange of objects may take; None: as long as torch's collectives of the group.
        self._patience: timedelta | None = None
        # Exchanges objects. A GPU's communicator would first run all that was issued, and would end the process after
        # minutes, so it serves only to make this group.
        self._objects = group if backend_of(group, "cpu") == "gloo" else None
        # The check uses the store, because a collective would fail with NCCL's own error, which is less clear. In a
        # group of some ranks it was made of all ranks before.
        if self.backend == "nccl" and self.world_size > 1 and numbers is None:
            store = dist.PrefixStore(f"zeroengine/gpus/{group.group_name}", default_store())
            check_gpus(store, self.rank, self.world_size, str(torch.cuda.get_device_properties(device).uuid))
        if self.has_peers and self._objects is None:
            self._objects = self.new_group("gloo")
            finalize(self, destroy_group, self._objects)

    def long_wait(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Surround a wait for other ranks that may be long. See ``Watchdog.long_wait``.

        Nothing watches the wait before ``surround_long_waits``.
        """
        return contextlib.nullcontext() if self._long_wait is None else self._long_wait(what)

    def all_gather_object(self, value: T, purpose: str = "of objects", call: str = "") -> list[T]:
        """Return every rank's ``value``, in rank order.

        Args:
            value: Anything that pickles.
            purpose: The purpose, such as "to save a checkpoint", for messages. All ranks pass the same.
            call: The public call, where ranks may rightly come here from different ones. "": the one in progress.

        Raises:
            DivergenceError: The ranks make different calls, or another rank has diverged, has ended or cannot be
                reached.
        """
        # Without peers this rank's value stands for those of all ranks.
        if not self.has_peers:
            return [value] * self.world_size
        if self._objects is None:
            values: list[T] = [value] * self.world_size
            dist.all_gather_object(values, value, self.process_group)
            return values
        content = pickle.dumps(value)
        with self._meeting(purpose, content, call) as (numels, contents):
            if max(numels) > ATTACHED_BYTES:
                contents = all_gather_bytes(self._objects, content, numels, self._patience)
            return [pickle.loads(row) for row in contents]

    @contextlib.contextmanager
    def _meeting(self, purpose: str, content: bytes = b"", call: str = "") -> Iterator[tuple[list[int], list[bytes]]]:
        """Compare with the other ranks what is exchanged inside, and surround the wait. A collective.

        Every exchange goes through here, so that ranks in different ones find out before any of them reads a value.

        Args:
            purpose: See ``all_gather_object``.
            content: This rank's bytes for the others.
            call: See ``all_gather_object``.

        Yields:
            The lengths of all ranks' bytes, and their first ``ATTACHED_BYTES``.
        """
        number, call = self.numbers[self.rank], call or public_call()
        label = ExchangeLabel(self.divergence.engine, call, purpose, len(content))
        self.divergence.check(f"exchange {purpose}")
        assert self._objects is not None
        try:
            with self.long_wait(str(label)):
                lengths = [LABEL_BYTES + ATTACHED_BYTES] * self.world_size
                own_row = label.encoded() + content[:ATTACHED_BYTES]
                rows = all_gather_bytes(self._objects, own_row, lengths, self._patience)
                labels = [ExchangeLabel.decoded(row[:LABEL_BYTES]) for row in rows]
                for failed, (engine, *_, failure) in zip(self.numbers, labels, strict=True):
                    if failure:
                        message = f"rank {failed} has diverged while rank {number} is in {label}. It said: {failure}"
                        # It may be another engine that has diverged.
                        raise of_engine.get(engine, Divergence()).error(message, self.process_group)
                # An error of all ranks ends a stream of the weights, which another call of one rank has met.
                self.num_errors += len({other[:3] for other in labels}) > 1
                check_labels(labels, self.numbers)
                numels = [other.numel for other in labels]
                yield numels, [row[LABEL_BYTES:][:numel] for row, numel in zip(rows, numels, strict=True)]
        except RuntimeError as error:
            raise self.divergence.error(
                f"rank {number} lost its peers: one has ended, or cannot be reached "
                f"({str(error).splitlines()[0]}). If no rank reports another error: {SAME_CALLS_ADVICE}.",
                self.process_group,
            ) from error

    def _tell_peers(self, failure: str) -> None:
        """Take part in the exchange that peers wait in, or come to next, with an error. See ``Divergence``."""
        if self.has_peers and self._objects is not None:
            # The peers may have ended.
            with contextlib.suppress(RuntimeError):
                content = ExchangeLabel(self.divergence.engine, public_call(), "", 0, failure).encoded()
                _, rows = start_all_gather_bytes(self._objects, content, LABEL_BYTES + ATTACHED_BYTES)
                leave_to_threads(self._objects, rows)

    @contextlib.contextmanager
    def collective_errors(self, purpose: str, fact: T | None = None, call: str = "") -> Iterator[list[T]]:
        """Make an error of one rank an error of all ranks, each with the message of the first.

        Args:
            purpose: The purpose, such as "to save a checkpoint", for the other ranks' message.
            fact: Anything that pickles, for the other ranks.
            call: See ``all_gather_object``.

        Yields:
            A list that holds every rank's ``fact``, in rank order, once the block has ended.
        """
        error: Exception | None = None
        report: tuple[type[ZeroEngineError], str] | None = None
        facts: list[T] = []
        outer, self.is_collecting_errors = self.is_collecting_errors, True
        try:
            yield facts
        except ZeroEngineError as raised:
            error, report = raised, (type(raised), str(raised))
        except Exception as raised:
            # The other ranks may lack the class of an error that is not zeroengine's own.
            error, report = raised, (ZeroEngineError, f"{type(raised).__name__}: {raised}")
        finally:
            self.is_collecting_errors = outer
        reports_and_facts = self.all_gather_object((report, fact), purpose, call)
        # Every rank takes part in the exchange before it raises, or the others would wait for it.
        failures = ((rank, other) for rank, (other, _) in enumerate(reports_and_facts) if other is not None)
        for rank, other in failures:
            error = error or other[0](f"rank {self.numbers[rank]} failed {purpose}: {other[1]}")
            self.num_errors += 1
            # The group does not keep the error, whose traceback has the variables of the functions of the user.
            error.__dict__["of_all_ranks"] = id(self), self.num_errors
            raise error
        facts += [fact for _, fact in reports_and_facts]  # type: ignore[misc]

    def is_error_of_all_ranks(self, error: BaseException | None) -> bool:
        """Return whether ``error`` is the last one of ``collective_errors``, so that every rank handles one now."""
        return getattr(error, "of_all_ranks", None) == (id(self), self.num_errors)

    def broadcast(self, tensor: torch.Tensor, purpose: str, source: int = 0) -> None:
        """Copy rank ``source``'s values to every rank, in place.

        Args:
            tensor: Contiguous, of any dtype.
            purpose: See ``all_gather_object``.
            source: The rank whose values count.
        """
        if self.has_peers:
            with self._meeting(_of_values(purpose, tensor)), self._on_backend_device(tensor) as values:
                # The backends know few dtypes. No arithmetic is done, so the bytes can travel instead.
                run_collective(
                    lambda sent: dist.broadcast(sent, group_src=source, group=self.process_group, async_op=True),
                    values.view(-1).view(torch.uint8),
                )

    def all_reduce(self, tensor: torch.Tensor, purpose: str, *, in_step: bool = False) -> None:
        """Sum over ranks, in place. For rare use: a ``Transport`` is faster.

        Args:
            tensor: Contiguous.
            purpose: See ``all_gather_object``.
            in_step: Whether this follows the update of a step, where the ranks have met, and where the host does not
                wait for a GPU.
        """
        if self.has_peers:
            meeting = self.long_wait(purpose) if in_step else self._meeting(_of_values(purpose, tensor))
            with meeting, self._on_backend_device(tensor) as values:
                run_collective(lambda sent: dist.all_reduce(sent, group=self.process_group, async_op=True), values)

    @contextlib.contextmanager
    def _on_backend_device(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensor, or for Gloo a CPU copy, which is copied back."""
        if self.backend != "gloo" or tensor.device.type == "cpu":
            yield tensor
            return
        values = tensor.cpu()
        yield values
        tensor.copy_(values)

    def ranks_per_node(self, machines: Sequence[str]) -> int:
        """Return the number of ranks on each machine; 0 if they differ or are not consecutive.

        Args:
            machines: The name of each rank's machine.
        """
        hosts = list(ranks_by_value(dict(enumerate(machines))).values())
        size = len(hosts[0])
        return size if hosts == HostLayout(self.rank, len(hosts), size).ranks_by_host() else 0

    def new_group(
        self, backend: str, timeout: float | None = None, members: Sequence[int] | None = None
    ) -> dist.ProcessGroup:
        """Return another process group of the same ranks, or of some of them. All ranks of this group make the call.

        Args:
            backend: One of torch.distributed's.
            timeout: Seconds that its collectives may take; None for torch's default.
            members: Ranks of this group, this one among them. The members on the others are the same, or others
                altogether. None: all.
        """
        all_ranks = dist.get_process_group_ranks(self.process_group)
        ranks = all_ranks if members is None else [all_ranks[member] for member in sorted(members)]
        # Ranks outside of a subset do not make this call, so torch must not wait for them.
        is_subset = len(ranks) < dist.get_world_size() and self.backend != "fake"
        own_groups: list[dist.ProcessGroup | None] = []
        if is_subset:
            # Ranks find one another by the group's name, which torch derives from the ranks and from a number of
            # groups of this process. A rank with fewer of them first joins groups of one to make up for it.
            num_groups = number_of_groups()
            for _ in range(self._agree_on_group_number(ranks, num_groups) - num_groups):
                own_groups.append(dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True))
        limit = None if timeout is None else timedelta(seconds=timeout)
        options = high_priority_options(limit) if backend == "nccl" else None
        group = dist.new_group(ranks, limit, backend, options, use_local_synchronization=is_subset)
        for own_group in own_groups:
            dist.destroy_process_group(own_group)
        assert isinstance(group, dist.ProcessGroup)
        if backend == "nccl":
            # The first collective connects the ranks, which may take longer than a stalled one is given.
            with self.long_wait("to connect the ranks' GPUs"):
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                torch.cuda.synchronize()
        return group

    def _agree_on_group_number(self, ranks: Sequence[int], num_groups: int) -> int:
        """Return the ``number_of_groups`` that every rank must have when it makes the next group of ``ranks``.

        No number is used twice, because a destroyed group of the same name leaves its addresses in the store.

        Args:
            ranks: The ranks of the new group, by torch's numbers. Each rank passes those of its own.
            num_groups: That of this rank.
        """
        store = dist.PrefixStore("zeroengine/groups", default_store())
        key = "_".join(map(str, ranks))
        # Adding 0 reads the counter, and creates it if there is none.
        last_number = store.add(key, 0)
        facts = self.all_gather_object((num_groups, last_number), "to make a process group")
        number = max(max(num, last + 1) for num, last in facts)
        if dist.get_rank() == ranks[0]:
            store.add(key, number - last_number)
        return number

    def subgroup(self, members: Sequence[int], watchdog: Watchdog | None) -> Group:
        """Return a group of some of the ranks. A collective.

        Args:
            members: As for ``new_group``.
            watchdog: The watchdog of this group, which that group uses as well, so that its messages name all ranks.
        """
        group = Group(self.new_group(self.backend, members=members), self.device, sorted(members), self.divergence)
        group._shared_watchdog = watchdog
        return group

    def start_watchdog(self, timeout: float) -> Watchdog:
        """Start the watchdog of this group's operations, or return that of ``subgroup``. A collective.

        Args:
            timeout: Seconds after which an operation has stalled.
        """
        if self._shared_watchdog is not None:
            self.surround_long_waits(self._shared_watchdog.long_wait, PATIENCE)
            return self._shared_watchdog
        own = uuid.uuid4().hex, host_name()
        names, hosts = zip(*self.all_gather_object(own, "to start the watchdog"), strict=True)
        # The random name of rank 0 keeps the keys of several engines apart.
        watchdog = Watchdog(own_store(names[0]), self.rank, hosts, timeout, self.divergence)
        self.surround_long_waits(watchdog.long_wait, PATIENCE)
        return watchdog

    def surround_long_waits(self, long_wait: LongWait, patience: timedelta | None = None) -> None:
        """Surround waits for other ranks with ``long_wait`` of what they are for, from now on.

        Args:
            long_wait: Is called with that.
            patience: How long such a wait may take. None: as long as torch's collectives.
        """
        self._long_wait, self._patience = long_wait, patience


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
        # Values are compared by their text, because not all of them can be compared or hashed.
        ranks_with = ranks_by_value({rank: repr(row[name]) for rank, row in enumerate(arguments)})
        if len(ranks_with) > 1:
            values = (f"{value} on {described(ranks)}" for value, ranks in list(ranks_with.items())[:MAX_SHOWN])
            differences.append(f"{name} is {' and '.join(values)}")
    if differences:
        raise DivergenceError(
            f"{call}: the ranks pass different arguments. {'. '.join(differences)}. Every rank must pass the same."
        )


def _of_values(purpose: str, tensor: torch.Tensor) -> str:
    # Ranks that exchange tensors of different sizes would wait for bytes that never come.
    return f"{purpose}, {tensor.numel()} values of {str(tensor.dtype).removeprefix('torch.')}"


def own_store(name: str) -> dist.Store:
    """Return a client of the process group's store whose keys begin with ``name``.

    It has a connection of its own, so that no request waits behind one of torch's or of another thread.
    """
    store = default_store()
    clone: Callable[[], dist.Store] = getattr(store, "clone", lambda: store)
    return dist.PrefixStore(f"zeroengine/{name}", clone())


def check_gpus(store: dist.Store, rank: int, world_size: int, gpu: str) -> None:
    """Check that each rank has a GPU of its own. NCCL's own error is less clear.

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


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str:
    """Return the backend for tensors of that device type: a group may have several (``cpu:gloo,cuda:nccl``)."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return dict(pairs).get(device_type, dist.get_backend(group))


def default_device() -> torch.device:
    """Return this rank's GPU (by ``LOCAL_RANK``, else torch's current one), or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    # Each rank may see only one GPU (CUDA_VISIBLE_DEVICES), so the number is taken modulo the visible GPUs.
    index = torch.cuda.current_device() if local_rank is None else int(local_rank) % torch.cuda.device_count()
    return torch.device("cuda", index)


def device_of_model(model: nn.Module, process_group: dist.ProcessGroup | None) -> torch.device:
    """Return the model's GPU if it is on one; otherwise any GPU, unless the process group is for CPUs.

    A model without values counts as being on torch's default device.
    """
    devices = {param.device for param in model.parameters()} if isinstance(model, nn.Module) else set()
    # Without meta_init the values of the model would be on torch's default device.
    if devices == {torch.device("meta")}:
        devices = {torch.get_default_device()}
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is not None:
        return gpu
    # The user chose a group that cannot move CUDA tensors, so the ranks compute on the CPU despite the GPU.
    if dist.is_initialized() and torch.cuda.is_available() and backend_of(process_group, "cuda") != "nccl":
        return torch.device("cpu")
    return default_device()


def start_torch_distributed(device: torch.device) -> None:
    """Start torch.distributed if it is not running: NCCL for a GPU, else Gloo; without peers a group of one process."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if has_peers():
        dist.init_process_group(backend)
    else:
        # A store in memory opens no port, so single processes on one machine do not collide.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # No thread of the groups may outlive the interpreter, as long as which the class lives.
    finalize(Group, _stop, backend)


def _stop(backend: str) -> None:
    # After an error a communicator may be stuck in an operation, for which NCCL would wait. It ends with the process.
    is_stuck = backend == "nccl" and (exits_with_error() or DivergenceError.has_occurred)
    if dist.is_initialized() and not is_stuck:
        dist.destroy_process_group()
