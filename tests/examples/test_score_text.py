"""The example that scores the lines of a text: perplexities are those of the model in plain PyTorch."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.environments import python_of

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "score_text.py")
LINES = ["a", "To be, or not to be", "that is the question: whether", "", "the same", "the same"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES))
    return path


def expected(tokens: int) -> list[str]:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **shape)).eval()
    found, total, count = [], 0.0, 0
    for line in filter(None, LINES):
        ids = torch.tensor([list(line.encode())[:tokens]])
        with torch.no_grad():
            loss = float(model(ids, labels=ids).loss) if ids.shape[1] > 1 else math.nan
        found.append(f"{math.exp(loss):12.3f}  {line}")
        total, count = total + (loss * (ids.shape[1] - 1) if ids.shape[1] > 1 else 0), count + ids.shape[1] - 1
    return [*found, f"{math.exp(total / count):12.3f}  all {len(found)} lines, {count} predicted tokens"]


def test_perplexities_are_those_of_the_plain_model(
    text: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--nvme", str(disk), "--keep", "0.3", "--batch", "2", "--tokens", "12"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(text), *options])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert capsys.readouterr().out.splitlines() == expected(12)
    text.write_text("\n")
    with pytest.raises(SystemExit, match="has no lines to score"):
        runpy.run_path(SCRIPT, run_name="__main__")


@pytest.mark.slow
def test_two_ranks_share_the_lines(text: Path) -> None:
    command = [str(python_of("transformers")), "-m", "zeroengine.cli.zero_launch", "--nproc", "2", "--cpu", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(text), "--batch", "2"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()][-6:] == expected(512)
