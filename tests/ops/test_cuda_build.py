"""The CUDA library is built for every architecture, spills nothing and contracts nothing; or its absence is said."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops import cuda
from zeroengine import ops
from zeroengine.ops import _cuda_library

FATBIN = struct.pack("<I", 0xBA55ED50)


def device_code(path: Path) -> Counter[tuple[str, int]]:
    """How often a library holds machine code ("ELF") or PTX of which architecture, as in ("ELF", 90)."""
    raw, found = path.read_bytes(), Counter[tuple[str, int]]()
    for match in re.finditer(re.escape(FATBIN), raw):
        header, size = struct.unpack_from("<HQ", raw, match.start() + 6)
        at, end = match.start() + header, match.start() + header + size
        while header == 16 and at < end:
            kind, _, header_size, body = struct.unpack_from("<HHIQ", raw, at)
            (architecture,) = struct.unpack_from("<I", raw, at + 28)
            found[{1: "PTX", 2: "ELF"}[kind], architecture] += 1
            at += header_size + body
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return cuda.build_with_nvcc(tmp_path_factory.mktemp("cuda"))


@pytest.mark.slow  # test_cuda_kernels compiles the same sources, with all warnings, by the C++ compiler
class TestBuilt:
    def test_every_source_is_compiled_for_every_architecture(self, built: tuple[Path, str]) -> None:
        architectures = list(map(int, cuda.setup_py().cuda_architectures(cuda.nvcc())))
        count = len(cuda.setup_py().sources("cuda"))
        wanted = {("ELF", a): count for a in architectures} | {("PTX", architectures[-1]): count}
        assert device_code(built[0]) == wanted
        handle = _cuda_library.load(built[0])
        assert handle.ze_cuda_architectures().decode() == " ".join(map(str, architectures)) + "+PTX"

    def test_kernels_fit_their_registers(self, built: tuple[Path, str]) -> None:
        """Nothing in local memory; four blocks of 256 threads on a multiprocessor at least."""
        names: dict[str, set[str]] = {}
        for entry in re.split(r"Compiling entry function ", built[1])[1:]:
            name, architecture = re.match(r"'(\w+)' for '(\w+)'", entry).groups()  # type: ignore[union-attr]
            names.setdefault(architecture, set()).add(re.sub(r"_GLOBAL__N__\w{8}_", "", name))
            assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in entry, entry
            assert int(re.search(r"Used (\d+) registers", entry)[1]) <= 64, entry  # type: ignore[index]
        # update, its prepare; cast, write; norm, factor; digest; nothing; quantize, its inverse, for 3 dtypes each
        kernels = 3 + 1 + 6 + 1 + 3 + 1 + 1 + 1 + 3 + 3
        architectures = cuda.setup_py().cuda_architectures(cuda.nvcc())
        assert {a: len(its) for a, its in names.items()} == {f"sm_{a}": kernels for a in architectures}

    def test_nothing_but_the_interface_is_visible(self, built: tuple[Path, str]) -> None:
        """CUDA's runtime above all: torch has its own."""
        nm = shutil.which("nm")
        if nm is None:
            pytest.skip("no nm: what the library exports cannot be listed")
        exported = {*_cuda_library._SIGNATURES, "ze_cuda_quantize", "ze_cuda_dequantize_sum"}
        lines = subprocess.run([nm, "-D", "--defined-only", built[0]], capture_output=True, text=True).stdout.split(
            "\n"
        )
        assert {line.split()[-1] for line in lines if line} == exported

    def test_the_compilers_warn_of_nothing(self, built: tuple[Path, str]) -> None:
        assert "warning" not in built[1].lower()

    @pytest.mark.parametrize("source", ["update", "cast"])
    def test_arithmetic_is_ieee_and_accesses_are_wide(self, source: str, tmp_path: Path) -> None:
        """In PTX: every operation rounds by itself, to nearest; a plain `mul` could still be fused later."""
        setup = cuda.setup_py()
        flags = [flag for flag in setup.CUDA_FLAGS if flag not in ("-Xptxas", "-v")]
        output = tmp_path / "code.ptx"
        architecture = setup.cuda_architectures(cuda.nvcc())[0]
        command = [cuda.nvcc(), *flags, f"-arch=compute_{architecture}", '-DZE_CUDA_ARCHITECTURES=""', "-ptx"]
        subprocess.run([*command, cuda.ROOT / f"csrc/cuda/{source}.cu", "-o", output], check=True)
        operations = set(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)*\.f(?:32|64))\s", output.read_text(), re.M))
        arithmetic = {x for x in operations if re.match(r"(add|sub|mul|fma|mad|div|rcp|sqrt|rsqrt|ex2|lg2)\.", x)}
        assert {"mul.rn.f32", "add.rn.f32"} <= arithmetic
        assert not {x for x in arithmetic if x.startswith(("fma", "mad")) or ".rn." not in x or ".ftz" in x}
        text = output.read_text()
        # Words, or numbers of their own dtype.
        loads = ("v4.u32", "v2.u32") if source == "update" else ("v4.f32", "v4.u16")
        for access in (*(f"ld.global.{width}" for width in loads), "st.global.v4.b32", "st.global.v2.b32"):
            assert access in text


