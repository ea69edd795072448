"""What a benchmark ran on, for the tables of several benchmarks."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def describe_machine(packages: Iterable[str] = ("torch", "deepspeed", "zeroengine")) -> str:
    """Return the CPU, the number of its cores, and the versions of ``packages``."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{cpu_name()}, {os.cpu_count()} cores; {', '.join(versions)}"
