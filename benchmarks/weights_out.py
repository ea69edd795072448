"""Measures how fast whole weights leave a model that is partitioned over ranks, and what memory that takes.

    pip install .[bench]
    python benchmarks/weights_out.py [--size b] [--ranks 2] [--rounds 3] [--repeats 3] [--bucket 64MiB]

Rank 0 copies each tensor into the memory of a second process (`process_vm_writev`), as soon as it has it. The model is
in bf16 and its parameters are partitioned over all ranks. The engines take turns:

- zeroengine: `engine.stream_weights()`, for rank 0 alone and for all ranks, and with `since` when a tenth of the blocks
  has changed
- DeepSpeed: a loop over parameters with `GatheredParameters`, stage 3
- FSDP2: a loop over `full_tensor()`

The bytes that arrive are compared by their digest. Peaks are resident memory above that before the transfer; pages that
ranks share count on each.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.machine import describe_machine
from benchmarks.workload import SIZES, Transformer

ENGINES = ["zeroengine", "deepspeed", "fsdp2"]
RECEIVER = """
import ctypes, sys, torch
from zeroengine import ops
values = torch.zeros(int(sys.argv[1]), dtype=torch.uint8)
print(values.data_ptr(), flush=True)
for line in sys.stdin:
    print(int(ops.digest(values)), flush=True)
"""


class IoVec(ctypes.Structure):
    """The struct `iovec` of Linux."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Receiver:
    """Another process with memory for the weights."""

    def __init__(self, nbytes: int) -> None:
        command = [sys.executable, "-c", RECEIVER, str(nbytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._address, self._libc = int(self._process.stdout.readline()), ctypes.CDLL(None, use_errno=True)

    def copy(self, values: torch.Tensor, offset: int) -> None:
        """Copy values to a byte of the memory there."""
        start, nbytes = values.data_ptr(), values.nbytes
        done = 0
        while done < nbytes:
            own, other = IoVec(start + done, nbytes - done), IoVec(self._address + offset + done, nbytes - done)
            written = self._libc.process_vm_writev(
                self._process.pid, ctypes.byref(own), ctypes.c_ulong(1), ctypes.byref(other), ctypes.c_ulong(1), 0
            )
            if written <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done += written

    def digest(self) -> int:
        """Return the digest of all bytes there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def tensors_of_zeroengine(model: nn.Module, bucket: str, ranks: Any, **options: Any) -> Callable[[], Iterator[Any]]:
    """Return what yields the tensors of the model by a stream."""
    import zeroengine

    engine = zeroengine.engine_of(model)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        with engine.stream_weights(ranks=ranks, bucket_bytes=bucket, **options) as stream:
            yield from stream

    return tensors


def cases(engine: str, model: nn.Module, args: argparse.Namespace) -> dict[str, Callable[[], Iterator[Any]]]:
    """Partition the model, and return what yields its tensors with their names."""
    if engine == "zeroengine":
        import zeroengine

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
        return {
            "zeroengine, rank 0": tensors_of_zeroengine(model, args.bucket, 0),
            "zeroengine, all ranks": tensors_of_zeroengine(model, args.bucket, "all"),
        }
    if engine == "deepspeed":
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
        deepspeed.initialize(model=model, config=config)

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, param in model.named_parameters():
                with deepspeed.zero.GatheredParameters([param]):
                    yield name, param.data

        return {"deepspeed": gathered}
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)

    def full_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in model.named_parameters():
            yield name, param.full_tensor()  # type: ignore[attr-defined]

    return {"fsdp2": full_tensors}


def resident(key: str) -> int:
    """Return a size of this process in bytes, by its key in `/proc/self/status`."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) * 1024


def work(args: argparse.Namespace) -> None:
    """Run one rank of one engine. Rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    layers, width, heads, vocab = SIZES[args.size]
    model = Transformer(layers, width, heads, vocab, 1024)
    sizes = {name: param.numel() * 2 for name, param in model.named_parameters()}
    offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    is_sender = dist.get_rank() == 0
    receiver = Receiver(sum(sizes.values())) if is_sender else None
    torch.set_default_dtype(torch.float32)
    figures: dict[str, Any] = {}
    for case, tensors in cases(args.engine, model, args).items():
        seconds, peak = [], 0
        for _ in range(args.repeats):
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            before, start = resident("VmRSS"), time.perf_counter()
            for name, values in tensors():
                if receiver is not None:
                    receiver.copy(values, offsets[name])
                # A consumer that keeps no tensor longer than it needs it.
                del values
            dist.barrier()
            seconds.append(time.perf_counter() - start)
            peak = max(peak, resident("VmHWM") - before)
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        digest = None if receiver is None else receiver.digest()
        figures[case] = {"seconds": seconds, "peaks_mib": [round(p / 2**20) for p in peaks], "digest": digest}
    if receiver is not None:
        receiver.close()
        print(json.dumps({"gib": sum(sizes.values()) / 2**30, "cases": figures}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="b", help="b has a billion parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="transfers in a run")
    parser.add_argument("--bucket", default="64MiB", help="the size of zeroengine's buckets")
    parser.add_argument("--only", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return work(args)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {}
    digests: set[int] = set()
    gib = 0.0
    for _ in range(args.rounds):
        for engine in args.only:
            launch = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node",
                str(args.ranks),
            ]
            options = ["--size", args.size, "--repeats", str(args.repeats), "--bucket", args.bucket, "--engine", engine]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1"}
            env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
            done = subprocess.run([*launch, __file__, *options], env=env, capture_output=True, text=True, timeout=900)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
            result = json.loads(lines[-1])
            gib = result["gib"]
            for case, figures in result["cases"].items():
                # The first transfer of a run takes new memory.
                seconds.setdefault(case, []).append(statistics.median(figures["seconds"][1:] or figures["seconds"]))
                before = peaks.get(case, [0] * args.ranks)
                peaks[case] = [max(pair) for pair in zip(before, figures["peaks_mib"], strict=True)]
                digests.add(figures["digest"])
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if len(digests) != 1:
        raise SystemExit(f"the engines sent different values: {digests}")
    fastest = min((statistics.median(s) for case, s in seconds.items() if not case.startswith("zeroengine")), default=0)
    text = f"size {args.size}, {gib:.2f} GiB in bf16, {args.ranks} ranks, buckets of {args.bucket}"
    print(f"{describe_machine()}; {text}")
    print(
        f"{'':<24} {'seconds':>8} {'min':>6} {'max':>6} {'GiB/s':>6} {'of the faster peer':>19}  peak MiB of each rank"
    )
    for case, values in seconds.items():
        median = statistics.median(values)
        ratio = f"{fastest / median:.1f}x" if fastest else ""
        figures = f"{median:>8.2f} {min(values):>6.2f} {max(values):>6.2f} {gib / median:>6.2f} {ratio:>19}"
        print(f"{case:<24} {figures}  {' '.join(map(str, peaks[case]))}")


if __name__ == "__main__":
    main()
