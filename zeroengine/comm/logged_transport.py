"""A transport that also logs its collectives, for the section ``comms_logger`` of the configuration.

[Note: When a collective ends]
On NCCL a stream of its own waits for each collective and records an event, so its time is that on the device. Over
Gloo a collective has ended when this rank first finds it complete, which may be later, so that a collective that
overlaps with computation seems slower than it was. In shared memory the ranks move bytes only within calls, so the time
is that of the calls. The exposed time is exact everywhere. Nothing here makes the host or the device wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.comm.comms_log import CommsLog, OperationTotals
from zeroengine.comm.forwarding_transport import ForwardingTransport
from zeroengine.comm.interfaces import Channel, Levels, Ranks, Slices, Transport
from zeroengine.comm.packing import Packing
from zeroengine.config.sinks import CommsLogger
from zeroengine.utils.process_finalizer import finalize
from zeroengine.utils.work import Then, Work


def log_collectives(transport: Transport, section: CommsLogger, undo: ExitStack, what: str = "") -> Transport:
    """Return a transport that logs what ``transport`` moves, and prints a table when the engine ends.

    Args:
        transport: The transport of rank 0. The other ranks log nothing.
        section: The section of the configuration.
        undo: Prints the table. A process that ends with the engine open prints it at its exit.
        what: What its collectives are of, for the title of the table; empty: all that the engine moves.
    """
    log = CommsLog(section, transport.world_size, what)
    recorder = _Recorder(log, on_device=transport.runs_on_streams, overlaps=transport.overlaps)
    logged = _LoggedTransport(transport, recorder)
    undo.callback(finalize(logged, recorder.print_table))
    return logged


class _LoggedTransport(ForwardingTransport):
    """A transport whose channels and small sums are logged."""

    def __init__(self, inner: Transport, recorder: _Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        channels = (inner.gather, inner.reduce, inner.exchange)
        self.gather, reduce, self.exchange = (_LoggedChannel(channel, recorder) for channel in channels)
        self.reduce, self.packed_sums = reduce, None if inner.packed_sums is None else reduce

    def all_reduce_scalars(self, values: torch.Tensor, label: str) -> torch.Tensor:
        recorder = self._recorder
        if not recorder.records():
            return self._inner.all_reduce_scalars(values, label)
        begin = recorder.mark()
        summed = self._inner.all_reduce_scalars(values, label)
        end = recorder.mark()
        # Labels hold numbers that change, such as the loss scale.
        recorder.take(_Collective("all_reduce", "(numbers of a step)", values.nbytes, begin, end, end), end, end)
        return summed


class _LoggedChannel:
    """See ``interfaces.Channel``, and ``interfaces.PackedSums`` where the channel within has packed sums."""

    def __init__(self, channel: Channel, recorder: _Recorder) -> None:
        self._channel, self._recorder = channel, recorder

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, ranks: Ranks = None) -> Work:
        return self._issue("all_gather", label, full, lambda: self._channel.all_gather(full, shard, label, ranks))

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        label: str,
        accumulate: bool = False,
        levels: Levels = None,
        packing: Packing | None = None,
    ) -> Work:
        # Channels without packed sums take no packing.
        packed = () if packing is None else (packing,)
        kind = "all_reduce" if packed and levels == () else "reduce_scatter"
        reduce: Callable[..., Work] = self._channel.reduce_scatter
        return self._issue(kind, label, full, lambda: reduce(shard, full, label, accumulate, levels, *packed))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, label: str, slices: Slices) -> Work:
        exchange = self._channel.all_to_all
        return self._issue("all_to_all", label, received, lambda: exchange(received, sent, label, slices))

    def all_reduce(self, full: torch.Tensor, label: str) -> Work:
        return self._issue("all_reduce", label, full, lambda: self._channel.all_reduce(full, label))

    def reusable(self, work: Work, timeout_s: float) -> bool:
        return self._channel.reusable(work.work if isinstance(work, _LoggedWork) else work, timeout_s)

    def _issue(self, operation: str, unit: str, full: torch.Tensor, run: Callable[[], Work]) -> Work:
        """Run a function that issues an operation on ``full``, and log the operation."""
        recorder = self._recorder
        if not recorder.records():
            return run()
        begin = recorder.mark()
        work = run()
        collective = _Collective(operation, unit, full.nbytes, begin, recorder.mark(), recorder.mark_end(work))
        return _LoggedWork(work, collective, recorder)


@dataclass
class _Collective:
    """A collective that was issued, with the marks around its issue, and at its end where that is known."""

    operation: str
    unit: str
    nbytes: int
    begin: Any
    issued: Any
    end: Any


class _LoggedWork:
    """See ``utils.work.Work``. The first wait that returns is the end of the collective for this rank."""

    def __init__(self, work: Work, collective: _Collective, recorder: _Recorder) -> None:
        self.work, self._recorder = work, recorder
        self._collective: _Collective | None = collective

    def wait_stream(self) -> None:
        self._wait(self.work.wait_stream)

    def wait_host(self) -> None:
        self._wait(self.work.wait_host)

    def _wait(self, wait: Callable[[], None]) -> None:
        if self._collective is None:
            wait()
            return
        before = self._recorder.mark()
        wait()
        self._take(before, self._recorder.mark())

    def done(self) -> bool:
        is_done = self.work.done()
        if is_done and self._collective is not None and not self._recorder.on_device:
            now = self._recorder.mark()
            self._take(now, now)
        return is_done

    def _take(self, before: Any, after: Any) -> None:
        # A wait inside the wait may have been first.
        if self._collective is not None:
            self._recorder.take(self._collective, before, after)
            self._collective = None


class _Recorder:
    """Marks points in time, and logs collectives once their marks can be read."""

    def __init__(self, log: CommsLog, on_device: bool, overlaps: bool) -> None:
        self._log, self.on_device, self._overlaps = log, on_device, overlaps
        self._unread: deque[tuple[_Collective, Any, Any]] = deque()
        self._stream = torch.cuda.Stream() if on_device else None

    def records(self) -> bool:
        """Return whether collectives are logged now. An event that a CUDA graph captures would have no time."""
        return not (self.on_device and torch.cuda.is_current_stream_capturing())

    def mark(self) -> Any:
        """Mark this point, on the current stream or on the clock of the host."""
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark_end(self, work: Work) -> Any:
        """Mark the end of a collective that was just issued; None where the first wait has to tell."""
        if self._stream is None:
            return None
        with torch.cuda.stream(self._stream):
            # What follows a collective, such as an addition, belongs to the stream that awaits it.
            (work.work if isinstance(work, Then) else work).wait_stream()
            return self.mark()

    def take(self, collective: _Collective, before: Any, after: Any) -> None:
        """Log a collective that was awaited between two marks, once they can be read."""
        self._unread.append((collective, before, after))
        while self._unread and (not self.on_device or self._unread[0][2].query()):
            self._read(*self._unread.popleft())

    def _read(self, collective: _Collective, before: Any, after: Any) -> None:
        end = after if collective.end is None else collective.end
        exposed = self._seconds(collective.begin, collective.issued) + self._seconds(before, after)
        seconds = self._seconds(collective.begin, end) if self._overlaps else exposed
        totals = OperationTotals(1, collective.nbytes, seconds, exposed)
        self._log.add(collective.operation, collective.unit, totals)

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self.on_device else float(end - begin)

    def print_table(self) -> None:
        """Print all collectives that have ended."""
        while self._unread:
            self._unread[0][2].synchronize()
            self._read(*self._unread.popleft())
        print(self._log.table(), flush=True)
