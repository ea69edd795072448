"""`python -m zeroengine.config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroengine.config import reference
from zeroengine.config.__main__ import main


def test_check_prints_the_resolved_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 32, "graph_harvesting": true}')
    assert main(["check", str(path), "--world-size", "4", "--set", "zero_optimization.stage=2"]) == 0
    out, err = capsys.readouterr()
    values = dict(line.split(maxsplit=1) for line in out.splitlines()[1:])
    assert (values["train_micro_batch_size_per_gpu"], values["zero_optimization.stage"]) == ("8", "2")
    assert "note: graph_harvesting (line 1) has no effect" in err


def test_check_of_a_wrong_file_fails_with_the_message_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3}')
    assert main(["check", str(path), "--world-size", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Change train_batch_size to 2 or 4" in err


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == reference.json_schema()


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "check" in capsys.readouterr().out


def test_a_configuration_that_splits_layers_is_checked_as_for_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "configs/tensor-parallel.json"]) == 0
    assert main(["check", "configs/tensor-parallel.json", "--world-size", "3"]) == 1
    assert "autotp_size is 2, and the number of ranks, 3, is no multiple of it" in capsys.readouterr().err
