"""What zeroengine reaches on a GPU: correctness first, then bandwidth, tokens/s and memory, written to docs/benchmarks.

    python benchmarks/gpu.py [--minutes 10] [--output docs/benchmarks/<gpu>.md]

Each section runs in a process of its own; one that fails or runs out of time is reported, and the next one goes on.
Bandwidths are of bytes that must move, each once, over the median time of rounds in which every case takes its turn.
The yardstick is a copy from the GPU's memory to the GPU's memory, in the same rounds. DeepSpeed is there when it can
be imported (`pip install .[bench]`). Without a GPU it says so and exits with 2; `--rehearse` then runs every section
on the CPU at tiny sizes, to show that they run: its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workload import ADAMW, CLIP, Transformer, plain_step

from zeroengine import ops

HYPER: dict[str, Any] = dict(step=10, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
RANKS = 64
Rows = list[Sequence[object]]


class Setting:
    """Where a section runs, and how large."""

    def __init__(self, rehearse: bool) -> None:
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.rehearse = rehearse
        self.numel = 10_000 if rehearse else 1 << 28
        self.rounds = 2 if rehearse else 30
        # layers, width, heads, vocabulary, context: 1.07 G parameters
        self.model = (2, 64, 2, 128, 32) if rehearse else (20, 2048, 16, 32768, 2048)
        self.large = (3, 64, 2, 128, 32) if rehearse else (36, 4096, 32, 50257, 2048)  # 7.5 G

    def synchronize(self) -> None:
        if not self.rehearse:
            torch.cuda.synchronize()

    def seconds(self, cases: dict[str, Callable[[], object]]) -> dict[str, float]:
        """The median time of each case, over rounds in which each takes its turn."""
        times: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(-3, self.rounds):
            for name, run in cases.items():
                self.synchronize()
                if self.rehearse:
                    start = time.perf_counter()
                    run()
                    elapsed = time.perf_counter() - start
                else:
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    events[0].record()
                    run()
                    events[1].record()
                    torch.cuda.synchronize()
                    elapsed = events[0].elapsed_time(events[1]) / 1e3
                if number >= 0:
                    times[name].append(elapsed)
        return {name: statistics.median(its) for name, its in times.items()}


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# -- correctness ----------------------------------------------------------------------------------------------


def correctness(s: Setting) -> str:
    """Against float64 on the same values, and against the CPU's kernels bit for bit."""
    rows = [*adam_errors(s), norm_error(s), cast_error(s), overflow(s)]
    failed = [name for name, _, _, passed in rows if not passed]
    text = table(["check", "found", "allowed", ""], [[*row[:3], "passed" if row[3] else "**FAILED**"] for row in rows])
    if failed:
        raise RuntimeError(f"{text}\n\nfailed: {', '.join(failed)}")
    return text


def adam_errors(s: Setting) -> Iterator[tuple[str, str, str, bool]]:
    n, generator = 100_003, torch.Generator().manual_seed(0)

    def array(dtype: torch.dtype) -> Tensor:
        return (torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator))).to(dtype)

    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for moments in (torch.float32, torch.bfloat16):
            cpu = [array(torch.float32), array(grad_dtype), array(moments), array(moments).square_()]
            gpu = [x.to(s.device, copy=True) for x in cpu]
            p, g, m, v = (x.double() for x in gpu)
            copy = torch.empty(n, dtype=torch.bfloat16, device=s.device)
            options = dict(HYPER, grad_scale=0.37, seed=3)
            ops.adam_step(*gpu, low_precision=copy, **options)
            ops.adam_step(*cpu, low_precision=(copy_cpu := torch.empty(n, dtype=torch.bfloat16)), **options)
            same = [torch.equal(a.cpu(), b) for a, b in zip([*gpu, copy], [*cpu, copy_cpu], strict=True)]
            g = g * 0.37
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            rate = 1e-3 / (1 - 0.9**10) / ((v / (1 - 0.95**10)).sqrt() + 1e-8)
            scale = p.abs() + rate * (m.abs() + g.abs())
            error = ((gpu[0] - (p * (1 - 1e-4) - rate * m)).abs() / scale).max().item()
            name = f"Adam, {grad_dtype} gradient, {moments} moments".replace("torch.", "")
            yield f"{name}: relative error", f"{error:.1e}", "1e-06", error < 1e-6
            yield f"{name}: arrays with the CPU's bits", f"{sum(same)} of 5", "5 of 5", all(same)


