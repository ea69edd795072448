"""What a run on several nodes would start, as lines for a shell."""

from __future__ import annotations

import shlex

from zeroengine.launch.cluster.hosts import Host, processes
from zeroengine.launch.cluster.request import Request
from zeroengine.launch.local import job
from zeroengine.launch.local.masking import masked

PORT = 29500  # stands for the free port that a real run finds


def describe(request: Request) -> str:
    """A line per rank. Run side by side they are the run; it needs port 29500 on the first node, if none was named."""
    counts = [processes(host, request.nproc) or _as_here(request) for host in request.hosts]
    world_size, rank, lines = sum(counts), 0, []
    for host, count in zip(request.hosts, counts, strict=True):
        lines.append(f"# {host.label}: {shlex.join(request.shell.starter(host.name))}, which starts")
        for local_rank in range(count):
            own = {
                "RANK": rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": request.address or request.hosts[0].label,
                "MASTER_PORT": request.port or PORT,
                "ZEROENGINE_HOST": host.label,
            }
            devices = _devices(host)
            given = {**own, **devices, **masked(request.environment), **request.ranks_environment}
            words = [f"{key}={value}" for key, value in given.items()]
            command = job.command(request.target, request.arguments, request.module)
            line = f"cd {shlex.quote(request.folder)} && exec env {shlex.join([*words, *command])}"
            lines.append(shlex.join(request.shell.command(host.name, line)))
            rank += 1
    return "\n".join(lines)


def _as_here(request: Request) -> int:
    """Hosts without slots have as many as this machine, as far as one can tell without asking them."""
    return job.count_processes("auto", request.cpu)


def _devices(host: Host) -> dict[str, str]:
    return {} if host.chosen is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.chosen))}
