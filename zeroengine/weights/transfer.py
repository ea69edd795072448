"""Send a stream of weights to other processes, and receive it there.

[Note: The messages of a transfer]
    sender                                  each receiver
                                        <-  its process
    its process                         ->
    shapes and dtypes                   ->
                                        <-  an answer: they suit it
    what lies in a bucket               ->  and the values
                                        <-  an answer: its consumer has taken them
    None                                ->
In place of any of these, either side sends an error, and leaves. Nobody waits for a message, or for a broadcast,
without looking for errors, for the end of a process of the same host, and at the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroengine.comm.group import backend_of
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.formats import listed
from zeroengine.utils.host_memory import page_lock
from zeroengine.utils.process_groups import PendingCollective, leave_to_threads
from zeroengine.utils.torch_internals import store_of_group
from zeroengine.weights.stream import Bucket, BucketMemory, WeightPiece, WeightStream

Into = nn.Module | Mapping[str, torch.Tensor] | None
Target = dist.ProcessGroup | dist.Store
# Waits until a function returns True, for so many seconds at most, and returns what is wrong with a silent peer, or "".
Wait = Callable[[Callable[[], bool], float], str]
# Polls follow one another faster at first. Receivers may wait for a sender for minutes.
FIRST_POLL_S, LAST_POLL_S = 1e-4, 2e-2


def open_store(target: Any, call: str) -> dist.Store:
    """Return the store that messages of a transfer are in.

    Raises:
        ZeroEngineError: `target` is neither a process group nor a store.
    """
    store = store_of_group(target) if isinstance(target, dist.ProcessGroup) else target
    if not isinstance(store, dist.Store):
        raise ZeroEngineError(
            f"{call}: target is {target!r}. Write a torch process group of training rank 0 and the receivers, or, for "
            "shared memory on one host, a store such as torch.distributed.TCPStore"
        )
    # A clone has a connection of its own.
    return dist.PrefixStore("zeroengine/weights", store.clone())  # type: ignore[attr-defined]


def own_process() -> tuple[int, str]:
    """Return the id of this process, and the host and the namespace of that id."""
    return os.getpid(), f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def wait_until(is_done: Callable[[], bool], timeout: float) -> str:
    """Do what `Wait` says."""
    start = time.monotonic()
    while not is_done():
        if (waited := time.monotonic() - start) > timeout:
            return f"has not answered for {timeout:g} s (timeout)"
        time.sleep(min(FIRST_POLL_S + waited / 10, LAST_POLL_S))
    return ""


class StoreChannel:
    """Messages between two processes as keys of a store. A reader deletes what it has read.

    Args:
        store: The store.
        peer: The other process, for errors.
        outgoing, incoming: The beginnings of the keys of this process and of those of the peer.

    Attributes:
        process: The other process, as `own_process` returns it there, once it has said so.
        inbox: The message that has come and is not taken yet.
    """

    def __init__(self, store: dist.Store, peer: str, outgoing: str, incoming: str) -> None:
        self._store, self.peer, self._outgoing, self._incoming = store, peer, outgoing, incoming
        self._num_sent = self._num_received = 0
        self.process = (0, "")
        self.inbox: list[Any] = []

    def send(self, content: object, error: str = "") -> None:
        """Send a message. Where the store is gone, `poll` says so."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._outgoing}/{self._num_sent}", json.dumps((content, error)))
        self._num_sent += 1

    def poll(self) -> bool:
        """Return whether a message has come.

        Raises:
            ZeroEngineError: The peer has sent an error or has ended, or the store is gone.
        """
        key = f"{self._incoming}/{self._num_received}"
        # A process that has ended may have sent a message before.
        has_ended, error = self.process[1] == own_process()[1] and _has_ended(self.process[0]), ""
        try:
            if not self.inbox and self._store.check([key]):
                content, error = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._num_received += 1
                self.inbox.append(content)
        except RuntimeError as store_error:
            error = f"the store is gone: {str(store_error).splitlines()[0]}"
        if error or (has_ended and not self.inbox):
            raise ZeroEngineError(f"{self.peer} failed: {error}" if error else f"{self.peer} has ended")
        return bool(self.inbox)

    def greet(self, timeout: float, action: str) -> None:
        """Wait until the peer has said which process it is."""
        self.process = tuple(receive([self], timeout, f"has not {action} within {timeout:g} s (start_timeout)")[0])
        self.peer += f" (process {self.process[0]} on {self.process[1].split()[0]})"


