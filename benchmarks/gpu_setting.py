"""The environment of the parts of benchmarks/gpu.py: devices, timing, and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).with_name("gpu.py")
Rows = list[Sequence[object]]
# A part's text, and for each of its questions a number, or in words why there is none.
Found = tuple[str, Sequence[float | str]]


AHEAD = 10_000_000  # of the GPU's cycles, about five milliseconds: it waits so long, and the host gets ahead


class Setting:
    """The device and the sizes of a part."""

    def __init__(self, dry_run: bool) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.dry_run = dry_run
        self.numel = 10_000 if dry_run else 260_000_000  # no power of two: arrays do not meet in the same banks
        self.rounds = 2 if dry_run else 30
        # layers, width, heads, vocabulary, context: 1.07 G parameters
        self.model = (2, 64, 2, 128, 32) if dry_run else (20, 2048, 16, 32768, 2048)
        self.large = (3, 64, 2, 128, 32) if dry_run else (36, 4096, 32, 50257, 2048)  # 7.5 G

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def peak(self) -> float:
        """Return the largest number of bytes that were allocated at one time since the last call."""
        if not self.on_gpu:
            return 0.0
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def seconds(self, cases: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median time of each case on the GPU, over rounds in which the cases take turns."""
        times: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(-3, self.rounds):
            for name, run in cases.items():
                elapsed = self._on_gpu(run) if self.on_gpu else self._on_cpu(run)
                if number >= 0:
                    times[name].append(elapsed)
        return {name: statistics.median(its) for name, its in times.items()}

    @staticmethod
    def _on_gpu(run: Callable[[], object]) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    @staticmethod
    def _on_cpu(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


# Begins the line of a process that has what it found. Libraries print lines of their own.
RESULT = "result of benchmarks/gpu.py: "


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def run_self(s: Setting, *arguments: str, timeout: float | None = None) -> str:
    """Run the script in a new process, and return the JSON that it prints after ``RESULT``."""
    command = [sys.executable, SCRIPT, *arguments, *(["--dry-run"] if s.dry_run else [])]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    has_session = timeout is not None
    with subprocess.Popen(command, **pipes, start_new_session=has_session) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            # And with it the processes that it has started.
            os.killpg(process.pid, signal.SIGKILL) if has_session else process.kill()
            raise
    results = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    if process.returncode or not results:
        raise RuntimeError((errors or output).strip() or f"ended with {process.returncode}")
    return results[-1]


def reason_of(text: str) -> str:
    """Return the line of an output that says why a process ended, which is not always the last one."""
    lines = text.splitlines()
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Expired)\b", line)), lines[-1])


def child(s: Setting, name: str, *arguments: str) -> dict[str, float]:
    return json.loads(run_self(s, "--child", name, *arguments))
