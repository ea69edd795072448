"""Launching small scripts, inside the test's own process or as the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.processes import wait_for
from zeroengine.cli.zero_launch import main

COMMAND = [sys.executable, "-m", "zeroengine.cli.zero_launch"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Launch = Callable[..., Result]
Script = Callable[[str], str]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts are named relative to a folder of their own, and nothing is inherited that zero-launch heeds."""
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "ZEROENGINE_CONFIG", "ZEROENGINE_OVERRIDES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a script; it finds its rank as `rank` and has what small scripts need."""

    def write(body: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(f"import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n{body}")
        return path.name

    return write


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for ranks that do not end, and for the failures of other ranks, in runs of `launch`."""
    from zeroengine.launch.local import rank

    monkeypatch.setattr(rank, "PEER_FAILURE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rank, "SIGKILL_TIMEOUT_S", 1.2)


@pytest.fixture
def launch(capfd: pytest.CaptureFixture[str]) -> Launch:
    """Run zero-launch on two CPU processes, or as the arguments say."""

    def run(*arguments: str) -> Result:
        code = main(["--nproc", "2", "--cpu", *arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start zero-launch as a command, and wait until each of its ranks has written its file `pids<rank>`."""
    processes = []

    def run(*arguments: str, ranks: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        wait_for(lambda: len(list(tmp_path.glob("pids*"))) == ranks or process.poll() is not None, 60)
        assert process.poll() is None, process.communicate()[1]
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()