def norm_error(s: Setting) -> tuple[str, str, str, bool]:
    tensors = [torch.randn(10_007 * (i + 1), device=s.device).bfloat16() for i in range(70)]
    exact = math.fsum(x.double().square().sum().item() for x in tensors)
    error = abs(ops.squared_norms(tensors).item() - exact) / exact
    return "norm of 70 tensors: relative error", f"{error:.1e}", "1e-13", error < 1e-13


def cast_error(s: Setting) -> tuple[str, str, str, bool]:
    sources = [torch.randn(1 + 977 * i, device=s.device) for i in range(70)]
    bucket = torch.zeros(sum(x.numel() for x in sources), dtype=torch.bfloat16, device=s.device)
    ops.cast_copy(sources, bucket.split([x.numel() for x in sources]))
    wrong = int((bucket != torch.cat(sources).bfloat16()).sum())
    return "cast-copies of 70 tensors: wrong elements", str(wrong), "0", wrong == 0


def overflow(s: Setting) -> tuple[str, str, str, bool]:
    arrays = [torch.rand(5000, device=s.device) for _ in range(4)]
    before = [x.clone() for x in arrays]
    adam = adam_table(s, 5000, 1)
    adam.prepare(ops.gradient_factor(torch.tensor(math.inf, dtype=torch.float64, device=s.device)))
    adam.update(0, *arrays)
    changed = sum(int((x != y).sum()) for x, y in zip(arrays, before, strict=True)) + int(adam.steps.sum())
    return "an overflow: elements and counts changed", str(changed), "0", changed == 0


# -- kernels --------------------------------------------------------------------------------------------------


def adam_table(s: Setting, numel: int, segments: int) -> ops.AdamTable:
    cuts = [numel * i // segments for i in range(segments + 1)]
    its = [ops.AdamSegment(cuts[i], cuts[i + 1], i % 2, i) for i in range(segments)]
    made = ops.AdamTable([ops.AdamBuffer(its)], 2, segments, s.device)
    made.set_groups([dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=True)] * 2)
    return made


class Arrays:
    """A shard's arrays, of random values that repeated steps keep in range."""

    def __init__(self, s: Setting, grad: torch.dtype, moments: torch.dtype, copy: bool) -> None:
        self.param, self.exp_avg, self.exp_avg_sq = (
            torch.rand(s.numel, device=s.device).to(dtype) for dtype in (torch.float32, moments, moments)
        )
        self.grad = torch.randn(s.numel, device=s.device).to(grad)
        self.copy = torch.empty(s.numel, dtype=torch.bfloat16, device=s.device) if copy else None

    @property
    def bytes(self) -> int:
        """That a step must move."""
        state = sum(x.nbytes for x in (self.param, self.exp_avg, self.exp_avg_sq))
        return 2 * state + self.grad.nbytes + (0 if self.copy is None else self.copy.nbytes)

    def step(self) -> None:
        ops.adam_step(
            self.param, self.grad, self.exp_avg, self.exp_avg_sq, low_precision=self.copy, grad_scale=0.5, **HYPER
        )


def copying(s: Setting) -> tuple[Callable[[], object], int]:
    """The yardstick, and the bytes that it moves."""
    source, target = (torch.ones(s.numel * 2, device=s.device) for _ in range(2))
    return lambda: target.copy_(source), 2 * source.nbytes


