"""Builds csrc/cpu, csrc/aio and csrc/cuda into one shared library each, which ctypes loads.

pyproject.toml holds everything else. ninja runs the compilers. CXX names the C++ compiler; without it the first of c++,
g++ and clang++ is used. The install succeeds even if no compiler works: zeroengine then uses torch's own kernels,
cannot offload to NVMe, and says so.

csrc/cuda is built if there is an nvcc: the one that CUDACXX names, or that of CUDA_HOME, PATH or /usr/local/cuda.
ZEROENGINE_CUDA_ARCHITECTURES lists the architectures, "80 90 100" by default. ZEROENGINE_CUDA=0 leaves the library out.
"""

from __future__ import annotations

import os
import platform
import re
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
# The libraries, and the folders in csrc that they are built from.
LIBRARIES = {"zeroengine.ops._cpu": "cpu", "zeroengine.ops._aio": "aio", "zeroengine.ops._cuda": "cuda"}
HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.h"))
COMPILER = "install a C++17 compiler (Debian: `apt install g++`)"
MISSING = {
    "cpu": f"its CPU kernels: {{error}}\nIt works on torch's own, slower kernels. For its own, {COMPILER}",
    "aio": f"its disk library: {{error}}\nIt cannot offload to NVMe. For that, {COMPILER}",
    "cuda": "its CUDA kernels: {error}\nOn GPUs it works on torch's own, slower kernels. For its own, repair that (to "
    "do without, set ZEROENGINE_CUDA=0)",
}

# These flags give the same IEEE operations on every CPU: no contraction into fused multiply-adds, no fast math, no
# -march=native.
FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra".split()
# GCC's own AVX-512 headers trip -Wuninitialized and -Wmaybe-uninitialized (its bug 105593).
ISA_FLAGS = {
    "isa_avx2": "-mavx2 -mfma -mf16c".split(),
    "isa_avx512": "-mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -Wno-maybe-uninitialized -Wno-uninitialized".split(),
}

# Only architectures that the nvcc knows are built. The PTX of the last one serves newer GPUs.
CUDA_ARCHITECTURES = "80 90 100"
# --fmad=false does for the GPU what -ffp-contract=off does for the CPU. ptxas reports registers and spills.
CUDA_FLAGS = (
    "-std=c++17 -O3 --fmad=false --ftz=false --prec-div=true --prec-sqrt=true -Xptxas -v "
    "-Xcompiler -fPIC,-fvisibility=hidden,-Wall,-ffp-contract=off"
).split()
# CUDA's runtime is linked in and hidden, because torch has its own.
CUDA_LINK_FLAGS = "-nodlink -cudart static -Xlinker --exclude-libs,ALL".split()

NINJA_RULES = """\
rule compile
  command = {compiler} -MMD -MF $out.d {flags} $isa -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {compiler} -shared $in -o $out {link}
"""


class BuildError(Exception):
    """A library cannot be built; the message says why."""


def find_compiler() -> list[str]:
    """Return the C++ compiler's command line."""
    if wanted := os.environ.get("CXX"):
        command = shlex.split(wanted)
        if not shutil.which(command[0]):
            raise BuildError(f"CXX names {command[0]!r}, which does not exist")
        return command
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler was found (looked at CXX, c++, g++ and clang++)")


def find_ninja() -> str:
    """Return the path of ninja."""
    try:
        import ninja

        return str(Path(ninja.BIN_DIR, "ninja"))
    except ImportError:
        if path := shutil.which("ninja"):
            return path
    raise BuildError("ninja was not found")


