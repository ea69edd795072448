"""The command `zero-report`: what a bug report should say about this machine, and how fast its parts are."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zeroengine.cli.parser import CommandParser, run_command
from zeroengine.launch.cluster import versions
from zeroengine.launch.local import core_binding, job, network

DISK_BYTES = 256 << 20
PROBE_BYTES = 64 << 20
Row = tuple[str, str]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command("zero-report", lambda: report(parser().parse_args(argv)))


def parser() -> CommandParser:
    """Return the parser of zero-report's arguments."""
    about = "Print the versions, devices and speeds that a bug report should contain."
    parser = CommandParser("zero-report", "zero-report [options]", about)
    parser.add_argument("--no-probes", action="store_true", help="measure nothing, only say what is there")
    parser.add_argument(
        "--disk", metavar="DIR", type=Path, default=Path.cwd(), help="whose disk to measure (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def report(options: argparse.Namespace) -> int:
    """Print the report; returns 0."""
    sections: dict[str, Callable[[], Iterator[Row]]] = {
        "versions": software,
        "machine": machine,
        "GPUs": gpus,
        "network": interfaces,
        "compiled": compiled,
    }
    if not options.no_probes:
        sections |= {"disk": lambda: disk(options.disk), "collectives, 2 processes on this machine": collectives}
    found = {title: list(_safely(rows)) for title, rows in sections.items()}
    if options.json:
        print(json.dumps({title: dict(rows) for title, rows in found.items()}, indent=2))
        return 0
    for title, rows in found.items():
        print(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}".rstrip())
    return 0


def _safely(rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """A part that cannot be looked at is said so, and the rest is there all the same."""
    try:
        yield from rows()
    except Exception as error:
        yield "failed", f"{type(error).__name__}: {error}"


def software() -> Iterator[Row]:
    import torch

    yield from versions.installed().items()
    yield "interpreter", sys.executable
    yield "CUDA of torch", str(torch.version.cuda or "none")
    yield "NCCL", _nccl()
    for name in ("numpy", "pydantic", "safetensors", "transformers"):
        yield name, versions.version_of(name)
    yield "environment", ", ".join(sorted(name for name in os.environ if name.startswith(PREFIXES))) or "none of ours"


PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_", "ZEROENGINE_")


def _nccl() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def machine() -> Iterator[Row]:
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {_distribution()}"
    yield "processor", _processor()
    nodes = core_binding.numa_nodes()
    yield (
        "cores",
        f"{job.count_cores()} of {os.cpu_count()} usable, {len(nodes) or 1} NUMA node{'s' * (len(nodes) > 1)}",
    )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{pages * size / 2**30:.1f} GiB"
    shm = shutil.disk_usage("/dev/shm")
    yield "/dev/shm", f"{shm.free / 2**30:.1f} of {shm.total / 2**30:.1f} GiB free"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "no /etc/os-release"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def gpus() -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        yield "none", "torch sees no GPU"
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield str(index), f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield "driver", subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0]


def interfaces() -> Iterator[Row]:
    yield "host name", f"{socket.gethostname()}, which is {_resolved(socket.gethostname())}"
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        state = _read(folder / "operstate") or "unknown"
        speed = _read(folder / "speed")
        rate = f", {speed} Mb/s" if speed and speed.isdecimal() else ""
        yield name, f"{state}{rate}, {network.address_of(name) or 'no IPv4 address'}"
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        yield device.name, f"InfiniBand, {_read(device / 'ports/1/rate') or 'rate unknown'}"


def _resolved(name: str) -> str:
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
    from zeroengine import ops

    library = ops.library()
    yield (
        "CPU kernels",
        "in use" if library is not None else "not there: torch's own serve. See the notice of pip install",
    )
    yield "compiler", next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "none")
    yield "nvcc", shutil.which("nvcc") or "none"


def disk(folder: Path) -> Iterator[Row]:
    """Written with fsync, and read back; the reading may come from memory."""
    usage = shutil.disk_usage(folder)
    yield str(folder), f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    block = os.urandom(1 << 20) * 8
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".zero-report-") as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield "write", _rate(DISK_BYTES, time.perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(block)):
            pass
        yield "read", _rate(DISK_BYTES, time.perf_counter() - start)


def collectives() -> Iterator[Row]:
    command = [
        sys.executable,
        "-m",
        "zeroengine.cli.zero_launch",
        "--nproc",
        "2",
        "--cpu",
        "-m",
        "zeroengine.launch.local.probe",
    ]
    done = subprocess.run([*command, str(PROBE_BYTES)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        yield "failed", done.stderr.strip().rpartition("\n")[2]
    for line in done.stdout.splitlines():
        name, _, rest = line.partition("] ")[2].partition(": ")
        yield name, rest


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s ({size >> 20} MiB in {seconds:.2f} s)"


if __name__ == "__main__":
    sys.exit(main())
