"""Run in a fresh process for each rank: how far its memory grew while a model was initialized and trained."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from zeroengine.config import load
from zeroengine.memory.state_bytes import RankTopology, predict_states
from zeroengine.partition.cut import cut_units

WIDTH, BLOCKS = 1024, 10


class WideBlock(nn.Module):
    """Two large matrices, whose activations for one token are small."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    return nn.Sequential(*(WideBlock() for _ in range(BLOCKS)))


def status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def train(model: nn.Module, config: dict[str, Any], steps: int) -> zeroengine.Engine:
    engine = zeroengine.initialize(model, config=config)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, WIDTH)).float().square().mean())
        engine.step()
    return engine


def main(deferred: bool, config: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    # A small engine first: what libraries load and what threads take is no state.
    small = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    train(small, config | {"zero_optimization": {"stage": 1}}, 1).close()
    del small
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if deferred:
        with zeroengine.meta_init():
            model = build()
    else:
        model = build()
    resolved = load(config).resolve(world_size=world_size)
    plans = cut_units(model, compute_dtype=resolved.low_precision)
    transport = "single" if world_size == 1 else resolved.comm.transport.replace("auto", "shm")
    predicted = predict_states(plans, resolved, RankTopology(world_size, "cpu", transport))
    # The activations of two tokens are small, but autograd makes the gradient of a matrix before it is copied.
    gradient = WIDTH * 4 * WIDTH * plans[0].dtype.itemsize
    del plans
    engine = train(model, config, 3)
    grown = status_bytes("VmHWM") - before
    if dist.get_rank() == 0:
        print(json.dumps([grown, predicted.device_total + predicted.peak_device_extra + gradient]))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1] == "deferred", json.loads(sys.argv[2]))
