"""``tiled_mlp`` has the values and gradients of the module, and is one use of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.collective_log import RankLog, recording
from tests.distributed.models import WIDTH, Block, TinyLM
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, Trained, assert_close, ordinary_loop, train_at, train_plainly
from zeroengine.errors import ZeroEngineError

STAGES = (0, 3)


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, 6))


def gradients(module: Any, call: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    hidden = hidden.clone().requires_grad_()
    output = call(module, hidden)
    (output * torch.arange(output.numel()).view(output.shape)).mean().backward()
    found = [output.detach(), hidden.grad, *(param.grad for param in module.parameters())]
    module.zero_grad()
    return found


@pytest.mark.parametrize("num_tiles", [None, 1, 4, 50])
@pytest.mark.parametrize("shape", [(3, 19, 8), (19, 8), (1, 8)])
def test_values_and_gradients_are_those_of_the_module(shape: tuple[int, ...], num_tiles: int | None) -> None:
    module, hidden = mlp(), torch.randn(shape)

    def tiled(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return zeroengine.tiled_mlp(module, hidden, num_tiles=num_tiles)

    expected = gradients(module, nn.Module.__call__, hidden)
    for found, one in zip(gradients(module, tiled, hidden), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(tiled(module, hidden), expected[0], rtol=1e-6, atol=1e-6)


def test_dropout_is_the_same_in_the_recomputation_and_inside_checkpoints() -> None:
    module, hidden = mlp(0.5), torch.randn(2, 12, 8)

    def tiled(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return zeroengine.tiled_mlp(module, hidden, num_tiles=3)

    def in_pieces(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([module(piece) for piece in hidden.chunk(3, -2)], -2)

    expected = gradients(module, in_pieces, hidden)
    calls = [tiled, *(lambda m, x, kind=kind: checkpoint(tiled, m, x, use_reentrant=kind) for kind in (True, False))]
    for call in calls:
        for found, one in zip(gradients(module, call, hidden), expected, strict=True):
            torch.testing.assert_close(found, one)


@pytest.mark.parametrize(
    "output", [lambda x: (x, x), lambda x: x.sum(), lambda x: x[..., :1, :], lambda x: None], ids=range(4)
)
def test_a_module_that_returns_anything_but_its_tokens_is_an_error(output: Any) -> None:
    with pytest.raises(ZeroEngineError, match=r"tiled_mlp\(\): a module returns one tensor with the tokens of"):
        zeroengine.tiled_mlp(output, torch.ones(2, 8, 4), num_tiles=2)


class TiledBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + zeroengine.tiled_mlp(
            lambda tile: self.down(nn.functional.gelu(self.up(tile))), self.norm(x), num_tiles=3
        )


class TiledLM(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(TiledBlock(WIDTH) for _ in self.blocks)
        blocks.load_state_dict(self.blocks.state_dict())
        self.blocks = blocks


def train_and_count(task: Task) -> list[tuple[Trained, list[str]]]:
    """Return what this rank saw at each stage, and its collectives."""
    found = []
    for stage in STAGES:
        log = RankLog()
        with recording(log):
            (trained,) = train_at([stage], task, ordinary_loop, {})
        found.append((trained, log.launches))
    return found


def test_parameters_are_gathered_and_reduced_as_by_the_whole_module() -> None:
    """Each gradient reaches the engine once a backward, so that nothing is reduced before all pieces are added."""
    tasks = [Task(model, micro_steps=2) for model in (TinyLM, TiledLM)]
    plain, tiled = (run_ranks(2, train_and_count, task) for task in tasks)
    for number, _ in enumerate(STAGES):
        assert_close([rank[number][0] for rank in tiled], train_plainly(tasks[0]))
        for before, now in zip(plain, tiled, strict=True):
            assert before[number][1] and before[number][1] == now[number][1]
