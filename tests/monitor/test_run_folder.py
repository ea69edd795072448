"""A run folder holds whole lines of strict JSON, whatever ended the run that wrote it before."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.record import FORMAT, RunEvent, SlowestRank, StepMemory, StepRecord
from zeroengine.monitor.run_folder import RunFolder, append_event

RECORD = StepRecord(
    step=3,
    time=5.5,
    seconds=0.25,
    loss=math.nan,
    lr=(0.1, 0.2),
    split={"forward": 0.25},
    slowest=SlowestRank(1, 0.1, "compute", "rank 1 computes longer"),
    memory=StepMemory(device={"parameters": 8}, peak=9),
    user={"accuracy": math.inf},
)


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_record_is_one_line_of_strict_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a", {"world_size": 2})
    folder.step(RECORD)
    folder.event(RunEvent(6.0, 3, "checkpoint", "saved", {"bytes": 7, "seconds": 0.5}))
    folder.close()
    (step,) = strict_lines(folder.path / "steps.jsonl")
    assert (step["step"], step["loss"], step["lr"], step["user"]) == (3, None, [0.1, 0.2], {"accuracy": None})
    assert step["slowest"]["cause"] == "compute" and step["memory"]["peak"] == 9
    assert strict_lines(folder.path / "events.jsonl") == [
        {"time": 6.0, "step": 3, "kind": "checkpoint", "text": "saved", "bytes": 7, "seconds": 0.5}
    ]
    assert json.loads((folder.path / "run.json").read_text()) == {"format": FORMAT, "world_size": 2}


def test_a_restarted_run_appends_after_a_line_that_its_predecessor_did_not_finish(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, {"started": 1})
    first.step(RECORD)
    first.close()
    with open(tmp_path / "steps.jsonl", "a") as steps:
        steps.write('{"step": 4, "ti')
    second = RunFolder(tmp_path, {"started": 2})
    second.step(RECORD)
    second.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(lines[0])["step"], lines[1], json.loads(lines[2])["step"]] == [3, '{"step": 4, "ti', 3]
    assert json.loads((tmp_path / "run.json").read_text())["started"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "run.json", "steps.jsonl"]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ZeroEngineError, match=r"monitor\.folder .*file"):
        RunFolder(tmp_path / "file" / "run", {})


def write_from_another_process(path: str) -> None:
    folder = RunFolder(path, {})
    folder.step(RECORD)
    print(folder.path.name)


def test_engines_of_two_processes_do_not_mix_their_steps(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, {})
    code = f"from tests.monitor.test_run_folder import *; write_from_another_process({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first.close()
    assert done.stdout == "engine-2\n"
    assert [len(strict_lines(path / "steps.jsonl")) for path in (tmp_path, tmp_path / "engine-2")] == [0, 1]


def test_a_folder_that_is_removed_or_a_disk_that_is_full_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", {})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"steps\.jsonl was removed"):
        folder.step(RECORD)
    folder.close()
    with mock.patch("os.write", return_value=5), pytest.raises(OSError, match="No space left"):
        append_event(tmp_path, RunEvent(6.0, 3, "checkpoint", "saved"))
