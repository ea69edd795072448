"""The memory of a released unit that another tensor shares: freed as soon as that tensor is gone."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.func import grad, vjp

import zeroengine
from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, start


def drop_a_view_between_forwards() -> None:
    start()
    engine = make_engine(Task(), 3)
    engine.eval()
    engine(*batch(0, engine.rank))
    with zeroengine.gathered(engine.module):
        view = engine.module.blocks[1].up.weight.detach()
    assert engine.memory().gathered > 0, "the view has values"
    del view
    assert engine.memory().gathered == 0


def warnings_of_a_view_that_is_kept() -> tuple[list[str], int]:
    """The warnings before the first step and after the second, and the bytes of the view's unit."""
    start()
    engine = make_engine(Task(), 3)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    views = []
    for step in range(2):
        with zeroengine.gathered(engine.module):
            views.append(engine.module.blocks[1].up.weight.detach())
        engine.backward(engine(*batch(step, engine.rank)))
        messages.append("step")
        nbytes = engine.memory().gathered
        engine.step()
    return messages, nbytes


def test_a_view_that_is_kept_is_reported_once_at_a_step_with_the_size() -> None:
    for messages, nbytes in run_ranks(2, warnings_of_a_view_that_is_kept):
        assert len(messages) == 3 and messages[0] == messages[2] == "step"
        assert f"{nbytes / 1024:.1f} KiB of parameters are held at a step (blocks.1): a tensor shares" in messages[1]


def test_a_unit_is_freed_once_no_tensor_shares_its_memory() -> None:
    run_ranks(2, drop_a_view_between_forwards)


class Scale(nn.Module):
    """Its product saves the parameter itself, where a matrix product would save a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class InputGradients(nn.Module):
    """Layers that are differentiated by their input inside of the forward, and a pullback that outlives them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + grad(lambda y: self.layers[0](y).tanh().sum())(x)
        y, pull_back = vjp(self.layers[1], x)
        y = self.layers[2](y)
        return y + pull_back(y)[0]


def differences_of_input_gradients() -> list[bool]:
    rank = start()
    torch.manual_seed(0)
    plain, model = InputGradients(), InputGradients()
    model.load_state_dict(plain.state_dict())
    zero = {"stage": 3, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "units": ["layers.*"], "zero_optimization": zero}
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config)
    x, equal = torch.randn(2, 4) + rank, []
    # No graph of autograd holds the parameters before the first forward with gradients, and one does in the last call.
    for has_grad, inference in ((False, False), (False, True), (True, False), (False, False)):
        with torch.inference_mode(inference), torch.set_grad_enabled(has_grad):
            output = engine(x)
        equal.append(torch.equal(output, plain(x)))
    engine.backward(engine(x).sum())
    engine.step()
    assert engine.memory().gathered == 0
    return equal


def test_a_graph_of_torch_func_keeps_the_memory_that_it_reads() -> None:
    assert run_ranks(2, differences_of_input_gradients) == [[True] * 4] * 2


class Gained(nn.Module):
    """Uses a parameter between its blocks that belongs to the unit of its embedding and of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.gains = nn.ParameterList([torch.randn(4)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(ids)).tanh() * self.gains[0]
        return nn.functional.cross_entropy(self.head(self.blocks[1](x).tanh()), labels)


def gradients_beside_a_view(keeps_view: bool) -> torch.Tensor:
    """A gradient with a penalty, while one rank keeps a view of a parameter, as for a log."""
    rank = start()
    torch.manual_seed(0)
    zero = {"stage": 3, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "units": ["blocks.*"]}
    config["zero_optimization"] = zero
    engine = zeroengine.initialize(model := Gained(), torch.optim.SGD(model.parameters(), lr=0.1), config)
    ids, views = (torch.arange(4) + rank) % 5, []
    for _ in range(2):
        loss = engine(ids, ids)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        engine.backward(loss + sum(grad.square().sum() for grad in grads))
        with zeroengine.gathered(model):
            views.append(model.gains[0].detach() if keeps_view and rank else None)
        engine.step()
    return engine.full_state_dict()["gains.0"]


def test_a_view_that_one_rank_keeps_changes_no_order_of_collectives() -> None:
    with_view, without = run_ranks(2, gradients_beside_a_view, True), run_ranks(2, gradients_beside_a_view, False)
    assert torch.equal(with_view[0], without[0])
