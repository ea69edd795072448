"""Measures the host time of a transformer block and step at stage 3, beside FSDP2's.

    python benchmarks/reads.py [--layers 24] [--rounds 7]

One process is rank 0 of 64 at stage 3 (torch's `fake` process group, whose collectives move nothing). The model is so
narrow that nearly all of its time is the host's. In each round all cases take turns with some steps; the table has
medians over the rounds, and for each case of the engine the median of its ratios to FSDP2 in the same round. The first
three rows are parts of the engine's step that guard reads of released parameters, timed inside it. FSDP2's rows are the
same model, sharded by block, with torch's fused AdamW. "LoRA" trains adapters of rank 4 beside frozen linear layers.
The last rows put torch's own `saved_tensors_hooks` around the same model without an engine: the cost of guarding by
them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from workload import Transformer

import zeroengine
from zeroengine.runtime import forward
from zeroengine.runtime.full_buffer import FullBuffer
from zeroengine.runtime.graph_route import SavedView

STEPS = 5


class Clock:
    """Sums the time that is spent in functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted under ``name``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return run


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) + self.up(self.down(x))
        return result


def build(layers: int, *, adapted: bool = False) -> nn.Module:
    """Return the model; ``adapted``: frozen, with adapters beside its linear layers."""
    torch.manual_seed(0)
    model = Transformer(layers, 32, 2, 64, 4)
    if adapted:
        model.requires_grad_(False)
        for block in model.blocks:
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, name, Adapted(module))
    return model


def initialize(model: nn.Module) -> zeroengine.Engine:
    """Return an engine at stage 3 that releases every unit."""
    return zeroengine.initialize(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        },
    )


def shard(model: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model as FSDP2 shards it, and its optimizer."""
    for block in (*model.blocks, model):
        fully_shard(block)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4, fused=True)


def measure(layers: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per block and step of each case, one number a round."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    ids = torch.randint(0, 64, (1, 4))
    clock = Clock()
    forward.replace_saved_views = clock.timed("walk of the graph", forward.replace_saved_views)
    FullBuffer.is_aliased = clock.timed("use counts", FullBuffer.is_aliased)  # type: ignore[method-assign]
    SavedView.restore = clock.timed("reads in backward", SavedView.restore)  # type: ignore[method-assign]

    engines = {adapted: initialize(build(layers, adapted=adapted)) for adapted in (False, True)}
    plain = build(layers)
    sharded = {adapted: shard(build(layers, adapted=adapted)) for adapted in (False, True)}

    def with_fsdp2(adapted: bool) -> None:
        model, optimizer = sharded[adapted]
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def with_engine(adapted: bool) -> None:
        engine = engines[adapted]
        engine.backward(engine(ids, ids))
        engine.step()

    def evaluate(model: Callable[..., Any]) -> None:
        with torch.no_grad():
            model(ids, ids)

    def without(hooks: bool) -> None:
        same = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with same if hooks else contextlib.nullcontext():
            loss = plain(ids, ids)
        loss.backward()
        plain.zero_grad()

    cases = {
        "whole step of the engine": lambda: with_engine(False),
        "whole step of FSDP2": lambda: with_fsdp2(False),
        "LoRA, the engine": lambda: with_engine(True),
        "LoRA, FSDP2": lambda: with_fsdp2(True),
        "evaluation, the engine": lambda: evaluate(engines[False]),
        "evaluation, FSDP2": lambda: evaluate(sharded[False][0]),
        "plain forward and backward": lambda: without(False),
        "the same inside saved_tensors_hooks": lambda: without(True),
    }
    measured: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, case in cases.items():
            clock.seconds.clear()
            begin = time.perf_counter()
            for _ in range(STEPS):
                case()
            rows = {**(clock.seconds if name == "whole step of the engine" else {}), name: time.perf_counter() - begin}
            if number:  # the first one warms up
                for row, seconds in rows.items():
                    measured[row].append(seconds / STEPS / layers * 1e6)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.layers} blocks, microseconds per block and step")
    measured = measure(arguments.layers, arguments.rounds)
    for name, values in measured.items():
        peer, ratio = measured.get(name.replace("the engine", "FSDP2"), []), ""
        if peer is not values and len(peer) == len(values):
            ratio = f"   {statistics.median(a / b for a, b in zip(values, peer, strict=True)):.2f} of FSDP2"
        print(f"{name:<40}{statistics.median(values):>8.0f}   ({min(values):.0f} to {max(values):.0f}){ratio}")


if __name__ == "__main__":
    main()
