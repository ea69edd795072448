"""Reading run folders: whole, growing, damaged, of a newer format, and longer than memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.view.generated_runs import STARTED, run_facts, run_lines, write_run
from zeroengine.errors import ZeroEngineError
from zeroengine.view.run_reader import RunReader
from zeroengine.view.summary import summarize


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_groups", [2, 7, 16, 1000])
def test_totals_are_exact_however_the_steps_are_thinned_out(tmp_path: Path, max_groups: int) -> None:
    folder = write_run(tmp_path / "run", ranks=3, steps=173, restart=True)
    records = records_of(folder)
    reader = RunReader(folder, max_groups)
    total = reader.total
    assert total is not None and len(reader.groups) <= max_groups
    assert total.num_steps == len(records) > 173
    assert total.sums["tokens"] == sum(record["tokens"] for record in records)
    assert total.sums["seconds"] == pytest.approx(math.fsum(record["seconds"] for record in records))
    assert total.minima["loss"] == min(record["loss"] for record in records)
    assert total.arrays["ranks.compute"][1] == pytest.approx(sum(record["ranks"]["compute"][1] for record in records))
    assert sum(delay.steps for delay in total.delays.values()) == sum(r["slowest"] is not None for r in records)


def test_groups_are_in_order_and_steps_that_are_taken_again_count_once_in_pictures(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run", steps=200, restart=True))
    # The run of 200 steps falls back from step 120 to the checkpoint of step 100.
    assert [group.first_step for group in reader.groups] == list(range(1, 201))
    assert reader.repeated is not None and reader.repeated.num_steps == 20
    assert summarize(reader)["progress"]["records"] == 220


def test_a_restart_that_replaces_the_run_file_does_not_move_the_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=30, started=STARTED + 1000.0)
    assert RunReader(folder).started == STARTED


def test_a_growing_run_reads_the_same_as_a_whole_one(tmp_path: Path) -> None:
    whole = summarize(RunReader(write_run(tmp_path / "whole", steps=40)), now=0.0)
    folder = tmp_path / "growing"
    folder.mkdir()
    reader = RunReader(folder, wait=True)
    assert reader.state() == "silent" and reader.total is None
    (folder / "run.json").write_text(json.dumps(run_facts(2, 6, 40)))
    for name, value in run_lines(2, 40):
        line = json.dumps(value) + "\n"
        # A reader that comes between two halves of a line must neither lose the line nor read it twice.
        for part in (line[:25], line[25:]):
            with open(folder / name, "a") as file:
                file.write(part)
            reader.read()
    assert not reader.read()
    growing = summarize(reader, now=0.0)
    del whole["folder"], growing["folder"]
    assert growing == whole


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=10)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    lines[3], lines[5], lines[6] = lines[3][:40], '{"step": "x", "time": 1}', "[" * 100_000
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n" + lines[0][:30])
    with open(folder / "events.jsonl", "ab") as events:
        events.write(b"\xff\x00\n")
    reader = RunReader(folder)
    assert reader.total is not None and reader.total.num_steps == 7
    assert reader.notices() == [
        "steps.jsonl: lines 4, 6, 7 are damaged and left out (3 of 10 lines)",
        "steps.jsonl: the last line is not whole yet and is left out",
        "events.jsonl: line 3 is damaged and left out (1 of 3 lines)",
    ]


def test_unknown_and_odd_values_do_not_stop_the_reading(tmp_path: Path) -> None:
    odd = {"loss": float("nan"), "lr": None, "memory": 3, "ranks": {"compute": [1.0, None, "x"]}, "new": {"a": ["b"]}}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(odd | {"step": n, "time": n}) + "\n" for n in (1, 2)))
    reader = RunReader(tmp_path)
    assert reader.total is not None and reader.total.num_steps == 2
    assert list(reader.total.arrays["ranks.compute"]) == [2.0, 0.0, 0.0]
    summary = summarize(reader)
    assert summary["loss"]["last"] is None and summary["lr"] == []
    assert reader.notices()[0].startswith("there is no run.json")


def test_a_newer_format_is_read_as_far_as_it_is_known_and_said_to_be_newer(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run", steps=3, format=2, zeroengine="9.1"))
    assert reader.total is not None and reader.total.num_steps == 3
    assert "format 2, written by zeroengine 9.1" in reader.notices()[0] and "Update zeroengine" in reader.notices()[0]


def test_a_folder_without_a_run_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ZeroEngineError, match="there is no such folder"):
        RunReader(tmp_path / "nowhere")
    with pytest.raises(ZeroEngineError, match=r"zero-launch --run-folder DIR"):
        RunReader(tmp_path)
    run = write_run(tmp_path / "a", steps=2)
    with pytest.raises(ZeroEngineError, match=rf"has no run itself. Write one of {run}"):
        RunReader(tmp_path)
    assert RunReader(run / "steps.jsonl").folder == run


def test_a_folder_with_a_damaged_run_file_shows_the_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    (folder / "run.json").write_text('{"format": 1, ')
    reader = RunReader(folder)
    assert reader.total is not None and reader.notices() == [
        "run.json is damaged: the model, the units and the configuration are unknown"
    ]


def test_the_state_tells_running_runs_from_those_that_ended_failed_or_fell_silent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    reader = RunReader(folder)
    assert reader.last is not None
    now = reader.last.end
    assert reader.state(now) == "ended"
    for kind, at, state in (("restart", 1, "running"), ("warning", 500, "silent"), ("error", 1, "failed")):
        with open(folder / "events.jsonl", "a") as events:
            events.write(json.dumps({"time": now, "step": 5, "kind": kind, "text": ""}) + "\n")
        reader.read()
        assert reader.state(now + at) == state


def test_the_figures_of_a_run_are_those_of_its_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=4, steps=60, steps_planned=100)
    (folder / "events.jsonl").unlink()
    records = records_of(folder)
    summary = summarize(RunReader(folder), now=records[-1]["time"] + 1.0)
    newest = records[-20:]
    seconds = sum(record["seconds"] for record in newest)
    assert summary["state"] == "running" and summary["progress"]["step"] == 60
    training = seconds - sum(record["split"].get("checkpoint", 0.0) for record in newest)
    assert training < seconds
    assert summary["recent"]["tokens_per_second"] == pytest.approx(sum(r["tokens"] for r in newest) / training)
    assert summary["progress"]["remaining_seconds"] == pytest.approx(40 * seconds / 20)
    assert sum(summary["run"]["split"].values()) == pytest.approx(summary["run"]["seconds_per_step"])
    assert summary["units"][0]["gather"] == max(unit["gather"] for unit in summary["units"])
    assert [(row["rank"], row["cause"]) for row in summary["slowest"]] == [(2, "compute")]
    # Programs read the figures as strict JSON.
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
