"""The command line: what it refuses and how, and what it says without running anything."""

from __future__ import annotations

import os
import resource
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.launch.conftest import COMMAND, Script
from zeroengine.cli.launch_options import parser
from zeroengine.cli.zero_launch import main
from zeroengine.launch.local import job
from zeroengine.migration.launch_options import SWITCHES, advice_of

Refuse = Callable[..., str]


@pytest.fixture
def refuse(capfd: pytest.CaptureFixture[str], script: Script) -> Refuse:
    """Run zero-launch with a request it refuses; returns its one message."""
    script("raise AssertionError('was started')")

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("zero-launch: ")
        return err.removeprefix("zero-launch: ").strip()

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian.py"], "trian.py: there is no such script. Did you mean train.py?"),
        (["nowhere/train.py"], "nowhere/train.py: there is no such script, nor a folder nowhere"),
        (["."], ". is a folder: name the script in it, for instance train.py"),
        (["-m", "jsn.tool"], "-m jsn.tool: there is no module jsn. Did you mean json?"),
        (["-m", "json.tol"], "-m json.tol: there is no module json.tol. Did you mean json.tool?"),
        (["-m", "json"], "-m json: a package without a __main__.py cannot be run; name a module in it"),
        (["-m", "a/b.py"], "-m a/b.py: -m takes a module's name. Write -m a.b, or leave -m out"),
        (["--nproc", "0", "train.py"], "--nproc 0: not a number from 1 to 4096. Write --nproc 2, or --nproc auto"),
        (["--nproc", "-1", "train.py"], "--nproc -1: not a number from 1 to 4096. Write --nproc 2, or --nproc auto"),
        (
            ["--nproc", "9999999", "train.py"],
            "--nproc 9999999: not a number from 1 to 4096. Write --nproc 2, or --nproc auto",
        ),
        (["--nproc", "two", "train.py"], "--nproc two: not a number from 1 to 4096. Write --nproc 2, or --nproc auto"),
        (
            ["--set", "stage", "train.py"],
            "--set stage: not of the form KEY=VALUE. Write --set zero_optimization.stage=3",
        ),
        (["--log-dir", "train.py", "train.py"], "--log-dir train.py: cannot be made a folder for logs (File exists)"),
    ],
)
def test_wrong_requests_are_refused_with_the_remedy(refuse: Refuse, arguments: list[str], message: str) -> None:
    assert refuse(*arguments) == message


@pytest.mark.parametrize("arguments", [[], ["--nporc", "2", "train.py"], ["--nproc"]])
def test_wrong_usage_shows_the_right_one(refuse: Refuse, arguments: list[str]) -> None:
    message = refuse(*arguments)
    assert "zero-launch [options] script.py" in message and "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--nproc_per_node", "4"], "--nproc_per_node 4: write --nproc 4"),
        (["--nproc-per-node=gpu"], "--nproc-per-node gpu: write --nproc auto"),
        (["--num_gpus", "8"], "--num_gpus 8: write --nproc 8"),
        (["--num_processes", "8"], "write --nproc 8, and count the processes of one node, not of all nodes"),
        (["--num_machines", "2"], "write --nnodes 2, and --hostfile FILE with their names"),
        (["--node_rank", "0"], "leave it out: zero-launch is started once"),
        (["--machine_rank", "0"], "leave it out: zero-launch is started once"),
        (["--master_addr", "10.0.0.1"], "write --master-addr 10.0.0.1"),
        (["--master_port=29501"], "write --master-port 29501"),
        (["--main_process_port", "29501"], "write --port 29501"),
        (["--rdzv_endpoint", "a:29400"], "leave it out: zero-launch opens the store on the first node"),
        (["--standalone"], "leave it out: zero-launch brings the ranks together itself"),
        (["-H", "hosts"], "-H hosts: write --hostfile hosts"),
        (["--mixed_precision", "bf16"], "write --set bf16.enabled=true"),
        (["--mixed_precision", "no"], "leave it out: without bf16 or fp16 in the configuration"),
        (["--zero_stage", "3"], "write --set zero_optimization.stage=3"),
        (["--deepspeed_config_file", "ds.json"], "write --config ds.json"),
        (["--max_restarts", "3"], "write --max-restarts 3"),
        (["--fsdp_sharding_strategy", "1"], "leave it out: --set zero_optimization.stage=N"),
        (["--launcher", "pdsh"], "--launcher pdsh: write --launcher ssh"),
        (["--launcher=openmpi"], "let mpirun start it"),
        (["--nporc", "2"], "--nporc 2: there is no such option. Did you mean --nproc?"),
    ],
)
def test_an_option_of_another_launcher_says_what_to_write(refuse: Refuse, arguments: list[str], advice: str) -> None:
    assert advice in refuse("--nproc", "1", *arguments, "train.py")


def test_options_of_another_launcher_are_listed_together(refuse: Refuse) -> None:
    assert refuse("--nproc_per_node=2", "--nnodes", "1", "--rdzv_backend", "c10d", "--standalone", "train.py") == (
        "there are no such options here:\n  --nproc_per_node 2: write --nproc 2\n"
        "  --rdzv_backend c10d: leave it out: zero-launch brings the ranks together itself, and every run has a store "
        "of its own\n  --standalone: leave it out: zero-launch brings the ranks together itself, and every run has a "
        "store of its own"
    )


def test_every_option_of_torchrun_is_known() -> None:
    own = {name for action in parser()._actions for name in action.option_strings}
    for action in get_args_parser()._actions:
        for option in set(action.option_strings) - own:
            name = option.lstrip("-").replace("_", "-")
            assert f"--{name}" in own or advice_of(name, "1"), option
            assert (action.nargs is None) == (name not in SWITCHES) or f"--{name}" in own, option


