"""The file descriptors that the ranks of this node write to, and the thread that reads them."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import struct
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from types import FrameType

from zeroengine.errors import LaunchError
from zeroengine.launch.local.console import STDERR, STDOUT

Receive = Callable[[int, int, bytes], None]  # local rank, STDOUT or STDERR, what it wrote there


class Pipes:
    """A pipe for each output of each rank, for a `with` block; for rank 0 a terminal, where it is to have one.

    Args:
        ranks: how many there are on this node.
        receive: called with everything they write, on a thread of its own.
        idle: called now and then on that thread, at the end with True.
        terminals: the targets for which rank 0 has a terminal, with the columns by which it is narrower than ours.

    Raises:
        LaunchError: so many files may not be open.
    """

    def __init__(
        self,
        ranks: int,
        receive: Receive,
        idle: Callable[[bool], None] = lambda _: None,
        terminals: Mapping[int, int] | None = None,
    ) -> None:
        self._receive, self._idle = receive, idle
        self._terminals = dict(terminals or {})
        self._ends: dict[tuple[int, int], tuple[int, int]] = {}  # (local rank, target) to (reader, writer)
        try:
            for rank in range(ranks):
                for target in (STDOUT, STDERR):
                    self._ends[rank, target] = self._open(rank == 0 and target in self._terminals)
        except OSError as error:
            self._close()
            raise LaunchError(
                f"the output of {ranks} ranks needs {4 * ranks} open files ({error.strerror}). Allow more (ulimit -n), "
                "or start fewer"
            ) from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-launch output", daemon=True)

    def path(self, rank: int, target: int) -> str:
        """The file that the rank's output is to be written to."""
        return f"/dev/fd/{self._ends[rank, target][1]}"

    def environment(self, rank: int) -> dict[str, str]:
        """What the rank must be told: a terminal's width, for programs that measure stdin's instead."""
        if rank or STDOUT not in self._terminals:
            return {}
        return {"COLUMNS": str(os.get_terminal_size(self._ends[0, STDOUT][0]).columns)}

    def __enter__(self) -> Pipes:
        if self._terminals:
            self._resize()
            signal.signal(signal.SIGWINCH, self._resize)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hand on what is left, once every process of the run is gone."""
        if self._terminals:
            signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        self._closing.set()
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for ends in self._ends.values():
            for end in ends:
                os.close(end)

    def _open(self, terminal: bool) -> tuple[int, int]:
        reader, writer = os.openpty() if terminal else os.pipe()
        if terminal:
            tty.setraw(writer)
        os.set_blocking(reader, False)
        return reader, writer

    def _resize(self, _: int = 0, __: FrameType | None = None) -> None:
        for target, indent in self._terminals.items():
            size = os.get_terminal_size(target)
            packed = struct.pack("4H", size.lines, max(1, size.columns - indent), 0, 0)
            fcntl.ioctl(self._ends[0, target][1], termios.TIOCSWINSZ, packed)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for key, (reader, _) in self._ends.items():
                selector.register(reader, selectors.EVENT_READ, key)
            while True:
                closing = self._closing.is_set()
                ready = selector.select(0.05 if closing else 0.2)
                for found, _ in ready:
                    rank, target = found.data
                    self._receive(rank, target, os.read(found.fd, 1 << 16))
                over = closing and not ready
                self._idle(over)
                if over:
                    return
