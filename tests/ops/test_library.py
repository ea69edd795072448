"""The library is found, or its absence said once; its instruction set is the user's to choose."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zeroengine import ops
from zeroengine.cli.zero_report import compiled
from zeroengine.errors import ZeroEngineError
from zeroengine.ops import _library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for again, in the test and after it."""
    before = ops.cpu_isa()
    ops.library.cache_clear()
    yield
    ops.library.cache_clear()
    if ops.library() is not None:
        ops.set_cpu_isa(before)


def test_a_missing_library_is_reported_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "PATH", Path("/nowhere/_cpu.so"))
    with pytest.warns(UserWarning, match="without its CPU kernels.*install a C"):
        assert ops.library() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.cpu_isa() == "torch"
        assert ops.kernels_in_use(torch.device("cpu")) == "torch's own, which are slower"
        assert ops.squared_norm(torch.ones(3)).item() == 3


def test_the_report_says_which_kernels_are_in_use_and_why_ours_are_not(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(compiled())
    assert rows["kernels on cpu"] == ops.kernels_in_use(torch.device("cpu"))
    monkeypatch.setattr(_library, "PATH", Path("/nowhere/_cpu.so"))
    ops.library.cache_clear()
    missing = dict(compiled())["kernels on cpu"]
    assert missing.startswith("torch's own, which are slower") and "/nowhere/_cpu.so was not built" in missing


def test_a_broken_library_counts_as_missing(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "_cpu.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(_library, "PATH", path)
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert ops.library() is None


@pytest.mark.skipif(ops.library() is None, reason="zeroengine's CPU library was not built")
def test_another_versions_library_counts_as_missing(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "ABI_VERSION", _library.ABI_VERSION + 1)
    with pytest.warns(UserWarning, match=r"cannot be loaded \(it has interface version \d+, this zeroengine needs"):
        assert ops.library() is None


@pytest.mark.skipif(ops.library() is None, reason="zeroengine's CPU library was not built")
class TestInstructionSet:
    def test_the_environment_chooses(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ZEROENGINE_CPU_ISA", "portable")
        assert ops.cpu_isa() == "portable"

    def test_a_wrong_choice_is_an_error_that_lists_the_right_ones(
        self, fresh: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ZEROENGINE_CPU_ISA", "avx3")
        with pytest.raises(ZeroEngineError, match=r"ZEROENGINE_CPU_ISA='avx3'.*offers.*portable"):
            ops.library()

    def test_the_best_is_the_default(self, fresh: None) -> None:
        best = ops.cpu_isa()
        ops.set_cpu_isa("portable")
        ops.set_cpu_isa("")
        assert ops.cpu_isa() == best


def test_advice_on_huge_pages_never_fails() -> None:
    x = torch.ones(1 << 20)
    ops.advise_huge_pages(x)
    ops.advise_huge_pages(torch.ones(0))
    assert x.sum().item() == 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false", None])
def test_the_install_succeeds_without_a_working_compiler(compiler: str | None, tmp_path: Path) -> None:
    source, site, tools = tmp_path / "source", tmp_path / "site", tmp_path / "bin"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info", ".*")
    shutil.copytree(ROOT, source, ignore=skip)
    tools.mkdir()
    tools.joinpath("false").symlink_to(shutil.which("false") or "/bin/false")
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")} | {"PATH": str(tools)}
    if compiler:
        env["CXX"] = compiler
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--no-index"]
    install = subprocess.run([*pip, "--target", site, source], env=env, capture_output=True, text=True)
    assert install.returncode == 0, install.stderr
    assert (install.stdout + install.stderr).count("NOTICE: zeroengine is installed without its CPU kernels") == 1
    assert (install.stdout + install.stderr).count("NOTICE: zeroengine is installed without its disk library") == 1
    assert not list(site.glob("**/*.so"))

    code = """if True:
        import torch, zeroengine.ops as ops
        p, g, m, v = (torch.ones(100) for _ in range(4))
        ops.update_step("adamw", ops.UpdateArrays(p, g, (m, v)), step=1, lr=1.0)
        print(ops.__file__, ops.library() is not None, ops.squared_norm(p).item(), p.abs().max().item())
    """
    run = subprocess.run(
        [sys.executable, "-c", code], env=env | {"PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.stdout.split() == [str(site / "zeroengine/ops/__init__.py"), "False", "0.0", "0.0"], run.stderr
    assert run.stderr.count("zeroengine runs without its CPU kernels") == 1
