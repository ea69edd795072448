"""The archive of benchmarks/gpu.py --pack: what a machine needs that has torch and the same Python alone."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = "zeroengine-gpu"
# zeroengine's dependencies besides torch, DeepSpeed with its own, and what the tests for GPUs take.
PACKAGES = [
    *("numpy", "pydantic>=2.10", "pyyaml", "rich", "safetensors", "xxhash"),
    *("hjson", "einops", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "tqdm", "setuptools"),
    *("pytest", "hypothesis"),
]
DEEPSPEED = "deepspeed==0.19.8"
SOURCES = ("zeroengine", "benchmarks", "tests", "csrc", "bin", "setup.py", "pyproject.toml", "README.md", "LICENSE")
LEFT_OUT = ("__pycache__", ".pyc", ".pytest_cache")


def pack(archive: Path, root: Path) -> None:
    """Write an archive of the checkout `root`, with its built libraries, and of the packages."""
    libraries = sorted(path.name for path in (root / "zeroengine/ops").glob("_*.so"))
    if "_cuda.so" not in libraries:
        print("there is no CUDA library in zeroengine/ops: build it first (pip install ., with nvcc)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "packages")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--no-compile"]
        subprocess.run([*install, *PACKAGES], check=True)
        # DeepSpeed compiles its operators where they are used. Its own requirements would bring torch.
        subprocess.run([*install, "--no-deps", "--no-build-isolation", DEEPSPEED], check=True)
        with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
            for name in SOURCES:
                tar.add(root / name, f"{FOLDER}/{name}", filter=_wanted)
            tar.add(target, f"{FOLDER}/packages", filter=_wanted)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, with {', '.join(libraries) or 'no libraries'}")


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if info.name.endswith(LEFT_OUT) else info
