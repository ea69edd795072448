"""When a backward releases units, and lets them be reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import WIDTH, Block, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import Task, check_every_stage, ordinary_loop, start


class Crossed(Block):
    def forward(self, x: torch.Tensor, context: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward(x + self.norm(context) * scale), scale


class SharedInputs(Net):
    """Every block takes what the stem gave, as decoders take the encoder's output, and a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Crossed() for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        context = x = self.stem(x)
        scale = self.scale * 1
        for block in self.blocks:
            x, scale = block(x, context, scale=scale)
        return self.loss(x)


def watched(task: Task, engine: zeroengine.Engine) -> Any:
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, engine.memory().gathered)

    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(look)
    found = ordinary_loop(task, engine)
    sizes = sorted(4 * unit.layout.numel for unit in engine.units)
    assert most <= sum(sizes[-2:]) + sizes[0]
    return found


def test_units_whose_calls_share_inputs_are_released_one_by_one_in_backward() -> None:
    check_every_stage(Task(SharedInputs, features), loop=watched)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class ManyCheckpoints(Net):
    """Runs blocks in checkpoints of both kinds, in turn, and in ones that hold a Function, or other checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        first, second, third, fourth = self.blocks
        x = self.stem(x)
        for number in range(3):
            x = checkpoint(first, x, use_reentrant=bool(number % 2))
            x = checkpoint(second, x, use_reentrant=not number % 2)
        x = checkpoint(lambda x: fourth(Doubled.apply(third(x))), x, use_reentrant=True)
        return self.loss(checkpoint(lambda x: checkpoint(fourth, x, use_reentrant=True), x, use_reentrant=False))


def without_late_gradients(task: Task, engine: zeroengine.Engine) -> Any:
    counts = [0]
    reduce_late = engine.reducer.reduce_late_gradients

    def count() -> None:
        counts[0] += 1
        reduce_late()

    engine.reducer.reduce_late_gradients = count  # type: ignore[method-assign]
    found = ordinary_loop(task, engine)
    # The first step shows how many gradients each parameter gets.
    assert counts[0] <= 1
    return found


def test_no_unit_is_reduced_before_its_checkpoints_have_run_again() -> None:
    check_every_stage(Task(ManyCheckpoints, features), loop=without_late_gradients)


class AuxiliaryLoss(Block):
    """Keeps a term that its output is made of, and of which a loss may be computed without the output."""

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        term = context * 2
        self.auxiliary = term.square().mean()
        return super().forward(x) + term


class AuxiliaryLossAlone(Net):
    """Computes its loss of tensors that its blocks keep, so the backward begins inside calls and skips their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AuxiliaryLoss() for _ in range(3))

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        context = x = self.stem(x)
        for block in self.blocks:
            x = block(x, context)
        return torch.stack([block.auxiliary for block in self.blocks]).sum()


def test_a_loss_of_a_tensor_inside_calls_whose_outputs_get_no_gradient_trains_as_plain_pytorch() -> None:
    check_every_stage(Task(AuxiliaryLossAlone, features))


class LastLayerUnused(nn.Module):
    """Two layers, of which the forward calls the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()  # type: ignore[no-any-return]


def reduces_of_unused_layer() -> list[bool]:
    """Whether the unused layer's reduce precedes the other's gradients, in `engine.backward` and `loss.backward`."""
    rank, seen = start(), []
    more = {"reduce_bucket_size": 1}
    engine = zeroengine.initialize(
        LastLayerUnused(), config=config(3, units=["used", "unused"], zero_optimization=more)
    )
    for is_plain in (False, True):
        launched: list[bool] = []
        unused = next(grads for grads in engine.reducer.gradients if grads.unit.name == "unused")
        bias = engine.module.used.bias
        handle = bias.register_post_accumulate_grad_hook(lambda _: launched.append(unused.launched_in_step))  # noqa: B023
        loss = engine(torch.full((2, WIDTH), 1.0 + rank))
        loss.backward() if is_plain else engine.backward(loss)
        handle.remove()
        engine.step()
        seen += launched
    engine.close()
    return seen


def test_what_no_forward_used_is_reduced_when_the_backward_begins() -> None:
    assert run_ranks(2, reduces_of_unused_layer) == [[True, True]] * 2
