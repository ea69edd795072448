"""Measures checkpoints beside the disk that holds them, as ratios of one run.

    python benchmarks/checkpoint.py export --gib 4      zero-export against cp, and its memory
    python benchmarks/checkpoint.py save                save_checkpoint against a plain write, async_save against both

Each command prints the machine, the disk's own speed for the same bytes, and the fraction that is reached. On both
sides, files are dropped from the page cache before they are read, and synced after they are written.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


# -- shared ---------------------------------------------------------------------------------------


def forget(*folders: Path) -> None:
    """Drop the files of ``folders`` from the page cache."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    """``cp`` and ``sync`` of every file."""
    target.mkdir()
    files = [file for file in source.iterdir() if file.is_file()]
    subprocess.run(["cp", *files, target], check=True)
    subprocess.run(["sync", *(target / file.name for file in files)], check=True)


def in_turns(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            found[name].append(run())
    return found


def show(found: dict[str, list[float]], nbytes: dict[str, float]) -> None:
    for name, times in found.items():
        median = statistics.median(times)
        spread = f"{min(times):.2f} to {max(times):.2f} s"
        print(f"{name:34}{median:8.2f} s{nbytes[name] / median / GIB:8.2f} GiB/s   ({spread})")


def machine(folder: Path) -> str:
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    load = os.getloadavg()[0]
    disk = subprocess.run(["df", "--output=source,fstype", folder], capture_output=True, text=True).stdout.split()[-2:]
    return (
        f"{model.partition(':')[2].strip()}, {os.cpu_count()} cores, load {load:.1f}, {' '.join(disk)}; "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


# -- export ---------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, gib: float, optimizer: bool) -> None:
    """Write a checkpoint as ``engine.save_checkpoint`` does, without the memory for the model: an embedding of an
    eighth, blocks for the rest, every tensor the same 64 MiB of noise over and over."""
    from zeroengine.checkpoint.dcp_save import save_files
    from zeroengine.checkpoint.directory import CheckpointFolder
    from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntry
    from zeroengine.checkpoint.manifest import FORMAT, Manifest
    from zeroengine.partition.boxes import Box

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    width = 4096
    noise = torch.randn(1 << 24).view(-1, width)
    rows = int(gib * GIB / 4 / width)
    shapes = {"embedding.weight": (rows // 8, width)}
    for i in range((rows - rows // 8) // width):
        shapes[f"blocks.{i}.weight"] = (width, width)
    entries = {}
    for name, shape in shapes.items():
        names = [MODEL + name]
        if optimizer:
            names += [f"{OPTIMIZER}{name}.{key}" for key in ("exp_avg", "exp_avg_sq")]
        for full in names:
            boxes = [(at, min(noise.shape[0], shape[0] - at)) for at in range(0, shape[0], noise.shape[0])]
            pieces = [(Box((at, 0), (count, width), at * width), noise[:count]) for at, count in boxes]
            entries[full] = StateEntry(shape, torch.float32, pieces)
    directory = CheckpointFolder(folder)
    directory.open()
    writing = directory.begin("big", 0)
    files = save_files(writing, entries, {}, {}, dist.group.WORLD, lambda n: None)
    facts: dict[str, object] = dict(step=1, stage=0, world_size=1, precision="float32", optimizer="AdamW", saved_at="")
    empty: dict[str, object] = dict(versions={}, counters={}, param_groups=[], loss_scaler={}, config={})
    directory.commit(writing, Manifest(format=FORMAT, tag="big", files=files, **facts, **empty), None)  # type: ignore
    directory.close()


# Not ru_maxrss, which remembers the process that this one was started by.
EXPORT = """
import sys
from zeroengine.cli.checkpoint_commands import export
code = export()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def export(options: argparse.Namespace) -> None:
    """zero-export in a process of its own against cp of the weights it writes, at each dtype."""
    here = options.dir / "zeroengine-benchmark"
    shutil.rmtree(here, ignore_errors=True)
    source, weights, copied, out = here / "runs", here / "weights", here / "copied", here / "out"
    try:
        make_checkpoint(source, options.gib, options.optimizer)
        peaks: list[float] = []

        def run(*more: str, to: Path = out) -> float:
            forget(source)
            shutil.rmtree(to, ignore_errors=True)
            command = [sys.executable, "-c", EXPORT, str(source), str(to), *more]
            start = time.perf_counter()
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            taken = time.perf_counter() - start
            peaks.append(int(done.stdout.split()[-1]) * 1024 / GIB)
            return taken

        def cp() -> float:
            forget(weights)
            taken = seconds(lambda: copy(weights, copied))
            shutil.rmtree(copied)
            return taken

        def import_alone() -> float:
            return seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"]))

        run(to=weights)
        cases = {
            "cp": cp,
            "zero-export": run,
            "zero-export --no-verify": lambda: run("--no-verify"),
            "zero-export --dtype bf16": lambda: run("--dtype", "bf16"),
            "python -c 'import torch'": import_alone,
        }
        found = in_turns(cases, options.rounds)
        total = sum(file.stat().st_size for file in weights.iterdir())
        print(machine(options.dir))
        state = "with Adam's moments" if options.optimizer else "weights alone"
        print(f"a checkpoint of {options.gib:g} GiB of fp32 weights, {state}; speeds are of weights read")
        show(found, dict.fromkeys(found, total) | {"python -c 'import torch'": 0})
        for kind, of in ("medians", statistics.median), ("fastest", min):
            base, start = of(found["cp"]), of(found["python -c 'import torch'"])
            for name in list(found)[1:-1]:
                taken = of(found[name])
                without = f"{base / (taken - start):.2f} without the start of Python"
                print(f"{name:34}{base / taken:8.2f} of cp's speed, by {kind}; {without}")
        print(f"peak memory {max(peaks):.2f} GiB")
    finally:
        shutil.rmtree(here, ignore_errors=True)


