"""Kills ranks and hosts of one run again and again, and checks afterwards that every step has the right bits.

The hosts are network namespaces (tests/launch/hosts.py). A host that is killed loses its processes, its folder in
memory and, half of the time, its cable.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import Screen
from tests.distributed.ranks import run_ranks
from tests.launch import hosts
from tests.launch.hosts import Machine, Rig
from tests.launch.processes import wait_for
from tests.recovery import killed_training
from tests.recovery.killed_training import POINTS
from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.checkpoint.manifest import Manifest
from zeroengine.errors import CheckpointError
from zeroengine.recovery.generations import HeldSnapshot, newest_first, newest_whole

# A lost host is taken back soon and as often as it is lost, since kills come by the minute here.
LAUNCH = """
from zeroengine.launch.cluster import restart_loop
restart_loop.STEADY_ROUND_S, restart_loop.EXCLUSION_S = 6.0, 0.0
from zeroengine.cli.zero_launch import main
raise SystemExit(main())
"""
KINDS = ("rank", "host", "copy holder", "copy holder at once")
STEPS = 1_000_000  # more than any run takes
GOES_ON_S = 60.0  # from a kill to the next step
SHM = Path("/dev/shm")


@dataclass
class Round:
    """What rank 0 has recorded of one round: the step it began with, and the loss and digest after each step."""

    world: int
    resumed: int
    text: str
    digest: str
    time: float
    steps: dict[int, tuple[str, str]] = field(default_factory=dict)
    first_step_time: float = float("inf")

    @property
    def last(self) -> int:
        return max(self.steps, default=self.resumed)


@dataclass
class Kill:
    """A kill, and what came of it."""

    kind: str
    point: str
    seconds: float
    source: str


@dataclass
class KilledRun:
    """One run that is killed many times.

    Attributes:
        fewer: Whether it goes on with the hosts that are left; otherwise it waits for the lost one.
        kinds: What is killed.
        memory: The configuration's folder of snapshots; otherwise that of the launcher.
    """

    rig: Rig
    folder: Path
    slots: int
    fewer: bool
    seed: int
    kinds: Sequence[str] = KINDS
    memory: str = ""
    every: float = 0.4
    memories: set[Path] = field(default_factory=set)
    memory_of: dict[str, Path] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "marks").mkdir()
        self.rng = random.Random(self.seed)
        count = len(self.rig.machines)
        words = [
            "--cpu", "--ssh", self.rig.ssh, "--hostfile", str(self.rig.hostfile(self.slots)),
            "--nnodes", f"{1 if self.fewer else count}:{count}", "--max-restarts", "100000",
            "--max-idle-rounds", "1000", "--node-timeout", "5", killed_training.__file__,
            str(self.folder), str(STEPS), str(self.every), str(self.seed), self.memory,
        ]  # fmt: skip
        environment = {"PYTHONPATH": str(hosts.ROOT), "OMP_NUM_THREADS": "1"}
        self.process = self.rig.popen(*words, command=[sys.executable, "-c", LAUNCH], environment=environment)
        self.screen = Screen(self.process)

    # -- looking ----------------------------------------------------------------------------------

    def rounds(self) -> list[Round]:
        rounds: dict[int, Round] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "record").read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    row = json.loads(line)
                    if "resumed" in row:
                        values = (row[key] for key in ("world", "resumed", "text", "digest", "time"))
                        rounds[row["round"]] = Round(*values)
                    elif row["round"] in rounds:
                        own = rounds[row["round"]]
                        own.steps[row["step"]] = row["loss"], row["digest"]
                        own.first_step_time = min(own.first_step_time, row["time"])
        return [rounds[key] for key in sorted(rounds)]

    def memory_folder(self, machine: Machine) -> Path | None:
        """The folder in memory of a host. Between two rounds it has no ranks that could tell."""
        for pid in machine.ranks():
            with contextlib.suppress(OSError):
                for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if word.startswith(b"ZEROENGINE_SNAPSHOT_FOLDER="):
                        path = Path(word.partition(b"=")[2].decode())
                        self.memories.add(path)
                        self.memory_of[machine.name] = path
                        return path
        return self.memory_of.get(machine.name)

    def held(self, without: Machine | None = None) -> list[Mapping[str, HeldSnapshot]]:
        """What each host has that is not killed."""
        holdings = []
        for machine in self.rig.machines:
            path = self.memory_folder(machine) if machine is not without else None
            held = {}
            if path is not None and path.is_dir():
                folder = CheckpointFolder(path)
                for tag in folder.tags():
                    # It may be removed meanwhile.
                    with contextlib.suppress(CheckpointError, OSError):
                        manifest = folder.manifest(tag)
                        names = frozenset(entry.name for entry in (path / tag).iterdir())
                        held[tag] = HeldSnapshot(manifest, names)
            holdings.append(held)
        return holdings

    def newest(self, without: Machine | None = None) -> Manifest | None:
        holdings = self.held(without)
        tag = newest_whole(holdings)
        return None if tag is None else newest_first(holdings)[tag]

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        def checked() -> bool:
            assert self.process.poll() is None, f"the run has ended: {self.report()}"
            return bool(condition())

        try:
            wait_for(checked, seconds)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}; seed {self.seed}, {self.kills[-3:]}\n{self.report()}") from None

    def report(self) -> str:
        return "\n".join(line for _, line in self.screen.lines[-150:])

    def wait_for_snapshot(self) -> None:
        """Wait until the round under way has one of its own, and a few steps."""

        def is_there() -> bool:
            rounds = self.rounds()
            if not rounds or len(rounds[-1].steps) < 3:
                return False
            manifest = self.newest()
            return manifest is not None and manifest.step > rounds[-1].resumed

        self.wait(is_there, GOES_ON_S, "no snapshot")

    # -- killing ----------------------------------------------------------------------------------

    def strike(self) -> None:
        """Kill something at a random moment, and wait until the run goes on."""
        rng, kind = self.rng, self.rng.choice(self.kinds)
        self.wait_for_snapshot()
        # A host that is back may have ended a round just now.
        self.wait(lambda: any(machine.ranks() for machine in self.rig.machines), GOES_ON_S, "no ranks")
        machine = rng.choice([machine for machine in self.rig.machines if machine.ranks()] or self.rig.machines)
        if kind == "rank":
            self.kill(kind, machine)
            return
        self.kill("host", machine)
        # With two hosts that may go on alone, the copy's holder is all that is left: nothing would remain.
        if kind.startswith("copy holder") and (len(self.rig.machines) > 2 or not self.fewer):
            order = self.rig.machines
            holder = order[(order.index(machine) + 1) % len(order)]
            if kind == "copy holder":
                self.wait_for_snapshot()
            self.kill(kind, holder)

    def at_point(self) -> str:
        """Wait for a random moment, and return which."""
        rng = self.rng
        point = rng.choice(("any", *POINTS, *POINTS))
        if point != "any":
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and not list((self.folder / "marks").glob(f"{point}.*")):
                time.sleep(0.002)
        time.sleep(rng.uniform(0, 1.0 if point == "any" else killed_training.LONGEST_S))
        # Where the ranks really are.
        points = {mark.name.split(".")[0] for mark in (self.folder / "marks").glob("*.*")}
        return "+".join(sorted(points)) or "outside"

    def kill(self, kind: str, machine: Machine) -> None:
        rng = self.rng
        cable = kind != "rank" and rng.random() < 0.3
        # "At once" hits a round that has no snapshot yet, or one that is still reading its own.
        point = "at once" if kind.endswith("at once") else self.at_point()
        memory = self.memory_folder(machine)
        expected = self.newest(without=machine if kind != "rank" else None)
        on_disk = self.newest_on_disk()
        shutil.rmtree(self.folder / "marks")
        (self.folder / "marks").mkdir()
        began = time.monotonic()
        if kind == "rank":
            pids = machine.ranks()
            if not pids:
                return
            os.kill(rng.choice(pids), signal.SIGKILL)
        else:
            if cable:
                machine.link("down")
            machine.kill_all()
            if memory is not None:
                shutil.rmtree(memory, ignore_errors=True)
                self.memory_of.pop(machine.name, None)
            if cable:
                self.screen.wait(f"{machine.name} was lost", began)
                machine.link("up")
        kind_text = kind + (", cable" if cable else "")
        self.kills.append(Kill(kind_text, point, float("nan"), "?"))
        self.wait(lambda: (r := self.rounds()) and began < r[-1].first_step_time < 1e18, GOES_ON_S, "does not go on")
        newer = next(r for r in self.rounds() if began < r.first_step_time < 1e18)
        source = re.match(r"resumed from the (snapshot|checkpoint)", newer.text)
        found = source[1] if source else "nothing"
        self.kills[-1] = Kill(kind_text, point, newer.first_step_time - began, found)
        least = on_disk if expected is None else expected.step
        assert newer.resumed >= least, f"{expected} was whole, and the run went on from {newer.text!r} {newer.resumed}"
        assert expected is None or found == "snapshot" or newer.resumed > least, f"{newer.text} in place of {expected}"

    def newest_on_disk(self) -> int:
        path = self.folder / "ckpt/latest"
        with contextlib.suppress(OSError, ValueError):
            return int(re.findall(r"\d+", path.read_text())[-1])
        return 0

    # -- the end ----------------------------------------------------------------------------------

    def end(self) -> None:
        """Let the run end, and check that nothing is left of it."""
        for machine in self.rig.machines:
            self.memory_folder(machine)
        (self.folder / "stop").touch()
        code = self.process.wait(60)
        assert code == 0, self.report()
        self.rig.wait_until_empty()
        wait_for(lambda: not any(path.exists() for path in self.memories), 10)

    def kill_launcher(self) -> None:
        """End what is left of a run, whatever has failed."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        (self.folder / "screen").write_text("\n".join(f"{when:.2f} {line}" for when, line in self.screen.lines))

    def check_bits(self) -> None:
        """Compare every step of every round with undisturbed runs that take the same turns."""
        rounds = self.rounds()
        # A trajectory is (the number of ranks, the trajectory and step that it began from).
        trajectories: list[tuple[int, int | None, int]] = []
        of_round: list[int] = []
        for index, own in enumerate(rounds):
            source = None
            if own.resumed:
                before = [i for i in range(index) if rounds[i].resumed < own.resumed <= rounds[i].last + 1]
                before += [i for i in range(index) if rounds[i].resumed == own.resumed and not rounds[i].steps]
                before.sort(reverse=True)
                known = [i for i in before if rounds[i].steps.get(own.resumed, ("", own.digest))[1] == own.digest]
                assert known, f"round {index} began from a state that no round has had: {own.text} {own.digest}"
                source = of_round[known[0]]
            if source is not None and trajectories[source][0] == own.world:
                of_round.append(source)
                continue
            key = own.world, source, own.resumed
            if key not in trajectories:
                trajectories.append(key)
            of_round.append(trajectories.index(key))
        folder = str(self.folder / "reference")
        for number, (world, source, step) in enumerate(trajectories):
            members = [own for own, of in zip(rounds, of_round, strict=True) if of == number]
            saves = {s: f"t{number}-{s}" for _, parent, s in trajectories if parent == number}
            load = None if source is None else f"t{source}-{step}"
            last = max([own.last for own in members] + list(saves))
            arguments = self.slots, folder, load, saves, last
            right = run_ranks(world, killed_training.reference, *arguments, timeout=300)[0]
            for own in members:
                assert own.digest == right[own.resumed][1], f"{own.text}: not the state of step {own.resumed}"
                for s, values in own.steps.items():
                    assert values == right[s], f"{own.text}: step {s} on {world} ranks is {values}, not {right[s]}"


def run_kills(
    folder: Path,
    num_hosts: int,
    slots: int,
    kills: int,
    *,
    seed: int,
    fewer: bool,
    kinds: Sequence[str] = KINDS,
    say: Callable[[Kill], None] = lambda kill: None,
) -> list[Kill]:
    """Kill so many times in one run, and check everything."""
    with hosts.build(num_hosts) as rig:
        run = KilledRun(rig, folder, slots, fewer, seed, kinds)
        try:
            while len(run.kills) < kills:
                before = len(run.kills)
                run.strike()
                for kill in run.kills[before:]:
                    say(kill)
            run.wait_for_snapshot()
            run.end()
        finally:
            run.kill_launcher()
    run.check_bits()
    return run.kills


def summary(kills: list[Kill]) -> str:
    return f"{len(kills)} kills: {Counter(kill.kind for kill in kills)}, {Counter(kill.source for kill in kills)}"
