"""Values that look secret are neither shown nor written into what others may read, and reach the ranks all the same."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import COMMAND, Script
from zeroengine.cli.zero_launch import main
from zeroengine.utils.masking import is_secret, masked


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY PGPASSWORD MY_PASSWD github_pat DB_CREDENTIALS OPENAI_APIKEY "
    "MYSQL_PWD APIKEY2 SECRETS TOKEN_B".split(),
)
def test_names_tell_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", "TOKENIZERS_PARALLELISM NCCL_DEBUG PATH PWD KEYBOARD OMP_NUM_THREADS MONKEY".split())
def test_other_names_do_not(name: str) -> None:
    assert not is_secret(name)
    assert is_secret(name, "http://user:word@proxy:3128") and not is_secret(name, "http://proxy:3128")


def test_a_login_in_an_address_is_masked() -> None:
    shown = masked({"PROXY": "http://me:hush@proxy:80/", "URL": "http://proxy:80/a@b", "API_KEY": "hush"})
    assert shown == {"PROXY": "http://me:***@proxy:80/", "URL": "http://proxy:80/a@b", "API_KEY": "***"}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options with secrets, and a file with one; each has `hidden` in its value."""
    Path(".zero_env").write_text("FILE_TOKEN=hidden1\nCOLOUR=red\n")
    monkeypatch.setenv("HERE_PASSWORD", "hidden2")
    return ["--env", "API_KEY=hidden3", "--env=OTHER_KEY=hidden4", "--env", "HERE_PASSWORD", "--env", "SHAPE=round"]


def test_dry_runs_of_mpi_show_no_secret(
    secrets: list[str], script: Script, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--launcher", "mpi", "--dry-run", *secrets, script("")]) == 0
    out = capfd.readouterr().out
    assert "hidden" not in out and "API_KEY=***" in out and "COLOUR=red" in out


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
def test_kubernetes_takes_secrets_from_a_secret(
    kind: str, secrets: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--launcher", "k8s", "--image", "i", "--nproc", "2", "--kind", kind, *secrets]
    assert main([*options, "/app/train.py"]) == 0
    out, err = capfd.readouterr()
    assert "hidden" not in out + err and "kubectl create secret generic train-env" in err
    spec = yaml.safe_load(out)["spec"]
    if kind == "TrainJob":
        variables = spec["trainer"]["env"]
    else:
        variables = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["env"]
    shown = {variable["name"]: variable.get("valueFrom", variable.get("value")) for variable in variables}
    for name in ("FILE_TOKEN", "API_KEY", "OTHER_KEY", "HERE_PASSWORD"):
        assert shown.pop(name) == {"secretKeyRef": {"name": "train-env", "key": name}}
    assert shown == {"COLOUR": "red", "SHAPE": "round"}


def test_sbatch_hands_secrets_over_beside_the_script(
    secrets: list[str], script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell script plays sbatch's part: it runs the batch script, as Slurm would, in the environment that it got."""
    (tmp_path / "bin").mkdir()
    for name, body in {
        "sbatch": 'export SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=7\nexec sh "$1"',
        "srun": 'while [ "$1" != sh ]; do shift; done\nexec "$@"',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    names = ("FILE_TOKEN", "API_KEY", "OTHER_KEY", "HERE_PASSWORD", "COLOUR", "SHAPE")
    target = script(f"print(*(os.environ[name] for name in {names}))")
    options = ["--launcher", "slurm", "--submit", "--nnodes", "1", "--nproc", "1", "--cpu", *secrets]
    done = subprocess.run([*COMMAND, *options, target], capture_output=True, text=True)
    assert "hidden1 hidden3 hidden4 hidden2 red round" in done.stdout, done.stderr
    text = Path("zero-launch.sbatch").read_text()
    assert "hidden" not in text and "SHAPE=round" in text


@pytest.mark.parametrize("export", ["NONE", "PATH,HOME", "NIL"])
def test_a_secret_that_would_not_reach_the_job_is_refused(
    export: str, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--launcher", "slurm", "--submit", "--dry-run", "--nnodes", "1", "--cpu", "--env", "API_KEY=hidden"]
    name = script("")
    assert main([*options, "--sbatch", f"--export={export}", name]) == 2
    err = capfd.readouterr().err
    assert "API_KEY looks secret" in err and "--export=API_KEY" in err and "hidden" not in err
    for kept in ("ALL,COLOUR=red", "API_KEY,PATH"):
        assert main([*options, "--sbatch", f"--export {kept}", name]) == 0
        assert "hidden" not in capfd.readouterr().out
