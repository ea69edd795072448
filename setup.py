"""Builds csrc/cpu and csrc/aio into a shared library each, which ctypes loads; pyproject.toml holds everything else.

ninja drives the compiler. CXX names it, else the first of c++, g++ and clang++ is taken. Without one that
works, the install still succeeds: zeroengine then runs on torch's own kernels, without NVMe, and says so.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = {"zeroengine.ops._cpu": "cpu", "zeroengine.ops._aio": "aio"}  # each built from its folder in csrc
HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.h"))
MISSING = {
    "cpu": "its CPU kernels: {error}\nIt works on torch's own, slower kernels. For its own",
    "aio": "its disk library: {error}\nIt cannot offload to NVMe. For that",
}

# The same IEEE operations on every CPU: no contraction into fused multiply-adds, no fast math, no -march=native.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra".split()
# GCC's own AVX-512 headers trip -Wmaybe-uninitialized (its bug 105593).
ISA_FLAGS = {
    "isa_avx2": "-mavx2 -mfma -mf16c".split(),
    "isa_avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -Wno-maybe-uninitialized".split(),
}

NINJA_RULES = """\
rule compile
  command = {cxx} -MMD -MF $out.d {flags} $isa -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared $in -o $out {link}
"""


class BuildError(Exception):
    """Why the library could not be built."""


def find_compiler() -> list[str]:
    """The C++ compiler's command line."""
    if wanted := os.environ.get("CXX"):
        command = shlex.split(wanted)
        if not shutil.which(command[0]):
            raise BuildError(f"CXX names {command[0]!r}, which is not there")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler was found (looked at CXX, c++, g++ and clang++)")


def find_ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR, "ninja"))
    except ImportError:
        if path := shutil.which("ninja"):
            return path
    raise BuildError("ninja was not found")


def openmp_flags(cxx: list[str]) -> list[str]:
    """`-fopenmp` where the compiler can link it; without it the kernels use one thread."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cpp")
        probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        command = [*cxx, "-fopenmp", str(probe), "-o", str(probe.with_suffix(""))]
        return ["-fopenmp"] if subprocess.run(command, capture_output=True).returncode == 0 else []


def sources(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"csrc/{folder}/*.cpp"))


def write_ninja(path: Path, folder: str, output: Path) -> None:
    """A build file that compiles every source in csrc/`folder` and links them into `output`."""
    cxx = find_compiler()
    threads = openmp_flags(cxx) if folder == "cpu" else ["-pthread"]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    rules = NINJA_RULES.format(cxx=shlex.join(cxx), flags=shlex.join(FLAGS + threads), link=shlex.join(threads))

    def escape(file: Path) -> str:
        return str(file).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    lines, objects = [f"builddir = {escape(path.parent)}\n{rules}"], []
    for source in map(Path, sources(folder)):
        objects.append(escape(path.parent / source.with_suffix(".o")))
        isa = ISA_FLAGS.get(source.stem, []) if x86 else []
        lines.append(f"build {objects[-1]}: compile {escape(ROOT / source)}\n  isa = {shlex.join(isa)}\n")
    lines.append(f"build {escape(output)}: link {' '.join(objects)}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


class NinjaBuild(build_ext):
    """build_ext for a library without Python in it: no ABI tag, and no failure where it cannot be built."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = LIBRARIES[ext.name]
        build_file = Path(self.build_temp).resolve() / folder / "build.ninja"
        try:
            write_ninja(build_file, folder, output)
            result = subprocess.run([find_ninja(), "-f", str(build_file)], capture_output=True, text=True)
            if result.returncode:
                raise BuildError(f"the compiler failed:\n{result.stdout}")
        except (BuildError, OSError) as error:
            output.unlink(missing_ok=True)
            print(
                f"\nNOTICE: zeroengine is installed without {MISSING[folder].format(error=error)}, install a C++17 "
                "compiler (Debian: `apt install g++`) and install zeroengine again.\n",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3: the library uses no CPython ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(name, sources(folder), depends=HEADERS, optional=True) for name, folder in LIBRARIES.items()
    ],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": PlatformWheel},
)
