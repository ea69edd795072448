"""Real ssh to hosts with addresses of their own, which are network namespaces of this machine."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import hosts
from tests.launch.hosts import Rig
from tests.launch.processes import wait_for

pytestmark = pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))

SOON = 30.0  # seconds in which a fault is on the screen
EXAMPLE = hosts.ROOT / "examples/train_lm.py"
TINY = "--layers 1 --width 16 --heads 2 --context 16 --eval-batches 1 --sample-bytes 4".split()
CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
    "comm": {"timeout_seconds": 60},
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts.build(3) as rig:
        yield rig


@pytest.fixture
def example(tmp_path: Path) -> list[str]:
    """Arguments that train the example for a few steps; written to the file whatever their number."""
    (tmp_path / "zero.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text").write_bytes(b"".join(b"%d bottles of beer on the wall\n" % n for n in range(500)))
    return ["--config", "zero.json", str(EXAMPLE), "--text", "text", *TINY]


def losses(out: str) -> list[str]:
    """What the example says about losses, without names and speed."""
    return re.findall(r"(?:loss (?:before|after)|step +\d+/\d+) +(?:loss )?([\d.]+)", out)


def training(folder: Path, body: str) -> str:
    """A script that has an engine over Gloo and runs the body."""
    head = """
import os, signal, sys, time
import torch, zeroengine
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
          "zero_optimization": {"stage": 3}, "comm": {"timeout_seconds": float(os.environ.get("TIMEOUT", 60))}}
