"""The file descriptors that the ranks of this node write to, and the thread that reads them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import struct
import termios
import threading
import tty
from collections.abc import Callable, Mapping

from zeroengine.errors import LaunchError
from zeroengine.launch.local.console import STDERR, STDOUT
from zeroengine.launch.local.descriptors import allow_descriptors
from zeroengine.launch.local.signals import signal_handlers

# Two pipes, what torch elastic opens of them, and the connections to the store.
DESCRIPTORS_PER_RANK = 8
# The arguments are the local rank, STDOUT or STDERR, and the data.
Receive = Callable[[int, int, bytes], None]


class Pipes:
    """Give each output of each rank a pipe, for a `with` block; rank 0 may have terminals instead.

    Args:
        ranks: The number of ranks on this node.
        receive: Called with everything they write, on a thread of its own.
        idle: Called now and then on that thread; with True at the end, when everything has been received.
        terminals: The targets for which rank 0 has a terminal, with the columns by which it is narrower than ours.

    Raises:
        LaunchError: The system does not allow so many open files.
    """

    def __init__(
        self,
        ranks: int,
        receive: Receive,
        idle: Callable[[bool], None] = lambda _: None,
        terminals: Mapping[int, int] | None = None,
    ) -> None:
        allow_descriptors(DESCRIPTORS_PER_RANK * ranks, f"{ranks} ranks of this node")
        self._receive, self._idle = receive, idle
        self._terminals = dict(terminals or {})
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}  # (local rank, target) to (reader, writer)
        try:
            for rank in range(ranks):
                for target in (STDOUT, STDERR):
                    self._ends[rank, target] = self._open(rank == 0 and target in self._terminals)
        except OSError as error:
            # The descriptors opened before the failing one must not stay open.
            self._close()
            raise LaunchError(f"the output of {ranks} ranks cannot be opened ({error.strerror}): start fewer") from None
        self._ranks_ended = threading.Event()
        self._handlers = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, name="zero-launch output", daemon=True)

    def path(self, rank: int, target: int) -> str:
        """Return the file that the rank's output is to be written to."""
        # torch elastic opens the file in this process and passes the descriptor on.
        return f"/dev/fd/{self._ends[rank, target][1]}"

    def environment(self, rank: int) -> dict[str, str]:
        """Return variables for the rank: the terminal's width, since some programs would measure stdin's."""
        if rank or STDOUT not in self._terminals:
            return {}
        return {"COLUMNS": str(os.get_terminal_size(self._ends[0, STDOUT][0]).columns)}

    def __enter__(self) -> Pipes:
        if self._terminals:
            # The width is set before the ranks start, because many programs ask for it only once.
            self._resize_terminals()
            self._handlers.enter_context(signal_handlers((signal.SIGWINCH,), lambda _: self._resize_terminals()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Every process of the run has ended by now, so what is in the pipes is the rest.
        self._handlers.close()
        # The thread ends by itself after it has read everything that is left.
        self._ranks_ended.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for ends in self._ends.values():
            for end in ends:
                os.close(end)

    def _open(self, terminal: bool) -> tuple[int, int]:
        reader, writer = os.openpty() if terminal else os.pipe()
        if terminal:
            # The launcher's own terminal translates line ends, and a second translation would double them.
            tty.setraw(writer)
        # The thread serves all ranks, so it must never wait for one of them.
        os.set_blocking(reader, False)
        return reader, writer

    def _resize_terminals(self) -> None:
        for target, indent in self._terminals.items():
            size = os.get_terminal_size(target)
            packed = struct.pack("4H", size.lines, max(1, size.columns - indent), 0, 0)
            fcntl.ioctl(self._ends[0, target][1], termios.TIOCSWINSZ, packed)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for key, (reader, _) in self._ends.items():
                selector.register(reader, selectors.EVENT_READ, key)
            while True:
                # The event is read before the pipes: what was written before it was set is still received.
                ranks_ended = self._ranks_ended.is_set()
                ready = selector.select(0.05 if ranks_ended else 0.2)
                for readable, _ in ready:
                    rank, target = readable.data
                    self._receive(rank, target, os.read(readable.fd, 1 << 16))
                # One more empty look after the end shows that nothing is left in any pipe.
                finished = ranks_ended and not ready
                self._idle(finished)
                if finished:
                    return