def openmp_flags(cxx: list[str]) -> list[str]:
    """Return `-fopenmp` if the compiler can link it. Without it the kernels use one thread."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cpp")
        probe.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        command = [*cxx, "-fopenmp", str(probe), "-o", str(probe.with_suffix(""))]
        return ["-fopenmp"] if subprocess.run(command, capture_output=True).returncode == 0 else []


def find_nvcc() -> str | None:
    """Return nvcc's path, or None if there is none or ZEROENGINE_CUDA is 0."""
    if os.environ.get("ZEROENGINE_CUDA", "1") == "0":
        return None
    if wanted := os.environ.get("CUDACXX"):
        return wanted
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*(str(Path(home, "bin")) for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def cuda_architectures(nvcc: str) -> list[str]:
    """Return the architectures to build for, ascending, as in "90"."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    if listed.returncode:
        raise BuildError(f"{nvcc} --list-gpu-arch failed:\n{listed.stderr or listed.stdout}")
    known = [line.removeprefix("compute_") for line in listed.stdout.split()]
    wanted = os.environ.get("ZEROENGINE_CUDA_ARCHITECTURES")
    architectures = re.split(r"[\s,;]+", (wanted or CUDA_ARCHITECTURES).strip())
    if wanted and (unknown := [a for a in architectures if a not in known]):
        raise BuildError(
            f"ZEROENGINE_CUDA_ARCHITECTURES names {', '.join(unknown)}, but {nvcc} builds for {', '.join(known)}; "
            'write some of these, as in "80 90"'
        )
    if not (found := [a for a in architectures if a in known]):
        raise BuildError(f"{nvcc} builds for {', '.join(known)}, but {', '.join(architectures)} are wanted")
    return sorted(set(found), key=lambda a: (int(re.sub(r"\D", "", a)), a))


def cuda_flags(nvcc: str) -> list[str]:
    """Return the compiler flags of nvcc."""
    architectures = cuda_architectures(nvcc)
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    targets.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    return [*CUDA_FLAGS, *targets, f'-DZE_CUDA_ARCHITECTURES="{" ".join(architectures)}+PTX"']


def sources(folder: str) -> list[str]:
    """Return the sources in csrc/`folder`, relative to the checkout."""
    suffix = "cu" if folder == "cuda" else "cpp"
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"csrc/{folder}/*.{suffix}"))


def commands(folder: str) -> dict[str, list[str]]:
    """Return the compiler of csrc/`folder`, and its flags for compiling and for linking."""
    if folder == "cuda":
        nvcc = find_nvcc()
        assert nvcc is not None
        return {"compiler": [nvcc], "flags": cuda_flags(nvcc), "link": CUDA_LINK_FLAGS}
    cxx = find_compiler()
    threads = openmp_flags(cxx) if folder == "cpu" else ["-pthread"]
    return {"compiler": cxx, "flags": FLAGS + threads, "link": threads}


def write_ninja(path: Path, folder: str, output: Path) -> None:
    """Write a build file that compiles every source in csrc/`folder` and links them into `output`."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    rules = NINJA_RULES.format(**{name: shlex.join(words) for name, words in commands(folder).items()})

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
    """Builds libraries that hold no Python: without an ABI tag, and without failing if a library cannot be built."""

    def run(self) -> None:
        """Build all libraries, and remove those of an earlier build that are not built any more."""
        for name in LIBRARIES.keys() - {ext.name for ext in self.extensions}:
            Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)
        # The libraries are built at the same time: each has a file that takes longer than all of its others.
        self.parallel = self.parallel or len(self.extensions)
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        """Return the file name of a library, without an ABI tag."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Build one library, or print a notice that says why that is impossible."""
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
                f"\nNOTICE: zeroengine is installed without {MISSING[folder].format(error=error)} and install "
                "zeroengine again.\n",
                file=sys.stderr,
            )

    def get_outputs(self) -> list[str]:
        """Return the libraries that were built."""
        return [path for path in super().get_outputs() if os.path.exists(path)]


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3: the libraries use no CPython ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


# Tests import this file without building anything.
if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(name, sources(folder), depends=HEADERS, optional=True)
            for name, folder in LIBRARIES.items()
            if folder != "cuda" or find_nvcc()
        ],
        cmdclass={"build_ext": NinjaBuild, "bdist_wheel": PlatformWheel},
    )
