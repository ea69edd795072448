"""Measures the optimizer step: unscale, norm, clip, Adam and the low-precision copy, per parameter.

    python benchmarks/update.py [--numel 32000000] [--threads N] [--repeats 15]

Every case runs in turn, round after round, and the table gives medians and minima over the rounds. The memory's
bandwidth is measured in the same rounds by `ze_stream`, which reads and writes the same arrays as Adam does and
computes next to nothing. Bytes are those that a step must move: gradient, and master and two moments in and out, the
bf16 copy, and the gradient once more for the norm. Moments are fp32, save where a row says otherwise. "Reads the copy"
is Adam at stages 0 to 2, which also looks for values that were written into the copy. DeepSpeed's CPU Adam and
bitsandbytes' AdamW8bit are there when these can be imported (`pip install .[bench]`, `pip install bitsandbytes`).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import cpu_name
from torch import Tensor

from zeroengine import ops
from zeroengine.ops._library import DTYPE_CODES

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
HYPER: dict[str, Any] = dict(step=10, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=WEIGHT_DECAY)
MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
UNSCALE, MAX_NORM = 1.0, 1.0  # factors that leave gradients as they are when steps repeat; all multiply all the same


class Buffers:
    """The arrays of a shard, on huge pages as in the engine."""

    def __init__(self, numel: int, grad: torch.dtype) -> None:
        self.numel = numel
        self.param = self.array(torch.float32)
        self.grad = self.array(grad).normal_(std=1e-3)
        self.copy = self.array(torch.bfloat16)
        self.moments = {dtype: (self.array(dtype), self.array(dtype)) for dtype in MOMENTS}
        self.scales = tuple(self.array(torch.float32, -(-numel // ops.MOMENT_BLOCK)) for _ in range(2))
        self.average = self.array(torch.float32)

    def array(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        x = torch.empty(self.numel if numel is None else numel, dtype=dtype)
        ops.advise_huge_pages(x)
        return x.fill_(0.01 if dtype.is_floating_point else 3)

    def arrays(self, moments: torch.dtype = torch.float32) -> ops.UpdateArrays:
        scales = self.scales if moments is torch.uint8 else ()
        return ops.UpdateArrays(self.param, self.grad, self.moments[moments], scales, self.copy)

    def bytes_per_element(self, norm: bool = True, moment: int = 4) -> int:
        return 2 * (4 + 2 * moment) + 2 + self.grad.element_size() * (1 + norm)


def zeroengine_chain(b: Buffers) -> Callable[[], object]:
    def run() -> None:
        norm = UNSCALE * ops.squared_norm(b.grad).sqrt().item()
        scale = UNSCALE * min(1.0, MAX_NORM / (norm + 1e-6))
        ops.update_step("adamw", b.arrays(), grad_scale=scale, **HYPER)

    return run


def separate_chain(b: Buffers, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], object]:
    """Return the same step as separate passes around an optimizer that needs fp32 gradients, in a kept buffer."""
    param = torch.nn.Parameter(b.array(torch.float32))
    widen = b.grad.dtype != torch.float32
    grad = param.grad = b.array(torch.float32) if widen else b.grad
    optimizer = make([param])

    def run() -> None:
        if widen:
            grad.copy_(b.grad)
        grad.mul_(UNSCALE)
        grad.mul_(torch.clamp(MAX_NORM / (torch.linalg.vector_norm(grad) + 1e-6), max=1.0))
        optimizer.step()
        b.copy.copy_(param.detach())

    return run


def torch_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


def deepspeed_adamw() -> Callable[[list[Tensor]], torch.optim.Optimizer] | None:
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return lambda params: DeepSpeedCPUAdam(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def bitsandbytes_adamw() -> Callable[[list[Tensor]], torch.optim.Optimizer] | None:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return None
    return lambda params: AdamW8bit(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def library_cases(b: Buffers) -> dict[str, Callable[[], object]]:
    """Return Adam alone, the norm alone, and the reference: Adam's traffic without its arithmetic."""
    library = ops.library()
    if library is None:
        return {}
    # The reference adds its gradient to the state, which would be no state for Adam.
    own = [b.array(torch.float32) for _ in range(3)]

    def traffic() -> None:
        state = [x.data_ptr() for x in own]
        grad, copy = (b.grad.data_ptr(), DTYPE_CODES[b.grad.dtype]), b.copy.data_ptr()
        library.ze_stream(*state, *grad, copy, b.numel, torch.get_num_threads())

    def step(rule: str, arrays: ops.UpdateArrays, **options: Any) -> Callable[[], object]:
        return lambda: ops.update_step(rule, arrays.of_rule(rule), seed=HYPER["step"], **HYPER, **options)

    full = b.arrays()
    second = full._replace(moments=full.moments[1:])
    alone = full._replace(param=b.copy, low_precision_param=None)
    return {
        "traffic of Adam": traffic,
        "zeroengine, Adam": step("adamw", full),
        "Adam, reads the copy": step("adamw", full, reload_written=True),
        "Adam, bf16 moments": step("adamw", b.arrays(torch.bfloat16)),
        "Adam, 8-bit moments": step("adamw", b.arrays(torch.uint8)),
        "Adam, bf16 master": step("adamw", alone),
        "Adam, bf16 and 8-bit": step("adamw", b.arrays(torch.uint8)._replace(param=b.copy, low_precision_param=None)),
        "Adam, moving average": step("adamw", full._replace(average=b.average), average_weight=0.001),
        "Lion": step("lion", full),
        "Lion, 8-bit moment": step("lion", b.arrays(torch.uint8)),
        "momentum SGD": step("momentum_sgd", full),
        "Adagrad": step("adagrad", second),
        "zeroengine, norm": lambda: ops.squared_norm(b.grad),
    }