def receive(channels: Sequence[StoreChannel], timeout: float, problem: str = "", wait: Wait = wait_until) -> list[Any]:
    """Take the next message of each peer.

    Args:
        channels: One for each peer.
        timeout: Seconds.
        problem: What is wrong with a silent peer, in place of what `wait` returns.
        wait: Waits for a broadcast as well.

    Raises:
        ZeroEngineError: A peer has failed, or is silent. Names it.
    """
    if error := wait(lambda: all([channel.poll() for channel in channels]), timeout):
        silent = [channel.peer for channel in channels if not channel.inbox]
        raise ZeroEngineError(f"{' and '.join(silent) or 'the broadcast'} {problem or error}")
    return [channel.inbox.pop() for channel in channels]


def start_broadcast(group: dist.ProcessGroup, memory: torch.Tensor, source: int) -> Wait:
    """Start a broadcast of bytes, and return what waits for it, and for something else.

    Args:
        group: The ranks.
        memory: 1-D, uint8.
        source: The sender's rank in the group.
    """
    pending = PendingCollective(partial(dist.broadcast, group_src=source, group=group, async_op=True), memory)

    def wait(is_done: Callable[[], bool], timeout: float) -> str:
        try:
            return wait_until(lambda: is_done() & pending.test(), timeout)
        except RuntimeError as error:
            return f"does not answer: {str(error).splitlines()[0]}. Make another process group"
        finally:
            # A broadcast that has failed meanwhile is over as well.
            with contextlib.suppress(RuntimeError):
                if not pending.test():
                    leave_to_threads(group, memory)
                    if memory.is_cuda:
                        # The kernel would stay in the stream for ever.
                        group.abort()

    return wait


def read_shared(process: tuple[int, str], descriptor: int, memory: torch.Tensor) -> None:
    """Read shared memory of another process.

    Raises:
        ZeroEngineError: The kernel refuses it, or the process is on another host.
    """
    pid, host = process
    try:
        if host != own_process()[1]:
            raise OSError("the hosts differ")
        with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            file.readinto(memory.numpy().data)
    except OSError as error:
        raise ZeroEngineError(
            f"the shared memory of process {pid} on {host} cannot be read from {own_process()[1]} ({error}): run "
            "sender and receivers as one user on one host, or pass a torch process group"
        ) from error


def _has_ended(pid: int) -> bool:
    try:
        # It is empty once a process has ended, also while its parent does not know yet.
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


