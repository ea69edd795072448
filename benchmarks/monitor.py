"""What the monitor costs, and whether the exposed waits that it reports explain what communication costs.

    python benchmarks/monitor.py [--size s] [--ranks 2] [--stages 0 2 3] [--steps 30] [--transport auto]

The ranks train three engines in turn, a step of each: one with the monitor, one without, and the floor, an engine of
each rank alone, which does the same local work at the same time and sends nothing. At stages 1 to 3 a rank updates its
share of the parameters, and the floor all of them, so the rest of its update is subtracted. Times are medians over the
steps; "explained" is the share of the median of (monitored engine - floor), step by step, that the record's gather and
reduce add up to, and the next column what the forward and the backward take longer than the floor's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import zeroengine
from benchmarks.workload import ADAMW, CLIP, SIZES, Transformer, batches
from zeroengine.engine.reports import Reports
from zeroengine.monitor.timer import Timer

WARMUP = 4


def make(options: argparse.Namespace, stage: int, folder: str | None, group: Any = None) -> zeroengine.Engine:
    torch.manual_seed(0)
    model = Transformer(*SIZES[options.size], options.context)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
        "comm": {"transport": options.transport},
        "monitor": {"enabled": folder is not None, "folder": folder},
    }
    return zeroengine.initialize(model, None, config, process_group=group)


def train(rank: int, options: argparse.Namespace, port: int, folder: str, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    # Subnormal numbers slow a CPU down several times. The engines train on different data, which makes more or fewer.
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rank_groups = [dist.new_group([number]) for number in range(options.ranks)]
    for stage in options.stages:
        folders = [f"{folder}/stage{stage}", f"{folder}/floor{stage}-{rank}"]
        engines = {
            "monitored": make(options, stage, folders[0]),
            "plain": make(options, stage, None),
            "floor": make(options, min(stage, 2), folders[1], rank_groups[rank]),
        }
        data = {name: batches(options.size, rank, options.batch, options.context) for name in engines}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        thread = next(t for t in threading.enumerate() if t.name == "zeroengine-monitor")
        host: list[float] = []
        count_host_seconds(engines["monitored"], host)
        spans = count_spans(engines["monitored"])
        for _ in range(WARMUP + options.steps):
            for name, engine in engines.items():
                batch = next(data[name])
                dist.barrier()
                begin = time.perf_counter()
                engine.backward(engine(*batch))
                engine.step()
                seconds[name].append(time.perf_counter() - begin)
        num_steps = WARMUP + options.steps
        thread_us = thread_cpu_seconds(thread) / num_steps * 1e6
        bytes_sent = 8 * len(engines["monitored"]._parts.reports.monitor._collector._layout.names)
        for engine in engines.values():
            engine.close()
        floor = list(map(json.loads, Path(folders[1], "steps.jsonl").read_text().splitlines()))
        # The monitor's own clock covers the barrier and the other engines as well, so only the floor's update is taken.
        update = statistics.median(record["split"]["update"] for record in floor[WARMUP:])
        row = {
            **{name: seconds[name][WARMUP:] for name in engines},
            "floor_compute": [record["split"]["forward"] + record["split"]["backward"] for record in floor[WARMUP:]],
            "surplus_update": update * (1 - 1 / options.ranks) if stage else 0.0,
            "host_us": statistics.median(host) * 1e6,
            "spans": spans[0] / num_steps,
            "thread_us": thread_us,
            "bytes_sent": bytes_sent,
        }
        answers.put((rank, row))
    dist.barrier()
    dist.destroy_process_group()


def count_host_seconds(engine: Any, host: list[float]) -> None:
    """Append the seconds that each step spends in the monitor's own calls, other than spans."""
    reports: Reports = engine._parts.reports
    assert reports.monitor is not None
    pending = [0.0]

    def timed(call: Any, ends: bool) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            pending[0] += time.perf_counter() - begin
            if ends:
                host.append(pending[0])
                pending[0] = 0.0
            return result

        return run

    calls = [(reports.monitor, "end_step"), (reports, "loss_noted"), (reports, "take_loss")]
    for part, name in [*calls, (reports.monitor.forwards, "begin"), (reports.monitor.forwards, "end")]:
        setattr(part, name, timed(getattr(part, name), name == "end_step"))


