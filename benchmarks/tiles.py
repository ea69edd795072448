"""Measures the peak memory and the seconds of the tiled loss, beside the linear layer and the cross entropy of torch.

    python benchmarks/tiles.py [--tokens 4096] [--memory-tokens 16384] [--vocabulary 131072] [--width 512] [--rounds 5]

Seconds are those of a forward and a backward, medians of rounds in which the cases take turns. Bytes are the growth of
the process's resident memory in one forward and backward, the gradients of hidden states and weight included, as the
kernel counts it (Linux). The plain loss is not run at the size of the memory's row, where its logits alone are shown.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import zeroengine

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Return the bytes of VmRSS, the memory now, or VmHWM, its peak."""
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith(field))


def inputs(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return random hidden states, the weight of a head, and labels."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width) * 0.02).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits that exist."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def seconds(rounds: int, *sizes: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the median seconds of the plain loss and of the tiled one, and how far their losses differ."""
    hidden, weight, labels = inputs(*sizes, dtype=dtype)
    times: dict[object, list[float]] = {plain: [], zeroengine.tiled_loss: []}
    values = {}
    for number in range(rounds + 1):
        for loss_of, measured in times.items():
            hidden.grad = weight.grad = None
            begin = time.perf_counter()
            loss = loss_of(hidden, weight, labels)  # type: ignore[operator]
            loss.backward()
            # The first round warms up.
            measured += [time.perf_counter() - begin] * (number > 0)
            values[loss_of] = loss.item()
    difference = abs(values[plain] - values[zeroengine.tiled_loss])
    return statistics.median(times[plain]), statistics.median(times[zeroengine.tiled_loss]), difference


def peak(*sizes: int, dtype: torch.dtype) -> int:
    """Return the bytes that the tiled loss takes at its peak above what was there."""
    hidden, weight, labels = inputs(*sizes, dtype=dtype)
    # The kernels of the products allocate buffers at their first use.
    zeroengine.tiled_loss(hidden[:64], weight[:4096], labels[:64] % 4096).backward()
    hidden.grad = weight.grad = None
    CLEAR.write_text("5")
    before = resident("VmRSS")
    zeroengine.tiled_loss(hidden, weight, labels).backward()
    return resident("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("memory-tokens", 16384), ("vocabulary", 131072), ("width", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"vocabulary {options.vocabulary}, width {options.width}")
    print("dtype     tokens  plain s  tiled s  ratio  difference of the losses")
    for name in options.dtypes:
        sizes = options.tokens, options.vocabulary, options.width
        before, now, difference = seconds(options.rounds, *sizes, dtype=getattr(torch, name))
        print(
            f"{name:9} {options.tokens:6}  {before:7.2f}  {now:7.2f}  {now / before:5.2f}  {difference:.1e}", flush=True
        )
    print("dtype     tokens  fp32 logits MiB  tiled peak MiB  part of the logits  without the gradient of the weight")
    for name in options.dtypes:
        dtype = getattr(torch, name)
        logits = 4 * options.memory_tokens * options.vocabulary
        taken = peak(options.memory_tokens, options.vocabulary, options.width, dtype=dtype)
        # It accumulates in fp32.
        rest = taken - 4 * options.vocabulary * options.width
        numbers = f"{logits >> 20:15}  {taken >> 20:14}  {'1/' + format(logits / taken, '.1f'):>18}  {rest >> 20} MiB"
        print(f"{name:9} {options.memory_tokens:6}  {numbers}", flush=True)


if __name__ == "__main__":
    main()
