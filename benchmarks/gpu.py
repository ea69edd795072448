"""Measures zeroengine on a GPU: correctness, then bandwidth, tokens/s and memory, written to docs/benchmarks.

    python benchmarks/gpu.py [--minutes 10] [--output docs/benchmarks/<gpu>.md]

Each section runs in its own process. A section that fails or runs out of time is reported, and the next one continues.
A bandwidth counts the bytes that must move, each once, over the median time of rounds in which all cases take turns.
The reference is a copy within the GPU's memory, in the same rounds. DeepSpeed is measured if it can be imported (`pip
install .[bench]`). Without a GPU the benchmark says so and exits with 2. `--rehearse` runs every section at tiny sizes,
on the CPU if there is no GPU, to show that they run. Its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_kernels import adam, beside_deepspeed, beside_torch, correctness, norm_and_casts
from gpu_setting import Setting, run_self
from gpu_training import grow, issue, large_memory, largest, memory, occupy, offload, offloaded, train, training

from zeroengine import ops

SECTIONS: dict[str, Callable[[Setting], str]] = {
    "Correctness": correctness,
    "The fused update": adam,
    "The fused update beside torch": beside_torch,
    "Norm and cast-copies": norm_and_casts,
    "Training": training,
    "Memory": memory,
    "Memory at 7.5 G parameters": large_memory,
    "The fused update beside DeepSpeed": beside_deepspeed,
    "Offload to CPU memory": offload,
    "The largest model": largest,
}
CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "train": train,
    "issue": issue,
    "occupy": occupy,
    "offloaded": offloaded,
    "grow": grow,
}


def heading(s: Setting) -> str:
    name = torch.cuda.get_device_name() if s.on_gpu else "CPU"
    lines = [f"# {name}{' (a rehearsal)' if s.rehearse else ''}", "", "`python benchmarks/gpu.py`", ""]
    if s.on_gpu:
        its = torch.cuda.get_device_properties(0)
        memory = f"{its.total_memory / 2**30:.0f} GiB, {its.multi_processor_count} multiprocessors"
        lines.append(f"{name}, {memory}, compute capability {its.major}.{its.minor}; CUDA {torch.version.cuda}; ")
    built = " ".join(ops.cuda_architectures()) or "no CUDA library, torch's own kernels served"
    lines.append(f"torch {torch.__version__}; Python {platform.python_version()}; zeroengine's kernels: {built}.")
    return "\n".join(lines)


def report(s: Setting, minutes: float, output: Path | None) -> bool:
    """Write the page, section by section. Return whether all sections succeeded."""
    end, parts, succeeded = time.monotonic() + 60 * minutes, [heading(s)], True
    for title, section in SECTIONS.items():
        left = end - time.monotonic()
        try:
            if left < 5:
                raise TimeoutError("no time was left")
            text = json.loads(run_self(s, "--section", title, timeout=left))
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            reason = "no time was left" if isinstance(error, subprocess.TimeoutExpired) else str(error)
            text, succeeded = f"**Failed**:\n\n```\n{reason[-2000:]}\n```", False
        parts.append(f"## {title}\n\n{inspect.getdoc(section)}\n\n{text}")
        print(f"{parts[-1]}\n", flush=True)
        if output is not None:
            output.write_text("\n\n".join(parts) + "\n")
    return succeeded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="sections that begin later are left out")
    parser.add_argument("--output", type=Path, help="the page; docs/benchmarks/<gpu>.md unless said otherwise")
    parser.add_argument("--rehearse", action="store_true", help="tiny, without a GPU too, and nothing is written")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.py: there is no GPU that this torch can use, so nothing was measured.", file=sys.stderr)
        return 2
    s = Setting(args.rehearse)
    if not args.rehearse and ops.cuda_library(s.device) is None:  # its warning says why
        print("benchmarks/gpu.py: zeroengine's kernels do not serve this GPU: nothing was measured.", file=sys.stderr)
        return 2
    if args.child:
        print(json.dumps(CHILDREN[args.child[0]](s, *args.child[1:])))
        return 0
    if args.section:
        print(json.dumps(SECTIONS[args.section](s)))
        return 0
    output: Path | None = None
    if not s.rehearse:
        file = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-") + ".md"
        output = args.output or Path(__file__).parents[1] / "docs/benchmarks" / file
        output.parent.mkdir(parents=True, exist_ok=True)
    succeeded = report(s, args.minutes, output)
    if output is not None:
        print(f"written to {output}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
