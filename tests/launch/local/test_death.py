"""However a run ends, none of its processes is left, nor those that its workers started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, Script, Start
from tests.launch.processes import is_alive, wait_for
from zeroengine.launch.local import guard
from zeroengine.launch.local.guard import SCAN_INTERVAL_S

# Each rank starts a helper in its own session, which ignores signals, and does so itself.
STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
helper = subprocess.Popen(['sleep', '600'], start_new_session=True)
with open(f'part{rank}', 'w') as file: file.write(f'{os.getpid()} {helper.pid}')
os.rename(f'part{rank}', f'pids{rank}')
"""


def pids(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("pids*") for pid in path.read_text().split()]


@pytest.fixture
def started(start: Start) -> Start:
    """Start it on two ranks."""
    return lambda name: start("--nproc", "2", "--cpu", name, ranks=2)


@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL]
)
def test_a_stopped_launcher_leaves_nothing(
    started: Start, script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    launcher = started(script(STUBBORN + "time.sleep(600)"))
    assert len(pids(tmp_path)) == 4 and all(map(is_alive, pids(tmp_path)))
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=15)
    if number != signal.SIGKILL:
        assert launcher.returncode == 128 + number
        assert err == f"zero-launch: stopped by {number.name}; every rank has ended\n"
        assert not any(map(is_alive, pids(tmp_path)))
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


@pytest.mark.slow  # test_signals sends a signal that ranks heed
def test_ranks_that_heed_ctrl_c_end_at_once_and_quietly(started: Start, script: Script, tmp_path: Path) -> None:
    body = "open(f'pids{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    launcher = started(script(body))
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=3)
    assert (out, err) == ("", "zero-launch: stopped by SIGINT; every rank has ended\n")


@pytest.mark.usefixtures("short_waits")
def test_a_failure_leaves_nothing(launch: Launch, script: Script, tmp_path: Path) -> None:
    body = STUBBORN + "while len([name for name in os.listdir() if name.startswith('pids')]) < 2: time.sleep(0.01)\n"
    result = launch(script(body + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"))
    assert result.code == 128 + signal.SIGKILL
    assert "rank 1 failed (exit code 137: killed by SIGKILL" in result.err
    assert len(pids(tmp_path)) == 4 and not any(map(is_alive, pids(tmp_path)))


def test_a_success_leaves_nothing(launch: Launch, script: Script, tmp_path: Path) -> None:
    assert launch(script(STUBBORN)).code == 0
    assert len(pids(tmp_path)) == 4 and not any(map(is_alive, pids(tmp_path)))


# Each rank starts a daemon: an empty environment, a session of its own, and no parent.
ESCAPED = """
line = f'echo $$ >part{rank}; mv part{rank} pids{rank}; exec sleep 600'
subprocess.run(['setsid', '-f', 'env', '-i', 'PATH=/usr/bin:/bin', 'sh', '-c', line])
while not os.path.exists(f'pids{rank}'): time.sleep(0.01)
"""


def test_a_daemon_with_an_environment_of_its_own_does_not_survive_the_run(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert launch(script(ESCAPED)).code == 0
        assert len(pids(tmp_path)) == 2 and not any(map(is_alive, pids(tmp_path)))
        assert bystander.poll() is None, "what was there before the run is none of its processes"
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow  # the tests above have a launcher that is killed, and a daemon
def test_a_daemon_does_not_survive_a_launcher_that_is_killed(started: Start, script: Script, tmp_path: Path) -> None:
    launcher = started(script(ESCAPED + "time.sleep(600)"))
    time.sleep(1.5 * SCAN_INTERVAL_S)
    assert len(pids(tmp_path)) == 2 and all(map(is_alive, pids(tmp_path)))
    launcher.kill()
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


def test_processes_that_cannot_be_ended_are_named(
    launch: Launch, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As another user's process, for which a guard stands that may send no signals."""
    patched = (tmp_path / "guard.py").absolute()
    source = Path(guard.__file__).read_text()
    patched.write_text(source.replace("os.kill(pid, number)", "raise PermissionError"))
    monkeypatch.setattr(guard, "__file__", str(patched))
    result = launch(script(ESCAPED))
    escaped = ", ".join(f"{pid} (sleep)" for pid in sorted(pids(tmp_path)))
    for pid in pids(tmp_path):
        os.kill(pid, signal.SIGKILL)
    assert result.code == 0 and f"zero-launch: processes of the run that cannot be ended: {escaped}\n" in result.err


def test_a_guard_whose_launcher_is_gone_spares_the_processes_of_its_new_parent() -> None:
    look = "import os; from zeroengine.launch.local.guard import ProcessSweeper; "
    look += "print(sorted(ProcessSweeper('no-such-run', {launcher}, ()).scan()))"
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        # This process stands for the init process, which becomes the parent of a guard whose launcher was killed.
        commands = [[sys.executable, "-c", look.format(launcher=pid)] for pid in (os.getpid(), sleeper.pid)]
        found = [subprocess.run(command, capture_output=True, text=True, check=True) for command in commands]
        sleeper.kill()
    assert sleeper.pid in json.loads(found[0].stdout)
    assert json.loads(found[1].stdout) == []
