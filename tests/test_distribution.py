"""The sdist and the wheel install on other machines, with the libraries and the page's assets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = """\
import torch, zeroengine
from zeroengine import ops
engine = zeroengine.initialize(torch.nn.Linear(4, 1), config={"optimizer": {"type": "AdamW"}})
for _ in range(3):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
print("trained", zeroengine.__file__, ops.kernels_in_use(engine.device))
engine.close()
"""


@pytest.mark.slow
def test_a_wheel_from_the_sdist_trains_in_another_environment(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # The CUDA library takes most of the time, and its own tests build it.
    environment |= {"ZEROENGINE_CUDA": "0"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Only what is in the repository, so that nothing that was built in this checkout is packed.
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "build", "dist", "*.egg-info", ".*", "runs", "shared")
    shutil.copytree(ROOT, source, ignore=skip)
    # These are the hooks that `python -m build` calls, without its environment of their own, which needs a network.
    hooks = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    dist = tmp_path / "dist"
    dist.mkdir()
    subprocess.run([sys.executable, "-c", hooks, "build_sdist", str(dist)], cwd=source, env=environment, check=True)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    subprocess.run([sys.executable, "-c", hooks, "build_wheel", str(dist)], cwd=unpacked, env=environment, check=True)
    (wheel,) = dist.glob("*.whl")
    assert "-py3-none-" in wheel.name

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # torch and the other dependencies, but not the checkout, which an editable install adds by a file of its own.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    assert {path.name for path in site.glob("zeroengine/ops/*.so")} == {"_cpu.so", "_aio.so"}
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = run(tmp_path / "venv/bin/zero-launch", "--nproc", "2", "--cpu", "--run-folder", tmp_path / "run", script)
    assert f"trained {site}/zeroengine/__init__.py C++ (" in output
    page = tmp_path / "page.html"
    run(tmp_path / "venv/bin/zero-view", tmp_path / "run", "--html", page)
    assert "class Chart" in page.read_text()
