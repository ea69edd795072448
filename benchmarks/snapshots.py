"""Measures snapshots in the memory of hosts: what they cost a run, and what they save it when a rank dies.

    sudo python benchmarks/snapshots.py cost                # 4 ranks on two hosts with 512 MB of states each
    sudo python benchmarks/snapshots.py kill --repeat 5     # from a kill to the next step, beside the disk

The hosts are network namespaces of this machine (tests/launch/hosts.py), so it needs root. All ranks share its cores
and its memory, which hosts of their own would not. `cost` needs about 26 times --mb of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MB = 10**6
BYTES_PER_PARAMETER = 12  # float32: the weight and two moments
NUM_HOSTS, SLOTS = 2, 2
RANKS = NUM_HOSTS * SLOTS
WIDTH = 1024
FAR = float("inf")


# -- the training, under zero-launch --------------------------------------------------------------


def train(folder: Path, mb: int, every: float, rounds: int) -> None:
    """Train, and write what each rank measures into the folder."""
    started = time.monotonic() - _age_s()
    import torch

    import zeroengine

    imported = time.monotonic()
    rank = int(os.environ["RANK"])
    layers = max(1, round(mb * MB * RANKS / BYTES_PER_PARAMETER / WIDTH**2))
    with zeroengine.meta_init():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "snapshots": {"every_seconds": every or None},
    }
    engine = zeroengine.initialize(model, config=config)
    initialized = time.monotonic()
    resumed = engine.resume(folder / "ckpt")
    loaded = time.monotonic()

    def step() -> float:
        began = time.perf_counter()
        loss = engine(torch.ones(4, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        return time.perf_counter() - began

    step()
    stepped = time.monotonic()
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if not rounds:
        assert resumed or not restart
        phases = {"start": started, "import": imported, "initialize": initialized, "resume": loaded, "step": stepped}
        _write(folder / f"phases.{restart}.{rank}", phases)
    if rounds:
        _write(folder / f"cost.{rank}", measure(engine, step, rounds))
        engine.close()
        return
    if not every:
        engine.save_checkpoint(folder / "ckpt")
    memory = Path(os.environ["ZEROENGINE_SNAPSHOT_FOLDER"])
    while not (folder / "stop").exists():
        step()
        # From here on a kill may come.
        if rank == 0 and (not every or any(memory.glob("step-*"))):
            (folder / f"ready.{restart}").touch()
    os._exit(0)
    os._exit(0)


def measure(engine: Any, step: Any, rounds: int) -> dict[str, Any]:
    """Time steps without a snapshot and beside one, in turns; ranks take the same turns."""
    import torch
    import torch.distributed as dist

    from zeroengine.recovery.server import PeerConnection

    snapshots = engine._parts.loop.snapshots
    sent, pauses, durations, thread_cpu = [0], [], [], []
    put, take, keep = PeerConnection.put, engine._checkpoints.take_snapshot, snapshots._keep

    def counted_put(self: Any, tag: str, path: Path) -> None:
        sent[0] += path.stat().st_size
        put(self, tag, path)

    def timed_take(*arguments: Any) -> None:
        began = time.perf_counter()
        take(*arguments)
        pauses.append(time.perf_counter() - began)

    def timed_keep(*arguments: Any) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        keep(*arguments)
        thread_cpu.append(time.thread_time() - cpu_began)
        durations.append(time.perf_counter() - began)

    PeerConnection.put, engine._checkpoints.take_snapshot = counted_put, timed_take  # type: ignore[method-assign]
    snapshots._keep = timed_keep
    without: list[float] = []
    beside: list[list[float]] = []
    extra_cpu: list[float] = []
    most = 0
    for turn in range(rounds + 1):
        snapshots._next_time = FAR
        cpu = [time.process_time()]
        plain = [step() for _ in range(4)]
        cpu.append(time.process_time())
        snapshots._next_time = 0.0
        busy: list[float] = []
        done = torch.zeros(1)
        while len(durations) <= turn or not done:
            busy.append(step())
            most = max(most, _used(snapshots._folder.path))
            if len(pauses) > turn:
                snapshots._next_time = FAR
            # The slowest rank ends the turn.
            done = torch.tensor([float(len(durations) > turn)])
            dist.all_reduce(done, dist.ReduceOp.MIN)
        cpu.append(time.process_time())
        # The first snapshot takes new memory, which later ones have.
        if turn:
            extra_cpu.append(cpu[2] - cpu[1] - len(busy) * (cpu[1] - cpu[0]) / len(plain))
            without += plain
            beside.append(busy)
    return {
        "without": without, "beside": beside, "pauses": pauses, "durations": durations,
        "thread_cpu": thread_cpu, "extra_cpu": extra_cpu,
        "sent": sent[0] / (rounds + 1), "folder": most, "copy": snapshots.copy_bytes,

    }  # fmt: skip


def _used(path: Path) -> int:
    total = 0
    for name, _, files in os.walk(path):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(name, file)).st_blocks * 512
    return total


def _age_s() -> float:
    """The seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _write(path: Path, facts: dict[str, Any]) -> None:
    path.with_suffix(path.suffix + ".new").write_text(json.dumps(facts))
    path.with_suffix(path.suffix + ".new").rename(path)


# -- the launcher's side --------------------------------------------------------------------------


