"""The CUDA kernels: built by nvcc to be looked at, built by a C++ compiler to be run on the CPU, or on a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zeroengine import ops
from zeroengine.ops import _cuda_library

ROOT = Path(__file__).parents[2]

# As on the GPU: no contraction. An access that the GPU would refuse as unaligned ends the process.
EMULATION_FLAGS = (
    "-x c++ -std=c++17 -O2 -fPIC -shared -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror "
    "-Wno-unknown-pragmas -DZE_EMULATED -fsanitize=alignment -fsanitize-undefined-trap-on-error"
).split()


@cache
def setup_py() -> ModuleType:
    """setup.py, whose functions say how libraries are built."""
    spec = importlib.util.spec_from_file_location("zeroengine_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_emulated(folder: Path, root: Path = ROOT, *flags: str) -> Path:
    """The library for the CPU, of the sources under ``root``; skips where there is no compiler."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler: the CUDA kernels cannot be run on the CPU")
    path = folder / "_emulated.so"
    sources = [root / source for source in setup_py().sources("cuda")]
    name = '-DZE_CUDA_ARCHITECTURES="emulated"'
    built = subprocess.run(
        [compiler, *EMULATION_FLAGS, *flags, name, *sources, "-o", path], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return path


def emulate(monkeypatch: pytest.MonkeyPatch, path: Path) -> ctypes.CDLL:
    """From now on the library in ``path`` serves CPU tensors as if they were a GPU's."""
    handle = _cuda_library.load(path)

    def call(library: ctypes.CDLL, name: str, device: torch.device, *arguments: Any) -> None:
        assert getattr(library, name)(0, None, *arguments) == 0, name

    monkeypatch.setattr(_cuda_library, "cuda_library", lambda device: handle)
    monkeypatch.setattr(_cuda_library, "call", call)
    return handle


def set_multiprocessors(handle: ctypes.CDLL, count: int) -> None:
    """So many blocks at most, 32 for each, share a launch's tiles."""
    ctypes.c_int.in_dll(handle, "ze_emulated_multiprocessors").value = count


def nvcc() -> str:
    """nvcc's path; skips where there is none."""
    found = setup_py().find_nvcc()
    if found is None:
        pytest.skip("no nvcc: the CUDA kernels cannot be compiled")
    return found


def build_with_nvcc(folder: Path) -> tuple[Path, str]:
    """The library as an install builds it, and what the compilers said; skips where there is no nvcc."""
    nvcc()
    path, build_file = folder / "_cuda.so", folder / "build" / "build.ninja"
    setup_py().write_ninja(build_file, "cuda", path)
    built = subprocess.run([setup_py().find_ninja(), "-f", str(build_file)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout
    return path, built.stdout


def need_library() -> None:
    """Skips where the library does not serve the GPU."""
    if ops.cuda_library(torch.device("cuda", 0)) is None:
        pytest.skip("zeroengine's CUDA library was not built, or not for this GPU")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation of torch's that waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
