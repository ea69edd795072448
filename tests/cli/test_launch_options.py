"""No option is dropped without a word: under every launcher each one has an effect, or is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Script
from zeroengine.cli.launch_options import HONORED_BY, parser
from zeroengine.cli.zero_launch import main
from zeroengine.launch.local import job

Ask = Callable[..., tuple[int, str]]
ALWAYS = {"launcher", "dry_run", "help", "version", "command"}  # said in every request here, or no request
VALUES = {
    "nproc": ["--nproc", "1"],
    "cpu": ["--cpu"],
    "config": ["--config", "zero.json"],
    "set": ["--set", "zero_optimization.stage=1"],
    "env": ["--env", "COLOUR=red"],
    "bind": ["--bind", "cores"],
    "max_restarts": ["--max-restarts", "1"],
    "module": ["-m"],
    "hostfile": ["--hostfile", "hosts"],
    "include": ["--include", "n1"],
    "exclude": ["--exclude", "n1"],
    "nnodes": ["--nnodes", "1"],
    "master_addr": ["--master-addr", "10.0.0.1"],
    "port": ["--port", "29511"],
    "ssh": ["--ssh", "ssh -p 2222"],
    "node_timeout": ["--node-timeout", "20"],
    "max_idle_rounds": ["--max-idle-rounds", "5"],
    "connect_timeout": ["--connect-timeout", "40"],
    "import_timeout": ["--import-timeout", "200"],
    "fan_out": ["--fan-out", "8"],
    "image": ["--image", "other:2"],
    "kind": ["--kind", "TrainJob"],
    "log_dir": ["--log-dir", "logs"],
    "run_folder": ["--run-folder", "run"],
    "no_live": ["--no-live", "--run-folder", "run"],
    "as_deepspeed": ["--as-deepspeed"],
}
ON_NODES = ("ssh", "slurm")
REQUESTS = {
    "local": [],
    "ssh": ["--hostfile", "hosts"],
    "slurm": [],
    "mpi": [],
    "k8s": ["--image", "i:1", "--nproc", "2", "--nnodes", "2"],
    "k8s, a TrainJob": ["--image", "i:1", "--nproc", "2", "--nnodes", "2", "--kind", "TrainJob"],
    "ray": ["--nproc", "2"],
}
# What shows when ranks run, and not in a dry run: other tests see it.
OF_NODES = ("node_timeout", "bind", "max_idle_rounds", "connect_timeout", "import_timeout", "fan_out")
WHEN_RUN = {
    *((request, option) for request in ("local", *ON_NODES) for option in ("max_restarts", "log_dir")),
    *((request, option) for request in ON_NODES for option in OF_NODES),
    ("local", "nnodes"),  # 1, which it is
}
ENVIRONMENT = {
    "slurm": {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "2"},
    "mpi": {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
}


@pytest.fixture
def ask(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ask:
    """Ask for a dry run; returns the exit code, and what was printed, with one name for all free ports."""
    script("")
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(job, "count_gpus", lambda: 2)

    def run(request: str, *options: str) -> tuple[int, str]:
        launcher = request.partition(",")[0]
        for name, value in ENVIRONMENT.get(launcher, {}).items():
            monkeypatch.setenv(name, value)
        target = "train" if "-m" in options else "train.py"
        code = main(["--launcher", launcher, "--dry-run", *REQUESTS[request], *options, target])
        out, err = capfd.readouterr()
        return code, re.sub(r"MASTER_PORT=(?!29511)\d+", "MASTER_PORT=free", out) if code == 0 else err

    return run


def test_every_option_has_a_value_to_try() -> None:
    options = {action.dest for action in parser()._actions} - ALWAYS
    assert options == set(VALUES) and set(HONORED_BY) <= options


@pytest.mark.parametrize("request_", REQUESTS)
def test_empty_filters_of_deepspeeds_command_lines_ask_for_nothing(request_: str, ask: Ask) -> None:
    assert ask(request_, "--include", "", "--exclude=", "--master-addr", "") == ask(request_)


@pytest.mark.parametrize("request_", REQUESTS)
def test_every_option_is_honored_or_refused(request_: str, ask: Ask) -> None:
    launcher = request_.partition(",")[0]
    code, plain = ask(request_)
    assert code == 0, plain
    for option, words in VALUES.items():
        if words[0] in REQUESTS[request_] and option in ("kind", "hostfile"):
            continue  # said already
        code, said = ask(request_, *words)
        if code == 0:
            assert said != plain or (request_, option) in WHEN_RUN, f"{option} is dropped"
        else:
            assert code == 2 and words[0] in said, said
            # This one goes with a PyTorchJob alone.
            alone = (request_, option) == ("k8s, a TrainJob", "max_restarts")
            assert alone or launcher not in HONORED_BY.get(option, (launcher,)), said
