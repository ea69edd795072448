"""Measures what the report of a stall costs the store that all ranks share, with simulated ranks.

    python benchmarks/stall.py --ranks 128 1024

Every rank but one notices the stall at the same time and asks where the others are. The last one does not answer, so
the report takes its full timeout. Ranks are threads of this process, each with its own client.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from zeroengine.comm import watchdog
from zeroengine.comm.alarm_board import AlarmBoard, RankPosition


class Counting:
    """A store's client that counts requests by their kind."""

    def __init__(self, store: dist.Store, counts: collections.Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._counts[name] += 1
            return method(*arguments)

        return call


def measure(ranks: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counts: collections.Counter[str] = collections.Counter()
    own, lost = RankPosition(True, "gather blocks.4 (number 117)"), ranks - 1
    begin, seconds, complete = threading.Barrier(ranks - 1), [0.0] * ranks, [False] * ranks

    def ask(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        board = AlarmBoard(Counting(client, counts), rank, [""] * ranks)  # type: ignore[arg-type]
        begin.wait()
        began = time.monotonic()
        places = board.ask(own)
        seconds[rank] = time.monotonic() - began
        complete[rank] = places is not None and [r for r, place in places.items() if place is None] == [lost]

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(ranks - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total, found = sum(counts.values()), seconds[:-1]
    kinds = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    print(f"| {ranks} | {total} | {total / ranks:.0f} | {statistics.median(found):.1f} s | {max(found):.1f} s "
          f"| {sum(complete)} of {ranks - 1} | {kinds} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, torch {torch.__version__}; patience {watchdog.ANSWER_TIMEOUT_S:g} s\n")
    print("| ranks | requests | a rank | median | slowest | complete reports | requests by kind |")
    print("|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        measure(ranks)


if __name__ == "__main__":
    main()
