"""Check what zero-launch is asked to start on this node, and build the command and environment of the ranks."""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.local import worker
from zeroengine.monitor.run_folder import RUN_FOLDER_VARIABLE
from zeroengine.utils.masking import masked

LOOPBACK = "127.0.0.1"
# In a dry run this port stands for the free one that a real run chooses.
DRY_RUN_PORT = 29500
# The number of processes that `--nproc auto` starts on a machine without a GPU.
CPU_PROCESSES = 2
# The most processes on a node. Each costs the launcher memory and four file descriptors.
MAX_PROCESSES = 4096


@dataclass(frozen=True)
class Job:
    """The same command in `nproc` processes of this node, one rank each."""

    nproc: int
    command: tuple[str, ...]  # what each rank executes, beginning with the interpreter
    environment: dict[str, str]  # every rank's variables in addition to the launcher's own

    def describe(self, port: int) -> str:
        """Return the run as lines for a shell, one per rank.

        Started side by side, the lines are the run, except that secrets are masked.

        Args:
            port: The port of the ranks' store.
        """
        lines = []
        for rank in range(self.nproc):
            own: dict[str, object] = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.nproc,
                "LOCAL_WORLD_SIZE": self.nproc,
            }
            own |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
            lines.append(shell_line({**own, **self.environment}, self.command))
        return "\n".join(lines)


def worker_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of one rank: of a script, or `-m` and a module, and its arguments."""
    # `-u` disables Python's buffer, so that output before a crash is not lost.
    return (sys.executable, "-u", worker.__file__, *words)


def shell_line(variables: Mapping[str, object], command: Sequence[str]) -> str:
    """Return a command with its variables as a line for a shell, without secrets."""
    # The line may end up in a log or a bug report.
    shown = masked({key: str(value) for key, value in variables.items()})
    return shlex.join(["env", *(f"{key}={value}" for key, value in shown.items()), *command])


def rank_environment(
    cpu: bool, config: str | None, overrides: Sequence[str], run_folder: str | None = None
) -> dict[str, str]:
    """Return the variables that the ranks of every node have."""
    variables = {}
    if cpu:
        # An empty list hides all GPUs from torch, also where the node sets the variable itself.
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if config is not None:
        # The ranks may change their working folder before they read the file.
        variables["ZEROENGINE_CONFIG"] = os.path.abspath(config)
    if overrides:
        variables["ZEROENGINE_OVERRIDES"] = json.dumps(overrides)
    if run_folder is not None:
        variables[RUN_FOLDER_VARIABLE] = os.path.abspath(run_folder)
    return variables


def omp_threads(processes: int) -> str:
    """Return OMP_NUM_THREADS as it is set, or else this node's cores divided by the processes."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // processes))


def parse_nproc(nproc: str) -> int | None:
    """Return the number of processes that `--nproc` gives; None for `auto`.

    Raises:
        LaunchError: It is neither.
    """
    if nproc == "auto":
        return None
    count = int(nproc) if re.fullmatch(r"\d{1,9}", nproc) else 0
    if not 1 <= count <= MAX_PROCESSES:
        raise LaunchError(f"--nproc {nproc}: not a number from 1 to {MAX_PROCESSES}. Write --nproc 2, or --nproc auto")
    return count


def count_processes(nproc: str, cpu: bool) -> int:
    """Return the number of processes that `--nproc` means here: at most one per GPU, or any number on the CPU.

    Raises:
        LaunchError: `nproc` is no number of processes, or there are too few GPUs.
    """
    processes = parse_nproc(nproc)
    # torch is asked only where GPUs matter, for its import takes a while.
    gpus = 0 if cpu else count_gpus()
    if processes is None:
        return gpus or CPU_PROCESSES
    if gpus and processes > gpus:
        raise LaunchError(
            f"--nproc {nproc}: only {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and each process needs its own."
            f" Write --nproc {gpus}, make more visible (CUDA_VISIBLE_DEVICES), or add --cpu"
        )
    return processes


def count_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    # A container or a scheduler may give this process fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_config(config: str | None, overrides: Sequence[str]) -> None:
    """Check the configuration once, before every rank would find the same mistake in it.

    Raises:
        ZeroEngineError: The configuration or an override is wrong.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not (key and equals):
            raise LaunchError(f"--set {override}: not of the form KEY=VALUE. Write --set zero_optimization.stage=3")
    if config is not None:
        # This imports torch, which takes a while.
        from zeroengine.config import load

        load(config, overrides)


def check_target(words: Sequence[str]) -> None:
    """Check that the script, or after `-m` the module, exists and can be run.

    Raises:
        LaunchError: It cannot; the message names a similar one if there is one.
    """
    if words[0] == "-m":
        _check_module(words[1])
    else:
        _check_script(words[0])


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise LaunchError(f"{script} is a folder: name the script in it, for instance {path / 'train.py'}")
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise LaunchError(f"{script}: there is no such script, nor a folder {folder}")
        suggestion = suggest(str(path), (str(entry) for entry in folder.iterdir()))
        raise LaunchError(f"{script}: there is no such script{suggestion}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"{script} cannot be read: check its permissions (chmod +r {script})")


def _check_module(name: str) -> None:
    """Look the module up as `python -m` does in this folder, without importing anything."""
    if name.endswith(".py"):
        raise LaunchError(
            f"-m {name}: -m takes a module's name. Write -m {name[:-3].replace('/', '.')}, or leave -m out"
        )
    path: list[str] = [os.getcwd(), *sys.path]
    parent = ""
    for part in name.split("."):
        # find_spec on a dotted name would import its parents, so each part is looked up in its parent's folders.
        # Only find_spec knows modules that are built into the interpreter.
        spec = PathFinder.find_spec(f"{parent}{part}", path) or (None if parent else find_spec(part))
        if spec is None:
            suggestion = suggest(f"{parent}{part}", (f"{parent}{entry.name}" for entry in pkgutil.iter_modules(path)))
            raise LaunchError(f"-m {name}: there is no module {parent}{part}{suggestion}")
        parent += f"{part}."
        path = list(spec.submodule_search_locations or [])
    if path and PathFinder.find_spec(f"{parent}__main__", path) is None:
        raise LaunchError(f"-m {name}: a package without a __main__.py cannot be run; name a module in it")


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return `. Did you mean ...?` with the most similar candidate, or an empty text if none is similar."""
    matches = difflib.get_close_matches(name, list(candidates), n=1)
    return f". Did you mean {matches[0]}?" if matches else ""