# -- save -----------------------------------------------------------------------------------------


def save(options: argparse.Namespace) -> None:
    """save_checkpoint on several ranks against one plain sequential write of as many bytes by one of them."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    arguments = ["rank", "--dir", str(options.dir), "--rounds", str(options.rounds), "--size", options.size]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, __file__, *arguments], env=environment, check=True)


def save_on_rank(options: argparse.Namespace) -> None:
    from workload import ADAMW, SIZES, Transformer, batches

    import zeroengine

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    here = options.dir / "zeroengine-benchmark"
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    engines = {
        name: zeroengine.initialize(
            Transformer(*SIZES[options.size], 32), config=settings | {"checkpoint": {"async_save": name == "async"}}
        )
        for name in ("sync", "async")
    }
    for engine in engines.values():
        engine.backward(engine(*next(batches(options.size, rank, 1, 32))))
        engine.step()
    chunk = torch.randn(1 << 22).numpy().tobytes()

    def clean() -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir()
            os.sync()
        dist.barrier()

    def save_at(name: str) -> float:
        clean()
        taken = seconds(lambda: engines[name].save_checkpoint(here, "benchmark"))
        engines[name].wait_for_checkpoint()
        return taken

    save_at("sync")  # the first one imports torch's part of it
    nbytes = sum(file.stat().st_size for file in here.rglob("*") if file.is_file())

    def plain() -> float:
        clean()
        start = time.perf_counter()
        if rank == 0:
            with open(here / "plain", "wb", buffering=0) as file:
                for _ in range(nbytes // len(chunk)):
                    file.write(chunk)
                os.fsync(file.fileno())
        dist.barrier()
        return time.perf_counter() - start

    def async_save() -> float:
        return save_at("async")

    async_save()
    cases = {"a plain write": plain, "save_checkpoint": lambda: save_at("sync"), "async_save, blocked": async_save}
    found = in_turns(cases, options.rounds)
    if rank == 0:
        print(machine(options.dir))
        print(f"{nbytes / GIB:.2f} GiB on {dist.get_world_size()} ranks, stage 3, with Adam's moments")
        show(found, dict.fromkeys(found, float(nbytes)))
        for what, of in (("medians", statistics.median), ("fastest", min)):
            base, sync, blocked = (of(times) for times in found.values())
            print(f"by {what}: save_checkpoint at {base / sync:.2f} of a plain write's speed")
            print(f"by {what}: async_save blocks for {blocked / sync:.2f} of save_checkpoint")
    for engine in engines.values():
        engine.close()
    clean()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--dir", type=Path, default=Path("/tmp"), help="a folder on the disk to measure")
    shared.add_argument("--rounds", type=int, default=3)
    add = commands.add_parser("export", parents=[shared], help=export.__doc__)
    add.add_argument("--gib", type=float, default=4, help="of fp32 weights")
    add.add_argument("--optimizer", action="store_true", help="the checkpoint has moments as well")
    add.set_defaults(run=export)
    for name, run in (("save", save), ("rank", save_on_rank)):
        help_of = {"help": run.__doc__} if run.__doc__ else {}
        add = commands.add_parser(name, parents=[shared], **help_of)
        add.add_argument("--size", default="m", help="of the model: xs, s (30 M parameters) or m (110 M)")
        add.add_argument("--ranks", type=int, default=2)
        add.set_defaults(run=run)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    options.run(options)


if __name__ == "__main__":
    main()
