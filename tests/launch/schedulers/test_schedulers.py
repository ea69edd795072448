"""Slurm, MPI, Kubernetes, Ray: what they say of a job becomes ours, and ours theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.conftest import COMMAND, Script
from zeroengine.cli.zero_launch import main
from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.local.core_binding import divide_cores
from zeroengine.launch.schedulers import slurm
from zeroengine.launch.schedulers.kubernetes import job_name
from zeroengine.launch.schedulers.mpi import mpi_rank_variables
from zeroengine.utils.launcher import expand_nodes


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("gpu[01-03,7],login", "gpu01 gpu02 gpu03 gpu7 login"),
        ("r[1-2]n[8-10]-x", "r1n8-x r1n9-x r1n10-x r2n8-x r2n9-x r2n10-x"),
    ],
)
def test_slurm_s_short_form_stands_for_names(nodes: str, names: str) -> None:
    assert list(expand_nodes(nodes)) == names.split()


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({}, [None, None, None]),
        ({"SLURM_TASKS_PER_NODE": "1(x3)"}, [None, None, None]),
        ({"SLURM_TASKS_PER_NODE": "4(x2),2"}, [4, 4, 2]),
        ({"SLURM_NTASKS_PER_NODE": "4"}, [4, 4, 4]),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_TASKS_PER_NODE": "1(x3)"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "h100:8"}, [8, 8, 8]),
    ],
)
def test_the_allocation_is_the_hostfile(more: dict[str, str], slots: list[int | None]) -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", **more}
    assert slurm.allocated_hosts(environ) == [Host(f"n{i}", count) for i, count in enumerate(slots, 1)]


def test_outside_of_slurm_is_said() -> None:
    with pytest.raises(LaunchError, match=r"not inside a Slurm allocation\. Start zero-launch in sbatch or salloc"):
        slurm.allocated_hosts({})


def test_slurm_s_nodes_run_the_ranks(script: Script, tmp_path: Path) -> None:
    """Through srun, of which a script plays the part: it gets options, sh -c, and the command."""
    fake = tmp_path / "bin/srun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nwhile [ "$1" != sh ]; do echo "$1" >>srun; shift; done\nexec "$@"\n')
    fake.chmod(0o755)
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SSH_CONNECTION": "127.0.0.1 1 127.0.0.1 22"}
    environment["PATH"] = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*COMMAND, "--launcher", "slurm", "--nproc", "1", "--cpu", script("print(os.environ['WORLD_SIZE'])")],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert sorted(done.stdout.splitlines()) == ["[n1:0] 2", "[n2:1] 2"], done.stderr
    options = Path("srun").read_text().splitlines()
    assert {"--nodelist=n1", "--nodelist=n2", "--jobid=7", "--ntasks=1", "--overlap"} <= set(options)


def fake_program(folder: Path, name: str, body: str) -> dict[str, str]:
    """Put a program on PATH that plays a scheduler's part; returns the environment that has it."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("more", "number"),
    [
        pytest.param({}, "7", id="job", marks=pytest.mark.slow),
        pytest.param(
            {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"},
            "7_3",
            id="task of an array, whose number may be the array's",
        ),
    ],
)
def test_ranks_whose_time_is_over_are_requeued_and_not_restarted(
    script: Script, tmp_path: Path, more: dict[str, str], number: str
) -> None:
    fake_program(tmp_path, "srun", 'while [ "$1" != sh ]; do shift; done\nexec "$@"')
    environment = fake_program(tmp_path, "scontrol", 'echo "$@" >>scontrol')
    environment |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", **more}
    options = ["--launcher", "slurm", "--nproc", "1", "--cpu", "--max-restarts", "2"]
    done = subprocess.run(
        [*COMMAND, *options, script("print('started', flush=True)\nsys.exit(75)")],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert (done.returncode, done.stdout.count("started")) == (75, 1), done.stderr
    assert Path("scontrol").read_text() == f"requeue {number}\n"
    assert "started again (exit code 75)" in done.stderr and f"Slurm is to start job {number} again" in done.stderr


@pytest.mark.parametrize(
    "environ",
    [
        dict.fromkeys(["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"], "1")
        | dict.fromkeys(["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"], "2"),
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ],
)
def test_mpi_s_environment_becomes_torch_s(environ: dict[str, str]) -> None:
    variables = mpi_rank_variables(environ)
    assert variables.items() >= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items()
    assert variables["MASTER_ADDR"] == "127.0.0.1" and 20000 <= int(variables["MASTER_PORT"]) < 40000
    assert (
        mpi_rank_variables(environ | {"PMI_ID": "x", "PMIX_NAMESPACE": "y"})["MASTER_PORT"] != variables["MASTER_PORT"]
    )


def test_tasks_of_srun_are_ranks_without_tasks_per_node() -> None:
    """What `srun -n 3` of Slurm 22.05 sets, where `--ntasks-per-node` was not given."""
    text = "STEP_ID=0 STEP_NUM_TASKS=3 STEP_TASKS_PER_NODE=2,1 STEP_NODELIST=n[1-2] JOB_ID=2 PROCID=2 LOCALID=0"
    environ = {f"SLURM_{word.split('=')[0]}": word.split("=")[1] for word in text.split()} | {"SLURM_NODEID": "1"}
    variables = mpi_rank_variables(environ)
    assert variables.items() >= {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items()
    assert variables["MASTER_ADDR"] == "n1"


def test_mpi_on_several_hosts_must_know_the_first() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(LaunchError, match="where is rank 0"):
        mpi_rank_variables(environ)
    assert mpi_rank_variables(environ, "node-a", 29500).items() >= {("MASTER_ADDR", "node-a"), ("MASTER_PORT", "29500")}
    assert mpi_rank_variables(environ | {"SLURM_JOB_NODELIST": "n[3-4]"})["MASTER_ADDR"] == "n3"
    with pytest.raises(LaunchError, match="MPI has not started this process"):
        mpi_rank_variables({})


@pytest.mark.slow  # the variables that MPI leads to are tested above
def test_ranks_that_mpi_starts_form_a_process_group(script: Script) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(total.item(), sys.argv[1:], os.environ["ZEROENGINE_OVERRIDES"])
"""
    name, size = script(body), {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    size["OMPI_MCA_ess_base_jobid"] = str(os.getpid())
    ranks = [
        subprocess.Popen(
            [*COMMAND, "--launcher", "mpi", "--cpu", "--set", "a=1", name, "x y"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **size, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)},
        )
        for r in range(2)
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["3.0 ['x y'] [\"a=1\"]\n"] * 2


RAY = """
import os, pickle, threading
class Settings:
    def __init__(self, **settings):
        self.settings = settings
FailureConfig = RunConfig = ScalingConfig = Settings
class WorkerGroupError(Exception):
    pass
class TorchTrainer:
    def __init__(self, train, train_loop_config, scaling_config, run_config):
        self.train, self.config, self.workers = train, train_loop_config, scaling_config.settings["num_workers"]
    def fit(self):
        failures = {}
        for rank in range(self.workers):
            os.environ["RANK"] = str(rank)
            try:
                self.train(self.config)
            except BaseException as error:
                failures[rank] = pickle.loads(pickle.dumps(error))
        self.error = WorkerGroupError("Training failed due to worker errors")
        self.error.worker_failures = failures
        if failures:
            raise self.error
        self.error = None
        return self
"""


@pytest.mark.parametrize(
    ("body", "code", "err"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(rank * 7)", 7, "zero-launch: rank 1 failed (exit code 7)\n"),
        (
            "class Mine(Exception): pass\nif rank:\n    raise Mine('loss is nan')",
            1,
            "zero-launch: rank 1 failed (exit code 1)\n[rank 1] Traceback (most recent call last):\n"
            '[rank 1]   File "{folder}/train.py", line 5, in <module>\n'
            "[rank 1]     raise Mine('loss is nan')\n[rank 1] Mine: loss is nan\n",
        ),
    ],
    ids=["success", "exit code", "exception"],
)
def test_a_script_that_fails_on_ray_is_reported_as_elsewhere(
    script: Script, tmp_path: Path, body: str, code: int, err: str
) -> None:
    """With the script's traceback, and none of zero-launch's. A module plays the part of Ray Train."""
    (tmp_path / "ray/train").mkdir(parents=True)
    (tmp_path / "ray/__init__.py").write_text("")
    (tmp_path / "ray/train/__init__.py").write_text(RAY)
    (tmp_path / "ray/train/torch.py").write_text("from ray.train import TorchTrainer")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}", "COLUMNS": "80"}
    done = subprocess.run(
        [*COMMAND, "--launcher", "ray", "--nproc", "2", "--cpu", script(body)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert (done.returncode, done.stderr) == (code, err.format(folder=tmp_path))


def manifest(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["--launcher", "k8s", "--image", "i:1", *arguments, "/app/Train_LM.py", "a b", "$(A)"]) == 0
    tree: dict[str, object] = yaml.safe_load(capfd.readouterr().out)
    return tree


def test_kubernetes_manifests(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["python", "-m", "torch.distributed.run", "/app/Train_LM.py", "a b", "$$$$(A)"]
    tree = manifest(capfd, "--nnodes", "3", "--nproc", "8", "--env", "A=it's\n$(x)", "--set", "a=1")
    assert (tree["kind"], tree["metadata"]) == ("PyTorchJob", {"name": "train-lm"})
    replicas = tree["spec"]["pytorchReplicaSpecs"]  # type: ignore[index]
    assert [(name, replicas[name]["replicas"]) for name in replicas] == [("Master", 1), ("Worker", 2)]
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["command"] == command and container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert {v["name"]: v["value"] for v in container["env"]} == {"A": "it's\n$$(x)", "ZEROENGINE_OVERRIDES": '["a=1"]'}

    tree = manifest(capfd, "--nnodes", "2:3", "--nproc", "2", "--cpu", "--max-restarts", "4")
    assert tree["spec"]["elasticPolicy"]["minReplicas"] == 2  # type: ignore[index]
    tree = manifest(capfd, "--nnodes", "2", "--nproc", "2", "--kind", "TrainJob")
    trainer = tree["spec"]["trainer"]  # type: ignore[index]
    assert trainer["numNodes"] == 2 and trainer["command"] == command
    # With limits alone, Trainer starts one process in each pod.
    assert trainer["resourcesPerNode"] == {kind: {"nvidia.com/gpu": 2} for kind in ("requests", "limits")}


def test_the_configuration_may_be_in_the_image_alone(capfd: pytest.CaptureFixture[str]) -> None:
    tree = manifest(capfd, "--nproc", "8", "--config", "/app/zero3.json")
    template = tree["spec"]["pytorchReplicaSpecs"]["Master"]["template"]  # type: ignore[index]
    assert {"name": "ZEROENGINE_CONFIG", "value": "/app/zero3.json"} in template["spec"]["containers"][0]["env"]
    Path("zero.json").write_text('{"zero_optimization": {"stag": 3}}')
    assert main(["--launcher", "k8s", "--image", "i", "--nproc", "8", "--config", "zero.json", "/app/train.py"]) == 2
    assert "stage" in capfd.readouterr().err, "what can be read here is checked here"


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob"])
@settings(max_examples=60, deadline=None)
@given(name=st.text(max_size=90), nodes=st.integers(1, 2000))
def test_names_of_jobs_are_what_kubernetes_takes(kind: str, name: str, nodes: int) -> None:
    """Of the services of all pods, too, which Kubeflow makes of it."""
    label, _ = job_name(name, kind, nodes)
    services = [f"{label}-worker-{nodes - 1}"] if kind == "PyTorchJob" else [f"{label}-node-0-{nodes - 1}"]
    for text in (label, *services):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text) and len(text) <= 63
    assert label == job_name(label, kind, nodes)[0]


def test_long_names_are_told_apart_and_said() -> None:
    names = ["pretraining-of-a-language-model-with-a-very-long-name-in-its-script-" + end for end in ("a", "b")]
    (one, notices), (other, _) = (job_name(name, "PyTorchJob", 2) for name in names)
    assert one != other and "the job is called pretraining-of-a" in notices[0]
    assert job_name("7b", "PyTorchJob", 2) == ("train-7b", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--submit", "--launcher", "slurm"], "--submit: write a batch script and submit it with sbatch: docs/launch/"),
        (["--launcher", "k8s"], "--launcher k8s: which image?"),
        (["--launcher", "k8s", "--image", "i"], "--launcher k8s: how many processes has a pod? Write --nproc 8"),
        (["--launcher", "ray", "--nproc", "2"], "--launcher ray: Ray is not installed. Write pip install 'ray[train]'"),
        (["--launcher", "mpi"], "--launcher mpi: MPI has not started this process."),
        (["--launcher", "ssh"], "--launcher ssh: which hosts? Name a file of them with --hostfile"),
        (["--sbatch", "--time=1:00:00"], "--sbatch --time=1:00:00: write a batch script and submit it with sbatch"),
        (
            ["--include", "localhost:0,1"],
            "--include has no meaning with --launcher local, but with ssh, slurm. To",
        ),
        (["--hostfile", "h", "--launcher", "slurm"], "--hostfile has no meaning with --launcher slurm, but with ssh."),
        (["--nnodes", "2"], "--nnodes 2: on which hosts? Name a file of them with --hostfile"),
        (["--port", "70000"], "--port 70000: ports go from 1 to 65535."),
        (["--max-restarts", "-1"], "--max-restarts -1: write 0 for none, or a positive number"),
        (["--node-timeout", "1"], "--node-timeout 1: nodes speak every 2 s; write 5 or more"),
    ],
)
def test_wrong_requests_are_refused_with_the_remedy(
    script: Script, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*arguments, script("raise AssertionError('was started')")]) == 2
    assert capfd.readouterr().err.startswith(f"zero-launch: {message}")


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 3), (2, 2), (2, 4), (2, 3), (4, 2), (2, 8)])
def test_ranks_get_cores_of_their_own(nodes: int, ranks: int) -> None:
    cores = [list(range(8 * n // nodes, 8 * (n + 1) // nodes)) for n in range(nodes)]
    shares = divide_cores("cores", cores, ranks)
    assert sorted(core for share in shares for core in share) == list(range(8))
    assert ranks < nodes or all(any(set(share) <= set(node) for node in cores) for share in shares)
    whole_nodes = divide_cores("numa", cores, ranks)
    assert all(share in cores for share in whole_nodes) and (
        ranks < nodes or len({tuple(s) for s in whole_nodes}) == nodes
    )


def test_bound_ranks_run_on_their_cores(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    assert main(["--nproc", "2", "--cpu", "--bind", "cores", script("print(*sorted(os.sched_getaffinity(0)))")]) == 0
    cores_of_ranks = [set(line.partition("] ")[2].split()) for line in capfd.readouterr().out.splitlines()]
    assert cores_of_ranks[0] and cores_of_ranks[1] and not cores_of_ranks[0] & cores_of_ranks[1]
    assert main(["--nproc", "999", "--cpu", "--bind", "cores", script("")]) == 2
    assert "--bind cores: 999 ranks, and only" in capfd.readouterr().err


def test_zero_report_says_what_is_there() -> None:
    command = [sys.executable, "-m", "zeroengine.cli.zero_report", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert re.fullmatch(r"\d+\.\d+\.\d+", report["versions"]["Python"]) and "lo" in report["network"]
    assert not any("failed" in rows for rows in report.values()), report
