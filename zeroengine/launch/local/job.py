"""What zero-launch is asked to start on this node: the command, the ranks and their environment."""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from zeroengine.errors import LaunchError
from zeroengine.launch.local import worker
from zeroengine.launch.local.core_binding import shares
from zeroengine.launch.local.masking import masked

HOST = "127.0.0.1"
CPU_PROCESSES = 2  # what `--nproc auto` means on a machine without a GPU
MOST = 4096  # processes on a node; each costs the launcher memory and four file descriptors


@dataclass(frozen=True)
class Job:
    """One run: the same command in `nproc` processes, one rank each."""

    nproc: int
    command: tuple[str, ...]  # what each rank executes, the interpreter first
    environment: dict[str, str]  # what every rank is given on top of the launcher's own environment

    def describe(self, port: int = 0) -> str:
        """The run as lines for a shell, a rank each: started side by side they are the run, but for masked secrets.

        Args:
            port: of the ranks' store; a free one where 0.
        """
        if not port:
            with socket.create_server((HOST, 0)) as server:
                port = server.getsockname()[1]
        lines = []
        for rank in range(self.nproc):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.nproc, "LOCAL_WORLD_SIZE": self.nproc}
            variables = own | {"MASTER_ADDR": HOST, "MASTER_PORT": port} | masked(self.environment)
            lines.append(" ".join(f"{key}={shlex.quote(str(value))}" for key, value in variables.items()))
            lines[-1] += f" {shlex.join(self.command)}"
        return "\n".join(lines)


def build(
    target: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    nproc: str = "auto",
    cpu: bool = False,
    config: str | None = None,
    overrides: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    bind: str | None = None,
) -> Job:
    """Check what was asked for and make the job of it.

    Raises:
        LaunchError: something that cannot be started; the message says what to write instead.
    """
    find_module(target) if module else find_script(target)
    processes = count_processes(nproc, cpu)
    given = environment(cpu, config, overrides) | dict(extra or {})
    if "OMP_NUM_THREADS" not in os.environ | given:
        given["OMP_NUM_THREADS"] = threads(processes)
    if bind is not None:
        given[worker.BIND] = shares(bind, processes)
    check_config(config, overrides)
    return Job(processes, command(target, arguments, module), given)


def command(target: str, arguments: Sequence[str], module: bool) -> tuple[str, ...]:
    """What a rank executes."""
    return (sys.executable, "-u", worker.__file__, *(["-m"] if module else []), target, *arguments)


def environment(cpu: bool, config: str | None, overrides: Sequence[str]) -> dict[str, str]:
    """What the ranks of every node are given."""
    found = {}
    if cpu:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if config is not None:
        found["ZEROENGINE_CONFIG"] = os.path.abspath(config)
    if overrides:
        found["ZEROENGINE_OVERRIDES"] = json.dumps(overrides)
    return found


def threads(processes: int) -> str:
    """OMP_NUM_THREADS: as it is set, otherwise this node's cores shared out."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // processes))


def count_processes(nproc: str, cpu: bool) -> int:
    """The number that `--nproc` means here: a GPU for each process, or any number of them on the CPU."""
    gpus = 0 if cpu else count_gpus()
    if nproc == "auto":
        return gpus or CPU_PROCESSES
    try:
        processes = int(nproc)
    except ValueError:
        raise LaunchError(f"--nproc {nproc}: not a number. Write --nproc 2, or --nproc auto") from None
    if processes < 1:
        raise LaunchError(f"--nproc {nproc}: at least one process is needed. Write --nproc 2, or --nproc auto")
    if processes > MOST:
        raise LaunchError(f"--nproc {nproc}: at most {MOST} processes fit on a node. Write --nproc 2, or --nproc auto")
    if gpus and processes > gpus:
        raise LaunchError(
            f"--nproc {nproc}: only {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and each process needs its own."
            f" Write --nproc {gpus}, make more visible (CUDA_VISIBLE_DEVICES), or add --cpu"
        )
    return processes


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_config(config: str | None, overrides: Sequence[str]) -> None:
    """Find mistakes in the configuration here, once, and not in every rank."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not (key and equals):
            raise LaunchError(f"--set {override}: not of the form KEY=VALUE. Write --set zero_optimization.stage=3")
    if config is not None:
        from zeroengine.config import load  # imports torch

        load(config, overrides)


def find_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        raise LaunchError(f"{script} is a folder: name the script in it, for instance {path / 'train.py'}")
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise LaunchError(f"{script}: there is no such script, nor a folder {folder}")
        near = suggest(str(path), (str(entry) for entry in folder.iterdir()))
        raise LaunchError(f"{script}: there is no such script{near}")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"{script} cannot be read: check its permissions (chmod +r {script})")


def find_module(name: str) -> None:
    """Look the module up as `python -m` does in this folder, importing nothing."""
    if name.endswith(".py"):
        raise LaunchError(
            f"-m {name}: -m takes a module's name. Write -m {name[:-3].replace('/', '.')}, or leave -m out"
        )
    path: list[str] = [os.getcwd(), *sys.path]
    known = ""
    for part in name.split("."):
        spec = PathFinder.find_spec(f"{known}{part}", path) or (None if known else find_spec(part))
        if spec is None:
            near = suggest(f"{known}{part}", (f"{known}{module.name}" for module in pkgutil.iter_modules(path)))
            raise LaunchError(f"-m {name}: there is no module {known}{part}{near}")
        known += f"{part}."
        path = list(spec.submodule_search_locations or [])
    if path and PathFinder.find_spec(f"{known}__main__", path) is None:
        raise LaunchError(f"-m {name}: a package without a __main__.py cannot be run; name a module in it")


def suggest(name: str, known: Iterable[str]) -> str:
    """`. Did you mean ...?`, or nothing where no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {near[0]}?" if near else ""
