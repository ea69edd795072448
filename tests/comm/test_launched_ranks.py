"""Processes that mpirun or srun started train together, without zero-launch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, ordinary_loop
from zeroengine import ZeroEngineError
from zeroengine.comm.launched_ranks import has_peers, join_launched_ranks
from zeroengine.utils.launcher import LaunchedRank, launched_rank, torch_variables

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def open_mpi(rank: int, size: int, local_size: int | None = None, job: str = "7") -> dict[str, str]:
    local_size = local_size or size
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, rank % local_size, local_size)
    found = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values, strict=True)}
    return found | {"OMPI_MCA_ess_base_jobid": job}


def slurm_step(rank: int, size: int, tasks_per_node: str, nodes: str = "n1", job: str = "7") -> dict[str, str]:
    """A task of `srun`, in an allocation of more nodes than the step has."""
    per_node = int(tasks_per_node[0])
    found = {"PROCID": rank, "LOCALID": rank % per_node, "NODEID": rank // per_node, "NTASKS": size, "STEP_ID": 2}
    found |= {"STEP_NUM_TASKS": size, "STEP_TASKS_PER_NODE": tasks_per_node, "STEP_NODELIST": nodes}
    found |= {"JOB_ID": job, "JOB_NODELIST": "n0,n[1-2]", "TASKS_PER_NODE": "4(x3)"}
    return {f"SLURM_{name}": str(value) for name, value in found.items()}


BATCH_SCRIPT = {  # of an allocation for four tasks
    f"SLURM_{name}": value
    for name, value in {"JOB_ID": "7", "NTASKS": "4", "PROCID": "0", "LOCALID": "0", "JOB_NODELIST": "n[1-2]"}.items()
}
INTERACTIVE_SHELL = slurm_step(0, 1, "1") | {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (open_mpi(3, 4, 2), LaunchedRank("mpirun", 3, 4, 1, 2)),
        (
            {
                f"MV2_COMM_WORLD_{n}": v
                for n, v in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "1212", strict=True)
            },
            LaunchedRank("mpirun", 1, 2, 1, 2),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            LaunchedRank("mpirun", 1, 2, 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchedRank("mpirun", 1, 2)),
        (slurm_step(5, 6, "4,2", "n[1-2]"), LaunchedRank("srun", 5, 6, 1, 2)),
        (slurm_step(1, 2, "2") | {"PMI_RANK": "1", "PMI_SIZE": "2"}, LaunchedRank("srun", 1, 2, 1, 2)),
        (open_mpi(3, 4, 2) | slurm_step(0, 1, "1", "n2"), LaunchedRank("mpirun", 3, 4, 1, 2)),
        (BATCH_SCRIPT, None),
        (INTERACTIVE_SHELL, LaunchedRank("srun", 0, 1, 0, 1)),
        ({}, None),
    ],
)
def test_the_launcher_says_which_rank_a_process_is(environ: dict[str, str], rank: LaunchedRank | None) -> None:
    assert launched_rank(environ) == rank


def variables(environ: dict[str, str]) -> dict[str, str]:
    launched = launched_rank(environ)
    assert launched is not None
    return torch_variables(launched, environ)


def test_rank_0_is_on_the_first_node_of_the_step_or_on_the_only_one() -> None:
    assert variables(slurm_step(5, 8, "4(x2)", "n[1-2]"))["MASTER_ADDR"] == "n1", "not n0, which has no task"
    assert variables(slurm_step(1, 4, "4", "n1"))["MASTER_ADDR"] == "127.0.0.1"
    assert variables(open_mpi(1, 4))["MASTER_ADDR"] == "127.0.0.1"
    on_slurm = open_mpi(3, 4, 2) | slurm_step(0, 1, "1", "n2")
    assert variables(on_slurm)["MASTER_ADDR"] == "n0", "the step is that of mpirun's daemons on the other nodes"
    assert "MASTER_ADDR" not in variables(open_mpi(3, 4, 2))
    assert variables(open_mpi(3, 4, 2) | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})["MASTER_PORT"] == "1"


def test_jobs_and_steps_beside_each_other_have_ports_of_their_own() -> None:
    step = slurm_step(1, 2, "2")
    environs = [
        step,
        step | {"SLURM_STEP_ID": "3"},
        step | {"SLURM_JOB_ID": "8"},
        open_mpi(1, 2),
        open_mpi(1, 2, job="8"),
    ]
    ports = [variables(environ)["MASTER_PORT"] for environ in environs]
    assert len(set(ports)) == len(ports)
    assert variables(slurm_step(0, 2, "2"))["MASTER_PORT"] == ports[0], "the same on all ranks"


def test_ranks_of_mpich_on_several_nodes_share_a_port_and_jobs_do_not(tmp_path: Path) -> None:
    """MPICH gives ranks no job id, and each node has a process of MPICH's, of which a script plays the part."""
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.write_text(f'#!/bin/sh\n{sys.executable} -c "$SHOW"\nexit 0\n')
    proxy.chmod(0o755)
    show = """
import os
from zeroengine.utils.launcher import launched_rank, torch_variables
print(torch_variables(launched_rank(os.environ), os.environ)["MASTER_PORT"])
"""

    def port_on_node(node: int, *arguments: str, local: str = "1", **more: str) -> str:
        ranks = {"PMI_RANK": str(node), "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": local}
        environ = {"PATH": os.environ["PATH"], "SHOW": show, **ranks, **more}
        done = subprocess.run([proxy, *arguments], cwd=ROOT, capture_output=True, text=True, env=environ)
        return done.stdout.strip() or done.stderr

    ports = [port_on_node(node, "--control-port", f"head:{job}") for job in (7, 8) for node in (0, 1)]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert port_on_node(0, "--control-port", "head:7", SLURM_JOB_ID="1") == ports[0], "mpirun twice in an allocation"
    assert port_on_node(0) == port_on_node(1), "without a word about the job"
    assert port_on_node(0, local="2") != port_on_node(0, local="2"), "jobs on one node each"