def bandwidths(s: Setting, cases: dict[str, tuple[Callable[[], object], int]]) -> str:
    copy, copied = copying(s)
    seconds = s.seconds({"copy": copy} | {name: run for name, (run, _) in cases.items()})
    yardstick = copied / seconds["copy"]
    rows: Rows = [["copy within the GPU's memory", "", f"{yardstick / 1e9:.0f}", "1.000"]]
    for name, (_, count) in cases.items():
        reached = count / seconds[name]
        rows.append([name, f"{count / s.numel:.4g}", f"{reached / 1e9:.0f}", f"{reached / yardstick:.3f}"])
    return table(["", "bytes an element", "GB/s", "of the copy"], rows)


def adam(s: Setting) -> str:
    """The fused update alone, by dtypes, and cut into segments."""
    f32, bf16 = torch.float32, torch.bfloat16
    cases: dict[str, tuple[Callable[[], object], int]] = {}
    for name, arguments in {
        "fp32": (f32, f32, False),
        "fp32, bf16 copy": (f32, f32, True),
        "bf16 gradient and copy": (bf16, f32, True),
        "bf16 gradient, copy and moments": (bf16, bf16, True),
    }.items():
        arrays = Arrays(s, *arguments)
        cases[name] = (arrays.step, arrays.bytes)
    segmented = adam_table(s, s.numel, 1000)
    factor = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64, device=s.device)

    def step_by_table() -> None:
        segmented.prepare(factor)
        segmented.update(0, arrays.param, arrays.grad, arrays.exp_avg, arrays.exp_avg_sq, arrays.copy)

    cases["the last, in 1,000 segments"] = (step_by_table, arrays.bytes)
    return bandwidths(s, cases)


def torch_chain(a: Arrays, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
    """The same step as separate passes around an optimizer that wants fp32 gradients."""
    param = nn.Parameter(a.param.clone())
    param.grad = a.grad.float()
    optimizer = make([param])

    def run() -> None:
        assert param.grad is not None and a.copy is not None
        param.grad.copy_(a.grad).mul_(0.5)
        optimizer.step()
        a.copy.copy_(param.detach())

    return run


def torch_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def peers(s: Setting, others: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]) -> str:
    arrays = Arrays(s, torch.bfloat16, torch.float32, True)
    cases: dict[str, Callable[[], object]] = {"zeroengine": arrays.step}
    cases |= {name: torch_chain(arrays, make) for name, make in others.items()}
    seconds = s.seconds(cases)
    rows: Rows = [[n, f"{t / s.numel * 1e12:.1f}", f"{t / seconds['zeroengine']:.2f}"] for n, t in seconds.items()]
    return table(["bf16 gradient, fp32 moments, bf16 copy", "ps a parameter", "over zeroengine"], rows)


def beside_torch(s: Setting) -> str:
    """The update beside torch's fused AdamW with its separate cast, scaling and copy."""
    return peers(s, {"torch.optim.AdamW(fused=True) and casts": torch_adamw})


