"""MPI: mpirun has started this process as one rank of many; its environment becomes torch.distributed's."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from zeroengine.errors import LaunchError
from zeroengine.launch import slurm

# Rank, size, and the same on this node, as MPI libraries name them: Open MPI, MPICH and Intel MPI, srun.
NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "PMI_ID", "SLURM_JOB_ID")
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def adapted(environ: Mapping[str, str], address: str | None = None, port: int = 0) -> dict[str, str]:
    """The variables that a rank is given.

    Args:
        address: of rank 0's host; found where all ranks are on one host, or Slurm says.
        port: of the store there; one made of the job's id where 0.

    Raises:
        LaunchError: MPI has not started this process, or rank 0's address is nowhere to be found.
    """
    names = next((names for names in NAMES if all(name in environ for name in names)), None)
    if names is None:
        raise LaunchError(
            "--launcher mpi: MPI has not started this process. Write mpirun -n 4 zero-launch --launcher mpi ..."
        )
    found = {ours: environ[theirs] for ours, theirs in zip(OURS, names, strict=True)}
    found["MASTER_ADDR"] = address or environ.get("MASTER_ADDR") or _address(environ, found)
    job = next((environ[name] for name in JOBS if name in environ), "0")
    found["MASTER_PORT"] = str(port or environ.get("MASTER_PORT") or 20000 + zlib.crc32(job.encode()) % 20000)
    return found


def _address(environ: Mapping[str, str], found: Mapping[str, str]) -> str:
    if found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]:
        return "127.0.0.1"
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        return next(slurm.expand(nodes))
    raise LaunchError(
        "--launcher mpi: on several hosts, where is rank 0? Add --master-addr with the first host's address"
    )
