"""Find the hosts of the allocation that this process is in, and ask Slurm to start its job again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import Host
from zeroengine.utils.launcher import expand_counts, expand_nodes


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the allocation's hosts, each with as many slots as it has GPUs, or else tasks.

    Raises:
        LaunchError: This process is not inside an allocation.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise LaunchError("--launcher slurm: not inside a Slurm allocation. Start zero-launch in sbatch or salloc")
    names, gpus = list(expand_nodes(nodes)), _gpus(environ)
    slots = list(expand_counts(environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")))
    if gpus is not None:
        slots = [gpus] * len(names)
    # SLURM_NTASKS_PER_NODE is one number for all nodes; SLURM_TASKS_PER_NODE has one for each.
    elif len(slots) == 1:
        slots *= len(names)
    if len(slots) != len(names) or (gpus is None and max(slots) == 1):
        return [Host(name) for name in names]
    return [Host(name, count) for name, count in zip(names, slots, strict=True)]


def _gpus(environ: Mapping[str, str]) -> int | None:
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        # The value may name the kind of GPU before the number, as in a100:4.
        return int(environ["SLURM_GPUS_ON_NODE"])
    match = re.search(r"(\d+)$", environ.get("SLURM_GPUS_PER_NODE", ""))
    return int(match[1]) if match else None


def requeue(environ: Mapping[str, str]) -> str:
    """Ask Slurm to start this process' job again, and return a sentence about it.

    Of a job array only this task is started again. SLURM_JOB_ID may be the number of the whole array.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    number = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")
    try:
        done = subprocess.run(["scontrol", "requeue", number], capture_output=True, text=True)
    except OSError as error:
        return f"job {number} is not started again: scontrol cannot be run ({error.strerror}). Submit it anew"
    if done.returncode:
        return f"job {number} is not started again: scontrol says {done.stderr.strip() or done.stdout.strip()}"
    return f"Slurm is to start job {number} again"
