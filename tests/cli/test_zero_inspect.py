"""`zero-inspect`: what it shows of folders, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.models import engine_at
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from zeroengine.checkpoint.directory import LATEST
from zeroengine.checkpoint.manifest import MANIFEST
from zeroengine.cli import checkpoint_commands

ROOT = Path(__file__).resolve().parents[2]


def save(root: Path) -> None:
    engine = engine_at(2, bf16={"enabled": True})
    for step in range(2):
        engine.backward(engine(*batch(step, engine.rank)))
        engine.step()
        engine.save_checkpoint(root)
    engine.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "runs"
    run_ranks(2, save, root)
    return root


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    """A folder of two checkpoints, to be spoilt."""
    shutil.copytree(saved, tmp_path / "runs")
    return tmp_path / "runs"


Show = Callable[..., tuple[int, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs the command; its exit code and what it printed."""

    def run(*arguments: Any) -> tuple[int, str]:
        code = checkpoint_commands.inspect([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert (err != "") is (code == 2), err
        return code, out or err

    return run


def rows(text: str) -> dict[str, str]:
    """The table's lines, by tag; each once blanks are one."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return {line.split()[0]: line for line in lines if line.startswith("step-")}


def test_what_is_inside_is_a_table(show: Show, saved: Path) -> None:
    code, text = show(saved)
    assert code == 0
    assert text.split()[:11] == "tag step stage ranks precision optimizer size saved at versions state".split()
    first, second = rows(text).values()
    assert first.startswith("step-1 1 2 2 bfloat16 AdamW ") and first.endswith(" whole")
    assert second.startswith("step-2 2 2 2 bfloat16 AdamW ") and second.endswith(" whole, latest")
    assert f"torch {torch.__version__}" in first and "zeroengine 0.1.0" in first and " KiB " in first
    assert json.loads((saved / "step-1" / MANIFEST).read_text())["saved_at"][:10] in first


def test_the_same_as_json(show: Show, saved: Path) -> None:
    code, text = show(saved, "--json")
    tree = json.loads(text)
    assert code == 0 and tree["directory"] == str(saved) and tree["problems"] == []
    first, second = tree["checkpoints"]
    expected = {
        "tag": "step-1",
        "step": 1,
        "stage": 2,
        "world_size": 2,
        "verdict": "whole",
        "latest": False,
        "files": 3,
    }
    assert expected.items() <= first.items() and second["latest"] is True
    assert first["nbytes"] == sum(path.stat().st_size for path in (saved / "step-1").iterdir())
    assert (
        show(saved / "step-1", "--json")[1]
        == json.dumps(tree | {"directory": str(saved / "step-1"), "checkpoints": [first]}, indent=1) + "\n"
    )


def test_one_tag_alone(show: Show, saved: Path) -> None:
    assert list(rows(show(saved, "--tag", "step-1")[1])) == ["step-1"]


def test_tensors_are_listed_with_shapes_and_dtypes(show: Show, saved: Path) -> None:
    code, text = show(saved, "--tag", "step-1", "--tensors")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0
    assert "model.tok.weight 61 x 24 float32 5.7 KiB" in lines
    assert "model.head.weight 61 x 24 float32 is model.tok.weight" in lines
    assert "model.blocks.1.up.weight 72 x 24 bfloat16 3.4 KiB" in lines, "frozen: no master"
    assert "model.seen scalar float32 4 B" in lines
    assert "optimizer.state.tok.weight.exp_avg 61 x 24 float32 5.7 KiB" in lines
    tree = json.loads(show(saved, "--tensors", "--json")[1])
    found = {tensor["name"]: tensor for tensor in tree["tensors"]}
    assert found["model.head.weight"] == {
        "name": "model.head.weight",
        "shape": [61, 24],
        "dtype": "float32",
        "nbytes": 61 * 24 * 4,
        "tied_to": "model.tok.weight",
    }


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "file", "problem"),
    [
        (flip, "__0_0.distcp", "__0_0.distcp has been changed: its checksum differs"),
        (cut, "__1_0.distcp", "__1_0.distcp has "),
        (Path.unlink, "__1_0.distcp", "__1_0.distcp cannot be read: No such file or directory"),
        (flip, ".metadata", ".metadata has been changed: its checksum differs"),
        (Path.unlink, ".metadata", ".metadata cannot be read"),
        (cut, MANIFEST, f"{MANIFEST} is damaged"),
    ],
)
def test_damage_is_named_and_is_exit_code_1(
    spoil: Callable[[Path], None], file: str, problem: str, show: Show, runs: Path
) -> None:
    spoil(runs / "step-1" / file)
    code, text = show(runs)
    assert code == 1
    assert rows(text)["step-2"].endswith(" whole, latest") and "damaged" in text
    assert [line for line in text.splitlines() if line.startswith(f"step-1: {runs}/step-1/{problem}")]
    assert show(runs, "--tag", "step-2")[0] == 0, "the other is whole"
    assert show(runs, "--tag", "step-1")[0] == 1 and show(runs / "step-1")[0] == 1
    tree = json.loads(show(runs, "--json")[1])
    assert {one["tag"]: one["verdict"] for one in tree["checkpoints"]} == {"step-1": "damaged", "step-2": "whole"}


def test_tensors_that_cannot_be_listed_leave_the_rest(show: Show, runs: Path) -> None:
    (runs / "step-2" / ".metadata").write_bytes(b"x")
    code, text = show(runs, "--tensors")
    assert code == 1 and "step-2/.metadata cannot be read" in text and rows(text)["step-1"].endswith(" whole")


def test_without_reading_the_files_sizes_are_compared(show: Show, runs: Path) -> None:
    flip(runs / "step-1" / "__0_0.distcp")
    code, text = show(runs, "--no-verify")
    assert code == 0 and rows(text)["step-1"].endswith(" not checked")
    cut(runs / "step-1" / "__0_0.distcp")
    code, text = show(runs, "--no-verify")
    assert code == 1 and "__0_0.distcp has" in text


def test_what_a_dead_writer_left_is_shown_and_is_no_damage(show: Show, runs: Path) -> None:
    shutil.copytree(runs / "step-2", runs / ".step-3.writing")
    (runs / "step-1").rename(runs / ".step-1.replaced")
    (runs / "notes").mkdir()
    code, text = show(runs)
    assert code == 0
    assert rows(text)["step-3"].endswith(" unfinished") and rows(text)["step-1"].endswith(" whole")
    assert "notes" not in text and "latest" in rows(text)["step-2"]


def test_latest_that_names_nothing_is_damage(show: Show, runs: Path) -> None:
    (runs / LATEST).write_text("step-9\n")
    code, text = show(runs)
    assert code == 1 and f"{runs}/{LATEST} names 'step-9', which is not there" in text
    (runs / LATEST).unlink()
    code, text = show(runs)
    assert code == 0 and rows(text)["step-2"].endswith("whole, latest"), "what load_checkpoint takes"


def test_a_newer_format_is_told(show: Show, runs: Path) -> None:
    manifest = runs / "step-1" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    code, text = show(runs)
    assert code == 1 and "has format 99; this version of zeroengine reads up to" in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_checkpoints_have_no_checksums(show: Show, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "plain")
    for folder in (tmp_path, tmp_path / "plain"):
        code, text = show(folder)
        assert code == 0 and "no checksums" in text and "plain" in text
    assert "model.w" in show(tmp_path / "plain", "--tensors")[1]
    (tmp_path / "plain" / ".metadata").unlink()
    code, text = show(tmp_path)
    assert code == 1 and f"has neither {MANIFEST} nor .metadata" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere"], "there is no folder {tmp}/nowhere"),
        (["{tmp}"], "{tmp} holds no checkpoint"),
        (["{tmp}/file"], "{tmp}/file is a file: checkpoints are kept in a folder"),
        (["{saved}", "--tag", "step-9"], "checkpoint 'step-9' in {saved} does not exist; there are: step-1, step-2"),
        (["{saved}", "--tag", "../x"], "a tag is a folder's name"),
        ([], "the following arguments are required: DIR. Usage: zero-inspect DIR"),
        (["{saved}", "--all"], "unrecognized arguments: --all. Usage: zero-inspect DIR"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    arguments: list[str], message: str, show: Show, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, text = show(*(argument.format(tmp=tmp_path, saved=saved) for argument in arguments))
    assert code == 2 and text.count("\n") == 1
    assert text.startswith("zero-inspect: ") and message.format(tmp=tmp_path, saved=saved) in text


def test_it_starts_without_torch(saved: Path) -> None:
    start = "import sys; from zeroengine.cli.checkpoint_commands import inspect"
    code = f"{start}; inspect(); sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, saved, "--tensors"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_it_is_a_command_of_a_checkout(saved: Path) -> None:
    environment = os.environ | {"ZEROENGINE_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([ROOT / "bin" / "zero-inspect", saved], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "step-2" in done.stdout and done.stderr == ""
