"""Parameters that are not split have one gradient on all ranks of a model group, or are an error by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")


class Heads(nn.Module):
    """Normalizes each head, of which a rank has some: the gradients of the norm are of these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.out = nn.Linear(4, 8), nn.LayerNorm(2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The gradients of the norm are small beside those of other layers that are not split.
        return x + 0.01 * self.out(self.norm(self.q(x).unflatten(-1, (-1, 2))).flatten(-2))


def train(size: int, sums: bool) -> list[float]:
    start()
    torch.manual_seed(0)
    model = nn.Sequential(Heads(), Heads(), nn.Linear(4, 4))
    if size > 1:
        zeroengine.parallelize(model, {"*.q": "colwise", "*.out": "rowwise"}, size=size)
    zero = {"stage": 3, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    if sums:
        group = model[0].q.weight.device_mesh.get_group()
        for param in (*model[0].norm.parameters(), *model[1].norm.parameters()):
            param.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
    norms = []
    for step in range(2):
        x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(10 * step + engine.sample_group))
        engine.backward(engine(x).square().mean())
        engine.step()
        assert engine.grad_norm is not None
        norms.append(engine.grad_norm)
    engine.close()
    return norms


def refused() -> str:
    with pytest.raises(zeroengine.DivergenceError) as caught:
        train(2, sums=False)
    return str(caught.value)


def test_a_gradient_of_a_part_of_the_heads_is_an_error_by_name_and_right_where_the_ranks_sum_it() -> None:
    for message in run_ranks(4, refused):
        assert "0.norm.weight, 0.norm.bias, 1.norm.weight, 1.norm.bias" in message and "all_reduce" in message
    for norms in run_ranks(4, train, 2, True):
        assert norms == pytest.approx(run_ranks(2, train, 1, False)[0], rel=1e-5)
