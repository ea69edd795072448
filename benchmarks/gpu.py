"""Answers, on a GPU and within minutes, what no CPU can: whether zeroengine is right there, and how fast.

    python benchmarks/gpu.py [--minutes 9] [--output gpu-report]

The most important questions come first. Each part runs in its own process; one that fails or runs out of time leaves
its reason, and the next one continues. After each part the folder of `--output` has `answers.md`, a line for each
question, `details.md`, and `failures.txt`, so a run that is cut short still answers.

A bandwidth counts the bytes that must move, each once, over the median time of rounds in which all cases take turns.
The reference is a copy within the GPU's memory, in the same rounds. DeepSpeed is measured if it can be imported.

    python benchmarks/gpu.py --pack zeroengine-gpu.tar.gz

makes an archive of all that is needed besides torch, the built libraries and DeepSpeed among them, for machines with
the same Python and nothing else. Unpack it there and run `python zeroengine-gpu/benchmarks/gpu.py`.

`--dry-run` runs every part at tiny sizes, on the CPU if there is no GPU, to show that they run; its figures mean
nothing. Without it and without a GPU the command says so and exits with 2.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# What an archive of --pack brings, for this process and those that it starts.
PACKAGES = [str(path) for path in (ROOT, ROOT / "packages") if path.is_dir()]
sys.path[:0] = PACKAGES
os.environ["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])

import gpu_kernels as kernels  # noqa: E402
import gpu_training as train  # noqa: E402
import torch  # noqa: E402
from gpu_pack import pack  # noqa: E402
from gpu_setting import RESULT, Found, Setting, reason_of, run_self, table  # noqa: E402

from zeroengine import ops  # noqa: E402


class Question(NamedTuple):
    """A question with a number for an answer.

    Attributes:
        text: The question.
        goal: The number to reach, if there is one.
        at_most: Whether the number may be at most the goal, and not at least.
        is_of_values: Whether it is about values, which a dry run answers as well, and not about speed or memory.
    """

    text: str
    goal: float | None = None
    at_most: bool = False
    is_of_values: bool = False

    def answer(self, found: float | str, dry_run: bool) -> list[str]:
        """Return the columns of the table: question, goal, what was found, and whether that is the goal."""
        goal = "" if self.goal is None else f"at {'most' if self.at_most else 'least'} {self.goal:g}"
        if isinstance(found, str):
            return [self.text, goal, found.replace("|", "/"), ""]
        if self.goal is None or (dry_run and not self.is_of_values):
            return [self.text, goal, f"{found:.3g}", ""]
        reached = found <= self.goal if self.at_most else found >= self.goal
        return [self.text, goal, f"{found:.3g}", "yes" if reached else "no"]


class Part(NamedTuple):
    """Some questions that one process answers, and the seconds that it may take at most."""

    run: Callable[[Setting], Found]
    seconds: float
    questions: tuple[Question, ...] = ()


PARTS = {
    "Correctness": Part(
        kernels.correctness,
        60,
        (Question("Share of the kernels' checks against float64 and the CPU's bits", 1.0, is_of_values=True),),
    ),
    "Stage 3 beside stage 0": Part(
        train.stage_3_is_right,
        60,
        (Question("Share of losses and gradients at stage 3 with stage 0's bits", 1.0, is_of_values=True),),
    ),
    "Waits": Part(train.nothing_waits, 60, (Question("Waits of the host for the GPU in a step", 0, at_most=True),)),
    "The fused update": Part(
        kernels.adam,
        60,
        (
            Question("Fused AdamW in fp32: bandwidth over a copy's", 0.90),
            Question("The same, bf16 gradient and copy, 8-bit moments"),
        ),
    ),
    "Training": Part(
        train.training,
        240,
        (
            Question("A step at stage 3 over one at stage 0, 1 G parameters", 1.03, at_most=True),
            Question("Tokens/s at stage 3 over FSDP2's, bf16", 1.0),
            Question("Tokens/s at stage 0 over plain PyTorch's"),
            Question("The host's work at stage 3 over FSDP2's", 1.0, at_most=True),
        ),
    ),
    "Offload to CPU memory": Part(train.offload, 120, (Question("ZeRO-Offload: tokens/s over DeepSpeed's", 1.5),)),
    "Checkpoints": Part(
        train.checkpoint_pause, 60, (Question("A save beside training lengthens a step by (share of the step)"),)
    ),
    "The fused update beside torch": Part(
        kernels.beside_torch, 40, (Question("Time of torch's fused AdamW and casts over the fused update's", 1.0),)
    ),
    "Norm and cast-copies": Part(
        kernels.norm_and_casts,
        30,
        (Question("The norm, fp32: bandwidth over a copy's", 0.90),),
    ),
    "Memory": Part(
        train.memory,
        60,
        (Question("Bytes between steps at stage 3 over ZeRO's formula and buckets", 1.05, True),),
    ),
    "The fused update beside DeepSpeed": Part(
        kernels.beside_deepspeed,
        60,
        (Question("Time of DeepSpeed's FusedAdam and casts over the update's", 1.0),),
    ),
    "Memory at 7.5 G parameters": Part(train.large_memory, 60),
    "The largest model": Part(train.largest, 120),
}
CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function
    for function in [train.train, train.occupy, train.offloaded, train.grow, train.same, train.waits, train.saves]
}


def heading(s: Setting) -> str:
    """Return the title, and what was measured with what."""
    name = torch.cuda.get_device_name() if s.on_gpu else "CPU"
    lines = [f"# {name}{' (a dry run: no figure means anything)' if s.dry_run else ''}", ""]
    if s.on_gpu:
        its = torch.cuda.get_device_properties(0)
        memory = f"{its.total_memory / 2**30:.0f} GiB, {its.multi_processor_count} multiprocessors"
        lines.append(f"{name}, {memory}, compute capability {its.major}.{its.minor}; CUDA {torch.version.cuda}; ")
    built = " ".join(ops.cuda_architectures()) or "no CUDA library, torch's own kernels served"
    lines.append(f"torch {torch.__version__}; Python {platform.python_version()}; zeroengine's kernels: {built}.")
    return "\n".join(lines)


def report(s: Setting, minutes: float, output: Path) -> bool:
    """Run the parts, and write the files after each. Return whether every question has a number for an answer."""
    output.mkdir(parents=True, exist_ok=True)
    # What an earlier run has found is not of this one.
    for name in ("answers.md", "details.md", "failures.txt"):
        (output / name).unlink(missing_ok=True)
    begun = time.monotonic()
    answers = {title: [q.answer("not reached", s.dry_run) for q in part.questions] for title, part in PARTS.items()}
    details, failures, succeeded = [heading(s)], [], True
    for title, part in PARTS.items():
        start = time.monotonic()
        seconds_left = begun + 60 * minutes - start
        values: list[float | str]
        try:
            if seconds_left < 5:
                raise TimeoutError(f"no time was left of {minutes:g} minutes")
            text, values = json.loads(run_self(s, "--part", title, timeout=min(seconds_left, part.seconds)))
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
            reason = str(error)
            if isinstance(error, subprocess.TimeoutExpired):
                reason = f"not done after {error.timeout:.0f} s"
            text, values = "", [f"failed: {reason_of(reason)[:200]}"] * len(part.questions)
            failures.append(f"== {title} ==\n{reason}\n")
        succeeded &= not any(isinstance(value, str) for value in values)
        answers[title] = [q.answer(value, s.dry_run) for q, value in zip(part.questions, values, strict=True)]
        lines = "\n".join(": ".join(filter(None, row[::2])) for row in answers[title])
        print(f"[{time.monotonic() - begun:3.0f} s] {title}\n{lines}\n", flush=True)
        took = f"{time.monotonic() - start:.0f} s."
        details.append("\n\n".join(filter(None, [f"## {title}", str(inspect.getdoc(part.run)), text, took])))
        rows = [row for own in answers.values() for row in own]
        head = ["question", "goal", "found", "reached"]
        (output / "answers.md").write_text(f"{heading(s)}\n\n{table(head, rows)}\n")
        (output / "details.md").write_text("\n\n".join(details) + "\n")
        (output / "failures.txt").write_text("\n".join(failures))
    print((output / "answers.md").read_text())
    print(f"written to {output}: answers.md, details.md and failures.txt")
    return succeeded


def main() -> int:
    """Measure, or pack, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="parts that begin later are left out")
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), help="the folder for what is found")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, without a GPU too")
    parser.add_argument(
        "--pack", type=Path, metavar="ARCHIVE", help="make an archive for machines that have torch alone"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pack:
        pack(args.pack, ROOT)
        return 0
    if not args.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.py: there is no GPU that this torch can use, so nothing was measured.", file=sys.stderr)
        return 2
    if not args.minutes >= 0:
        parser.error("--minutes takes a number")
    if args.output.exists() and not args.output.is_dir():
        parser.error(f"--output takes a folder, and {args.output} is a file")
    # Whoever ends this process ends its parts: they may hold the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    s = Setting(args.dry_run)
    if not args.dry_run and ops.cuda_library(s.device) is None:  # its warning says why
        print("benchmarks/gpu.py: zeroengine's kernels do not serve this GPU: nothing was measured.", file=sys.stderr)
        return 2
    result: Any = None
    if args.child:
        result = CHILDREN[args.child[0]](s, *args.child[1:])
    elif args.part:
        result = PARTS[args.part].run(s)
    if result is not None:
        print(f"{RESULT}{json.dumps(result)}")
        return 0
    return 0 if report(s, args.minutes, args.output) else 1


if __name__ == "__main__":
    sys.exit(main())
