"""Breaks runs on three hosts in every way that the launcher handles, and times the report and the recovery.

    sudo python benchmarks/faults.py                        # each fault once
    sudo python benchmarks/faults.py --repeat 30            # each 30 times, in one run unless it is elastic
    sudo python benchmarks/faults.py --start --repeat 5     # launcher start to first step, against torchrun

The hosts are network namespaces of this machine, each with an address and an sshd (tests/launch/hosts.py), so it needs
root. They train a tiny examples/train_lm.py and share its folder of checkpoints. After each fault the benchmark checks
that no process stays and that no checkpoint is lost.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.launch import hosts
from tests.launch.hosts import Rig
from tests.launch.processes import wait_for

TIMEOUT = 8  # seconds: comm.timeout_seconds
CONFIG = f"""
train_batch_size: 12
train_micro_batch_size_per_gpu: 2
optimizer: {{type: AdamW, params: {{lr: 0.001}}}}
zero_optimization: {{stage: 3}}
comm: {{timeout_seconds: {TIMEOUT}}}
"""
EXAMPLE = hosts.ROOT / "examples/train_lm.py"
TINY = "--layers 1 --width 16 --heads 2 --context 16 --eval-batches 1 --sample-bytes 4".split()
FUTURE = "import time; now = time.time; time.time = lambda: now() + 3600\n"


class Screen:
    """Records the lines that a process prints, with their times."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._more = threading.Condition()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._more:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self._more.notify_all()

    def wait(self, pattern: str, after: float = 0.0) -> float:
        """Return the time of the first line that matches the pattern, `after` a time."""
        return self.wait_for_line(pattern, after)[0]

    def wait_for_line(self, pattern: str, after: float, seconds: float = 120.0) -> tuple[float, str]:
        deadline = time.monotonic() + seconds
        with self._more:
            while True:
                for when, line in self.lines:
                    if when > after and re.search(pattern, line):
                        return when, line
                if not self._more.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(
                        f"no {pattern!r} in {seconds} s:\n" + "\n".join(line for _, line in self.lines)
                    )


@dataclass
class Case:
    """A run that a fault breaks."""

    rig: Rig
    folder: Path
    screen: Screen

    def newest(self) -> int:
        path = self.folder / "ckpt/latest"
        return int(path.read_text().strip().rpartition("-")[2]) if path.exists() else 0


@dataclass(frozen=True)
class Fault:
    """One way to break a run.

    Attributes:
        options: of zero-launch.
        strike: breaks it; nothing for what is broken from the start.
        told: a pattern of the report.
        mend: what an operator does once it is told.
        starts: whether a run that is broken from the start goes on all the same.
    """

    name: str
    options: str
    strike: Callable[[Case], None] | None
    told: str
    mend: Callable[[Case], None] | None = None
    starts: bool = True


