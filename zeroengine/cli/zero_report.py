"""Run the command `zero-report`: collect what a bug report should say about this machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from zeroengine.cli.parser import CommandParser, command
from zeroengine.errors import ZeroEngineError
from zeroengine.launch.cluster.versions import installed_versions, version_of
from zeroengine.launch.local.core_binding import numa_nodes
from zeroengine.launch.local.job import count_cores
from zeroengine.launch.local.network import address_of
from zeroengine.utils.formats import counted

REPORTED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_", "ZEROENGINE_")
Row = tuple[str, str]


@command("zero-report")
def main(argv: list[str] | None = None) -> int:
    """Print the report and return the exit code."""
    about = "Print the versions and devices that a bug report should contain."
    parser = CommandParser("zero-report", "zero-report [options]", about)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    # What earlier versions measured and attached.
    add("--disk", "--no-probes", "--run", dest="removed", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.removed is not None:
        raise ZeroEngineError(
            "leave --disk, --no-probes and --run out: zero-io DIR measures a disk, zero-plan --measure collectives, "
            "and zero-view RUN --html FILE writes a page about a run that holds no secrets"
        )
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "versions": software,
        "machine": machine,
        "network": interfaces,
        "compiled": compiled,
    }
    # Every section is collected before anything is printed, so that JSON and text show the same facts.
    rows_by_title = {title: list(_rows_or_failure(rows)) for title, rows in sections.items()}
    if options.json:
        print(json.dumps({title: dict(rows) for title, rows in rows_by_title.items()}, indent=2))
        return 0
    for title, rows in rows_by_title.items():
        print(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}".rstrip())
    return 0


def _rows_or_failure(rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield a section's rows. A section that fails says so, and does not prevent the other sections."""
    try:
        yield from rows()
    except Exception as error:
        yield "failed", f"{type(error).__name__}: {error}"


def software() -> Iterator[Row]:
    """Yield versions of the packages, and what torch reports about the system, its compilers and its GPUs."""
    import torch
    from torch.utils.collect_env import get_env_info

    yield from installed_versions().items()
    yield "interpreter", sys.executable
    for name in ("pydantic", "safetensors", "transformers"):
        yield name, version_of(name)
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    for name, value in get_env_info()._asdict().items():
        # Some values, such as those of several GPUs, have several lines.
        yield name.replace("_", " "), "; ".join(" ".join(line.split()) for line in str(value or "none").splitlines())
    # Only the names are shown, because values may hold secrets.
    variables = sorted(name for name in os.environ if name.startswith(REPORTED_PREFIXES))
    yield "environment", ", ".join(variables) or "none of ours"


def machine() -> Iterator[Row]:
    """Yield cores and memory."""
    num_nodes = len(numa_nodes())
    nodes = counted(num_nodes or 1, "NUMA node")
    yield "cores", f"{count_cores()} of {os.cpu_count()} usable, {nodes}"
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{pages * size / 2**30:.1f} GiB"
    # Ranks of one node exchange tensors through this file system, and containers often make it small.
    shm = shutil.disk_usage("/dev/shm")
    yield "/dev/shm", f"{shm.free / 2**30:.1f} of {shm.total / 2**30:.1f} GiB free"


def interfaces() -> Iterator[Row]:
    """Yield the host name, and state, speed and address of each network interface."""
    yield "host name", f"{socket.gethostname()}, which is {_resolve(socket.gethostname())}"
    for _, name in socket.if_nameindex():
        # Some interfaces, such as virtual ones, have no speed or refuse to tell it.
        folder = Path("/sys/class/net") / name
        state = _read(folder / "operstate") or "unknown"
        speed = _read(folder / "speed")
        rate = f", {speed} Mb/s" if speed and speed.isdecimal() else ""
        yield name, f"{state}{rate}, {address_of(name) or 'no IPv4 address'}"
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        yield device.name, f"InfiniBand, {_read(device / 'ports/1/rate') or 'rate unknown'}"


def _resolve(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        return f"nowhere to be found ({error})"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def compiled() -> Iterator[Row]:
    """Yield which kernels are in use on each device, and the compilers that could build zeroengine's."""
    import torch

    from zeroengine import ops

    for name in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        # The warning says why they are not there.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernels = ops.kernels_in_use(torch.device(name))
        yield f"kernels on {name}", ". ".join([kernels, *(str(warning.message) for warning in caught)])
    yield "compiler", next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "none")
    yield "nvcc", shutil.which("nvcc") or "none"


if __name__ == "__main__":
    sys.exit(main())
