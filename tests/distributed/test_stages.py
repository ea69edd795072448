"""The same losses at every stage, on any transport, and those of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config, plain_losses
from tests.distributed.ranks import run_ranks

STEPS = 15


def losses_of(settings: dict[str, Any], steps: int = STEPS, seed_per_rank: bool = False) -> tuple[list[float], Any]:
    """Each step's loss, averaged over ranks, and the final state."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(TinyLM, seed=rank if seed_per_rank else 0)
    engine = zeroengine.initialize(model, config=settings)
    losses = []
    for step in range(steps):
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        assert engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses, engine.full_state_dict(rank0_only=True)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fp32_losses_are_bit_for_bit_equal_at_every_stage_and_match_one_process(world_size: int) -> None:
    results = {stage: run_ranks(world_size, losses_of, config(stage))[0] for stage in range(4)}
    losses, state = results[0]
    for stage in (1, 2, 3):
        assert results[stage][0] == losses, f"stage {stage}"
        assert all(torch.equal(results[stage][1][name], state[name]) for name in state), f"stage {stage}"
    assert losses == pytest.approx(list(plain_losses(world_size, STEPS)), rel=1e-6)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in range(3)), 3])
def test_gloo_gives_the_bits_of_shared_memory(stage: int) -> None:
    shm, gloo = (run_ranks(3, losses_of, config(stage, comm={"transport": kind}), 6)[0][0] for kind in ("shm", "gloo"))
    assert shm == gloo


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.slow)], ids=str)
def test_bf16_stages_agree_and_learn(stages: tuple[int, ...]) -> None:
    results = [run_ranks(2, losses_of, config(stage, bf16={"enabled": True}))[0][0] for stage in stages]
    assert all(other == results[0] for other in results[1:])
    assert results[0] == pytest.approx(list(plain_losses(2, STEPS)), rel=0.05)


def test_rank_0_gives_the_initial_values() -> None:
    same, different = (run_ranks(2, losses_of, config(3), 3, own)[0][0] for own in (False, True))
    assert same == different


def test_one_process_needs_no_launcher() -> None:
    (losses, _), *_ = run_ranks(1, losses_of, config(3))
    assert losses == pytest.approx(list(plain_losses(1, STEPS)), rel=1e-6)
