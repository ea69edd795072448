"""Several losses in one step, and several engines in one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import WIDTH, Block, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_accumulation import backwards, by_pairs, plain_backwards
from tests.distributed.test_evaluation import record
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    adamw,
    assert_close,
    assert_same_bits,
    check_every_stage,
    make_engine,
    settings,
    start,
)
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO, TRANSPORTS, in_turn
from zeroengine import ZeroEngineError

# -- several losses -----------------------------------------------------------------------------------


def two_losses(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Over one graph, each with its own backward."""
    loss = model(ids, labels)
    second = loss.square() * 1e-2
    backward(loss, retain_graph=True)
    backward(second)
    return [loss, second]


def three_losses(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """One is differentiated twice, and another has a graph of its own."""
    loss, other = model(ids, labels), model(ids[:1], labels[:1])
    backward(loss, retain_graph=True)
    backward(other)
    backward(loss)
    return [loss, other]


def for_some(model: nn.Module, backward: Any, ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """A loss that trains the blocks alone."""
    loss = model(ids, labels)
    backward(loss, inputs=list(model.blocks.parameters()))
    return [loss]


def loop_two(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, two_losses)


def loop_three(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, three_losses)


def loop_some(task: Task, engine: zeroengine.Engine) -> Any:
    return backwards(task, engine, for_some)


@SHARED_MEMORY_AND_SLOW_GLOO
def test_two_losses_of_one_graph_add_up(transport: str) -> None:
    task = Task()
    check_every_stage(task, loop=loop_two, plain=plain_backwards(task, two_losses), comm={"transport": transport})


@SHARED_MEMORY_AND_SLOW_GLOO
def test_three_losses_of_two_graphs_add_up(transport: str) -> None:
    task = Task()
    by_pairs(task, loop_three, plain_backwards(task, three_losses), comm={"transport": transport})


@SHARED_MEMORY_AND_SLOW_GLOO
def test_a_loss_may_be_for_some_parameters(transport: str) -> None:
    task = Task()
    found = check_every_stage(
        task, loop=loop_some, plain=plain_backwards(task, for_some), comm={"transport": transport}
    )[0]
    assert torch.equal(found.state["norm.weight"], build(task.factory).state_dict()["norm.weight"])


def gradients() -> list[list[torch.Tensor]]:
    """As torch.autograd.grad gives them, of this rank's own loss."""
    rank = start()
    found = []
    for stage in STAGES:
        engine = make_engine(Task(), stage)
        found.append(list(torch.autograd.grad(engine(*batch(0, rank)), list(engine.module.parameters()))))
        engine.backward(engine(*batch(0, rank)))
        assert engine.step()
    return found


def test_torch_autograd_grad_takes_released_parameters() -> None:
    model = build()
    for rank, found in enumerate(run_ranks(2, gradients)):
        expected = torch.autograd.grad(model(*batch(0, rank)), list(model.parameters()))
        for gradients_of_stage, stage in zip(found, STAGES, strict=True):
            for own, first, plain in zip(gradients_of_stage, found[0], expected, strict=True):
                assert torch.equal(own, first), stage
                torch.testing.assert_close(own, plain)


# -- a generator and a discriminator ------------------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        x = self.stem(noise)
        for block in self.blocks:
            x = block(x)
        return x


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class Plain:
    """What an engine is for a game, in plain PyTorch: each rank has the whole model, and gradients are averaged."""

    def __init__(self, model: nn.Module) -> None:
        self.module, self.optimizer = model, adamw(model)
        self.zero_grad = self.optimizer.zero_grad

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for param in self.module.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()


def discriminate(d: Any, real: torch.Tensor, fake: torch.Tensor) -> float:
    """As in the DCGAN example: one backward for what is real, one for what is not."""
    first = F.softplus(-d(real)).mean()
    d.backward(first)
    second = F.softplus(d(fake.detach())).mean()
    d.backward(second)
    d.step()
    return (first + second).item()


def frozen(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> list[float]:
    """The discriminator is frozen while the generator learns."""
    fake = g(noise)
    first = discriminate(d, real, fake)
    d.module.requires_grad_(False)
    second = F.softplus(-d(fake)).mean()
    g.backward(second)
    g.step()
    d.module.requires_grad_(True)
    return [first, second.item()]


def dropped(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> list[float]:
    """The discriminator gets gradients of the generator's loss, which are dropped."""
    fake = g(noise)
    d.zero_grad()
    first = discriminate(d, real, fake)
    second = F.softplus(-d(fake)).mean()
    g.backward(second)
    g.step()
    return [first, second.item()]


def dropped_by_modules(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> list[float]:
    """The modules drop gradients, as in plain PyTorch's and DeepSpeed's DCGAN examples."""
    d.module.zero_grad()
    fake = g(noise)
    first = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
    d.backward(first)
    d.step()
    g.module.zero_grad()
    second = F.softplus(-d(fake)).mean()
    g.backward(second)
    g.step()
    return [first.item(), second.item()]


def dropped_by_the_optimizer(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> list[float]:
    d.optimizer.zero_grad()
    second = F.softplus(-d(g(noise))).mean()
    g.backward(second)
    g.optimizer.zero_grad()  # the first thing of all that this step does again
    d.optimizer.zero_grad()
    fake = g(noise)
    g.backward(F.softplus(-d(fake)).mean())
    g.step()
    d.optimizer.zero_grad()
    return [discriminate(d, real, fake), second.item()]


def together(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> list[float]:
    """Not a game: one loss trains both."""
    loss = F.softplus(-d(real + g(noise))).mean()
    g.backward(loss)
    g.step()
    d.step()
    return [loss.item()]


GAMES = {game.__name__: game for game in (frozen, dropped, dropped_by_modules, dropped_by_the_optimizer, together)}
PAIRS = [(0, 0), (1, 1), (2, 2), (3, 3), (3, 1), (0, 3)]


def play(game: str, g: Any, d: Any) -> Trained:
    losses: list[float] = []
    for step in range(4):
        losses += GAMES[game](g, d, *features(step, dist.get_rank()), *features(100 + step, dist.get_rank()))
    state = {
        f"{which}.{name}": value for which, e in (("g", g), ("d", d)) for name, value in e.full_state_dict().items()
    }
    return Trained(losses, [], state)


def players(stages: tuple[int, int], **more: Any) -> list[zeroengine.Engine]:
    models = (build(Generator), build(Discriminator, seed=1))
    return [
        zeroengine.initialize(model, adamw(model), settings(Task(), stage, **copy.deepcopy(more)))
        for model, stage in zip(models, stages, strict=True)
    ]


def play_all(game: str, more: dict[str, Any], pairs: Sequence[tuple[int, int]]) -> tuple[list[Trained], Trained]:
    """On one rank: with engines of each pair of stages, and in plain PyTorch."""
    start()
    found = []
    for stages in pairs:
        engines = players(stages, **more)
        found.append(play(game, *engines))
        for engine in engines:
            engine.gatherer.quiesce()
            assert engine.memory().gathered == 0
            engine.close()
    return found, play(game, Plain(build(Generator)), Plain(build(Discriminator, seed=1)))


@pytest.mark.parametrize(
    "pairs",
    [pytest.param([(0, 0), (3, 1)], id="some"), pytest.param(PAIRS, id="all", marks=pytest.mark.slow)],
)
@in_turn(
    ("game", "transport"),
    [pytest.param(g, id=g, marks=pytest.mark.slow if g in ("dropped_by_modules", "together") else ()) for g in GAMES],
    TRANSPORTS,
)
def test_a_game_of_two_engines_is_that_of_plain_pytorch(
    game: str, transport: str, pairs: list[tuple[int, int]]
) -> None:
    for found, plain in run_ranks(2, play_all, game, {"comm": {"transport": transport}}, pairs):
        for stages, trained in zip(pairs, found, strict=True):
            assert_same_bits(found[0], trained, stages)
        assert_close([found[0]], plain)


@pytest.mark.parametrize(
    "game", [pytest.param(game, marks=() if game == "together" else pytest.mark.slow) for game in GAMES]
)
def test_a_bf16_game_of_two_engines_follows_plain_pytorch(game: str) -> None:
    for found, plain in run_ranks(2, play_all, game, {"bf16": {"enabled": True}}, [(1, 2), (3, 0)]):
        for trained in found:
            assert trained.losses == pytest.approx(plain.losses, rel=3e-2)


def frozen_bystander() -> None:
    """What a frozen discriminator does while the generator learns."""
    start()
    for stage in STAGES:
        g, d = players((stage, stage))
        whole = d.full_state_dict()
        for step in range(3):
            d.module.requires_grad_(False)
            issued: list[str] = []
            record(d.reducer.launcher._transport.reduce, ["all_reduce", "reduce_scatter"], issued)
            gathered: list[int] = []
            fake = g(*features(step, g.rank))
            fake.register_hook(lambda _, d=d, gathered=gathered: gathered.append(d.memory().gathered))
            g.backward(F.softplus(-d(fake)).mean())
            g.step()
            with pytest.raises(ZeroEngineError, match=r"step\(\) without backward"):
                d.step()
            assert not issued, "no gradient of its own is reduced"
            (held,) = gathered
            assert held < 0.6 * sum(value.nbytes for value in whole.values()), "released block by block"
            d.module.requires_grad_(True)
        assert all(torch.equal(value, whole[name]) for name, value in d.full_state_dict().items())


def test_a_frozen_discriminator_reduces_nothing_and_is_released_block_by_block() -> None:
    run_ranks(2, frozen_bystander)


def zero_before_each_micro_step(by_engine: bool) -> tuple[float, float, list[str]]:
    start()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    norms = []
    for zeroes in (True, False):
        engine = zeroengine.initialize(model := build(Net), adamw(model), settings(Task(micro_steps=2), 2))
        for number in range(2) if zeroes else (7, 1):
            if zeroes or number == 1:
                engine.zero_grad() if by_engine else model.zero_grad()
            engine.backward(engine(*features(number, engine.rank)))
            updated = engine.step()
        assert updated, "a micro-step counts although its gradients were dropped"
        norms.append(engine.grad_norm)
        engine.close()
    return *norms, warnings


@pytest.mark.parametrize("by_engine", [True, False])
def test_zero_grad_between_micro_steps_drops_the_earlier_ones_with_a_warning(by_engine: bool) -> None:
    on_rank_0, on_rank_1 = run_ranks(2, zero_before_each_micro_step, by_engine)
    for norm, norm_without_first, _ in (on_rank_0, on_rank_1):
        assert norm == norm_without_first
    assert ["has dropped the gradients of the earlier ones" in text for text in on_rank_0[2]] == [True, True]
    assert not on_rank_1[2]


# -- a teacher ----------------------------------------------------------------------------------------


def distil(stages: tuple[int, ...], more: dict[str, Any]) -> list[Trained]:
    """A student learns from a frozen model that has an engine for its memory alone."""
    rank = start()
    found = []
    for stage in stages:
        teacher = build(Net, seed=7).requires_grad_(False)
        master = zeroengine.initialize(teacher, adamw(teacher), settings(Task(), stage, **copy.deepcopy(more)))
        student = build(Net)
        engine = zeroengine.initialize(student, adamw(student), settings(Task(), stage, **copy.deepcopy(more)))
        losses = []
        for step in range(3):
            (x,) = features(step, rank)
            with torch.no_grad():
                target = master(x)
            loss = (engine(x) - target).square() + master(
                x + engine.module.stem(x.to(engine.module.stem.weight.dtype)) * 1e-2
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        memory = master.memory()
        assert memory.gradients == memory.optimizer == memory.master == memory.gathered == 0
        found.append(Trained(losses, [], engine.full_state_dict()))
    return found


def test_a_frozen_teacher_may_have_an_engine_of_its_own() -> None:
    for more in ({}, {"bf16": {"enabled": True}}):
        for found in run_ranks(2, distil, STAGES, more):
            for trained in found:
                assert_same_bits(found[0], trained)
