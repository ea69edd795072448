"""The example for Ray: a worker is lost, Ray starts new ones, and the losses are those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.environments import ROOT, python_of

STEPS, SAVE_EVERY = 120, 20
# Ray starts a dozen processes, which takes minutes on a busy machine.
TIMEOUT_SECONDS = 600.0
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    # Ray keeps a token in the home folder otherwise.
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's sockets, whose paths have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Run:
    """A run of the example, whose processes end with it."""

    def __init__(self, folder: Path, config: Path, ray_folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [str(python_of("ray")), "examples/ray_train.py", "--config", str(config), "--folder", str(folder)]
        command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **VARIABLES, "RAY_TMPDIR": str(ray_folder)},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        try:
            code = self.process.wait(TIMEOUT_SECONDS)
        finally:
            self.end()
        assert code == 0, self.log.read_text()[-8000:]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def starts(self) -> list[tuple[int, int, int]]:
        """Return rank, process and first step of each start of a worker."""
        lines = re.findall(r"rank (\d+) is process (\d+), from step (\d+)", self.log.read_text())
        return [(int(rank), int(process), int(step)) for rank, process, step in lines]

    def losses(self) -> list[tuple[int, float]]:
        """Return steps and losses in the order in which they were computed."""
        file = self.folder / "losses.jsonl"
        # The last line may be half written.
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        values = [json.loads(line) for line in lines if line.endswith("\n")]
        return [(value["step"], value["loss"]) for value in values]


@pytest.mark.slow
def test_losses_after_a_lost_worker_are_those_of_an_uninterrupted_run(tmp_path: Path, ray_folder: Path) -> None:
    config = tmp_path / "ds.json"
    # Large batches make the run last long enough for a worker to be killed in the middle.
    settings = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 3}}
    config.write_text(json.dumps({**settings, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    interrupted = Run(tmp_path / "interrupted", config, ray_folder)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        worker = None
        while worker is None or len(interrupted.losses()) < SAVE_EVERY + SAVE_EVERY // 2:
            assert interrupted.process.poll() is None and time.monotonic() < deadline, interrupted.log.read_text()
            worker = next((process for rank, process, _ in interrupted.starts() if rank == 1), None)
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        interrupted.wait()
    finally:
        interrupted.end()
    uninterrupted = Run(tmp_path / "uninterrupted", config, ray_folder)
    uninterrupted.wait()

    expected = uninterrupted.losses()
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    found = interrupted.losses()
    resumed_at = max(step for _, _, step in interrupted.starts())
    assert resumed_at >= SAVE_EVERY and resumed_at % SAVE_EVERY == 0
    # The steps after the last checkpoint were taken twice, and the second time the losses are the same again.
    restart = next(i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0])
    assert found[restart][0] == resumed_at + 1
    assert found[:restart] == expected[:restart]
    assert found[restart:] == expected[resumed_at:]
