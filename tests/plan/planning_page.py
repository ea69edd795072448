"""Run the commands of docs/planning.md, and write what they print: python -m tests.plan.planning_page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex

from tests.conftest import ROOT
from zeroengine.cli.zero_plan import main

PAGE = ROOT / "docs" / "planning.md"
BLOCK = re.compile(r"```console\n\$ zero-plan ([^\n]*)\n(.*?)```", re.DOTALL)
COLUMNS = "100"


def output_of(arguments: str) -> str:
    """Return what a command prints on a terminal of 100 columns."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main(shlex.split(arguments))
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return output.getvalue()


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda m: f"```console\n$ zero-plan {m[1]}\n{output_of(m[1])}```", PAGE.read_text()))
