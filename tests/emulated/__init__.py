"""Runs tests on tensors of device "cuda" where there is no GPU. See ``device.cpp`` and ``gpu``.

``ZEROENGINE_TEST_DEVICE=emulated pytest ...`` builds the device, once for each torch, and gives it to all processes
that tests start with ``run_ranks``. ``load`` must come before torch is first imported.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")


def wanted() -> str:
    """On which device ranks compute: ``cpu``, ``cuda``, or ``emulated``."""
    device = os.environ.get("ZEROENGINE_TEST_DEVICE", "cpu")
    if device not in ("cpu", "cuda", "emulated"):
        raise RuntimeError(f"ZEROENGINE_TEST_DEVICE is {device!r}: write cpu, cuda or emulated")
    return device


def cpu_alone(reason: str) -> Any:
    """A test that means nothing on a GPU, or cannot be run on one."""
    import pytest

    return pytest.mark.skipif(wanted() != "cpu", reason=f"on the CPU alone: {reason}")


def need_transport(transport: str) -> None:
    """Skips where ranks that share a GPU have no such transport."""
    import pytest

    if transport == "shm" and wanted() != "cpu":
        pytest.skip("on the CPU alone: shared memory")


def a_real_gpu(reason: str) -> Any:
    """A test that runs on the CPU and on a GPU, but not on the emulated one."""
    import pytest

    return pytest.mark.skipif(wanted() == "emulated", reason=f"not on an emulated GPU: {reason}")


def load() -> None:
    ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)


def emulate_gpu() -> None:
    """torch has a GPU from now on, but no NCCL."""
    from tests.emulated import gpu

    gpu.install()
    over_gloo()


def share_gpu(rank: int) -> None:
    """Tensors are made on a GPU from now on, and ranks that have the same one may talk."""
    import torch

    torch.set_default_device(torch.device("cuda", rank % torch.cuda.device_count()))
    over_gloo()
    # What tests compare may be on either side.
    equal, assert_close = torch.equal, torch.testing.assert_close
    torch.equal = lambda a, b: equal(a.cpu(), b.cpu())
    torch.testing.assert_close = functools.partial(assert_close, check_device=False)


def over_gloo() -> None:
    """Whoever asks for NCCL gets Gloo."""
    import torch.distributed as dist

    init_process_group = dist.init_process_group

    def init(backend: str | None = None, **options: Any) -> None:
        init_process_group("gloo" if backend == "nccl" else backend, **options)

    dist.init_process_group = init  # type: ignore[assignment]


def build() -> Path:
    """The device as a shared library, compiled if it has not been for this torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent

    def compile_to(path: Path) -> None:
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(SOURCE), "-o", str(path)]
        command += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise RuntimeError(f"the emulated GPU does not compile:\n{built.stderr[:5000]}")

    # The library names the folder of torch's libraries.
    return _kept("device", [SOURCE, torch / "version.py"], compile_to, str(torch))


def build_kernels() -> Path:
    """zeroengine's CUDA kernels, for the CPU."""
    from tests.ops.cuda import EMULATION_FLAGS, ROOT, build_emulated

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            build_emulated(Path(folder)).replace(path)

    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return _kept("kernels", sources, compile_to, " ".join(EMULATION_FLAGS))


def _kept(name: str, sources: Sequence[Path], compile_to: Callable[[Path], None], settings: str) -> Path:
    """What is compiled from ``sources`` with ``settings``: once, whoever asks."""
    digests = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources)
    key = hashlib.sha256(digests + settings.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"zeroengine-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}-{key}.so"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        compile_to(fresh)
        fresh.replace(path)
    return path
