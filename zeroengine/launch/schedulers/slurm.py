"""Find the hosts of the allocation that this process is in, and write batch scripts that ask for one."""

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

SCRIPT_NAME = "zero-launch.sbatch"
# Options of sbatch that choose a part of a node, its memory, or an array of jobs.
SHARE_OPTIONS = ("--exclusive", "--oversubscribe", "-s", "--cpus-per-task", "-c", "--cpus-per-gpu", "--mincpus")
MEMORY_OPTIONS = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
ARRAY_OPTIONS = ("--array", "-a")
SUBMIT_HINT = "Submit one with --submit --nnodes N, or start zero-launch inside sbatch or salloc"


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the allocation's hosts, each with as many slots as it has GPUs, or else tasks.

    Raises:
        LaunchError: This process is not inside an allocation.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise LaunchError(f"--launcher slurm: this is not inside a Slurm allocation. {SUBMIT_HINT}")
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


def batch_script(
    name: str, nodes: int, gpus: int | None, options: Sequence[str], arguments: Sequence[str], *, elastic: bool = False
) -> str:
    """Return a script for sbatch that runs zero-launch in its allocation.

    Each node has one task, the launcher's part there, which starts all ranks. It needs the whole node's cores and
    memory, which Slurm would otherwise divide between tasks. `options` can ask for less.

    Args:
        name: The job's name.
        nodes: The number of nodes.
        gpus: The GPUs of each node; None asks for none.
        options: Further options of sbatch, such as `--time=8:00:00`. They win.
        arguments: zero-launch's own arguments.
        elastic: Whether the run goes on without a node that is lost. Otherwise Slurm starts the job again.
    """
    own_options = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    own_options += [f"--gpus-per-node={gpus}"] if gpus else []
    if not _is_among(SHARE_OPTIONS, options):
        own_options += ["--exclusive"]
        own_options += [] if _is_among(MEMORY_OPTIONS, options) else ["--mem=0"]
    own_options += ["--no-kill"] if elastic else []
    log = "%x-%A_%a.log" if _is_among(ARRAY_OPTIONS, options) else "%x-%j.log"
    # A job that is started again continues its log.
    own_options += ["--requeue", "--open-mode=append", f"--output={log}"]
    # Options of the user stand on the last line, and sbatch takes the last of several.
    lines = [f"#SBATCH {shlex.quote(option)}" for option in own_options]
    lines += [f"#SBATCH {shlex.join(options)}"] if options else []
    # Slurm sends SIGTERM to the script's own process first, which exec makes zero-launch.
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", *arguments]
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {shlex.join(command)}", ""])


def _is_among(names: Sequence[str], options: Sequence[str]) -> bool:
    """Return whether sbatch's options contain one of these, as `--name`, `--name=value`, `-n` or `-nvalue`."""
    words = [option.partition("=")[0] if option.startswith("--") else option[:2] for option in options]
    return any(word in names for word in words)


def check_export(options: Sequence[str], secrets: Iterable[str], environ: Mapping[str, str]) -> None:
    """Check that sbatch passes on the variables whose values are not written into the script.

    Args:
        options: The options of sbatch.
        secrets: The names of the variables.
        environ: The launcher's environment, for SBATCH_EXPORT.

    Raises:
        LaunchError: `--export` among the options, or SBATCH_EXPORT, excludes one of them.
    """
    # Without an option sbatch passes on the whole environment.
    text, source = environ.get("SBATCH_EXPORT", "ALL"), "SBATCH_EXPORT="
    for option, following in itertools.zip_longest(options, options[1:], fillvalue=""):
        name, equals, value = option.partition("=")
        if name == "--export":
            text, source = (value if equals else following), "--sbatch --export="
    exported = {word.partition("=")[0] for word in text.split(",")}
    for name in secrets:
        if not exported & {"ALL", name}:
            names = [name, *(word for word in text.split(",") if word not in ("NONE", "NIL"))]
            raise LaunchError(
                f"{source}{text}: {name} looks secret, is therefore not written into the batch script, and would not "
                f"reach the job. Write --export={','.join(names)}, or put it into .zero_env"
            )


def submit(script: str, path: Path, secrets: Mapping[str, str]) -> str:
    """Write the script, submit it, and return the answer of sbatch.

    Args:
        script: The script's text.
        path: The file to write.
        secrets: Variables that the job finds in its environment. They are not written into the script.

    Raises:
        LaunchError: There is no sbatch, or it refuses the script.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError("--submit: there is no sbatch here. Log in to a machine of the cluster, or add --dry-run")
    path.write_text(script)
    # The values travel in the environment of sbatch, so they never reach a file or a command line.
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, env={**os.environ, **secrets})
    if done.returncode:
        raise LaunchError(f"--submit: sbatch refused {path}: {done.stderr.strip()}")
    return done.stdout.strip()


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