class Sender:
    """The side of training rank 0 in a transfer. At the end of a `with`, an error is told to the receivers.

    Args:
        target: See `Engine.send_weights`.
        receivers: How many receivers there are at a store.
        timeout: Seconds that a receiver may take for a bucket.
        start_timeout: Seconds to wait for the receivers.
        device: The engine's device.

    Attributes:
        device: Where buckets are.
        allocate: Returns the memory of a bucket. None: the stream's own.
    """

    def __init__(self, target: Any, receivers: int, timeout: float, start_timeout: float, device: torch.device) -> None:
        self._store = open_store(target, "send_weights()")
        self._group = group = target if isinstance(target, dist.ProcessGroup) else None
        self._timeout, self._start_timeout = timeout, start_timeout
        # For each receiver, the beginning of its keys, and its name. Those at a store come in any order.
        self._places = [("any", f"{i} of {receivers}") for i in range(receivers)]
        if group is not None:
            self._places = [(str(r), f"at rank {r} of the group") for r in range(group.size()) if r != group.rank()]
        if not self._places:
            raise ZeroEngineError("send_weights(): there is no receiver. Pass a group that has some, or receivers=1")
        self._channels: list[StoreChannel] = []
        # The bucket that was sent last, which must not be filled yet, and what waits for it.
        self._under_way: list[tuple[Bucket, Wait]] = []
        # The descriptor of each bucket's memory, by its address.
        self._descriptors: dict[int, int] = {}
        # Gloo sends from CPU memory.
        self.device = torch.device("cpu") if group is None or backend_of(group, device.type) == "gloo" else device
        self.allocate = self._allocate if group is None else None

    def __enter__(self) -> Sender:
        """Return the sender."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """End the transfer."""
        if error is not None:
            # A broadcast under way comes to its end, so that the group stays usable.
            with contextlib.suppress(ZeroEngineError):
                self._finish()
            self._tell(None, f"{type(error).__name__}: {error}")
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def send(self, stream: WeightStream, *, is_whole: bool) -> None:
        """Send all buckets. Each is filled while the receivers take the one before.

        Args:
            stream: The weights.
            is_whole: Whether it has all parameters.
        """
        for prefix, name in self._places:
            self._channels.append(self._meet(prefix, name))
        specs = {name: (str(spec.dtype).removeprefix("torch."), spec.shape) for name, spec in stream.tensors.items()}
        self._tell((specs, is_whole))
        receive(self._channels, self._timeout)
        for bucket in filter(lambda bucket: bucket.runs, iter(stream.next_bucket, None)):
            self._finish()
            runs = [(r.offset, r.end, r.tensor.name, r.row, tuple(bucket.piece(r).values.shape)) for r in bucket.runs]
            descriptor = self._descriptors.get(bucket.memory.data_ptr())
            self._tell((runs, bucket.memory.numel(), self.device.type, descriptor))
            values, group = bucket.memory[: bucket.runs[-1].end], self._group
            self._under_way.append((bucket, start_broadcast(group, values, group.rank()) if group else wait_until))

    def end(self) -> None:
        """Wait until the receivers have taken everything."""
        self._finish()
        self._tell(None)

    def _finish(self) -> None:
        if self._under_way:
            receive(self._channels, self._timeout, wait=self._under_way.pop()[1])

    def _meet(self, prefix: str, name: str) -> StoreChannel:
        """Return a channel to the next receiver that waits at `prefix`."""
        while True:
            number = self._store.add(f"{prefix}/met", 0) + 1
            channel = StoreChannel(self._store, f"receiver {name}", f"{prefix}/{number}/to", f"{prefix}/{number}/from")
            channel.greet(self._start_timeout, "called receive_weights()")
            self._store.add(f"{prefix}/met", 1)
            # One that has ended, or does not wait any more, has left its number.
            with contextlib.suppress(ZeroEngineError):
                channel.poll()
                channel.send(own_process())
                return channel

    def _tell(self, content: object, error: str = "") -> None:
        for channel in self._channels:
            channel.send(content, error)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory without a name, which the kernel frees with the last process that has it."""
        descriptor = os.memfd_create("zeroengine weights", os.MFD_CLOEXEC)
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=max(nbytes, 1), dtype=torch.uint8)
        self._descriptors[memory.data_ptr()] = descriptor
        if torch.cuda.is_initialized():
            # A GPU copies to it. If the system refuses, that is slower.
            code, unlock = page_lock(memory)
            if not code:
                weakref.finalize(memory.untyped_storage(), unlock)
        return memory