def fill(case: Case) -> None:
    with open(case.folder / "ckpt/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            pass


def break_ssh(case: Case) -> None:
    for pid in hosts.pids_in(f"{case.rig.prefix}0"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0] == b"ssh" and b"node-b" in words:
            os.kill(pid, signal.SIGKILL)


FAULTS = (
    Fault(
        "a rank killed",
        "--max-restarts 1",
        lambda c: os.kill(c.rig.machines[1].ranks()[0], signal.SIGKILL),
        r"rank 1 \(node-b\) failed",
    ),
    Fault("a node's processes killed", "--max-restarts 1", lambda c: c.rig.machines[1].kill_all(), "node-b was lost"),
    Fault(
        "a node's processes killed, elastic",
        "--nnodes 2:3",
        lambda c: c.rig.machines[1].kill_all(),
        "node-b was lost",
    ),
    Fault("ssh killed on the launcher's side", "--nnodes 2:3", break_ssh, "node-b was lost: its connection ended"),
    Fault(
        "a link cut",
        "--nnodes 2:3",
        lambda c: c.rig.machines[1].link("down"),
        "node-b was lost: no sign of life",
        lambda c: c.rig.machines[1].link("up"),
    ),
    Fault(
        "the first node's link cut",
        "--nnodes 2:3",
        lambda c: c.rig.machines[0].link("down"),
        "node-a was lost: no sign of life",
        lambda c: c.rig.machines[0].link("up"),
    ),
    Fault(
        "the disk full",
        "--max-restarts 1",
        fill,
        "the disk( of ckpt)? is full",
        lambda c: (c.folder / "ckpt/filler").unlink(),
    ),
    Fault(
        "a straggler",
        "--max-restarts 1",
        lambda c: os.kill(c.rig.machines[2].ranks()[0], signal.SIGSTOP),
        r"rank 2 \(node-c\)",
    ),
    Fault(
        "ssh refused on one of three",
        "",
        None,
        r"node-c +ssh: connect to host node-c port 22: Connection refused",
        starts=False,
    ),
    Fault("ssh refused on one of three, elastic", "--nnodes 2:3", None, "node-c is left out: .*Connection refused"),
    Fault("a host name that does not resolve", "", None, "node-x +ssh: Could not resolve hostname", starts=False),
    Fault("a clock an hour off", "", None, "the clock of node-b is 1.0 h ahead of this one"),
)


Times = tuple[float, float | None]  # seconds from the fault to its report, and to recovery where there is one


def struck(fault: Fault, case: Case, repeat: int) -> list[Times]:
    """Break one run repeatedly. After each recovery a host has at most one rank, and no checkpoint is lost."""
    found: list[Times] = []
    for _ in range(repeat):
        wait_for_steps(case, case.newest() + 4)
        before, began = case.newest(), time.monotonic()
        assert fault.strike is not None
        fault.strike(case)
        told = case.screen.wait(fault.told, began)
        if fault.mend is not None:
            fault.mend(case)
        resumed, line = case.screen.wait_for_line("continues after step", told)
        assert int(line.rpartition("step ")[2].split()[0]) >= before, (
            f"a checkpoint was lost: {before}, and then {line}"
        )
        found.append((told - began, resumed - began))
        wait_for_steps(case, case.newest() + 2)
        ranks = [len(machine.ranks()) for machine in case.rig.machines]
        assert max(ranks) == 1, f"ranks on the hosts: {ranks}"
    return found


def broken(fault: Fault, case: Case, began: float) -> Times:
    """Start a run that has the fault from its beginning."""
    told = case.screen.wait(fault.told, began) - began
    if not fault.starts:
        assert case.screen.process.wait(30) == 2, "a run that cannot start is refused"
        return told, None
    wait_for_steps(case, 5)
    return told, time.monotonic() - began


def run(fault: Fault, folder: Path, repeat: int) -> tuple[list[Times], float]:
    """Return the times of each repetition, and the seconds that the last process outlived the launcher."""
    environments = {}
    if "clock" in fault.name:
        (folder / "future").mkdir(exist_ok=True)
        (folder / "future/sitecustomize.py").write_text(FUTURE)
        environments["node-b"] = {"PYTHONPATH": str(folder / "future")}
    with hosts.build(3, environments) as rig:
        hostfile = rig.hostfile(1)
        if fault.told.startswith("node-x"):
            hostfile.write_text(hostfile.read_text() + "node-x slots=1\n")
        if "refused" in fault.told:
            rig.machines[2].stop_sshd()
        options = fault.options.replace("--max-restarts 1", f"--max-restarts {repeat}").split()
        example = [str(EXAMPLE), "--text", "text", *TINY, "--steps", "1000000"]
        words = [*options, "--config", "zero.yaml", *example, "--checkpoint", "ckpt", "--save-every", "5"]
        found: list[Times] = []
        slowest = 0.0
        # An elastic run puts a node aside that is lost twice within ten minutes.
        in_one_run = repeat if fault.strike and "--nnodes" not in fault.options else 1
        for _ in range(repeat // in_one_run):
            began = time.monotonic()
            case = Case(rig, folder, Screen(rig.popen("--hostfile", str(hostfile), *words)))
            try:
                found += struck(fault, case, in_one_run) if fault.strike else [broken(fault, case, began)]
            finally:
                case.screen.process.send_signal(signal.SIGINT)
                case.screen.process.wait(60)
            ended = time.monotonic()
            rig.wait_until_empty(30)
            slowest = max(slowest, time.monotonic() - ended)
            clear(folder / "ckpt")
        return found, slowest


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def wait_for_steps(case: Case, step: int) -> None:
    wait_for(lambda: case.newest() >= step or case.screen.process.poll() is not None, 90)
    assert case.screen.process.poll() is None, "\n".join(line for _, line in case.screen.lines)


def faults(only: Sequence[str], repeat: int) -> None:
    print(f"| fault | options | report after | resumed after | nothing left after | runs |\n|{'---|' * 6}", flush=True)
    for fault in FAULTS:
        if any(part in fault.name for part in only):
            found, empty = attempt(fault, repeat)
            resumed = [seconds for _, seconds in found if seconds is not None]
            cells = [fault.name, f"`{fault.options}`" if fault.options else "", spread([told for told, _ in found])]
            cells += [spread(resumed) if resumed else "refused", f"{empty:.1f} s", str(repeat)]
            print("| " + " | ".join(cells) + " |", flush=True)


def attempt(fault: Fault, repeat: int) -> tuple[list[Times], float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ckpt").mkdir()
        hosts.run("mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", folder / "ckpt")
        (folder / "zero.yaml").write_text(CONFIG)
        (folder / "text").write_bytes(b"".join(b"%d bottles of beer on the wall\n" % n for n in range(500)))
        home = Path.cwd()
        os.chdir(folder)
        try:
            return run(fault, folder, repeat)
        finally:
            os.chdir(home)
            hosts.run("umount", folder / "ckpt")


def spread(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.1f} s"
    return f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


def start(repeat: int) -> None:
    """Time two nodes from the launcher's start to the first step's end, in turn with torchrun over the same ssh."""
    script = """
import os, sys, torch, zeroengine
model = torch.nn.Linear(16, 16)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
engine = zeroengine.initialize(model, config=config)
engine.backward(engine(torch.ones(1, 16)).square().mean())
engine.step()
print("first step", flush=True)
"""
    found: dict[str, list[float]] = {"zero-launch": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as name, hosts.build(2) as rig:
        os.chdir(name)
        Path("train.py").write_text(script)
        for _ in range(repeat):
            began = time.monotonic()
            screen = Screen(rig.popen("--hostfile", str(rig.hostfile(1)), "train.py"))
            found["zero-launch"].append(screen.wait("first step", began) - began)
            screen.process.wait(30)
            began = time.monotonic()
            screens = [Screen(torchrun(rig, node)) for node in range(2)]
            found["torchrun"].append(screens[0].wait("first step", began) - began)
            for other in screens:
                other.process.wait(60)
    for launcher, seconds in found.items():
        print(f"{launcher:<12} {spread(seconds)}")
    ratio = statistics.median(found["zero-launch"]) / statistics.median(found["torchrun"])
    print(f"zero-launch takes {ratio:.2f} times as long as torchrun, median of {repeat}")


def torchrun(rig: Rig, node: int) -> subprocess.Popen[str]:
    """Return the commands that a user would type: torchrun over ssh on each node, side by side."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    address = rig.machines[0].address
    command += [
        f"--rdzv-endpoint={address}:29400",
        f"--rdzv-id={os.getpid()}",
        f"--local-addr={rig.machines[node].address}",
    ]
    path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}:{hosts.ROOT}"
    line = f"cd {os.getcwd()} && env {path} GLOO_SOCKET_IFNAME=eth0 {shlex.join(command)} train.py"
    return rig.popen(rig.machines[node].name, line, command=rig.ssh.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each")
    parser.add_argument("--only", action="append", help="faults whose name contains this; may be repeated")
    parser.add_argument("--start", action="store_true", help="time the start instead")
    options = parser.parse_args()
    if reason := hosts.why_not():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # taking the hosts down
    import torch

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}\n"
    )
    if options.start:
        start(options.repeat)
    else:
        faults(options.only or [""], options.repeat)


if __name__ == "__main__":
    main()
