"""Print the lines that a run on several nodes would start."""

from __future__ import annotations

import shlex

from zeroengine.launch.cluster.hosts import processes_on
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.local.job import DRY_RUN_PORT, count_processes, shell_line, worker_command


def describe_run(request: ClusterRequest) -> str:
    """Return the run as lines for a shell, one per rank.

    Started side by side, the lines are the run. It needs port 29500 on the first node, unless the request names a port.
    """
    # Nobody asks the hosts how many GPUs they have, so hosts without slots are assumed to be like this machine.
    counts = [processes_on(host, request.nproc) or count_processes("auto", request.cpu) for host in request.hosts]
    world_size, rank, lines = sum(counts), 0, []
    address = request.address or request.hosts[0].label
    for host, count in zip(request.hosts, counts, strict=True):
        lines.append(f"# {host.label}: {shlex.join(request.shell.starter(host.name))}, which starts")
        for local_rank in range(count):
            own: dict[str, object] = {"RANK": rank, "LOCAL_RANK": local_rank, "ZEROENGINE_HOST": host.label}
            own |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": count}
            own |= {"MASTER_ADDR": address, "MASTER_PORT": request.port or DRY_RUN_PORT}
            if host.chosen is not None:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.chosen))
            variables = {**own, **request.environment, **request.ranks_environment}
            line = f"cd {shlex.quote(request.folder)} && exec {shell_line(variables, worker_command(request.words))}"
            lines.append(shlex.join(request.shell.command(host.name, line)))
            rank += 1
    return "\n".join(lines)
