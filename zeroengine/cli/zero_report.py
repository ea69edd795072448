"""Run the command `zero-report`: collect what a bug report should say about this machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zeroengine.cli.parser import CommandParser, command
from zeroengine.errors import ZeroEngineError
from zeroengine.launch.cluster.versions import installed_versions, version_of
from zeroengine.launch.local.core_binding import numa_nodes
from zeroengine.launch.local.job import count_cores
from zeroengine.launch.local.network import address_of
from zeroengine.monitor.run_folder import RUN_FOLDER_VARIABLE
from zeroengine.utils.masking import masked_tree
from zeroengine.utils.paths import path_argument
from zeroengine.view.live_line import plain_line
from zeroengine.view.run_reader import EVENTS_FILE, STEPS_FILE, RunReader, last_objects

REPORTED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_", "ZEROENGINE_")
# Of a run, so many of its newest events and steps are attached, and so many values of a list.
REPORTED_EVENTS, REPORTED_STEPS, MAX_REPORTED_VALUES = 10, 3, 8
Row = tuple[str, str]


@command("zero-report")
def main(argv: list[str] | None = None) -> int:
    """Print the report and return the exit code."""
    about = "Print the versions and devices that a bug report should contain."
    parser = CommandParser("zero-report", "zero-report [options]", about)
    add = parser.add_argument
    run_help = "a run folder: attach its newest steps and events"
    add("--run", metavar="DIR", type=path_argument, default=os.environ.get(RUN_FOLDER_VARIABLE), help=run_help)
    add("--json", action="store_true", help="print JSON")
    # Earlier versions measured the disk and the collectives.
    add("--disk", "--no-probes", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.disk is not None:
        raise ZeroEngineError(
            "zero-report measures nothing any more: leave --disk and --no-probes out. zero-io DIR measures a disk, and "
            "zero-plan --measure the collectives"
        )
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "versions": software,
        "machine": machine,
        "network": interfaces,
        "compiled": compiled,
    }
    if options.run is not None:
        sections[f"run {options.run}"] = lambda: newest_records(Path(options.run))
    # Every section is collected before anything is printed, so that JSON and text show the same facts.
    rows_by_title = {title: list(_rows_or_failure(rows)) for title, rows in sections.items()}
    if options.json:
        print(json.dumps({title: dict(_with_unique_names(rows)) for title, rows in rows_by_title.items()}, indent=2))
        return 0
    for title, rows in rows_by_title.items():
        print(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}".rstrip())
    return 0


def _with_unique_names(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows with a number behind a name that is there again, since JSON has a name once."""
    counts: Counter[str] = Counter()
    for name, value in rows:
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name} ({counts[name]})"), value


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
    nodes = f"{num_nodes or 1} NUMA node{'s' * (num_nodes > 1)}"
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
    """Yield whether the compiled kernels are in use, and the compilers that could build them."""
    from zeroengine import ops

    in_use = ops.library() is not None
    yield "CPU kernels", "in use" if in_use else "not there: torch's own serve. See the notice of pip install"
    yield "compiler", next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "none")
    yield "nvcc", shutil.which("nvcc") or "none"


def newest_records(folder: Path) -> Iterator[Row]:
    """Yield how a run went, and its newest events and steps as they were written, without secrets."""
    reader = RunReader(folder)
    yield "state", f"{reader.state()}: {plain_line(reader)}"
    for notice in reader.notices():
        yield "notice", notice
    facts = {key: value for key, value in reader.facts.items() if key not in ("hosts", "units")}
    yield "run.json", _json(facts)
    for name, count in ((EVENTS_FILE, REPORTED_EVENTS), (STEPS_FILE, REPORTED_STEPS)):
        for value in last_objects(folder / name, count):
            kind = value.get("kind", "record")
            yield f"{kind} at step {value.get('step')}", _json(shortened(value))


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the rest of long lists, such as those of many ranks."""
    short: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            short[key] = shortened(value)
        elif isinstance(value, list) and len(value) > MAX_REPORTED_VALUES:
            short[key] = [*value[:MAX_REPORTED_VALUES], f"and {len(value) - MAX_REPORTED_VALUES} more"]
        else:
            short[key] = value
    return short


def _json(value: dict[str, Any]) -> str:
    return json.dumps(masked_tree(value), separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main())
