"""The rank that mpirun or srun gave this process, read from its environment. Needs no torch.

Both start many processes and say to each which one it is, in variables of their own. torch.distributed wants RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Rank and number of ranks, of all and on this node, as MPI libraries name them: Open MPI, MVAPICH2, MPICH, Cray. Intel
# MPI has MPICH's.
RANK_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
LOCAL_RANK_NAMES = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
# Of a step's task. The shell of an allocation has some of SLURM_*, and of these at most a step of one task.
SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID")
# The exit code, EX_TEMPFAIL of sysexits.h, of ranks that have saved what they need to go on and ended because their
# time is over: to be started again by whoever gave them the time. See `checkpoint/on_signal.py`.
START_AGAIN = 75
STEP_FILE = "ZEROENGINE_STEP_FILE"  # where a rank tells zero-launch that it has taken a step in this round
FIRST_PORT, NUM_PORTS = 20000, 12000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class LaunchedRank:
    """One process of those that mpirun or srun started."""

    launcher: str  # mpirun or srun
    rank: int
    world_size: int
    local_rank: int | None = None  # on this node; None where the launcher does not say
    local_world_size: int | None = None


def report_step() -> None:
    """Tell zero-launch, where it started this process, that a step was taken. Calls after the first do nothing."""
    path = os.environ.pop(STEP_FILE, None)
    if path is not None:
        with contextlib.suppress(OSError):  # the round is being ended
            open(path, "w").close()


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return this process's rank, or None where neither mpirun nor srun has started it."""
    by_mpi, by_slurm = _rank_of_mpi(environ), _rank_of_slurm(environ)
    if by_mpi is None:
        return by_slurm
    # srun gives MPI's names, too, and more of its own. mpirun on Slurm starts its ranks below a step of its daemons.
    if by_slurm is not None and (by_slurm.rank, by_slurm.world_size) == (by_mpi.rank, by_mpi.world_size):
        return by_slurm
    return by_mpi


def _rank_of_mpi(environ: Mapping[str, str]) -> LaunchedRank | None:
    pair = _numbers(environ, RANK_NAMES)
    return None if pair is None else LaunchedRank("mpirun", *pair, *(_numbers(environ, LOCAL_RANK_NAMES) or ()))


def _numbers(environ: Mapping[str, str], names: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
    """Return the values of the first pair of variables that are set."""
    pairs = ((environ.get(first, ""), environ.get(second, "")) for first, second in names)
    return next(((int(a), int(b)) for a, b in pairs if a.isdecimal() and b.isdecimal()), None)


def _rank_of_slurm(environ: Mapping[str, str]) -> LaunchedRank | None:
    if not all(environ.get(name, "").isdecimal() for name in SLURM_NAMES):
        return None
    rank, world_size, local_rank = (int(environ[name]) for name in SLURM_NAMES[:3])
    counts, node = list(expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))), environ.get("SLURM_NODEID", "")
    local_world_size = counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None
    return LaunchedRank("srun", rank, world_size, local_rank, local_world_size)


def torch_variables(
    launched: LaunchedRank, environ: Mapping[str, str], address: str | None = None, port: int = 0
) -> dict[str, str]:
    """Return torch.distributed's variables for a rank. MASTER_ADDR is absent where nothing says where rank 0 is.

    Args:
        address: of rank 0's node; else MASTER_ADDR, this node if all ranks are on it, or the first that Slurm names.
        port: of the store there; else MASTER_PORT, or one made of the job's id where 0.
    """
    variables = {"RANK": str(launched.rank), "WORLD_SIZE": str(launched.world_size)}
    if launched.local_rank is not None:
        variables["LOCAL_RANK"] = str(launched.local_rank)
    if launched.local_world_size is not None:
        variables["LOCAL_WORLD_SIZE"] = str(launched.local_world_size)
    address = address or environ.get("MASTER_ADDR") or _address(launched, environ)
    if address is not None:
        variables["MASTER_ADDR"] = address
    port_of_job = FIRST_PORT + zlib.crc32(_job(launched, environ).encode()) % NUM_PORTS
    variables["MASTER_PORT"] = str(port or environ.get("MASTER_PORT") or port_of_job)
    return variables


def _address(launched: LaunchedRank, environ: Mapping[str, str]) -> str | None:
    if launched.local_world_size == launched.world_size:
        return "127.0.0.1"
    # Under mpirun a step's nodes are those of its daemons, which need not include the first.
    nodes = environ.get("SLURM_STEP_NODELIST" if launched.launcher == "srun" else "SLURM_JOB_NODELIST")
    return next(expand_nodes(nodes)) if nodes else None


def _job(launched: LaunchedRank, environ: Mapping[str, str]) -> str:
    """Return what all ranks of the job know, and, as far as the launcher says, no other job on these nodes has."""
    named = next((environ[name] for name in JOBS if name in environ), None)
    if named is not None:
        return named
    if launched.launcher == "srun":
        return f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    proxy, control_port = _hydra()
    if control_port:
        return f"hydra {control_port}"
    if proxy and launched.local_world_size == launched.world_size:  # another node has another process
        return f"hydra {proxy}"
    return environ.get("SLURM_JOB_ID") or f"user {os.getuid()}"


def _hydra() -> tuple[int, str | None]:
    """Return MPICH's process on this node that started this one, or 0, and where mpirun listens for it, or None.

    MPICH gives its ranks no job id. Its process on each node is told on the command line to connect to
    `--control-port host:port`, which is the same on all nodes, and no two jobs have one at the same time.
    """
    pid = "self"
    while pid not in ("0", "1"):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if status["Name"].startswith("hydra"):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                return int(status["Pid"]), dict(itertools.pairwise(words)).get("--control-port")
        except OSError:
            break
        pid = status["PPid"].strip()
    return 0, None


def expand_nodes(nodes: str) -> Iterator[str]:
    """Yield the names that Slurm's short form stands for: `gpu[01-03,7]-x,login`."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        yield from _expand_one(item)


def _expand_one(item: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        yield item
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand_one(f"{item[: match.start()]}{number:0{len(first)}}{item[match.end() :]}")


def expand_counts(text: str) -> Iterator[int]:
    """Yield the numbers that Slurm's short form stands for: `2(x3),1`."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)
