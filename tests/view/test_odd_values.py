"""Run folders with values that nobody expects: the rest is shown all the same."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.view.generated_runs import run_facts, run_lines
from zeroengine.view.live_line import plain_line
from zeroengine.view.page_data import run_data
from zeroengine.view.run_reader import RunReader
from zeroengine.view.summary import summarize
from zeroengine.view.terminal import render_run

ODD = [None, -1, 10**400, 1e308, float("nan"), "x", [], {}, [[1]], {"a": {"b": [1, "c"]}}]
STEPS = 4


def lines() -> dict[str, list[dict[str, Any]]]:
    named: dict[str, list[dict[str, Any]]] = {"run.json": [run_facts(3, 2, STEPS)]}
    for name, value in run_lines(3, STEPS, layers=2):
        named.setdefault(name, []).append(value)
    return named


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "events.jsonl"])
def test_one_odd_value_leaves_the_others_shown(name: str, tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO())
    # Each key takes a third of the values; together they take all.
    for turn, key in enumerate(lines()[name][-1]):
        for odd in ODD[turn % 3 :: 3]:
            named = lines()
            named[name][-1][key] = odd
            for file, values in named.items():
                (tmp_path / file).write_text("".join(json.dumps(value) + "\n" for value in values))
            reader = RunReader(tmp_path)
            # A step without its number or its time is left out, and any other is kept.
            assert reader.total is not None
            assert reader.total.num_steps == STEPS - reader._steps.num_damaged >= STEPS - 1
            console.print(render_run(reader, 80))
            for value in (summarize(reader), run_data(reader, "a")):
                json.dumps(value, allow_nan=False)
            assert plain_line(reader)
