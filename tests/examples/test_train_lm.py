"""The example under zero-launch on two ranks, small."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--steps",
    "20",
    "--layers",
    "2",
    "--width",
    "32",
    "--context",
    "32",
    "--eval-batches",
    "2",
    "--sample-bytes",
    "8",
]


def train(stage: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = (f"zero_optimization.stage={stage}", "optimizer.params.lr=0.01", "scheduler.params.warmup_num_steps=5")
    settings += ("zero_optimization.stage3_param_persistence_threshold=0",)
    command = [
        sys.executable,
        "-m",
        "zeroengine.cli.zero_launch",
        "--nproc",
        "2",
        "--cpu",
        "--config",
        "configs/zero2.json",
    ]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["examples/train_lm.py", *TINY, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def losses(output: str) -> dict[str, str]:
    return dict(re.findall(r"(byte unigram entropy|held-out loss before|held-out loss after) +([\d.]+) nats", output))


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_training_learns_the_same_at_every_stage(stages: tuple[int, ...]) -> None:
    runs = {stage: train(stage) for stage in stages}
    for stage, run in runs.items():
        assert run.returncode == 0, run.stderr
        assert f"at stage {stage} on 2 ranks (cpu)" in run.stdout
        assert re.search(r"\[rank 0\] step 20/20  loss [\d.]+  [\d,]+ tokens/s  \d+ MiB resident", run.stdout)
        assert re.search(r"memory of rank 1 .* MiB of parameters, gradients and optimizer state", run.stdout)
        assert re.search(r"\[rank 0\] 11 steps left, about \d+ seconds", run.stdout)
        assert "[rank 0] def " in run.stdout and "[rank 1]" not in run.stdout
    first = losses(runs[stages[0]].stdout)
    assert len(first) == 3
    assert float(first["held-out loss after"]) < float(first["held-out loss before"]) - 1
    assert all(losses(run.stdout) == first for run in runs.values())


@pytest.mark.slow
def test_a_run_continues_from_a_checkpoint_at_another_stage(tmp_path: Path) -> None:
    saving = ("--checkpoint", str(tmp_path), "--save-every", "7")
    whole = train(1, "--steps", "14")
    assert train(1, *saving, "--steps", "7").returncode == 0
    run = train(3, *saving, "--steps", "14")
    assert "continues after step 7\n" in run.stdout, run.stderr
    assert losses(run.stdout) == losses(whole.stdout)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["latest", "step-14", "step-7"]


@pytest.mark.slow
def test_quickstart_fits_its_time_and_the_commands_that_it_names_work() -> None:
    environment = os.environ | {"ZEROENGINE_PYTHON": sys.executable}
    before = set(ROOT.glob("runs/quickstart-*"))

    def run(command: str) -> str:
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        output = run(f"bin/quickstart {' '.join(TINY[2:])} --minutes 0.05")
        steps = int(re.findall(r"step +\d+/(\d+)  loss", output)[-1])
        assert steps >= 20 and f"step {steps}/{steps}" in output
        picture = ROOT / re.search(r"open (\S+) in a browser", output)[1]
        assert picture.read_text().startswith("<!doctype html>")
        commands = re.findall(r"^ +(bin/(?:.*\\\n)*.*)$", output, re.MULTILINE)
        view, stage, resume = commands
        assert f"{steps:,}" in run(view)
        assert losses(run(stage))["held-out loss after"] == losses(output)["held-out loss after"]
        assert f"continues after step {steps}\n" in run(f"{resume} --minutes 0.05")
    finally:
        for folder in set(ROOT.glob("runs/quickstart-*")) - before:
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "--text missing.txt: there is no such file"),
        (
            ["--text", "setup.py", "--context", "1000"],
            "setup.py has too little text: name a file of at least 20,020 bytes",
        ),
        (["--width", "30", "--heads", "4"], "--width 30 is not a multiple of --heads 4"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("examples/train_lm.py", run_name="__main__")
    assert end.value.code
    assert message in (capsys.readouterr().err or str(end.value.code)).splitlines()[-1]
