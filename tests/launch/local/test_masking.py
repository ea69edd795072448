"""Values that look secret are neither shown nor written into what others may read, and reach the ranks all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import Script
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
