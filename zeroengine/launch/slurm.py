"""Slurm: the hosts of the allocation that this process is in, and batch scripts that make one."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.hosts import Host
from zeroengine.launcher_environment import expand_counts, expand_nodes

SCRIPT = "zero-launch.sbatch"
SUBMIT = "Submit one with --submit --nnodes N, or start zero-launch inside sbatch or salloc"


def allocated(environ: Mapping[str, str]) -> list[Host]:
    """The allocation's hosts, each with as many slots as it has GPUs or, where tasks were asked for, tasks.

    Raises:
        LaunchError: this is no allocation.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise LaunchError(f"--launcher slurm: this is not inside a Slurm allocation. {SUBMIT}")
    names = list(expand_nodes(nodes))
    gpus = _gpus(environ)
    if gpus is not None:
        return [Host(name, gpus) for name in names]
    tasks = list(expand_counts(environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")))
    if len(tasks) == 1:
        tasks *= len(names)
    slots = tasks if len(tasks) == len(names) and max(tasks) > 1 else [None] * len(names)
    return [Host(name, count) for name, count in zip(names, slots, strict=True)]


def _gpus(environ: Mapping[str, str]) -> int | None:
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return int(environ["SLURM_GPUS_ON_NODE"])
    match = re.search(r"(\d+)$", environ.get("SLURM_GPUS_PER_NODE", ""))
    return int(match[1]) if match else None


def batch_script(name: str, nodes: int, gpus: int | None, options: Sequence[str], arguments: Sequence[str]) -> str:
    """A script for sbatch that runs zero-launch in its allocation.

    Args:
        gpus: to ask for on each node; None asks for none.
        options: further options of sbatch, such as `--time=8:00:00`.
        arguments: zero-launch's own.
    """
    asked = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", "--output=%x-%j.log"]
    asked += [f"--gpus-per-node={gpus}"] if gpus else []
    lines = [f"#SBATCH {option}" for option in (*asked, *options)]
    # Slurm gives SIGTERM to the script's own process first, which is then zero-launch.
    command = [sys.executable, "-m", "zeroengine.launch.cli", *arguments]
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {shlex.join(command)}", ""])


def submit(script: str, path: Path) -> str:
    """Write the script and hand it to sbatch; returns what that says.

    Raises:
        LaunchError: there is no sbatch, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError("--submit: there is no sbatch here. Log in to a machine of the cluster, or add --dry-run")
    path.write_text(script)
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(f"--submit: sbatch refused {path}: {done.stderr.strip()}")
    return done.stdout.strip()
