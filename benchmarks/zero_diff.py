"""How long `zero-diff` takes for two long runs: reading, comparing, and the page.

    python benchmarks/zero_diff.py [--steps 10000] [--units 100]

It writes two run folders with digests of each step and learning rates that differ in the second half, and times the
command as a whole, in processes of its own: as text, and with the page. The figure of the page is its size.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.view.generated_digests import write_digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--units", type=int, default=100)
    options = parser.parse_args()
    units = ["embedding", *(f"layers.{index}" for index in range(options.units - 2)), "head"]
    with tempfile.TemporaryDirectory() as folder:
        a, b, page = (Path(folder, name) for name in ("a", "b", "page.html"))
        write_digests(a, options.steps, units)
        write_digests(b, options.steps, units, lr={1: 0.001, options.steps // 2: 0.002})
        size = (a / "digests.jsonl").stat().st_size
        print(f"{options.steps:,} steps of {options.units} units, {size / 1e6:.0f} MB of digests in each run, ", end="")
        print(f"{os.cpu_count()} cores, Python {platform.python_version()}")
        for title, (first, second), more in (
            ("equal runs", (a, a), ()),
            ("another learning rate", (a, b), ()),
            ("the same with the page", (a, b), ("--html", page)),
        ):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "zeroengine.cli.zero_diff", first, second, *more]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
            seconds = time.perf_counter() - begin
            print(f"{title:24}{seconds:6.2f} s   exit code {done.returncode}")
        print(f"{'the page':24}{page.stat().st_size / 1e3:6.0f} kB")


if __name__ == "__main__":
    main()
