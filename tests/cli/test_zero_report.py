"""What zero-report attaches of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.view.generated_runs import write_run
from zeroengine.cli import zero_report
from zeroengine.cli.zero_report import main


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for section in ("software", "machine", "interfaces", "compiled"):
        monkeypatch.setattr(zero_report, section, lambda: iter(()))
    folder = write_run(tmp_path / "run", ranks=64, steps=120, restart=True)
    with open(folder / "events.jsonl", "a") as events:
        text = "cannot reach http://me:hush@proxy:80/"
        events.write(json.dumps({"time": 0, "step": 120, "kind": "error", "text": text}) + "\n")
    return folder


def test_the_newest_steps_and_events_are_attached_without_secrets(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "failed: step 120/120" in text and "record at step 118" in text and "record at step 120" in text
    assert "restart 1 of 3" in text and '"and 56 more"' in text and "record at step 117" not in text
    assert "http://me:***@proxy" in text and "hush" not in text and "hidden-key" not in text


def test_the_run_of_the_environment_is_attached_as_json(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROENGINE_RUN_FOLDER", str(run_folder))
    assert main(["--json"]) == 0
    section = json.loads(capsys.readouterr().out)[f"run {run_folder}"]
    assert json.loads(section["record at step 120"])["step"] == 120
    assert json.loads(section["run.json"])["config"]["wandb"]["api_key"] == "***"


def test_a_folder_without_a_run_does_not_prevent_the_report(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(run_folder / "nowhere")]) == 0
    assert "there is no such folder" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--no-probes", "--disk=/"])
def test_what_measures_instead_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 2
    assert "zero-io DIR measures a disk, and zero-plan --measure the collectives" in capsys.readouterr().err