def receive_weights(
    target: Target, into: Into = None, *, sender: int = 0, timeout: float = 60.0, start_timeout: float = 600.0
) -> Generator[WeightPiece]:
    """Receive what ``engine.send_weights`` sends, in another process than those that train.

        with contextlib.closing(zeroengine.receive_weights(target)) as weights:
            for name, values in weights: ...

    The values are in the memory of a bucket, which is not used again as long as anything refers to it.

    Args:
        target: A torch process group of training rank 0 and of the receivers; or a store that the sender has as well,
            for shared memory of one host.
        into: A module or a state dict. All values are copied into its tensors before this returns. Before the first
            value, names and shapes are compared.
        sender: The rank of training rank 0 in the group.
        timeout: Seconds without a message of the sender.
        start_timeout: Seconds to wait for the sender, and for it to have all receivers.

    Returns:
        A generator of pieces, as ``engine.stream_weights`` yields them; with ``into``, at its end. Closing it early
        ends the transfer. Closed by an error, as above, it sends the text to the training ranks.

    Raises:
        ZeroEngineError: No sender has come, or the tensors do not suit ``into``; or the sender, or another receiver,
            has failed.
    """
    pieces = _received(target, into, sender, timeout, start_timeout)
    if into is not None:
        # It yields nothing.
        list(pieces)
    return pieces


def _received(target: Target, into: Into, sender: int, timeout: float, start_timeout: float) -> Generator[WeightPiece]:
    """Yield each piece, or copy it into `into`."""
    store = open_store(target, "receive_weights()")
    group = target if isinstance(target, dist.ProcessGroup) else None
    prefix = "any" if group is None else str(group.rank())
    number = store.add(f"{prefix}/come", 1)
    channel = StoreChannel(store, "the sender", f"{prefix}/{number}/from", f"{prefix}/{number}/to")
    buckets: BucketMemory | None = None
    try:
        channel.send(own_process())
        channel.greet(start_timeout, "called send_weights()")
        # The sender may still wait for other receivers.
        specs, is_whole = receive([channel], start_timeout)[0]
        targets = {} if into is None else _checked_targets(into, specs, is_whole)
        channel.send("")
        while (content := receive([channel], timeout)[0]) is not None:
            runs, bucket_bytes, device, descriptor = content
            buckets = buckets or BucketMemory(bucket_bytes, partial(torch.empty, dtype=torch.uint8, device=device))
            memory = buckets.take()
            values = memory[: runs[-1][1]]
            if group is None:
                read_shared(channel.process, descriptor, values)
            elif problem := start_broadcast(group, values, sender)(lambda: not channel.poll(), timeout):
                raise ZeroEngineError(f"{channel.peer} {problem}")
            for start, end, name, row, shape in runs:
                dtype, whole_shape = specs[name]
                values = memory[start:end].view(getattr(torch, dtype)).view(shape)
                if into is None:
                    yield WeightPiece(name, values, row, tuple(whole_shape))
                else:
                    (targets[name].detach()[row : row + shape[0]] if shape else targets[name].detach()).copy_(values)
            del memory, values
            channel.send("")
    except BaseException as error:
        # A consumer's error closes the generator.
        cause = error.__context__ if isinstance(error, GeneratorExit) else error
        channel.send(None, f"{type(cause).__name__}: {cause}" if cause else "its consumer left the loop")
        raise


def _checked_targets(into: Into, specs: Mapping[str, Any], is_whole: bool) -> Mapping[str, torch.Tensor]:
    """Return the tensors that values are copied into, by name.

    Raises:
        ZeroEngineError: Lists all tensors that differ.
    """
    targets: Any = into.state_dict() if isinstance(into, nn.Module) else into
    shapes = {name: list(target.shape) for name, target in targets.items()}
    # A tied tensor is sent once, and buffers on request.
    sent = {targets[name].data_ptr() for name in specs if name in shapes}
    required = dict(into.named_parameters()) if isinstance(into, nn.Module) else targets
    differing = [f"{n}: {shapes.get(n, 'absent')} here, {s} sent" for n, (_, s) in specs.items() if shapes.get(n) != s]
    if is_whole:
        differing += [f"{name}: not sent" for name in required if targets[name].data_ptr() not in sent]
    if differing:
        raise ZeroEngineError(f"the weights do not suit the argument into: {listed(differing, 20)}")
    return targets  # type: ignore[no-any-return]
