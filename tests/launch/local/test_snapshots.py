"""A rank that is killed costs no bits: its round goes on from a snapshot in memory, which the launcher removes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.launch.conftest import Launch, Script, Start
from tests.launch.local.snapshot_run import start as start_engine
from tests.launch.local.snapshot_run import take_step
from tests.launch.processes import wait_for

SCRIPT = """
from tests.launch.local.snapshot_run import start, take_step
engine = start(SIZE, every_seconds=0.05)
print("resumed", engine.resume(), flush=True)
folder = os.environ["ZEROENGINE_SNAPSHOT_FOLDER"]
open("folder", "w").write(folder)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
while engine.global_steps < 30:
    print("loss", engine.global_steps, take_step(engine).hex(), flush=True)
    time.sleep(0.01)
    if first and rank == 1 and engine.global_steps == 20:
        while not any(name.startswith("step-") for name in os.listdir(folder)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
engine.close()
"""


def undisturbed(size: int) -> list[str]:
    engine = start_engine(size)
    return [take_step(engine).hex() for _ in range(30)]


@pytest.mark.slow  # recovery/test_snapshots goes on from memory, and test_death kills
@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 1), (4, 2)], ids=["whole", "split"])
def test_a_killed_rank_costs_no_bits_and_nothing_stays_in_memory(
    launch: Launch, script: Script, tmp_path: Path, num_ranks: int, size: int
) -> None:
    body = SCRIPT.replace("SIZE", str(size))
    result = launch("--max-restarts", "1", "--nproc", str(num_ranks), script(body))
    assert result.code == 0, result.err
    assert not Path((tmp_path / "folder").read_text()).exists()
    assert "resumed from the snapshot of step" in result.err and result.out.count("resumed True") == num_ranks
    for rank, losses in enumerate(run_ranks(num_ranks, undisturbed, size)):
        found = set(re.findall(rf"\[rank {rank}\] loss (\d+) (.*)", result.out))
        assert found == {(str(step), loss) for step, loss in enumerate(losses)}


def test_the_folder_goes_with_a_launcher_that_is_killed(start: Start, script: Script, tmp_path: Path) -> None:
    body = "folder = os.environ['ZEROENGINE_SNAPSHOT_FOLDER']\nos.makedirs(f'{folder}/{rank}')\n"
    launcher = start(
        "--nproc", "2", "--cpu", script(body + "open(f'pids{rank}', 'w').write(folder)\ntime.sleep(60)"), ranks=2
    )
    folder = Path((tmp_path / "pids0").read_text())
    assert sorted(os.listdir(folder)) == ["0", "1"] and folder.parent == Path("/dev/shm")
    launcher.send_signal(signal.SIGKILL)
    wait_for(lambda: not folder.exists(), 10)


def test_ranks_that_outlive_a_killed_launcher_cannot_make_the_folder_anew() -> None:
    code = "import time\nfrom zeroengine.launch.local.snapshot_folder import SNAPSHOT_FOLDER, SnapshotFolder\n"
    code += "print(SnapshotFolder().environment[SNAPSHOT_FOLDER], flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        folder.mkdir()
        launcher.kill()
    wait_for(lambda: not folder.exists(), 10)
    # As a rank does that takes a snapshot before the guard has ended it.
    time.sleep(0.5)
    folder.mkdir()
    wait_for(lambda: not folder.exists(), 10)
