"""Leaves no process of a run behind, whatever becomes of the launcher.

The guard is a small process of its own. It waits until the launcher closes the pipe between them, which the
operating system does for a launcher that was killed, and then ends every process of the run on this node. It knows
them by an id in their environment, which children inherit, so a worker's own helpers are found as well, in whatever
session or process group. zero-launch starts this file by its path: it must not import torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "ZEROENGINE_LAUNCH_ID"
GRACE = 1.0  # seconds between SIGTERM and SIGKILL
PATIENCE = 10.0  # seconds after SIGKILL until a process that the kernel will not let go is given up


class Guard:
    """The launcher's end: closing it ends the run's processes, waits until they are gone and removes `folder`."""

    def __init__(self, launch_id: str, folder: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != MARK}
        command = [sys.executable, "-I", "-S", __file__, launch_id, folder]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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


def sweep(launch_id: str, grace: float = GRACE) -> None:
    """End every process of the run: SIGTERM, and SIGKILL after `grace` seconds."""
    deadline = time.monotonic() + grace
    asked: set[int] = set()
    while (pids := members(launch_id)) and time.monotonic() < deadline + PATIENCE:
        late = time.monotonic() > deadline
        for pid in pids:
            if late or pid not in asked:
                asked.add(pid)
                signal_process(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def signal_process(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def main() -> None:
    ends, tells = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), (signal.SIGUSR1, signal.SIGUSR2)
    for number in (*ends, *tells):  # schedulers send some of them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _, launch_id, folder = sys.argv
    sweep(launch_id)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
