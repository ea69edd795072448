"""SIGUSR1 and SIGUSR2 reach every rank, and end nothing by themselves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Script, Start
from tests.launch.processes import is_alive, wait_for
from zeroengine.launch.local.guard import ProcessGuard

BODY = """
heard = []
signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
helper = subprocess.Popen(["sleep", "60"])
open(f"pids{rank}", "w").write(str(helper.pid))
while not heard:
    time.sleep(0.05)
print("heard", helper.poll(), flush=True)
helper.kill()
"""


@pytest.mark.parametrize(
    "nodes",
    [pytest.param(0, id="on this machine"), pytest.param(2, id="on two nodes", marks=pytest.mark.slow)],
)
def test_every_rank_hears_a_signal_that_the_launcher_gets(
    nodes: int, start: Start, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their helpers do not: none of them knows what to do with it."""
    options = ["--cpu", "--nproc", "2"]
    if nodes:
        ssh = tmp_path / "ssh"
        ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec sh -c "$*"\n')
        ssh.chmod(0o755)
        (tmp_path / "hosts").write_text("".join(f"n{number}\n" for number in range(nodes)))
        monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 22")
        options = ["--cpu", "--nproc", "1", "--hostfile", "hosts", "--ssh", str(ssh)]
    process = start(*options, script(BODY), ranks=2)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and out.count("heard None") == 2, err


def test_the_guard_outlives_a_signal_to_all_processes_of_a_job() -> None:
    """As Slurm sends one to all that a step has started: the guard still ends what is left."""
    mark = "a run of this test"
    sleeper = subprocess.Popen(["sleep", "60"], env={"ZEROENGINE_LAUNCH_ID": mark})
    ready = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    with ProcessGuard(mark, "/nonexistent") as guard:
        ready.wait()  # as long as the guard takes to start, and longer
        guard._process.send_signal(signal.SIGUSR1)
    wait_for(lambda: sleeper.poll() is not None or not is_alive(sleeper.pid), 5)
    assert guard._process.returncode == 0