# -- choosing -------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit from before Blackwell, that cannot compile."""
    path = tmp_path / "bin/nvcc"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n[ $1 = --list-gpu-arch ] || exit 1\necho compute_80; echo compute_90; echo compute_90a\n"
    )
    path.chmod(0o755)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "ZEROENGINE_CUDA", "ZEROENGINE_CUDA_ARCHITECTURES"):
        monkeypatch.delenv(name, raising=False)
    return path


def test_the_user_chooses_nvcc(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = cuda.setup_py().find_nvcc
    monkeypatch.setenv("PATH", str(fake_nvcc.parent))
    assert find() == str(fake_nvcc)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc.parents[1]))
    assert find() == str(fake_nvcc)
    monkeypatch.setenv("CUDACXX", "/elsewhere/nvcc")
    assert find() == "/elsewhere/nvcc"
    monkeypatch.setenv("ZEROENGINE_CUDA", "0")
    assert find() is None


def test_architectures_are_those_that_nvcc_knows(fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = cuda.setup_py()
    assert setup.cuda_architectures(str(fake_nvcc)) == ["80", "90"]
    monkeypatch.setenv("ZEROENGINE_CUDA_ARCHITECTURES", " 90a;80,90 ")
    assert setup.cuda_architectures(str(fake_nvcc)) == ["80", "90", "90a"]
    assert "-gencode=arch=compute_90a,code=compute_90a" in setup.cuda_flags(str(fake_nvcc))
    monkeypatch.setenv("ZEROENGINE_CUDA_ARCHITECTURES", "80 120")
    with pytest.raises(setup.BuildError, match=r"names 120, but .* builds for 80, 90, 90a; write some of these"):
        setup.cuda_architectures(str(fake_nvcc))


@pytest.mark.slow
def test_the_install_succeeds_without_a_working_nvcc(fake_nvcc: Path, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info", ".*")
    shutil.copytree(cuda.ROOT, source, ignore=skip)
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--no-index"]
    env = os.environ | {"CUDACXX": str(fake_nvcc)}
    install = subprocess.run([*pip, "--target", site, source], env=env, capture_output=True, text=True)
    assert install.returncode == 0, install.stderr
    assert (install.stdout + install.stderr).count("NOTICE: zeroengine is installed without its CUDA kernels") == 1
    assert {path.name for path in site.glob("**/*.so")} == {"_cpu.so", "_aio.so"}


# -- finding --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for again, in the test and after it."""

    def forget() -> None:
        _cuda_library._loaded.cache_clear()
        _cuda_library._usable.cache_clear()

    forget()
    yield
    forget()


def test_tensors_on_the_cpu_never_load_the_cuda_library(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_library, "PATH", Path("/nowhere/_cuda.so"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.cuda_library(torch.device("cpu")) is None
        assert ops.cuda_architectures() == ()
        assert ops.squared_norms([torch.ones(3), torch.ones(2)]).item() == 5


def test_a_missing_cuda_library_is_reported_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_library, "PATH", Path("/nowhere/_cuda.so"))
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="without its CUDA kernels on cuda:0.*was not built.*install zeroengine again"):
        assert ops.cuda_library(device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.cuda_library(device) is None


def test_a_broken_cuda_library_counts_as_missing(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "_cuda.so"
    path.write_bytes(b"not a library")
    monkeypatch.setattr(_cuda_library, "PATH", path)
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert ops.cuda_library(torch.device("cuda", 0)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cuda_library_that_cannot_run_here_is_reported_with_the_reason(
    fresh: None,
) -> None:
    if not _cuda_library.PATH.exists():
        pytest.skip("the set-up built no CUDA library")
    with pytest.warns(UserWarning, match="without its CUDA kernels on cuda:0: .*torch's own, slower kernels serve"):
        assert ops.cuda_library(torch.device("cuda", 0)) is None
