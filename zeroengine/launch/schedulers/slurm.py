"""Slurm: the hosts of the allocation that this process is in, and batch scripts that make one."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import Host
from zeroengine.utils.launcher_environment import expand_counts, expand_nodes

SCRIPT = "zero-launch.sbatch"
# Options of sbatch that say which part of a node is wanted, how much memory, and that there are many such jobs.
SHARES = ("--exclusive", "--oversubscribe", "-s", "--cpus-per-task", "-c", "--cpus-per-gpu", "--mincpus")
MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
ARRAY = ("--array", "-a")
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


def batch_script(
    name: str,
    nodes: int,
    gpus: int | None,
    options: Sequence[str],
    arguments: Sequence[str],
    *,
    elastic: bool = False,
) -> str:
    """A script for sbatch that runs zero-launch in its allocation.

    One task a node is the launcher's part there, and starts all ranks: it needs the node's cores and memory, which
    Slurm otherwise shares out by tasks. Whoever says how many of them are wanted gets that many.

    Args:
        gpus: to ask for on each node; None asks for none.
        options: further options of sbatch, such as `--time=8:00:00`. They win.
        arguments: zero-launch's own.
        elastic: whether the run goes on without a node that is lost. Otherwise Slurm is to start the job again.
    """
    asked = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    asked += [f"--gpus-per-node={gpus}"] if gpus else []
    if not _is_among(SHARES, options):
        asked += ["--exclusive"]
        asked += [] if _is_among(MEMORY, options) else ["--mem=0"]
    asked += ["--no-kill"] if elastic else []
    log = "%x-%A_%a.log" if _is_among(ARRAY, options) else "%x-%j.log"
    asked += ["--requeue", "--open-mode=append", f"--output={log}"]  # a job that is started again goes on with its log
    lines = [f"#SBATCH {shlex.quote(option)}" for option in asked]
    lines += [f"#SBATCH {shlex.join(options)}"] if options else []
    # Slurm gives SIGTERM to the script's own process first, which is then zero-launch.
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", *arguments]
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {shlex.join(command)}", ""])


def _is_among(names: Sequence[str], options: Sequence[str]) -> bool:
    """Whether sbatch's options have one of these, as `--name`, `--name=value`, `-n` or `-nvalue`."""
    words = [option.partition("=")[0] if option.startswith("--") else option[:2] for option in options]
    return any(word in names for word in words)


def check_export(options: Sequence[str], hidden: Iterable[str], environ: Mapping[str, str]) -> None:
    """See that sbatch hands over variables whose values are not in the script.

    Raises:
        LaunchError: `--export` among its options, or SBATCH_EXPORT, keeps one of them back.
    """
    text, said = environ.get("SBATCH_EXPORT", "ALL"), "SBATCH_EXPORT="
    for option, following in itertools.zip_longest(options, options[1:], fillvalue=""):
        name, equals, value = option.partition("=")
        if name == "--export":
            text, said = (value if equals else following), "--sbatch --export="
    exported = {word.partition("=")[0] for word in text.split(",")}
    for name in hidden:
        if not exported & {"ALL", name}:
            names = [name, *(word for word in text.split(",") if word not in ("NONE", "NIL"))]
            raise LaunchError(
                f"{said}{text}: {name} looks secret, is therefore not written into the batch script, and would not "
                f"reach the job. Write --export={','.join(names)}, or put it into .zero_env"
            )


def submit(script: str, path: Path, hidden: Mapping[str, str]) -> str:
    """Write the script and hand it to sbatch; returns what that says.

    Args:
        hidden: variables that the job finds in its environment, and nobody in the script.

    Raises:
        LaunchError: there is no sbatch, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError("--submit: there is no sbatch here. Log in to a machine of the cluster, or add --dry-run")
    path.write_text(script)
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, env={**os.environ, **hidden})
    if done.returncode:
        raise LaunchError(f"--submit: sbatch refused {path}: {done.stderr.strip()}")
    return done.stdout.strip()


def requeue(environ: Mapping[str, str]) -> str:
    """Have Slurm start the job that this process is in again; returns a sentence about it.

    Of a job array the task alone: the array goes by the number of one of its tasks.
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
