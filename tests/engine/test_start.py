"""What training needs before its first step: the modules that are imported, and the collectives of `initialize`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from zeroengine.comm import group as group_module

# What takes longer to import than all of zeroengine, or serves few runs. `import torch` alone imports none of them.
SLOW = ["rich", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
SLOW += ["torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "transformers", "yaml"]
SCRIPT = """
import gc, json, sys
import torch, torch.distributed
before = set(sys.modules)
gc.collect()
full_collections = gc.get_stats()[2]["collections"]
import zeroengine
collected = gc.get_stats()[2]["collections"] != full_collections
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3},
    "memory_check": "off",
}
engine = zeroengine.initialize(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), config=config)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
engine.close()
print(json.dumps([sorted(set(sys.modules) - before), collected, gc.isenabled()]))
"""


def test_a_run_imports_nothing_slow_and_collects_no_garbage_meanwhile() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    modules, collected, is_enabled = json.loads(done.stdout.splitlines()[-1])
    assert "zeroengine.engine.engine" in modules
    assert not set(modules) & set(SLOW)
    assert not collected and is_enabled


def count_all_gathers() -> tuple[int, int]:
    """Return the units of a model, and the all-gathers of bytes with which it was initialized."""
    calls, original = [0], group_module.all_gather_bytes

    def counted(*arguments: object) -> list[bytes]:
        calls[0] += 1
        return original(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(group_module, "all_gather_bytes", counted)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3},
        }
        engine = zeroengine.initialize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    num_units = len(engine.units)
    engine.close()
    return num_units, calls[0]


def test_initialize_meets_nine_times_and_once_for_each_unit() -> None:
    for num_units, calls in run_ranks(2, count_all_gathers):
        # Errors of the checks (4), the facts compared, hosts, memory files and whether all can open them, free memory.
        assert calls <= 9 + num_units
