"""`zero-io`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from zeroengine.cli.zero_io import main
from zeroengine.disk import probe
from zeroengine.disk.probe import DiskSettings, candidate_settings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """zero-io that takes no time; gives its exit code, output and errors."""
    monkeypatch.setattr(probe, "TRIAL_SECONDS", 0)
    monkeypatch.setattr(probe, "DEPTHS", (1, 2))
    monkeypatch.setattr(probe, "BLOCK_SIZES", (1 << 18, 1 << 20))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return call


def settings_of(tree: dict[str, Any]) -> DiskSettings:
    return DiskSettings(**tree)


def test_output_shows_the_disk_every_trial_and_the_configuration(run: Run, disk: Path) -> None:
    before = os.listdir(disk)
    code, out, err = run(disk, "--size", "8MiB")
    assert (code, err) == (0, "") and os.listdir(disk) == before
    assert out.startswith(f"{os.path.realpath(disk)}: ") and "direct I/O" in out
    rows = re.findall(r"^(io_uring|threads) +(\d+) +([\d,]+) +[\d.]+ +[\d.]+ +[\d.]+", out, re.MULTILINE)
    assert [(name, int(depth), int(block.replace(",", ""))) for name, depth, block in rows] == [
        (one.backend, one.queue_depth, one.block_size) for one in candidate_settings()
    ]
    assert out.count("best") == 1
    chosen = json.loads("{" + out.splitlines()[-1] + "}")
    assert settings_of(chosen["aio"]) in candidate_settings()


def test_json_output_holds_everything(run: Run, disk: Path) -> None:
    code, out, _ = run(disk, "--size", "8MiB", "--json")
    tree = json.loads(out)
    assert code == 0 and settings_of(tree["aio"]) in candidate_settings()
    assert len(tree["tried"]) == len(candidate_settings()) and tree["best"] in tree["tried"]
    assert all(tree["best"][f"{name}_gb_s"] > 0 for name in ("read", "write", "both"))
    assert tree["disk"]["path"] == os.path.realpath(disk)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{disk}/nowhere"], "nvme_path {disk}/nowhere does not exist: write a folder on a local disk"),
        (["{disk}/file"], "nvme_path {disk}/file is a file: write a folder"),
        (["{disk}", "--size", "big"], "--size big: write a size such as 5GB"),
        (["{disk}", "--size", "0GB"], "--size 0GB: write a size such as 5GB"),
        (["{disk}", "--size", "9000000GB"], "are needed: make room"),
        (["{disk}", "--write-config", "{disk}/a.json"], 'leave --write-config out, and paste "aio" into the conf'),
        ([], "the following arguments are required: PATH. Usage: zero-io PATH"),
        (["{disk}", "--sise", "1GB"], "unrecognized arguments: --sise 1GB. Usage: zero-io PATH"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(run: Run, disk: Path, arguments: list[str], message: str) -> None:
    (disk / "file").write_text("[1]")
    code, out, err = run(*(argument.format(disk=disk) for argument in arguments))
    assert (code, out) == (2, "") and err.startswith("zero-io: ") and err.count("\n") == 1
    assert message.format(disk=disk) in err


@pytest.mark.slow  # test_zero_launch starts a command of a checkout
def test_bin_zero_io_runs_from_a_checkout(disk: Path) -> None:
    environment = os.environ | {"ZEROENGINE_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    command = [ROOT / "bin" / "zero-io", disk / "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stdout == "" and "does not exist" in done.stderr
