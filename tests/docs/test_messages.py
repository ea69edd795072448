"""What the pages of docs/trouble/ quote is what runs print that go wrong in that way, but for the numbers."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.test_docs import snippets_in

SCRIPT = Path(__file__).with_name("train.py")
# The runs whose messages a page quotes.
RUNS = {
    "nan": ["skipped_step", "loss_scale_falls", "loss_scale_at_minimum", "updates_with_nan"],
    "memory": ["does_not_fit", "out_of_memory", "killed"],
    "hangs": ["stalled", "only_rank_zero_saves", "different_calls", "other_path", "killed"],
    "slow": ["same_batches"],
}
# Of these a page quotes nothing that the launcher prints.
UNLAUNCHED = ("same_batches",)
# The first word of a block that shows what zero-view printed, which tests/view/ checks.
ZERO_VIEW = "a step "


def without_numbers(line: str) -> str:
    """Return the line with each number replaced, and the ranks' names, which either rank may have."""
    line = re.sub(r"^\[rank \d\] ", "", line.strip())
    return re.sub(r"\d[\d.,]*", "#", line)


def print_into(path: Path, run: str) -> None:
    """Run it on this rank, and write to a file what it prints."""
    with path.with_suffix("." + os.environ["RANK"]).open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    start()
    # The module reads the rank when it is imported.
    getattr(importlib.import_module("tests.docs.train"), run)()
    sys.stdout.flush()


def output_of(run: str, folder: Path) -> str:
    if run in UNLAUNCHED:
        run_ranks(2, print_into, folder / run, run)
        return "".join(path.read_text() for path in folder.glob(f"{run}.*"))
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--cpu", "--nproc", "2", str(SCRIPT), run]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def quoted_lines(page: str) -> list[str]:
    text = (ROOT / "docs" / "trouble" / f"{page}.md").read_text()
    blocks = [s.code for s in snippets_in(text, page) if s.language == "text" and not s.code.startswith(ZERO_VIEW)]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "page", ["slow", *(pytest.param(page, marks=pytest.mark.slow) for page in ("nan", "memory", "hangs"))]
)
def test_a_page_quotes_what_the_engine_prints(page: str, tmp_path: Path) -> None:
    printed = "\n".join(output_of(run, tmp_path) for run in RUNS[page])
    lines = {without_numbers(line) for line in printed.splitlines()}
    quoted = quoted_lines(page)
    assert quoted
    missing = [line for line in quoted if not any(without_numbers(line) in other for other in lines)]
    assert missing == [], printed[-6000:]