engine = zeroengine.initialize(model, config=config)
def step():
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()
step()
"""
    (folder / "train.py").write_text(head + body)
    return "train.py"


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_over_several_hosts_gives_the_losses_of_one(rig: Rig, example: list[str], count: int) -> None:
    several = rig.launch("--hostfile", str(rig.hostfile(1, rig.machines[:count])), *example, "--steps", "4")
    assert several.returncode == 0, several.stderr
    one = rig.launch("--hostfile", str(rig.hostfile(count, rig.machines[:1])), *example, "--steps", "4")
    assert one.returncode == 0, one.stderr
    assert losses(several.stdout) == losses(one.stdout) and len(losses(one.stdout)) == 6
    rig.wait_until_empty()


def test_hosts_talk_over_their_own_addresses(rig: Rig, tmp_path: Path) -> None:
    body = "print(engine._parts.ranks.transport.name, os.environ['GLOO_SOCKET_IFNAME'], os.environ['MASTER_ADDR'])"
    done = rig.launch("--hostfile", str(rig.hostfile(1, rig.machines[:2])), training(tmp_path, body))
    address = rig.machines[0].address
    assert sorted(done.stdout.splitlines()) == [f"[node-{h}:{r}] gloo eth0 {address}" for h, r in (("a", 0), ("b", 1))]


def test_hosts_that_cannot_be_reached_are_one_table(rig: Rig, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\nnode-x slots=1\n")
    name = training(tmp_path, "open('started', 'w')")
    rig.machines[1].stop_sshd()
    try:
        start = time.monotonic()
        done = rig.launch("--hostfile", str(hostfile), name)
    finally:
        rig.machines[1].start_sshd()
    assert done.returncode == 2 and time.monotonic() - start < SOON
    first, *rows = done.stderr.splitlines()
    assert first == "zero-launch: 2 of 3 nodes cannot take part:"
    assert [row.split()[0] for row in rows] == ["node-b", "node-x"]
    assert "Connection refused" in rows[0] and "Could not resolve hostname node-x" in rows[1]
    assert not (tmp_path / "started").exists()
    rig.wait_until_empty()


def test_a_missing_script_and_other_sources_are_reported_per_host(rig: Rig, tmp_path: Path) -> None:
    """A script, and the same zeroengine."""
    with hosts.build(2) as own:
        (tmp_path / "work").mkdir()
        name = training(tmp_path / "work", "open('started', 'w')")
        own.machines[0].mount("1m", tmp_path / "work")
        other = tmp_path / "errors.py"
        other.write_text("# another\n" + (hosts.ROOT / "zeroengine/errors.py").read_text())
        own.machines[1].cover(hosts.ROOT / "zeroengine/errors.py", other)
        done = own.launch("--hostfile", str(own.hostfile(1)), f"work/{name}")
        assert done.returncode == 2
        rows = done.stderr.splitlines()
        assert rows[0] == "zero-launch: 2 of 2 nodes cannot take part:"
        assert rows[1] == "  node-a  work/train.py: there is no such script"
        assert re.fullmatch(r"  node-b  zeroengine \S+ \(sources \w+\), and \S+ \(sources \w+\) here", rows[2])
        assert not (tmp_path / "work/started").exists()
        own.wait_until_empty()


@pytest.mark.slow  # test_nodes has a short form
def test_a_killed_launcher_leaves_nothing_on_any_host(rig: Rig, tmp_path: Path) -> None:
    name = training(tmp_path, "open(f'up{rank}', 'w')\ntime.sleep(600)")
    launcher = rig.popen("--hostfile", str(rig.hostfile()), name)
    wait_for(lambda: len(list(tmp_path.glob("up*"))) == 3 or launcher.poll() is not None, 60)
    assert all(machine.pids() for machine in rig.machines)
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    rig.wait_until_empty(10)


@pytest.mark.slow
def test_a_cut_link_is_a_lost_node(rig: Rig, tmp_path: Path) -> None:
    name = training(tmp_path, "open(f'up{rank}', 'w')\nwhile True: step()")
    launcher = rig.popen("--hostfile", str(rig.hostfile()), name)
    wait_for(lambda: len(list(tmp_path.glob("up*"))) == 3 or launcher.poll() is not None, 60)
    rig.machines[1].link("down")
    try:
        start = time.monotonic()
        _, err = launcher.communicate(timeout=60)
        assert time.monotonic() - start < SOON
        assert launcher.returncode != 0
        assert "node-b was lost: no sign of life for 10 s: the node or its network is down (rank 1)" in err, err
        rig.wait_until_empty()
    finally:
        rig.machines[1].link("up")


@pytest.mark.slow
def test_a_stall_is_one_report_that_names_rank_and_host(rig: Rig, tmp_path: Path) -> None:
    name = training(tmp_path, "if rank == 1: time.sleep(600)\nstep()")
    done = rig.launch("--hostfile", str(rig.hostfile()), "--env", "TIMEOUT=4", name)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.search(r"rank 1 \(node-b\) is at gather rest \(number \d+\), the others wait at reduce rest ", last), last
    rig.wait_until_empty()


@pytest.mark.slow  # test_a_cut_link_is_a_lost_node is the short form
def test_a_lost_node_is_waited_for_and_training_goes_on(rig: Rig, example: list[str], tmp_path: Path) -> None:
    """From the newest checkpoint; the losses are those of a run that nothing happened to."""
    more = ["--steps", "12", "--checkpoint", "ckpt", "--save-every", "2"]
    launcher = rig.popen("--hostfile", str(rig.hostfile(1, rig.machines[:2])), "--max-restarts", "1", *example, *more)
    wait_for(lambda: (tmp_path / "ckpt/step-4").exists() or launcher.poll() is not None, 60)
    rig.machines[1].kill_all()
    out, err = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, err
    assert "zero-launch: node-b was lost: its connection ended" in err and "restart 1 of 1 with node-a, node-b" in err
    assert re.search(r"continues after step \d+", out)
    undisturbed = rig.launch("--hostfile", str(rig.hostfile(1, rig.machines[:2])), *example, "--steps", "12")
    assert losses(out)[-1] == losses(undisturbed.stdout)[-1]
    rig.wait_until_empty()


@pytest.mark.slow
def test_three_nodes_become_two_and_three_again(rig: Rig, example: list[str], tmp_path: Path) -> None:
    """The loss goes on falling as if nothing had happened: the global batches are those of three nodes all the time."""
    more = ["--steps", "2000", "--checkpoint", "ckpt", "--save-every", "5"]
    launcher = rig.popen("--hostfile", str(rig.hostfile()), "--nnodes", "2:3", *example, *more)
    newest = tmp_path / "ckpt/latest"

    def step() -> int:
        return int(newest.read_text().strip().rpartition("-")[2]) if newest.exists() else 0

    try:
        wait_for(lambda: step() >= 10 or launcher.poll() is not None, 90)
        rig.machines[2].stop_sshd()
        rig.machines[2].kill_all()
        before = step()
        wait_for(lambda: step() >= before + 10 or launcher.poll() is not None, 90)
        rig.machines[2].start_sshd()
        wait_for(lambda: bool(rig.machines[2].ranks()) or launcher.poll() is not None, 180)
        before = step()
        wait_for(lambda: step() >= before + 10 or launcher.poll() is not None, 90)
    finally:
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130, err
    assert err.count("node-c was lost") == 1 and "going on with node-a, node-b\n" in err
    assert "node-c is back" in err and "going on with node-a, node-b, node-c\n" in err
    assert "2 of 3 ranks: gradient_accumulation_steps is 3 instead of 2, so that train_batch_size stays 12" in err, err
    assert out.count("continues after step") == 2
    losses_of_steps = [float(loss) for loss in re.findall(r"step +\d+/2000 +loss ([\d.]+)", out)]
    assert all(later < earlier + 0.3 for earlier, later in itertools.pairwise(losses_of_steps)), losses_of_steps
    steps = ["--hostfile", str(rig.hostfile()), *example, "--steps", str(step())]
    evaluated, undisturbed = rig.launch(*steps, "--checkpoint", "ckpt"), rig.launch(*steps, timeout=300)
    assert f"continues after step {step()}" in evaluated.stdout, evaluated.stderr
    assert float(losses(evaluated.stdout)[-1]) == pytest.approx(float(losses(undisturbed.stdout)[-1]), abs=0.02)
    rig.wait_until_empty()


def test_plain_commands_reach_the_hosts(rig: Rig) -> None:
    """The rig itself: names resolve, and every host has its own address."""
    done = [
        subprocess.run(
            ["ip", "netns", "exec", f"{rig.prefix}0", *rig.ssh.split(), machine.name, "echo $ZT $SSH_CONNECTION"],
            capture_output=True,
            text=True,
        ).stdout.split()
        for machine in rig.machines
    ]
    assert [(words[0], words[3]) for words in done] == [(machine.name, machine.address) for machine in rig.machines]
