"""Leaves no process of a run behind, whatever becomes of the launcher.

The guard is a small process of its own. It waits until the launcher closes the pipe between them, which the
operating system does for a launcher that was killed, and then ends every process of the run on this node. It knows
them in two ways:

- by an id in their environment, which children inherit, in whatever session or process group;
- by their descent. On Linux the launcher is a subreaper: processes whose parent has ended become its children, so all
  that the ranks have started stay below it, whatever they did to their environment. Ranks have sessions of their own,
  which tells what they started from what the launcher did. Of a launcher that is killed no child is left; for that
  case the guard looks every LOOK seconds, and remembers.

zero-launch starts this file by its path: it must not import torch.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

MARK = "ZEROENGINE_LAUNCH_ID"
GRACE = 1.0  # seconds between SIGTERM and SIGKILL
PATIENCE = 10.0  # seconds after SIGKILL until a process that the kernel will not let go is given up
LOOK = 2.0  # seconds between two looks at what is below the launcher
PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """The launcher's end: closing it ends the run's processes, waits until they are gone and removes `folder`.

    Attributes:
        left: after that, the processes that could not be ended, in words; empty where there are none.
    """

    def __init__(self, launch_id: str, folder: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        self.left = ""
        self._spared = {process.pid for process in started_by_ranks(os.getpid())}  # of an earlier run, or a test's
        command = [sys.executable, "-I", "-S", __file__, launch_id, folder, *map(str, self._spared)]
        set_subreaper(True)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._spared.add(self._process.pid)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        said = self._process.communicate()[0]
        self.left = said.decode(errors="replace")
        self.reap()
        set_subreaper(False)

    def reap(self, own: Collection[int] = ()) -> None:
        """Take note of the end of processes whose parent ended before them; `own` are those that others wait for."""
        for process in started_by_ranks(os.getpid(), zombies=True):
            if process.is_zombie and process.parent == os.getpid() and process.pid not in {*own, *self._spared}:
                try:
                    os.waitpid(process.pid, os.WNOHANG)
                except ChildProcessError:
                    continue


class Process(NamedTuple):
    """A line of the process table."""

    pid: int
    name: str
    parent: int
    session: int
    started: int  # in clock ticks since the system's start: with the pid, this names a process for good
    is_zombie: bool


def set_subreaper(on: bool) -> None:
    """Become the parent of all descendants whose own parent ends, or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on))


def process_table() -> dict[int, Process]:
    """All processes by pid; empty where there is no /proc."""
    table = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            before, _, after = (entry / "stat").read_text(errors="replace").rpartition(")")
        except OSError:  # gone meanwhile
            continue
        words, pid = after.split(), int(entry.name)
        name, state = before.partition("(")[2], words[0]
        table[pid] = Process(pid, name, int(words[1]), int(words[3]), int(words[19]), state in "ZX")
    return table


def started_by_ranks(launcher: int, others: Iterable[Process] = (), zombies: bool = False) -> list[Process]:
    """The processes below the launcher, or below others, that have another session than it has."""
    table = process_table()
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    alive = [table[other.pid] for other in others if other.pid in table and table[other.pid].started == other.started]
    session = table[launcher].session if launcher in table else 0
    found: dict[int, Process] = {}
    waiting = [*children.get(launcher, []), *alive]
    while waiting:
        process = waiting.pop()
        if process.pid not in found:
            found[process.pid] = process
            waiting += children.get(process.pid, [])
    return [one for one in found.values() if one.session != session and (zombies or not one.is_zombie)]


def members(launch_id: str) -> list[int]:
    """The pids of the run's living processes."""
    marker = f"{MARK}={launch_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


class Sweeper:
    """Finds a run's processes and ends them, in the guard's own process.

    Args:
        spared: pids of processes that do not belong to the run.
    """

    def __init__(self, launch_id: str, spared: Collection[int]) -> None:
        self._launch_id, self._spared = launch_id, {os.getpid(), *spared}
        self._launcher = os.getppid()
        self._seen: list[Process] = []

    def look(self) -> set[int]:
        """The pids of the run's living processes. Once the launcher is gone, what was below it the last time counts."""
        launcher = self._launcher if os.getppid() == self._launcher else -1
        self._seen = [p for p in started_by_ranks(launcher, self._seen) if p.pid not in self._spared]
        return {process.pid for process in self._seen}

    def sweep(self, grace: float = GRACE) -> str:
        """End every process of the run: SIGTERM, and SIGKILL after `grace` seconds. Returns in words what is left."""
        deadline = time.monotonic() + grace
        asked: set[int] = set()
        not_allowed: set[int] = set()
        pids: set[int] = set()
        while time.monotonic() < deadline + PATIENCE:
            pids = {*members(self._launch_id), *self.look()}
            if pids <= not_allowed:
                break
            late = time.monotonic() > deadline
            for pid in pids - not_allowed:
                if late or pid not in asked:
                    asked.add(pid)
                    if not signal_process(pid, signal.SIGKILL if late else signal.SIGTERM):
                        not_allowed.add(pid)
            time.sleep(0.05)
        table = process_table()
        return ", ".join(f"{pid} ({table[pid].name})" for pid in sorted(pids) if pid in table)


def signal_process(pid: int, number: int) -> bool:
    """Whether that is allowed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:  # another user's, such as one that sudo has started
        return False
    return True


def main() -> None:
    ends, tells = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), (signal.SIGUSR1, signal.SIGUSR2)
    for number in (*ends, *tells):  # schedulers send some of them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    _, launch_id, folder, *spared = sys.argv
    sweeper = Sweeper(launch_id, set(map(int, spared)))
    while not select.select([0], [], [], LOOK)[0]:
        sweeper.look()
    left = sweeper.sweep()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.write(1, left.encode())
    except OSError:  # the launcher is gone
        pass


if __name__ == "__main__":
    main()
