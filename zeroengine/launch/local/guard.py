"""End every process of a run, whatever becomes of the launcher.

[Note: The guard]
The guard is a small process of its own. It waits until the launcher closes the pipe between them, which the operating
system does for a launcher that was killed. Then it ends every process of the run on this node. It recognises them in
two ways:

- by an id in their environment, which children inherit, in any session or process group;
- by their descent. On Linux the launcher is a subreaper: processes whose parent has ended become its children, so
  everything that the ranks have started stays below the launcher, whatever it did to its environment. Ranks have
  sessions of their own, which tells their descendants from processes that the launcher started. A launcher that was
  killed has no children any more; for that case the guard looks every two seconds, and remembers.

zero-launch starts this file by its path, with `python -I -S`: it may import the standard library only.
"""

from __future__ import annotations

import contextlib
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

LAUNCH_ID_VARIABLE = "ZEROENGINE_LAUNCH_ID"
# So many seconds lie between SIGTERM and SIGKILL.
SIGKILL_DELAY_S = 1.0
# So long after SIGKILL, a process that the kernel does not end is given up.
SWEEP_TIMEOUT_S = 10.0
# So many seconds lie between two looks at the processes below the launcher.
SCAN_INTERVAL_S = 2.0
PR_SET_CHILD_SUBREAPER = 36


class ProcessGuard:
    """The launcher's end of the guard, for a `with` block.

    At the end of the block the guard ends the run's processes, waits until they have ended and removes `folder`. A
    message on stderr names the processes that cannot be ended.

    Args:
        launch_id: The id that the run's processes have in their environment.
        folder: The run's temporary folder.
    """

    def __init__(self, launch_id: str, folder: str) -> None:
        # The guard's own process runs this file without zeroengine on its path.
        from zeroengine.launch.local.signals import FORWARDED_SIGNALS, STOP_SIGNALS

        # A launcher within another run has that run's id, and the other run's guard must not end this one's.
        environment = {key: value for key, value in os.environ.items() if key != LAUNCH_ID_VARIABLE}
        # Processes of an earlier run, or of a test, are below the launcher as well and must survive.
        self._spared = {process.pid for process in started_by_ranks(os.getpid())}
        ignored = ",".join(str(int(number)) for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS))
        pids = map(str, (os.getpid(), *self._spared))
        command = [sys.executable, "-I", "-S", __file__, launch_id, folder, ignored, *pids]
        # The launcher becomes a subreaper before any rank exists, so that no orphan can escape to another parent.
        set_subreaper(True)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Neither Ctrl-C nor a closing terminal may reach the guard.
            start_new_session=True,
        )
        # `communicate` waits for the guard at the end, so `reap` must leave its exit code alone.
        self._spared.add(self._process.pid)

    def __enter__(self) -> ProcessGuard:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing its stdin tells the guard that the run is over. `communicate` does so, and returns when the guard has
        # ended.
        remaining = self._process.communicate()[0].decode(errors="replace")
        self.reap()
        set_subreaper(False)
        if remaining:
            sys.stderr.write(f"zero-launch: processes of the run that cannot be ended: {remaining}\n")

    def reap(self, own: Collection[int] = ()) -> None:
        """Reap ended processes that a subreaper inherited, except those in `own`, for which others wait."""
        for process in started_by_ranks(os.getpid(), zombies=True):
            if process.is_zombie and process.parent == os.getpid() and process.pid not in {*own, *self._spared}:
                # Only this pid is waited for. A wait for any child would take exit codes that torch elastic needs.
                # Another part of the launcher may have reaped the process meanwhile.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)


class ProcessEntry(NamedTuple):
    """One entry of the process table."""

    pid: int
    name: str
    parent: int
    session: int
    # In clock ticks since the system's start. A pid may be used again; pid and start time together may not.
    start_time: int
    is_zombie: bool


