"""Parts of benchmarks/gpu.py: the kernels' correctness, and their speed beside a copy and other optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpu_setting import Found, Rows, Setting, table
from torch import Tensor, nn

from zeroengine import ops

RULES = ("adamw", "lion", "momentum_sgd", "adagrad")
HYPER: dict[str, Any] = dict(step=10, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


# -- correctness ----------------------------------------------------------------------------------------------


def correctness(s: Setting) -> Found:
    """Check against float64 on the same values, and against the CPU's kernels bit for bit."""
    rows = [*adam_errors(s), *rule_bits(s), norm_error(s), cast_error(s), overflow(s)]
    failed = [name for name, _, _, passed in rows if not passed]
    text = table(["check", "found", "allowed", ""], [[*row[:3], "passed" if row[3] else "**FAILED**"] for row in rows])
    if failed:
        text += f"\n\nFailed: {', '.join(failed)}"
    return text, [1 - len(failed) / len(rows)]


def adam_errors(s: Setting) -> Iterator[tuple[str, str, str, bool]]:
    n, generator = 100_003, torch.Generator().manual_seed(0)

    def array(dtype: torch.dtype) -> Tensor:
        return (torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator))).to(dtype)

    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for moments in (torch.float32, torch.bfloat16):
            cpu = [array(torch.float32), array(grad_dtype), array(moments), array(moments).square_()]
            gpu = [x.to(s.device, copy=True) for x in cpu]
            p, g, m, v = (x.double() for x in gpu)
            for arrays in (cpu, gpu):
                arrays.append(torch.empty(n, dtype=torch.bfloat16, device=arrays[0].device))
                param, grad, exp_avg, exp_avg_sq, copy = arrays
                fused = ops.UpdateArrays(param, grad, (exp_avg, exp_avg_sq), (), copy)
                ops.update_step("adamw", fused, grad_scale=0.37, seed=3, **HYPER)
            same = [torch.equal(a.cpu(), b) for a, b in zip(gpu, cpu, strict=True)]
            g = g * 0.37
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            rate = 1e-3 / (1 - 0.9**10) / ((v / (1 - 0.95**10)).sqrt() + 1e-8)
            scale = p.abs() + rate * (m.abs() + g.abs())
            error = ((gpu[0] - (p * (1 - 1e-4) - rate * m)).abs() / scale).max().item()
            name = f"Adam, {grad_dtype} gradient, {moments} moments".replace("torch.", "")
            yield f"{name}: relative error", f"{error:.1e}", "1e-06", error < 1e-6
            yield f"{name}: arrays with the CPU's bits", f"{sum(same)} of 5", "5 of 5", all(same)


