"""However a run ends, none of its processes is left, nor those that its workers started."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from .conftest import Launch, Script, Start
from .processes import is_alive, wait_for

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


def test_ranks_that_heed_ctrl_c_end_at_once_and_quietly(started: Start, script: Script, tmp_path: Path) -> None:
    body = "open(f'pids{rank}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    launcher = started(script(body))
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=3)
    assert (out, err) == ("", "zero-launch: stopped by SIGINT; every rank has ended\n")


def test_a_failure_leaves_nothing(launch: Launch, script: Script, tmp_path: Path) -> None:
    body = STUBBORN + "while len([name for name in os.listdir() if name.startswith('pids')]) < 2: time.sleep(0.01)\n"
    result = launch(script(body + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"))
    assert result.code == 128 + signal.SIGKILL
    assert "rank 1 failed (exit code 137: killed by SIGKILL" in result.err
    assert len(pids(tmp_path)) == 4 and not any(map(is_alive, pids(tmp_path)))


def test_a_success_leaves_nothing(launch: Launch, script: Script, tmp_path: Path) -> None:
    assert launch(script(STUBBORN)).code == 0
    assert len(pids(tmp_path)) == 4 and not any(map(is_alive, pids(tmp_path)))
