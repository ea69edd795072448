"""Muon updates the whole matrices of split parameters, as it does in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import WIDTH, TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    Task,
    Train,
    Trained,
    assert_close,
    assert_same_bits,
    make_engine,
    ordinary_loop,
    settings,
    start,
    take_steps,
    train_at,
    train_plainly,
)
from tests.emulated import cpu_alone
from tests.slices import test_experts
from tests.slices.split_models import UNEVEN_PLAN, UnevenBlock, by_sample_group
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon
from zeroengine.partition import owners

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

INNER = 2 * WIDTH


class GatedBlock(nn.Module):
    """A block whose first matrix is two, one above the other, each of which is split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(INNER, WIDTH)
        self.fused = nn.Parameter(torch.randn(2 * INNER, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, fused = self.norm(x), self.fused
        if isinstance(fused, DTensor):
            # Each rank computes a term of the gradient of ``y``.
            y = DTensor.from_local(y, fused.device_mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            fused = fused.to_local()
        gate, up = (y @ fused.T).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class MatricesLM(TinyLM):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList((GatedBlock(), GatedBlock(), UnevenBlock(), UnevenBlock()))


def split(size: int) -> nn.Module:
    if size == 1:
        return MatricesLM()
    plan = {"blocks.*.down": "rowwise", "blocks.[23].up": UNEVEN_PLAN["blocks.*.up"]}
    model = zeroengine.parallelize(MatricesLM(), plan, size=size)
    for block in list(model.blocks)[:2]:
        mesh, way = block.down.weight.device_mesh, [_StridedShard(0, split_factor=2)]
        block.fused = nn.Parameter(distribute_tensor(block.fused.data, mesh, way))
    return model


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the matrices inside of blocks, of which a fused one is two, and experts are one each."""
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1 and "blocks" in name}
    groups = [
        {"params": [p], "num_matrices": 2 if "fused" in name else len(p) if p.ndim == 3 else 1}
        for name, p in matrices.items()
    ]
    others = [p for name, p in model.named_parameters() if name not in matrices]
    return MixedOptimizer([Muon(groups, lr=0.01, ns_dtype="fp32"), torch.optim.AdamW(others, lr=3e-3, eps=1e-5)])


def task(size: int) -> Task:
    return Task(functools.partial(split, size), optimizer=muon, steps=4)


def with_experts(size: int) -> Task:
    return Task(functools.partial(test_experts.build, size), data=test_experts.batch, optimizer=muon, steps=4)


@dataclass(frozen=True)
class Case:
    """Trainings of one model on 4 ranks, whose numbers are to be the same.

    Attributes:
        whole: The same training of a model that is not split.
        split: The training.
        num_shares: The groups of ranks that see other samples.
        settings: The stages, each with further keys of the configuration.
        loop: Of the engine.
    """

    whole: Task
    split: Task
    num_shares: int
    settings: tuple[tuple[int, dict[str, Any]], ...]
    loop: Train = by_sample_group


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
GLOO = {"comm": {"transport": "gloo"}}
CASES = {
    "two slices": Case(task(1), task(2), 2, ((0, {}), (3, {}), (2, OFFLOAD))),
    # Shards of other sizes are added to another norm, in its last bit.
    "Gloo": Case(task(1), task(2), 2, ((3, GLOO),)),
    "four slices": Case(task(1), task(4), 1, ((3, {}),)),
    "experts": Case(with_experts(1), with_experts(2), 4, ((0, {}), (3, {})), ordinary_loop),
    "experts, one on each rank": Case(with_experts(1), with_experts(4), 4, ((3, {}),), ordinary_loop),
}


def momentum_of(engine: zeroengine.Engine) -> dict[str, torch.Tensor]:
    """Return the momentum of all matrices, whole. A collective."""
    named = {name: p for name, p in engine.module.named_parameters() if p.ndim > 1 and "blocks" in name}
    return {name: zeroengine.full_optimizer_state(p, "momentum_buffer") for name, p in named.items()}


def save_and_load(folder: Path) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    """On one rank: the momentum that is saved and loaded at other numbers of slices, and the losses that follow."""
    found = []
    for size, stage in ((2, 3), (4, 0), (1, 1), (2, 1)):
        engine = make_engine(task(size), stage)
        if found:
            engine.load_checkpoint(folder)
        else:
            take_steps(engine, range(2), share=engine.sample_group)
            engine.save_checkpoint(folder)
        found.append((momentum_of(engine), take_steps(engine, range(2, 4), share=engine.sample_group)))
        engine.close()
    return found


def message_of_cut_experts() -> str:
    """On one rank: the error where all experts are one matrix."""
    model = test_experts.build(2)
    experts = [param for param in model.parameters() if param.ndim == 3]
    others = [param for param in model.parameters() if param.ndim < 3]
    optimizer = MixedOptimizer([Muon(experts), torch.optim.AdamW(others)])
    with pytest.raises(zeroengine.ZeroEngineError) as raised:
        zeroengine.initialize(model, optimizer, settings(Task(), 3))
    return str(raised.value)


DROPPED = "blocks.0.down.weight"


def drop_a_slice(stage: int) -> Trained:
    """On one rank: two steps for which the ranks with the second slice of a matrix drop its gradient."""
    engine = make_engine(task(2), stage)
    losses, norms = [], []
    for step in range(2):
        losses += take_backward(engine, step)
        if engine.rank % 2:
            dict(engine.module.named_parameters())[DROPPED].grad = None
        engine.step()
        norms.append(engine.grad_norm or 0.0)
    found = Trained(losses, norms, engine.full_state_dict())
    engine.close()
    return found


def take_backward(engine: zeroengine.Engine, step: int) -> list[float]:
    loss = engine(*batch(step, engine.sample_group))
    engine.backward(loss)
    return [loss.item()]


def drop_a_slice_plainly() -> dict[str, torch.Tensor]:
    model = build(task(1).factory)
    optimizer = muon(model)
    for step in range(2):
        optimizer.zero_grad()
        torch.stack([model(*batch(step, share)) for share in range(2)]).mean().backward()
        dropped = dict(model.named_parameters())[DROPPED].grad
        assert dropped is not None
        dropped[:, INNER // 2 :] = 0
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


class Found(NamedTuple):
    """What one rank saw: of each case at each of its settings, of checkpoints, and of many rounds in one memory."""

    trained: dict[str, list[Trained]]
    loaded: list[tuple[dict[str, torch.Tensor], list[float]]]
    refused: str
    in_rounds: Trained
    without_a_slice: list[Trained]


def train(folder: Path) -> Found:
    start()
    trained = {
        name: [train_at((stage,), case.split, case.loop, more)[0] for stage, more in case.settings]
        for name, case in CASES.items()
    }
    loaded, refused = save_and_load(folder), message_of_cut_experts()
    with pytest.MonkeyPatch.context() as patch:
        # Each unit is a round of its own.
        patch.setattr(owners, "MATRICES_PER_ROUND", 0)
        patch.setattr(owners, "NUMEL_PER_ROUND", 0)
        in_rounds = train_at((2,), task(2), by_sample_group, {})[0]
    return Found(trained, loaded, refused, in_rounds, [drop_a_slice(stage) for stage in (0, 3)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return run_ranks(4, train, tmp_path_factory.mktemp("muon"), timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_split_matrices_are_updated_as_whole_ones(name: str, ranks: list[Found]) -> None:
    case = CASES[name]
    plain = train_plainly(case.whole, case.num_shares)
    assert_close([found.trained[name][0] for found in ranks], plain, tolerance=2e-6)
    for found in ranks:
        for given, trained in zip(case.settings, found.trained[name], strict=True):
            assert_same_bits(found.trained[name][0], trained, given)


def test_many_rounds_in_one_memory_give_the_same_bits(ranks: list[Found]) -> None:
    for found in ranks:
        assert_same_bits(found.trained["two slices"][0], found.in_rounds)


def test_a_slice_without_a_gradient_is_one_of_zeros_in_the_matrix(ranks: list[Found]) -> None:
    plain = drop_a_slice_plainly()
    for found in ranks:
        for trained in found.without_a_slice:
            for name, value in trained.state.items():
                torch.testing.assert_close(value, plain[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_momentum_loads_at_other_numbers_of_slices_with_the_same_bits(ranks: list[Found]) -> None:
    for found in ranks:
        (saved, losses), *others = found.loaded
        for momentum, _ in others:
            assert momentum.keys() == saved.keys()
            assert all(torch.equal(momentum[name], value) for name, value in saved.items())
        # The same slices go on with the same bits.
        assert others[-1][1] == losses


def test_experts_that_are_split_within_a_matrix_are_refused(ranks: list[Found]) -> None:
    for found in ranks:
        assert "blocks.0.experts.up of shape (4, 8, 16) has experts that are split" in found.refused
        assert "num_matrices" in found.refused