@contextlib.contextmanager
def running(folder: Path, mb: int, every: float, rounds: int) -> Iterator[tuple[Any, Any]]:
    """A run on the hosts, and what it prints."""
    from benchmarks.faults import Screen
    from tests.launch import hosts

    with hosts.build(NUM_HOSTS) as rig:
        words = ["--hostfile", str(rig.hostfile(SLOTS)), "--max-restarts", "1000", __file__]
        words += ["train", str(folder), "--mb", str(mb), "--every", str(every), "--rounds", str(rounds)]
        process = rig.popen(*words, environment={"PYTHONPATH": str(ROOT)})
        screen = Screen(process)
        try:
            yield rig, screen
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def cost(mb: int, rounds: int) -> None:
    from zeroengine.memory.snapshot_bytes import snapshot_memory_bytes

    with tempfile.TemporaryDirectory() as name, running(Path(name), mb, 1e6, rounds) as (_, screen):
        code = screen.process.wait(1800)
        lines = "\n".join(line for _, line in screen.lines)
        assert code == 0, lines
        print("\n".join(line for _, line in screen.lines if "no snapshot" in line))
        facts = [json.loads((Path(name) / f"cost.{rank}").read_text()) for rank in range(RANKS)]
    plain = statistics.median(facts[0]["without"])
    turns = facts[0]["beside"]
    extra = statistics.median(sum(turn) - len(turn) * plain for turn in turns)
    pause = [max(row["pauses"][turn + 1] for row in facts) for turn in range(rounds)]
    whole = [max(row["durations"][turn + 1] for row in facts) for turn in range(rounds)]

    def cpu_of(key: str, first: int) -> list[float]:
        return [sum(row[key][turn + first] for row in facts) for turn in range(rounds)]

    # The states of one rank, as the run itself has copied them.
    nbytes = facts[0]["copy"]
    memory = sum(facts[host * SLOTS]["folder"] for host in range(NUM_HOSTS)) + sum(row["copy"] for row in facts)
    planned = RANKS * snapshot_memory_bytes(nbytes, 1)
    rows = [
        ("states of a rank", f"{nbytes / MB:.0f} MB"),
        ("a step without a snapshot", f"{plain:.2f} s"),
        ("a step beside one", f"{statistics.median(t for turn in turns for t in turn):.2f} s"),
        ("the pause of training", f"{spread(pause)}, {100 * statistics.median(pause) / plain:.1f} % of a step"),
        ("a snapshot, from the copy to the end", spread(whole)),
        ("CPU seconds of its threads, all ranks", spread(cpu_of("thread_cpu", 1))),
        ("CPU seconds of the ranks beyond those of their steps", spread(cpu_of("extra_cpu", 0))),
        ("a run loses for each", f"{extra:.2f} s, {100 * extra / 60:.1f} % at every_seconds: 60"),
        ("sent by a rank", f"{facts[-1]['sent'] / MB:.1f} MB, planned {nbytes / MB:.1f} MB"),
        ("memory of both hosts", f"{memory / MB:.0f} MB, planned {planned / MB:.0f} MB"),
    ]
    print(f"| {RANKS} ranks on {NUM_HOSTS} hosts, {rounds} snapshots | |\n|---|---|")
    for title, value in rows:
        print(f"| {title} | {value} |")


def kill(mb: int, repeat: int) -> None:
    """From a kill to the next step, and the seconds of each phase of the slowest rank."""
    print("| resumed from | kill to step | told | start | import | initialize | resume | first step |")
    print("|---" * 8 + "|", flush=True)
    for source, every in (("snapshot", 2.0), ("disk", 0.0)):
        rows: list[list[float]] = []
        with tempfile.TemporaryDirectory(dir=".") as name, running(Path(name).resolve(), mb, every, 0) as (rig, screen):
            folder = Path(name).resolve()
            for number in range(1, repeat + 1):
                wait(folder / f"ready.{number - 1}", screen)
                time.sleep(3)
                for path in (folder / "ckpt").rglob("*.distcp"):
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.monotonic()
                os.kill(rig.machines[1].ranks()[0], signal.SIGKILL)
                told = screen.wait(f"restart {number} of", began)
                facts = []
                for rank in range(RANKS):
                    wait(folder / f"phases.{number}.{rank}", screen)
                    facts.append(json.loads((folder / f"phases.{number}.{rank}").read_text()))
                times = [began, told, *(max(f[key] for f in facts) for key in facts[0])]
                rows.append([times[-1] - began, *(b - a for a, b in itertools.pairwise(times))])
            (folder / "stop").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                screen.process.wait(30)
        print(f"| {source} | " + " | ".join(spread(column) for column in zip(*rows, strict=True)) + " |", flush=True)


def wait(path: Path, screen: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline or screen.process.poll() is not None:
            raise AssertionError(f"no {path.name}:\n" + "\n".join(line for _, line in screen.lines))
        time.sleep(0.02)


def spread(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.2f} s"
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "kill", "train"))
    parser.add_argument("folder", nargs="?", type=Path, help="of train, which the others start")
    parser.add_argument("--mb", type=int, default=512, help="of states of each rank, in units of 10^6 bytes")
    parser.add_argument("--every", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5, help="snapshots")
    parser.add_argument("--repeat", type=int, default=3, help="kills")
    options = parser.parse_args()
    if options.what == "train":
        train(options.folder, options.mb, options.every, options.rounds)
        return
    from tests.launch import hosts

    if reason := hosts.why_not():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # taking the hosts down
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.python_version()}\n")
    if options.what == "cost":
        cost(options.mb, options.rounds)
    else:
        kill(options.mb, options.repeat)


if __name__ == "__main__":
    main()
