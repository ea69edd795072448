"""What a rank holds at each stage is what the table of ZeRO, section 5, says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import Block
from tests.distributed.ranks import run_ranks

WIDTH, BLOCKS = 192, 12


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def memory_of(stage: int, ranks: int, bf16: bool) -> tuple[zeroengine.Memory, int, int]:
    """After two steps: the engine's memory, the model's parameters, those of its largest unit."""
    init_fake_group(ranks)
    model = Model()
    numel = sum(p.numel() for p in model.parameters())
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = zeroengine.initialize(model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    return engine.memory(), numel, numel // BLOCKS


@pytest.mark.parametrize("ranks", [pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_follow_the_formula_and_nothing_else_stays(stage: int, ranks: int) -> None:
    memory, numel, unit = run_ranks(1, memory_of, stage, ranks, True)[0]
    optimizer, gradients, parameters = (ranks if stage >= least else 1 for least in (1, 2, 3))
    assert memory.parameters == pytest.approx(numel * 2 / parameters, rel=0.03)
    assert memory.gradients == pytest.approx(numel * 2 / gradients, rel=0.03)
    assert memory.master == pytest.approx(numel * 4 / optimizer, rel=0.03)
    assert memory.optimizer == pytest.approx(numel * 8 / optimizer, rel=0.03)
    assert memory.gathered == 0, "between steps everything partitioned is released"
    assert memory.buckets <= 2 * unit * 2 * 1.03
    assert memory.total == memory.states + memory.buckets


def test_fp32_parameters_are_the_master() -> None:
    memory, numel, _ = run_ranks(1, memory_of, 1, 64, False)[0]
    assert memory.master == 0
    assert memory.states == pytest.approx(numel * (4 + 4 + 8 / 64), rel=0.03)


def test_memory_prints_as_a_table() -> None:
    lines = str(run_ranks(1, memory_of, 3, 64, True)[0][0]).splitlines()
    assert lines[0] in ("on cpu", "on cuda:0")
    assert [line.split()[0] for line in lines[1:]] == [
        *("parameters", "gradients", "master", "optimizer", "buckets", "gathered", "total")
    ]
    assert all(line.endswith("MiB") for line in lines[1:])


def private_and_shared_bytes() -> int:
    """Return the resident bytes of this process that belong to no file of the system, such as a library."""
    sizes = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert len(sizes) == 2
    return sum(map(int, sizes)) << 10


def growth_in_initialize(width: int) -> tuple[int, int, int]:
    """What this process has more after ``initialize`` than before its model, the states, and the model's bytes."""
    before = private_and_shared_bytes()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(16)))
    numel = sum(p.numel() for p in model.parameters())
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    engine = zeroengine.initialize(model, config=config)
    return private_and_shared_bytes() - before, engine.memory().states, numel * 4


def test_after_initialize_a_process_holds_its_states_and_not_the_model_that_was_passed() -> None:
    for growth, states, model in run_ranks(2, growth_in_initialize, 1024):
        assert states == pytest.approx(4 * model / 2, rel=0.03)
        assert states <= growth <= states + (8 << 20)