def trains_under(launcher: str) -> tuple[int, int, str | None, list[float]]:
    """Which ranks an ordinary script trains on, whose environment is the launcher's."""
    rank, job = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
    for name in TORCH:
        os.environ.pop(name, None)
    if launcher == "mpirun":
        os.environ |= open_mpi(rank, 2, job=job)
    elif launcher == "srun":
        os.environ |= slurm_step(rank, 2, "2", job=job)
    elif launcher == "a copy in each":
        os.environ |= open_mpi(rank, 2, job=job) | {"RANK": "0", "WORLD_SIZE": "1"}
    else:
        os.environ |= BATCH_SCRIPT if rank == 0 else INTERACTIVE_SHELL
    task = Task(steps=2)
    engine = make_engine(task, 2)
    losses, _ = ordinary_loop(task, engine)
    engine.close()
    return engine.rank, dist.get_world_size(), os.environ.get("LOCAL_RANK"), losses


def as_ever() -> list[float]:
    engine = make_engine(Task(steps=2), 2)
    losses, _ = ordinary_loop(Task(steps=2), engine)
    engine.close()
    return losses


def test_processes_of_mpirun_and_srun_train_as_one() -> None:
    expected = [(rank, 2, str(rank), losses) for rank, losses in enumerate(run_ranks(2, as_ever))]
    assert run_ranks(2, trains_under, "mpirun") == expected
    assert run_ranks(2, trains_under, "srun") == expected


def test_the_shell_of_an_allocation_and_a_requested_copy_train_alone() -> None:
    (losses,) = run_ranks(1, as_ever)
    assert run_ranks(2, trains_under, "a shell") == [(0, 1, None, losses)] * 2
    assert run_ranks(2, trains_under, "a copy in each") == [(0, 1, None, losses)] * 2


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "the environment has RANK, and not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: which ranks"),
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE, and not RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "has RANK and WORLD_SIZE, and not MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "1"} | open_mpi(1, 2), "the environment has RANK, and not WORLD_SIZE"),
        (
            open_mpi(1, 4, 2),
            r"mpirun started 4 processes, and nothing says on which host rank 0 is. Write mpirun -n 4 zero-launch "
            "--launcher mpi --master-addr HOST train.py",
        ),
    ],
)
def test_missing_variables_of_a_rank_are_an_error(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have left a process group of one rank in this process.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in TORCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ZeroEngineError) as caught:
        join_launched_ranks()
    assert re.search(message, str(caught.value))
    if "RANK" in environ or "WORLD_SIZE" in environ:
        with pytest.raises(ZeroEngineError, match="which ranks does this process belong to"):
            has_peers()