def rule_bits(s: Setting) -> Iterator[tuple[str, str, str, bool]]:
    """Compare every rule with 8-bit moments and an average with the CPU, bit for bit."""
    n, generator = 100_003, torch.Generator().manual_seed(0)
    for rule in RULES:
        signs = ops.RULES[rule].signs
        cpu = ops.UpdateArrays(
            torch.randn(n, generator=generator),
            torch.randn(n, generator=generator).bfloat16(),
            tuple(torch.zeros(n, dtype=torch.uint8) for _ in signs),
            tuple(torch.zeros(-(-n // ops.MOMENT_BLOCK)) for _ in signs),
            torch.zeros(n, dtype=torch.bfloat16),
            torch.zeros(n, dtype=torch.bfloat16),
        )
        gpu = cpu.like([x.to(s.device, copy=True) for x in cpu.tensors()])
        for step in (1, 2, 3):
            for arrays in (cpu, gpu):
                ops.update_step(rule, arrays, **HYPER | {"step": step}, average_weight=0.1, seed=step)
        same = [torch.equal(a.cpu(), b) for a, b in zip(gpu.tensors(), cpu.tensors(), strict=True)]
        yield f"{rule}, 8-bit moments: arrays with the CPU's bits", str(sum(same)), str(len(same)), all(same)


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
    fused = ops.UpdateArrays(arrays[0], arrays[1], (arrays[2], arrays[3]))
    adam = adam_table(s, 5000, 1)
    adam.prepare(ops.gradient_factor(torch.tensor(math.inf, dtype=torch.float64, device=s.device)))
    adam.set_arrays(0, fused)
    adam.update(0, 1)
    changed = sum(int((x != y).sum()) for x, y in zip(arrays, before, strict=True)) + int(adam.steps.sum())
    return "an overflow: elements and counts changed", str(changed), "0", changed == 0


# -- speed ----------------------------------------------------------------------------------------------------


def adam_table(s: Setting, numel: int, segments: int) -> ops.UpdateTable:
    cuts = [numel * i // segments for i in range(segments + 1)]
    segment_list = [ops.UpdateSegment(cuts[i], cuts[i + 1], i % 2, i) for i in range(segments)]
    table = ops.UpdateTable([ops.SegmentList(segment_list)], 2, segments, s.device)
    table.set_groups([dict(rule="adamw", **{key: value for key, value in HYPER.items() if key != "step"})] * 2)
    return table


class Arrays:
    """The arrays of a shard, with random values that repeated steps keep in range."""

    def __init__(
        self,
        s: Setting,
        grad: torch.dtype,
        moments: torch.dtype,
        copy: bool,
        rule: str = "adamw",
        average: bool = False,
    ) -> None:
        def random(dtype: torch.dtype, numel: int = s.numel) -> Tensor:
            return (torch.rand(numel, device=s.device) * (1 if dtype.is_floating_point else 100)).to(dtype)

        signs, blocks = ops.RULES[rule].signs, -(-s.numel // ops.MOMENT_BLOCK)
        self.rule = rule
        self.fused = ops.UpdateArrays(
            random(torch.float32),
            torch.randn(s.numel, device=s.device).to(grad),
            tuple(random(moments) for _ in signs),
            tuple(random(torch.float32, blocks) for _ in signs if moments is torch.uint8),
            random(torch.bfloat16) if copy else None,
            random(torch.float32) if average else None,
        )

    @property
    def bytes(self) -> int:
        """Return the bytes that a step must move."""
        once = sum(x.nbytes for x in (self.fused.grad, self.fused.low_precision_param) if x is not None)
        return 2 * sum(x.nbytes for x in self.fused.tensors()) - once

    def step(self) -> None:
        ops.update_step(self.rule, self.fused, grad_scale=0.5, average_weight=0.001, **HYPER)


def copying(s: Setting) -> tuple[Callable[[], object], int]:
    """Return the reference copy, and the bytes that it moves."""
    source, target = (torch.randn(s.numel * 2, device=s.device) for _ in range(2))
    return lambda: target.copy_(source), 2 * source.nbytes


def bandwidths(s: Setting, cases: dict[str, tuple[Callable[[], object], int]], asked: Sequence[str]) -> Found:
    """Return a table of bandwidths, and those of the cases that are ``asked`` for over that of a copy."""
    copy, copied = copying(s)
    seconds = s.seconds({"copy": copy} | {name: run for name, (run, _) in cases.items()})
    yardstick = copied / seconds["copy"]
    rows: Rows = [["copy within the GPU's memory", "", f"{yardstick / 1e9:.0f}", "1.000"]]
    shares = {}
    for name, (_, count) in cases.items():
        reached = count / seconds[name]
        shares[name] = reached / yardstick
        rows.append([name, f"{count / s.numel:.4g}", f"{reached / 1e9:.0f}", f"{reached / yardstick:.3f}"])
    return table(["", "bytes an element", "GB/s", "of the copy"], rows), [shares[name] for name in asked]


def adam(s: Setting) -> Found:
    """Measure the fused update alone, by dtypes, and divided into segments."""
    f32, bf16, u8 = torch.float32, torch.bfloat16, torch.uint8
    cases: dict[str, tuple[Callable[[], object], int]] = {}
    for name, arguments in {
        "fp32": (f32, f32, False),
        "fp32, bf16 copy": (f32, f32, True),
        "bf16 gradient and copy": (bf16, f32, True),
        "the same, 8-bit moments": (bf16, u8, True),
        "the same, Lion": (bf16, u8, True, "lion"),
        "momentum SGD, fp32": (f32, f32, False, "momentum_sgd"),
        "Adagrad, fp32": (f32, f32, False, "adagrad"),
        "fp32, moving average": (f32, f32, False, "adamw", True),
        "bf16 gradient, copy and moments": (bf16, bf16, True),
    }.items():
        arrays = Arrays(s, *arguments)  # type: ignore[arg-type]
        cases[name] = (arrays.step, arrays.bytes)
    segmented = adam_table(s, s.numel, 1000)
    segmented.set_arrays(0, arrays.fused)
    factor = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64, device=s.device)

    def step_by_table() -> None:
        segmented.prepare(factor)
        segmented.update(0, 1)

    cases["the last, in 1,000 segments"] = (step_by_table, arrays.bytes)
    return bandwidths(s, cases, ["fp32", "the same, 8-bit moments"])


def torch_chain(a: Arrays, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], object]:
    """Return the same step as separate passes around an optimizer that needs fp32 gradients."""
    param, grad, copy = nn.Parameter(a.fused.param.clone()), a.fused.grad, a.fused.low_precision_param
    assert grad is not None and copy is not None
    param.grad = grad.float()
    optimizer = make([param])

    def run() -> None:
        assert param.grad is not None
        param.grad.copy_(grad).mul_(0.5)
        optimizer.step()
        copy.copy_(param.detach())

    return run


def torch_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def peers(s: Setting, others: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]) -> Found:
    arrays = Arrays(s, torch.bfloat16, torch.float32, True)
    cases: dict[str, Callable[[], object]] = {"zeroengine": arrays.step}
    cases |= {name: torch_chain(arrays, make) for name, make in others.items()}
    seconds = s.seconds(cases)
    rows: Rows = [[n, f"{t / s.numel * 1e12:.1f}", f"{t / seconds['zeroengine']:.2f}"] for n, t in seconds.items()]
    text = table(["bf16 gradient, fp32 moments, bf16 copy", "ps a parameter", "over zeroengine"], rows)
    return text, [seconds[name] / seconds["zeroengine"] for name in others]


def beside_torch(s: Setting) -> Found:
    """Measure the update beside torch's fused AdamW with its separate cast, scaling and copy."""
    return peers(s, {"torch.optim.AdamW(fused=True) and casts": torch_adamw})


def beside_deepspeed(s: Setting) -> Found:
    """Measure the update beside DeepSpeed's FusedAdam with the same casts."""
    if not s.on_gpu:
        return "DeepSpeed's FusedAdam is for GPUs.", ["there is no GPU"]
    try:
        from deepspeed.ops.adam import FusedAdam
    except ImportError as error:
        reason = f"DeepSpeed cannot be imported here ({error}): not measured"
        return f"{reason}.", [reason]

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return FusedAdam(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    return peers(s, {"DeepSpeed FusedAdam and casts": make})


def norm_and_casts(s: Setting) -> Found:
    """Measure the norm, and cast-copies of 200 gradients into a bucket."""
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
        ["norm, fp32"],
    )
