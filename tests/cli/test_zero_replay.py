"""zero-replay says whether a run computed what it should have, and what to write where it cannot say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from zeroengine.cli.zero_replay import main

FLIPPED = 6
SCRIPT = """
import os, sys, torch, zeroengine
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
config = {
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "digests": {"every": 2}, "units": ["0", "1"],
}
engine = zeroengine.initialize(model, config=config)
torch.manual_seed(int(os.environ.get("DATA", 0)))
loader = engine.dataloader([(torch.randn(8), torch.randn(1)) for _ in range(64)])
while engine.global_steps < 8:
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        # The first step is skipped, which counts for digests and not for the tags of checkpoints.
        engine.backward(loss if engine.micro_steps else loss * float("inf"))
        engine.step()
        if engine.global_steps == int(os.environ.get("FLIPPED", -1)) - 1:
            with torch.no_grad():
                model[1].bias.view(torch.int32)[0] ^= 1 << 10
        if engine.global_steps == 3:
            engine.save_checkpoint(sys.argv[1])
        if engine.global_steps == 8:
            break
engine.close()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--cpu", "--nproc", "1", "--run-folder", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLIPPED": str(FLIPPED)}
    subprocess.run([*words, "train.py", "saved"], cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "run"


def test_a_replay_differs_from_where_a_bit_was_flipped(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main([str(run), "--step", "8", "--once"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    # The checkpoint of step 3 is found, and the run gave the model the same data.
    assert "steps 5 to 8 on 1 rank, from" in out and "step-3, which is of step 4: its tag leaves skipped" in out
    assert "The inputs" not in out and "the replay differ first at step 8, in" in out and "Settings" not in out


@pytest.mark.slow
def test_a_replay_with_other_data_blames_nothing_else(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DATA", "1")
    assert main([str(run), "--step", "8"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert "The inputs of the model of step 6 differ" in out and '"replay": {"keep": N}' in out
    assert "memory, a processor" not in out and out.count("on 1 rank, from") == 1, "once is enough"


@pytest.mark.slow
def test_a_replay_is_equal_before_a_flip_and_two_that_agree_say_that_the_run_was_wrong(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main([str(run), "--step", "6"]) == 0
    assert f"{run} and the replay are equal." in " ".join(capfd.readouterr().out.split())
    assert main([str(run), "--step", "8"]) == 1
    assert "Two replays agree, so the run computed something else" in capfd.readouterr().out


def test_what_cannot_be_replayed_is_an_error_that_says_what_can(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--step", "5"]) == 2
    assert "no digests of step 5: it has 4 steps (2 to 8, every 2)" in capsys.readouterr().err
    (tmp_path / "digests.jsonl").write_bytes((run / "digests.jsonl").read_bytes())
    facts = json.loads((run / "run.json").read_text())
    del facts["command"]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert main([str(tmp_path), "--step", "4"]) == 2
    assert "does not say how the run was started" in capsys.readouterr().err
