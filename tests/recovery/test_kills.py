"""Whatever is killed, and whenever: a run goes on from the newest whole snapshot, with the bits of an undisturbed one.

The slow tests kill thirty times in all; ZEROENGINE_KILLS=100 makes it a hundred.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch import hosts
from tests.recovery.kills import GOES_ON_S, KilledRun, run_kills, summary

pytestmark = pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
KILLS = int(os.environ.get("ZEROENGINE_KILLS", "30"))
# (hosts, ranks of each, whether the run goes on with the hosts that are left)
RUNS = {"three hosts, fewer go on": (3, 1, True), "two hosts, all are needed": (2, 2, False)}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_run_survives_kills_of_ranks_hosts_and_holders_of_copies(tmp_path: Path, run: str) -> None:
    num_hosts, slots, fewer = RUNS[run]
    kills = run_kills(tmp_path, num_hosts, slots, -(-KILLS // len(RUNS)), seed=len(run), fewer=fewer)
    print(summary(kills))
    assert sum(kill.source == "snapshot" for kill in kills) > len(kills) / 2, summary(kills)


@pytest.mark.slow
def test_a_lost_host_costs_no_bits(tmp_path: Path) -> None:
    """One host of two is killed, at a random moment within a snapshot, and the other one goes on alone."""
    (kill,) = run_kills(tmp_path, 2, 1, 1, seed=1, fewer=True, kinds=("host",))
    assert kill.source == "snapshot"


@pytest.mark.slow
def test_full_memory_costs_no_step_and_a_host_that_is_back_with_old_snapshots_no_bits(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with hosts.build(2) as rig:
        for machine in rig.machines:
            machine.mount("8m", memory)
        run = KilledRun(rig, tmp_path, 1, fewer=True, seed=1, memory=str(memory))
        try:
            run.wait(lambda: (rounds := run.rounds()) and rounds[-1].last > 40, GOES_ON_S, "no steps")
            other = rig.machines[1]
            pid = (other.folder / "sshd.pid").read_text().strip()
            began = time.monotonic()
            subprocess.run(
                ["nsenter", "-t", pid, "-m", "dd", "if=/dev/zero", f"of={memory}/filler", "bs=1M"], capture_output=True
            )
            run.screen.wait("no snapshot of step .* is full.* The one before is as it was", began)
            step = run.rounds()[-1].last
            run.wait(lambda: run.rounds()[-1].last > step + 10, GOES_ON_S, "no steps beside full memory")
            hosts.run("nsenter", "-t", pid, "-m", "rm", memory / "filler")
            time.sleep(4)
            step = run.rounds()[-1].last
            # Its memory stays, as if the launcher's processes alone had been killed.
            other.kill_all()
            run.wait(lambda: run.rounds()[-1].world == 1, GOES_ON_S, "does not go on alone")
            run.wait(lambda: len(r := run.rounds()) > 2 and len(r[-1].steps) > 10, GOES_ON_S, "is not back")
            run.end()
        finally:
            run.kill_launcher()
    first, alone, together = run.rounds()[:3]
    assert all(own.text.startswith("resumed from the snapshot") for own in (alone, together))
    # What was taken before memory was full would be older, and so would be what the host has that is back.
    assert step - 60 < alone.resumed <= first.last and alone.resumed <= together.resumed
    assert (alone.world, together.world) == (1, 2)
    run.check_bits()