def beside_deepspeed(s: Setting) -> str:
    """The update beside DeepSpeed's FusedAdam with the same casts."""
    try:
        from deepspeed.ops.adam import FusedAdam
    except ImportError as error:
        return f"DeepSpeed cannot be imported here ({error}): not measured."

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return FusedAdam(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    return peers(s, {"DeepSpeed FusedAdam and casts": make})


def norm_and_casts(s: Setting) -> str:
    """The norm, and cast-copies of 200 gradients into a bucket."""
    fp32, bf16 = torch.randn(s.numel, device=s.device), torch.randn(s.numel, device=s.device).bfloat16()
    bucket = torch.empty_like(fp32)
    numels = [s.numel // 200] * 200
    sources = bf16[: sum(numels)].split(numels)
    targets = bucket[: sum(numels)].split(numels)
    moved = sum(numels) * 6
    return bandwidths(
        s,
        {
            "norm, fp32": (lambda: ops.squared_norm(fp32), fp32.nbytes),
            "norm, bf16": (lambda: ops.squared_norm(bf16), bf16.nbytes),
            "norm, bf16, by torch in fp32": (lambda: torch.linalg.vector_norm(bf16, dtype=torch.float32), bf16.nbytes),
            "200 casts, bf16 to fp32": (lambda: ops.cast_copy(sources, targets), moved),
            "200 casts, by torch one by one": (
                lambda: [t.copy_(x) for x, t in zip(sources, targets, strict=True)],
                moved,
            ),
        },
    )


# -- training -------------------------------------------------------------------------------------------------


def build(s: Setting, size: tuple[int, ...]) -> Transformer:
    torch.manual_seed(0)
    with s.device:
        return Transformer(*size)


def engine_of(model: nn.Module, stage: int) -> Any:
    import zeroengine

    config = {
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }
    return zeroengine.initialize(model, config=config)


def engine_step(engine: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def train(s: Setting, way: str) -> dict[str, float]:
    """One way of training, in this process: tokens/s, the allocator's peak, the last loss."""
    *_, vocab, context = s.model
    model = build(s, s.model)
    step = plain_step(model, torch.bfloat16) if way == "plain" else engine_step(engine_of(model, int(way)))
    batch = 4 if s.rehearse or torch.cuda.get_device_properties(0).total_memory > 60 << 30 else 1
    ids = torch.randint(0, vocab, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(s.device)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    steps = 2 if s.rehearse else 20
    for _ in range(steps // 2):
        step(inputs, labels)
    s.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(inputs, labels)
    issued = time.perf_counter() - start
    s.synchronize()
    elapsed = time.perf_counter() - start
    peak = 0.0 if s.rehearse else torch.cuda.max_memory_allocated() / 2**30
    return {
        "tokens": steps * batch * context / elapsed,
        "issued": issued / elapsed,
        "peak": peak,
        "loss": loss.item(),
        "numel": sum(p.numel() for p in model.parameters()),
    }


def training(s: Setting) -> str:
    """World size 1, bf16: plain PyTorch (autocast, fused AdamW), and the engine at stages 0 and 3, in two rounds."""
    runs: dict[str, list[dict[str, float]]] = {"plain": [], "0": [], "3": []}
    for _ in range(1 if s.rehearse else 2):
        for way, its in runs.items():
            its.append(child(s, "train", way))
    names = {"plain": "plain PyTorch", "0": "zeroengine, stage 0", "3": "zeroengine, stage 3"}
    best = {way: max(run["tokens"] for run in its) for way, its in runs.items()}
    rows: Rows = []
    for way, its in runs.items():
        last, slowest = its[-1], min(run["tokens"] for run in its)
        speed = [f"{best[way]:,.0f}", f"{slowest:,.0f}", f"{best[way] / best['plain']:.3f}"]
        rows.append([names[way], *speed, f"{last['issued']:.2f}", f"{last['peak']:.1f}", f"{last['loss']:.4f}"])
    head = ["", "tokens/s", "slower round", "over plain", "host's share of the time", "peak GiB", "loss"]
    stages = f"Stage 3 over stage 0: {best['3'] / best['0']:.3f}."
    return f"{runs['0'][0]['numel'] / 1e9:.2f} G parameters.\n\n{table(head, rows)}\n\n{stages}"


# -- memory ---------------------------------------------------------------------------------------------------


def occupy(s: Setting, stage: str, large: str) -> dict[str, float]:
    """Rank 0 of 64, in this process: the allocator's peak over a second step, and the formula."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    size = s.large if int(large) else s.model
    engine = engine_of(build(s, size), int(stage))
    ids = torch.zeros(1, 8, dtype=torch.long, device=s.device)
    step = engine_step(engine)
    step(ids, ids)
    s.synchronize()
    if not s.rehearse:
        torch.cuda.reset_peak_memory_stats()
    step(ids, ids)
    s.synchronize()
    numel = sum(p.numel() for p in engine.module.parameters())
    optimizer, gradients, parameters = ((RANKS if int(stage) >= i else 1) for i in (1, 2, 3))
    return {
        "formula": numel * (2 / parameters + 2 / gradients + 12 / optimizer),
        "total": engine.memory().total,
        "peak": 0.0 if s.rehearse else torch.cuda.max_memory_allocated(),
        "numel": numel,
    }


def memory(s: Setting, large: bool = False) -> str:
    """The allocator's peak on rank 0 of 64 (torch's `fake` process group) beside ZeRO's formula."""
    rows: Rows = []
    for stage in (1, 2, 3) if large else (0, 1, 2, 3):
        try:
            run = child(s, "occupy", str(stage), str(int(large)))
        except RuntimeError as error:
            rows.append([stage, "", "", "", "", f"failed: {str(error).splitlines()[-1]}"])
            continue
        gib = {name: f"{run[name] / 2**30:.2f}" for name in ("formula", "total", "peak")}
        ratios = [f"{run['peak'] / run[name]:.3f}" for name in ("formula", "total")]
        rows.append([stage, gib["formula"], gib["total"], gib["peak"], *ratios])
    head = ["stage", "formula GiB", "engine.memory() GiB", "peak GiB", "peak / formula", "peak / engine.memory()"]
    return table(head, rows)


def large_memory(s: Setting) -> str:
    """The same for ZeRO's 7.5 G-parameter row, where the GPU is large enough."""
    if not s.rehearse and torch.cuda.get_device_properties(0).total_memory < 100 << 30:
        return "Not measured: building the model whole takes a GPU of 100 GiB."
    return memory(s, large=True)


# -- running --------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Setting], str]] = {
    "Correctness": correctness,
    "The fused update": adam,
    "The fused update beside torch": beside_torch,
    "Norm and cast-copies": norm_and_casts,
    "Training": training,
    "Memory": memory,
    "Memory at 7.5 G parameters": large_memory,
    "The fused update beside DeepSpeed": beside_deepspeed,
}
CHILDREN: dict[str, Callable[..., dict[str, float]]] = {"train": train, "occupy": occupy}


def run_self(s: Setting, *arguments: str, timeout: float | None = None) -> str:
    """This script in a new process: the last line that it prints, which is JSON."""
    command = [sys.executable, __file__, *arguments, *(["--rehearse"] if s.rehearse else [])]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes, start_new_session=timeout is not None) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and with it the processes that it has started
            raise
    if process.returncode:
        raise RuntimeError((errors or output).strip() or f"ended with {process.returncode}")
    return output.strip().splitlines()[-1]


def child(s: Setting, name: str, *arguments: str) -> dict[str, float]:
    return json.loads(run_self(s, "--child", name, *arguments))


def heading(s: Setting) -> str:
    name = "CPU (a rehearsal)" if s.rehearse else torch.cuda.get_device_name()
    lines = [f"# {name}", "", "`python benchmarks/gpu.py`", ""]
    if not s.rehearse:
        its = torch.cuda.get_device_properties(0)
        memory = f"{its.total_memory / 2**30:.0f} GiB, {its.multi_processor_count} multiprocessors"
        lines.append(f"{name}, {memory}, compute capability {its.major}.{its.minor}; CUDA {torch.version.cuda}; ")
    built = " ".join(ops.cuda_architectures()) or "no CUDA library, torch's own kernels served"
    lines.append(f"torch {torch.__version__}; Python {platform.python_version()}; zeroengine's kernels: {built}.")
    return "\n".join(lines)


def report(s: Setting, minutes: float) -> tuple[str, bool]:
    """The page, and whether every section succeeded."""
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
        parts.append(f"## {title}\n\n{section.__doc__}\n\n{text}")
        print(f"{parts[-1]}\n", flush=True)
    return "\n\n".join(parts) + "\n", succeeded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.5, help="sections that begin later are left out")
    parser.add_argument("--output", type=Path, help="the page; docs/benchmarks/<gpu>.md unless said otherwise")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny, and nothing is written")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.py: there is no GPU that this torch can use, so nothing was measured.", file=sys.stderr)
        return 2
    s = Setting(args.rehearse)
    if args.child:
        print(json.dumps(CHILDREN[args.child[0]](s, *args.child[1:])))
        return 0
    if args.section:
        print(json.dumps(SECTIONS[args.section](s)))
        return 0
    page, succeeded = report(s, args.minutes)
    if not s.rehearse:
        file = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-") + ".md"
        output = args.output or Path(__file__).parents[1] / "docs/benchmarks" / file
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page)
        print(f"written to {output}")
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