def set_subreaper(enabled: bool) -> None:
    """Become the parent of all descendants whose own parent ends, or stop that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(enabled))


def process_table() -> dict[int, ProcessEntry]:
    """Return all processes by pid; nothing on a system without /proc.

    psutil reads the same table, but the guard starts without site-packages and would not find it. For 138 processes
    psutil takes 10.2 ms instead of 3.0 ms, and its import takes 80 ms and 2.2 MiB. It does not tell the session.
    """
    table = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The name, in parentheses, may itself hold spaces and parentheses.
            before, _, after = (entry / "stat").read_text(errors="replace").rpartition(")")
        except OSError:
            # The process has ended meanwhile.
            continue
        words, pid = after.split(), int(entry.name)
        name, state = before.partition("(")[2], words[0]
        table[pid] = ProcessEntry(pid, name, int(words[1]), int(words[3]), int(words[19]), state in "ZX")
    return table


def started_by_ranks(launcher: int, known: Iterable[ProcessEntry] = (), zombies: bool = False) -> list[ProcessEntry]:
    """Return the processes below the launcher, or below `known` ones, whose session is not the launcher's.

    Args:
        launcher: The launcher's pid.
        known: Processes of the run that may no longer be below the launcher.
        zombies: Whether to return processes that have ended and are not reaped.
    """
    table = process_table()
    children: dict[int, list[ProcessEntry]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process)
    # A pid may have been used again for a process that has nothing to do with the run, so the start time is compared.
    alive = [table[p.pid] for p in known if p.pid in table and table[p.pid].start_time == p.start_time]
    session = table[launcher].session if launcher in table else 0
    descendants: dict[int, ProcessEntry] = {}
    pending = [*children.get(launcher, []), *alive]
    while pending:
        process = pending.pop()
        if process.pid not in descendants:
            descendants[process.pid] = process
            pending += children.get(process.pid, [])
    # Processes in the launcher's session were started by the launcher itself.
    return [p for p in descendants.values() if p.session != session and (zombies or not p.is_zombie)]


def pids_with_launch_id(launch_id: str) -> list[int]:
    """Return the pids of the processes that have this id in their environment."""
    variable = f"{LAUNCH_ID_VARIABLE}={launch_id}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        # The process may have ended meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            if variable in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


class ProcessSweeper:
    """Find a run's processes and end them, within the guard's own process.

    Args:
        launch_id: The id in the processes' environment.
        launcher: The launcher's pid. It must come from the launcher itself: one that was killed before the guard ran
            has left it to another parent, such as the init process, below which is every process of the machine.
        spared: The pids of processes that do not belong to the run.
    """

    def __init__(self, launch_id: str, launcher: int, spared: Collection[int]) -> None:
        self._launch_id, self._launcher, self._spared = launch_id, launcher, {os.getpid(), *spared}
        self._known: list[ProcessEntry] = []

    def scan(self) -> set[int]:
        """Return the pids of the run's living processes, by their descent.

        Once the launcher is gone, the search starts from the processes that the last scan found below it.
        """
        # No process has the pid -1, so the search then relies on the known processes only.
        launcher = self._launcher if os.getppid() == self._launcher else -1
        self._known = [p for p in started_by_ranks(launcher, self._known) if p.pid not in self._spared]
        return {process.pid for process in self._known}

    def sweep(self) -> str:
        """End every process of the run by SIGTERM, then by SIGKILL.

        Returns:
            The processes that are left, in words; empty if there are none.
        """
        deadline = time.monotonic() + SIGKILL_DELAY_S
        terminated: set[int] = set()
        not_allowed: set[int] = set()
        pids: set[int] = set()
        while time.monotonic() < deadline + SWEEP_TIMEOUT_S:
            # A process that ends may leave children that only now come into view, so every turn looks again.
            pids = {*pids_with_launch_id(self._launch_id), *self.scan()}
            # Processes of another user cannot be ended, and waiting for them would only delay the end.
            if pids <= not_allowed:
                break
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
            # SIGTERM is sent once, so that a handler is not interrupted by itself. SIGKILL is repeated.
            for pid in pids - not_allowed - (terminated if number == signal.SIGTERM else set()):
                terminated.add(pid)
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
                except PermissionError:
                    # The process belongs to another user, as one that sudo has started.
                    not_allowed.add(pid)
            # The system needs a moment to end processes, and the table is expensive to read.
            time.sleep(0.05)
        table = process_table()
        return ", ".join(f"{pid} ({table[pid].name})" for pid in sorted(pids) if pid in table)


def main() -> None:
    """Run the guard: wait until stdin is closed, then end the run's processes and remove its folder."""
    _, launch_id, folder, ignored, launcher, *spared = sys.argv
    # Schedulers send some signals to all processes of a job, and the guard must outlive the others.
    for number in ignored.split(","):
        signal.signal(int(number), signal.SIG_IGN)
    sweeper = ProcessSweeper(launch_id, int(launcher), set(map(int, spared)))
    # The pipe becomes readable when the launcher closes it or dies, because nothing is ever written into it.
    while not select.select([0], [], [], SCAN_INTERVAL_S)[0]:
        sweeper.scan()
    remaining = sweeper.sweep()
    # The folder goes last: processes that still ran might have written into it.
    shutil.rmtree(folder, ignore_errors=True)
    # Nobody reads this if the launcher is gone.
    with contextlib.suppress(OSError):
        os.write(1, remaining.encode())


if __name__ == "__main__":
    main()