def count_spans(engine: Any) -> list[int]:
    timer: Timer = engine._parts.reports.timer
    count, push = [0], timer._push

    def counted(slot: int) -> int:
        count[0] += 1
        return push(slot)

    timer._push = counted  # type: ignore[method-assign]
    return count


def thread_cpu_seconds(thread: threading.Thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def span_cost(enabled: bool) -> float:
    """Return the seconds of one empty span."""
    timer = Timer(["unit"], torch.device("cpu") if enabled else None)
    rounds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(2000):
            with timer.span("gather", "unit", "gather"):
                pass
        rounds.append((time.perf_counter() - begin) / 2000)
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--transport", choices=("auto", "shm", "gloo"), default="auto")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        processes = [
            context.Process(target=train, args=(rank, options, port, folder, answers)) for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        print_head(options)
        for stage in options.stages:
            row_of_rank = dict(answers.get() for _ in processes)
            print_row(stage, [row_of_rank[rank] for rank in range(options.ranks)], Path(folder, f"stage{stage}"))
        for process in processes:
            process.join()


def print_head(options: argparse.Namespace) -> None:
    print(
        f"{options.ranks} ranks on {os.cpu_count()} CPUs, size {options.size}, {options.steps} steps; Linux "
        f"{platform.release()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n"
        f"an empty span: {span_cost(True) * 1e9:.0f} ns with the monitor, {span_cost(False) * 1e9:.0f} ns without\n\n"
        f"{'stage':>5} {'on ms':>8} {'off ms':>8} {'on/off':>7} {'quartiles':>13} {'floor ms':>9} {'waits ms':>9} "
        f"{'explained':>9} {'compute':>7} {'spans':>6} {'host us':>8} {'thread us':>9} {'bytes sent':>10} "
        f"{'bytes kept':>10}",
        flush=True,
    )


def print_row(stage: int, rows: list[dict[str, Any]], folder: Path) -> None:
    """Print what the ranks measured at one stage."""
    lines = (folder / "steps.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))[WARMUP:]
    # All ranks of a step together: the mean over the ranks, then the median over the steps.
    means = {
        name: [statistics.mean(times) for times in zip(*(row[name] for row in rows), strict=True)]
        for name in ("monitored", "plain", "floor")
    }
    on, off, floor = (statistics.median(means[name]) for name in ("monitored", "plain", "floor"))
    surplus = statistics.mean(row["surplus_update"] for row in rows)
    longer = statistics.median(a - b for a, b in zip(means["monitored"], means["floor"], strict=True)) + surplus
    compute = [record["split"]["forward"] + record["split"]["backward"] for record in records]
    floor_compute = [statistics.mean(times) for times in zip(*(row["floor_compute"] for row in rows), strict=True)]
    more_compute = statistics.median(a - b for a, b in zip(compute, floor_compute, strict=True))
    low, middle, high = statistics.quantiles(
        [monitored / plain for monitored, plain in zip(means["monitored"], means["plain"], strict=True)], n=4
    )
    wait = statistics.median(record["split"]["gather"] + record["split"]["reduce"] for record in records)
    print(
        f"{stage:>5} {on * 1e3:>8.1f} {off * 1e3:>8.1f} {middle:>7.3f} {f'{low:.3f}-{high:.3f}':>13} "
        f"{(floor - surplus) * 1e3:>9.1f} {wait * 1e3:>9.1f} {wait / longer:>9.0%} {more_compute * 1e3:>7.1f} "
        f"{rows[0]['spans']:>6.0f} {rows[0]['host_us']:>8.0f} {rows[0]['thread_us']:>9.0f} "
        f"{rows[0]['bytes_sent']:>10} {statistics.median(map(len, lines)):>10.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
