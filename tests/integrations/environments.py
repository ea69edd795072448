"""One Python environment per framework, with the versions that the integration is tested with.

``tests/integrations/requirements/NAME.txt`` names the packages. The environment sees the packages of the one that runs
the tests, torch among them, after its own. It is made at its first use, in ``.venv-integrations/NAME`` of the checkout,
and again when its requirements change. Nothing of a framework is imported in the process that runs the tests.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
# Each release of torch that `bin/test --torch` runs has its own.
_RELEASE = Path(sys.prefix).name.partition("-torch-")[2]
ENVIRONMENTS = ROOT / (f".venv-integrations-torch-{_RELEASE}" if _RELEASE else ".venv-integrations")
TIMEOUT_SECONDS = 240.0
# What takes long to import, once for all ranks of all scripts. torch's optimizers import its compiler. Lightning is not
# here, because its import notes the rank.
PRELOADED = ("torch._dynamo", "torch.distributed.checkpoint", "zeroengine.engine.engine")
PRELOADED_OF = {"transformers": ("transformers.trainer", "peft"), "accelerate": ("accelerate",)}


def python_of(name: str) -> Path:
    """Return the Python of the environment with ``requirements/NAME.txt``, which is made if it is not there."""
    requirements = (REQUIREMENTS / f"{name}.txt").read_text()
    folder = ENVIRONMENTS / name
    stamp, python = folder / "requirements", folder / "bin" / "python"
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        # Several processes may share the tests.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Two checkouts may share an environment through links, so the folder's own name counts and not a link's.
        packages_of_tests = str(Path(sysconfig.get_path("purelib")).resolve())
        wanted = hashlib.sha256(f"{packages_of_tests}\n{requirements}".encode()).hexdigest()
        if not stamp.is_file() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=not _has_pip())
            packages = subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            # The packages of the tests' own environment come last, so pinned versions win over them.
            line = f"import site; site.addsitedir({packages_of_tests!r})\n"
            Path(packages, "zz_packages_of_the_tests.pth").write_text(line)
            _install(python, requirements)
            stamp.write_text(wanted)
    return python


def _has_pip() -> bool:
    """Whether the Python that runs the tests has a pip that installs for others: one of their own is slow to unpack."""
    try:
        return int(importlib.metadata.version("pip").partition(".")[0]) >= 23
    except importlib.metadata.PackageNotFoundError:
        return False


def _install(python: Path, requirements: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        # Without this line pip might take another torch, with gigabytes of CUDA packages.
        file.write(f"{requirements}\ntorch=={_torch_version()}\n")
        file.flush()
        pip = [sys.executable, "-m", "pip", "--python", python] if _has_pip() else [python, "-m", "pip"]
        # Modules are compiled when they are imported: most never are.
        options = ["--disable-pip-version-check", "--no-input", "-q", "--no-compile"]
        command = [*pip, "install", *options, "-r", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"pip install failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _torch_version() -> str:
    import torch

    return torch.__version__.partition("+")[0]


def run_script(
    environment: str,
    script: str | Path,
    arguments: Sequence[object] = (),
    *,
    ranks: int = 2,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run a script on some ranks in an environment, and return what each rank reported.

    Args:
        environment: The name of the environment.
        script: The script. It reports by writing JSON to the file that the variable ``REPORT`` names, followed by a dot
            and the rank (see ``report``).
        arguments: Its arguments.
        ranks: How many processes run it, with the variables of torchrun.
        timeout: Seconds after which the processes are ended and the test fails.

    Raises:
        AssertionError: The script failed. The message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        report_path, output = Path(folder, "report"), Path(folder, "output")
        variables = {**_variables(), "REPORT": str(report_path)}
        code = _start_ranks(environment, [ranks, str(output), variables, str(script), *map(str, arguments)], timeout)
        assert code == "0", f"{script} failed ({code or 'no answer'}):\n{output.read_text()[-8000:]}"
        return [json.loads(Path(f"{report_path}.{rank}").read_text()) for rank in range(ranks)]


def _start_ranks(environment: str, request: list[Any], timeout: float) -> str:
    """Let the starter of an environment run a script, and return the exit code; empty: there was no answer in time."""
    starter = _starter(environment)
    assert starter.stdin is not None and starter.stdout is not None
    answer = b""
    try:
        Path(request[1]).touch()
        starter.stdin.write(json.dumps(request).encode() + b"\n")
        if select.select([starter.stdout], [], [], timeout)[0]:
            answer = starter.stdout.readline()
    finally:
        if not answer:
            _starter.cache_clear()
            os.killpg(starter.pid, 9)
            starter.wait()
    return answer.decode().strip()


@functools.cache
def _starter(environment: str) -> subprocess.Popen[bytes]:
    """Return a process that has imported what takes longest, for all scripts of this environment."""
    modules = ",".join([*PRELOADED, *PRELOADED_OF.get(environment, ())])
    starter = subprocess.Popen(
        [python_of(environment), Path(__file__).with_name("start_ranks.py"), modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=_variables(),
        start_new_session=True,
    )
    assert starter.stdin is not None
    # It ends when there is nothing more to read.
    atexit.register(starter.stdin.close)
    return starter


def _variables() -> dict[str, str]:
    """Return the environment variables of a program without network and GPU, one thread a process."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    return {**os.environ, **settings}


def run_program(
    command: Sequence[str], variables: dict[str, str] | None = None, timeout: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a program without network and GPU, one thread a process, and return it with its output."""
    # In a session of its own, so that a timeout ends the ranks with their launcher.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_variables() | (variables or {}),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, 9)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def report(value: Any) -> None:
    """Write what a rank of ``run_script`` found."""
    Path(f"{os.environ['REPORT']}.{os.environ['RANK']}").write_text(json.dumps(value))