def test_options_after_the_script_are_the_scripts(capfd: pytest.CaptureFixture[str], script: Script) -> None:
    arguments = ["--nproc_per_node", "2", "--deepspeed_config", "ds.json"]
    name = script("import sys; print(sys.argv[1:])")
    assert main(["--nproc", "1", "--cpu", "--dry-run", name, *arguments]) == 0
    assert shlex.join(arguments) in capfd.readouterr().out


def test_a_port_in_use_is_refused(refuse: Refuse) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        message = refuse("--nproc", "1", "--cpu", "--port", str(port), "train.py")
    assert message == f"port {port} is in use. Choose another with --port, or leave --port out"


def test_a_wrong_configuration_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert "zer.json" in refuse("--config", "zer.json", "train.py")
    message = refuse("--config", "zero.json", "--set", "zero_optimization.stag=3", "train.py")
    assert "stag" in message and "stage" in message


def test_more_processes_than_files_may_be_open_are_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_allowed(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    monkeypatch.setattr(resource, "setrlimit", not_allowed)
    assert refuse("--nproc", "2", "--cpu", "train.py") == (
        "2 ranks of this node need 116 open files, and 24 are allowed here. Allow more (ulimit -n 116, or nofile in "
        "/etc/security/limits.conf), or start fewer"
    )


def test_more_processes_than_gpus_are_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "count_gpus", lambda: 2)
    assert refuse("--nproc", "3", "train.py") == (
        "--nproc 3: only 2 GPUs are visible, and each process needs its own."
        " Write --nproc 2, make more visible (CUDA_VISIBLE_DEVICES), or add --cpu"
    )
    assert job.count_processes("auto", cpu=False) == 2
    assert job.count_processes("3", cpu=True) == 3


@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("0<&-", "1>&-", "2>&-")), "0<&- 1>&- 2>&-"],
)
def test_closed_standard_descriptors_change_nothing(script: Script, closed: str) -> None:
    name = script("print('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
    command = f"{shlex.join(COMMAND)} --cpu --nproc 1 {name} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "1>&-" in closed or done.stdout == "[rank 0] out\n"
    assert "2>&-" in closed or "rank 0 failed (exit code 3)" in done.stderr


def test_dry_run_lines_are_the_run(
    capfd: pytest.CaptureFixture[str], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started side by side in a shell, they do what zero-launch would have done."""
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(total.item(), sys.argv[1], os.environ["ZEROENGINE_OVERRIDES"])
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    arguments = ["--nproc", "2", "--cpu", "--port", port, "--dry-run", "--set", "a=b c", script(body), "x $y"]
    assert main(arguments) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["env", "RANK=0"], ["env", "RANK=1"]]
    shells = [subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, text=True) for line in lines]
    assert [shell.communicate()[0] for shell in shells] == ['3.0 x $y ["a=b c"]\n'] * 2


def test_omp_num_threads_is_shared_out_unless_set(
    monkeypatch: pytest.MonkeyPatch, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    name = script("")

    def dry_run(nproc: str) -> str:
        assert main(["--nproc", nproc, "--cpu", "--dry-run", name]) == 0
        return capfd.readouterr().out

    monkeypatch.setattr(job, "count_cores", lambda: 12)
    assert "OMP_NUM_THREADS=3 " in dry_run("4")
    assert "OMP_NUM_THREADS=1 " in dry_run("16")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in dry_run("4")


def test_modules_run_as_with_python(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/__main__.py").write_text(
        "import sys; from . import __name__ as n; print(n, sys.argv, sys.path[0])"
    )
    assert main(["--nproc", "1", "--cpu", "-m", "pack", "-x"]) == 0
    expected = subprocess.run([sys.executable, "-m", "pack", "-x"], capture_output=True, text=True).stdout
    assert capfd.readouterr().out == f"[rank 0] {expected}"


def test_scripts_run_as_with_python(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    body = """
import pickle, sys
class A: x: int = 0
print(__name__, __file__, sys.argv, sys.path[0], pickle.dumps(A()), A.__annotations__)
"""
    (tmp_path / "folder/train.py").write_text(body)
    assert main(["--nproc", "1", "--cpu", "folder/train.py", "-x"]) == 0
    expected = subprocess.run([sys.executable, "folder/train.py", "-x"], capture_output=True, text=True).stdout
    assert capfd.readouterr().out == f"[rank 0] {expected}"


def test_help_and_version(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "zero-launch --nproc 4" in capfd.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and "torch" in capfd.readouterr().out


def test_the_command_works_from_a_checkout(tmp_path: Path, script: Script) -> None:
    command = Path(__file__).resolve().parents[2] / "bin/zero-launch"
    environment = os.environ | {"ZEROENGINE_PYTHON": sys.executable}
    environment.pop("PYTHONPATH")
    done = subprocess.run(
        [command, "--nproc", "1", "--cpu", script("import zeroengine; print(zeroengine.__name__)")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (0, "[rank 0] zeroengine\n"), done.stderr


def test_the_launcher_imports_what_it_needs_alone(tmp_path: Path) -> None:
    """Only a run with a run folder draws with rich, and only a configuration needs pydantic."""
    (tmp_path / "script.py").write_text("")
    command = [sys.executable, "-X", "importtime", "-m", "zeroengine.cli.zero_launch", "--nproc", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch.distributed.elastic.agent.server.api" in modules
    assert not modules & {"pydantic", "rich.console", "zeroengine.config", "zeroengine.view.live_line"}
