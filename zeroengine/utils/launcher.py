"""What a rank has from its launcher: rank, address, and where to report steps. This file needs no torch.

mpirun and srun start many processes, and tell each of them its rank in variables of their own. torch.distributed reads
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# -- ranks -------------------------------------------------------------------------------------------


# The variables with the rank and the world size, in the whole job and on this node, of Open MPI, MVAPICH2, MPICH (also
# Intel MPI) and Cray.
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
# A task of a step has all of these. The shell of an allocation has only some of them.
SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
JOB_ID_NAMES = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID")
# These ports lie below the range that Linux uses for outgoing connections.
FIRST_PORT, NUM_PORTS = 20000, 12000


@dataclass(frozen=True)
class LaunchedRank:
    """One of the processes that mpirun or srun started."""

    launcher: str  # "mpirun" or "srun"
    rank: int
    world_size: int
    local_rank: int | None = None  # on this node; None if the launcher does not say
    local_world_size: int | None = None


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return this process's rank, or None if neither mpirun nor srun started it."""
    by_mpi, by_slurm = _numbers(environ, RANK_NAMES), _rank_of_slurm(environ)
    # srun also sets MPI's variables, but its own hold more. Under Slurm, mpirun starts its daemons as a step, whose
    # variables describe the daemon instead of the rank.
    if by_mpi is None or (by_slurm is not None and (by_slurm.rank, by_slurm.world_size) == by_mpi):
        return by_slurm
    return LaunchedRank("mpirun", *by_mpi, *(_numbers(environ, LOCAL_RANK_NAMES) or ()))


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
    """Return torch.distributed's variables for a rank. MASTER_ADDR is absent if nothing says where rank 0 is.

    Args:
        launched: The rank.
        environ: The environment that the launcher has set.
        address: The address of rank 0's node. By default MASTER_ADDR, this node if all ranks are on it, or the first
            node that Slurm names.
        port: The port of the store there. By default (0) MASTER_PORT, or a port derived from the job's id.
    """
    # All ranks must choose the same port without communicating, and jobs on one node should choose different ones. So
    # the port is a hash of the job's id.
    port_of_job = FIRST_PORT + zlib.crc32(_job(launched, environ).encode()) % NUM_PORTS
    variables = {
        "RANK": launched.rank,
        "WORLD_SIZE": launched.world_size,
        "LOCAL_RANK": launched.local_rank,
        "LOCAL_WORLD_SIZE": launched.local_world_size,
        "MASTER_ADDR": address or environ.get("MASTER_ADDR") or _address(launched, environ),
        "MASTER_PORT": port or environ.get("MASTER_PORT") or port_of_job,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def _address(launched: LaunchedRank, environ: Mapping[str, str]) -> str | None:
    if launched.local_world_size == launched.world_size:
        # All ranks are on this node, so the address needs no name resolution and no network.
        return "127.0.0.1"
    # Under mpirun the step's nodes are those of its daemons, which may lack the first node.
    nodes = environ.get("SLURM_STEP_NODELIST" if launched.launcher == "srun" else "SLURM_JOB_NODELIST")
    return next(expand_nodes(nodes)) if nodes else None


def _job(launched: LaunchedRank, environ: Mapping[str, str]) -> str:
    """Return a string that all ranks of the job share and, if possible, no other job on these nodes."""
    job_id = next((environ[name] for name in JOB_ID_NAMES if name in environ), None)
    if job_id is not None:
        return job_id
    if launched.launcher == "srun":
        return f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    proxy, control_port = _hydra()
    if control_port:
        return f"hydra {control_port}"
    if proxy and launched.local_world_size == launched.world_size:
        # Each node has a proxy of its own, so its pid identifies the job only on one node.
        return f"hydra {proxy}"
    return environ.get("SLURM_JOB_ID") or f"user {os.getuid()}"


def _hydra() -> tuple[int, str | None]:
    """Return the pid of MPICH's proxy that started this process, or 0, and where mpirun listens for it, or None.

    MPICH gives its ranks no job id. Its proxy on each node is started with `--control-port host:port`, which is the
    same on all nodes and unique among the jobs that run at the same time.
    """
    pid = "self"
    # Walk up the parents of this process until MPICH's proxy is found, or the first process of the container.
    while pid not in ("0", "1"):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if status["Name"].startswith("hydra"):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                return int(status["Pid"]), dict(itertools.pairwise(words)).get("--control-port")
        # A parent may have ended, or its files may belong to another user.
        except OSError:
            break
        pid = status["PPid"].strip()
    return 0, None


def expand_nodes(nodes: str) -> Iterator[str]:
    """Yield the names of Slurm's short form, such as `gpu[01-03,7]-x,login`."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        match = re.search(r"\[([^\]]*)\]", item)
        # A name without brackets is complete.
        if match is None:
            yield item
            continue
        for part in match[1].split(","):
            first, _, last = part.partition("-")
            # Slurm pads the numbers with zeros to the width of the first one.
            for index in range(int(first), int(last or first) + 1):
                yield from expand_nodes(f"{item[: match.start()]}{index:0{len(first)}}{item[match.end() :]}")


def expand_counts(text: str) -> Iterator[int]:
    """Yield the numbers of Slurm's short form, such as `2(x3),1`."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


# -- reports -----------------------------------------------------------------------------------------


# The exit code (EX_TEMPFAIL of sysexits.h) of a rank that saved a checkpoint and ended because its time was over. The
# launcher should start it again. See `checkpoint/on_signal.py`.
RESTART_EXIT_CODE = 75
# This variable names the file by which a rank reports its first step.
STEP_FILE = "ZEROENGINE_STEP_FILE"
# This variable names the folder in memory that the launcher's process on this node removes when it ends.
SNAPSHOT_FOLDER = "ZEROENGINE_SNAPSHOT_FOLDER"
# The steps that an engine has taken (`step`), and those before its first step in this process (`resumed_step`). Where
# the script fails, worker.py writes them beside the error. Empty without an engine.
REPORTED_STEPS: dict[str, int] = {}


def report_step(step: int) -> None:
    """Note that so many steps were taken. The first call reports to zero-launch, if it started this process."""
    REPORTED_STEPS.setdefault("resumed_step", step - 1)
    # Of several engines the one that has taken the most steps says how far the round has come.
    REPORTED_STEPS["step"] = max(step, REPORTED_STEPS.get("step", 0))
    # The variable is removed, so that later steps cost one lookup and child processes do not report.
    path = os.environ.pop(STEP_FILE, None)
    if path is not None:
        # The folder no longer exists if zero-launch is ending this round.
        with contextlib.suppress(OSError):
            open(path, "w").close()


# -- addresses ---------------------------------------------------------------------------------------


def own_address(reached_at: str | None, others: Sequence[str]) -> str:
    """Return the address at which the other nodes reach this one.

    Args:
        reached_at: The address at which the launcher reached this node, if it is known.
        others: Addresses of other nodes.
    """
    # A loopback address leads every node to itself, so it is of no use to the others.
    if reached_at and not is_loopback(reached_at):
        return reached_at
    # The route to another node shows which of this node's addresses is on the same network.
    for other in others:
        if not is_loopback(other) and (address := source_address_for(other)):
            return address
    return reached_at or ("127.0.0.1" if not others else socket.gethostname())


def is_loopback(address: str) -> bool:
    """Return whether an address leads every node to itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def source_address_for(address: str) -> str | None:
    """Return this node's address on the way to another one."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, destination = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket chooses a route and sends nothing.
            probe.connect(destination)
            return str(probe.getsockname()[0])
    return None