def measure(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each case in each round, without the first round, which warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def report(b: Buffers, seconds: dict[str, list[float]]) -> None:
    numel, ours = b.numel, statistics.median(seconds["zeroengine"])
    print(f"\n{str(b.grad.dtype).removeprefix('torch.')} gradients, bf16 copy, {numel:,} parameters")
    print(f"{'':24}{'ns/parameter':>14}{'fastest':>10}{'over zeroengine':>17}")
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = f"{median / ours:15.2f} x" if name in CHAINS else ""
        print(f"{name:24}{median / numel * 1e9:14.3f}{min(times) / numel * 1e9:10.3f}{ratio}")
    for kind, summary in ("medians", statistics.median), ("fastest", min):
        if "traffic of Adam" not in seconds:
            break
        time_of = {name: summary(times) / numel * 1e9 for name, times in seconds.items()}
        adam, adam_bf16 = (b.bytes_per_element(norm=False, moment=size) for size in (4, 2))
        bandwidth = adam / time_of["traffic of Adam"]
        reached = adam / time_of["zeroengine, Adam"] / bandwidth
        reached_bf16 = adam_bf16 / time_of["Adam, bf16 moments"] / bandwidth
        whole = b.bytes_per_element() / time_of["zeroengine"] / bandwidth
        print(
            f"memory, by {kind}: {bandwidth:.1f} GB/s; of it Adam reaches {reached:.2f}, with bf16 moments "
            f"({adam_bf16} bytes for {adam}) {reached_bf16:.2f}, the whole step {whole:.2f}"
        )


CHAINS = ("zeroengine", "torch fused AdamW", "DeepSpeed CPUAdam", "bitsandbytes AdamW8bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=32_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{cpu_name()}, {os.cpu_count()} cores, {args.threads} threads; kernels: {ops.cpu_isa()}; ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}")
    makers = (torch_adamw, deepspeed_adamw(), bitsandbytes_adamw())
    for grad in (torch.bfloat16, torch.float32):
        b = Buffers(args.numel, grad)
        cases = {CHAINS[0]: zeroengine_chain(b)}
        cases |= {name: separate_chain(b, make) for name, make in zip(CHAINS[1:], makers, strict=True) if make}
        cases |= library_cases(b)
        report(b, measure(cases, args.repeats))


if __name__ == "__main__":
    main()
