"""What a model writes into its own parameters inside a forward counts as in plain PyTorch, at every stage."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, batch, build
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import STAGES, Task, adamw, settings, start
from zeroengine import DivergenceError

BF16 = {"bf16": {"enabled": True}}
KEEPS_NOTHING_WHOLE = {"stage3_param_persistence_threshold": 0}


class WritingBlock(nn.Module):
    """Initializes its scale by the first batch, and keeps a weight within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.bounded, self.linear = nn.Parameter(torch.randn(WIDTH, WIDTH) / 10), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.training and not self.initialized:
                self.scale.copy_(1 / (x.abs().mean((0, 1)) + 0.1))
                self.initialized.fill_(True)
            self.bounded.data.mul_(0.9)
            self.bounded.clamp_(-0.08, 0.08)
        return x + self.linear(x * self.scale) @ self.bounded


class WritingLM(nn.Module):
    """The root writes a parameter, its embedding renormalizes rows, and its blocks write theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH, max_norm=0.7)
        self.blocks = nn.ModuleList(WritingBlock() for _ in range(2))
        self.gain, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # No version counter of autograd sees this.
        self.gain.data.mul_(0.9)
        # This one is released until it is written.
        self.blocks[1].linear.weight.data.mul_(0.95)
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x * self.gain).flatten(0, 1).float(), labels.flatten())


def same_batch(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Every rank initializes by the same data."""
    return batch(step, 0)


TASK = Task(factory=WritingLM, data=same_batch, micro_steps=2)


def trained_plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = build(WritingLM), []
    optimizer = adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        for micro_step in range(2):
            loss = model(*batch(2 * step + micro_step, 0))
            (loss / 2).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            losses.append(model.eval()(*batch(50, 0)).item())
        model.train()
    return losses, model.state_dict()


def trained(stage: int, **more: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Evaluates between steps, and ends with an evaluation whose writes no step has followed."""
    start()
    model = build(WritingLM)
    engine = zeroengine.initialize(model, adamw(model), settings(TASK, stage, **more))
    losses = []
    for step in range(3):
        for micro_step in range(2):
            loss = engine(*batch(2 * step + micro_step, 0))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine.eval()(*batch(50, 0)).item())
        engine.train()
    state = engine.full_state_dict()
    masters = {name: zeroengine.full_master(param).clone() for name, param in model.named_parameters()}
    engine.release()
    for name, param in model.named_parameters():
        # A release restores the fp32 masters, which the last writes have reached.
        assert torch.equal(param.detach(), masters[name]), (stage, name)
    return losses, state


def check_stages(stages: tuple[int, ...]) -> None:
    expected, expected_state = trained_plainly()
    for stage in stages:
        losses, state = trained(stage)
        assert losses == pytest.approx(expected, rel=1e-5), stage
        for name, value in expected_state.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    low, low_state = trained(1, **BF16)
    again, again_state = trained(3, **BF16)
    assert again == low
    assert all(torch.equal(value, again_state[name]) for name, value in low_state.items())


def test_writes_inside_a_forward_count_as_in_plain_pytorch() -> None:
    run_ranks(2, check_stages, STAGES)


def check_on_disk(folder: str) -> None:
    disk = {"device": "nvme", "nvme_path": folder}
    zero = KEEPS_NOTHING_WHOLE | {"offload_param": disk, "offload_optimizer": disk}
    assert trained(3, zero_optimization=zero)[0] == trained(3)[0]


@pytest.mark.slow
def test_parameters_on_a_disk_take_writes_inside_a_forward(tmp_path: Any) -> None:
    run_ranks(2, check_on_disk, str(tmp_path))


class Halving(nn.Module):
    """A frozen parameter whose values come from its forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.frozen.mul_(0.5)
        return (self.linear(x) * self.frozen.clone()).sum()


def halved_beside_a_second_copy() -> list[float]:
    start()
    degrees = dict.fromkeys(("parameters", "gradients", "optimizer"), 2) | {"secondary_parameters": 1}
    zero = {"degrees": degrees, "param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    model = build(Halving)
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), settings)
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4) * (1 + engine.rank)))
        engine.step()
    values: list[float] = engine.full_state_dict()["frozen"].tolist()
    engine.close()
    return values


def test_the_second_copy_of_a_frozen_parameter_takes_writes_inside_a_forward() -> None:
    assert run_ranks(2, halved_beside_a_second_copy) == [[0.125] * 4] * 2


# -- ranks that write differently ---------------------------------------------------------------------


def differ(stage: int, when: str, folder: str) -> None:
    start()
    model = build(WritingLM)
    engine = zeroengine.initialize(model, adamw(model), settings(Task(), stage))
    # Each rank initializes by its own data.
    engine.backward(engine(*batch(0, engine.rank)))
    if when == "step":
        engine.step()
    else:
        engine.zero_grad()
        engine.save_checkpoint(folder) if when == "save" else engine.release()


@pytest.mark.parametrize(
    ("stage", "when"), [(3, "step"), pytest.param(3, "save", marks=pytest.mark.slow), (3, "release"), (1, "step")]
)
def test_ranks_that_write_differently_raise_by_name(stage: int, when: str, tmp_path: Any) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, differ, stage, when, str(tmp_path))
    for kind, text, _ in failed.value.failures.values():
        assert kind == DivergenceError.__name__
        assert "blocks.0.scale" in text and "blocks.0.bounded" not in text


# -- ways that autograd does not see ------------------------------------------------------------------


class Hidden(nn.Module):
    """Writes through NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        array = self.inner.weight.detach().numpy()
        array.clip(-0.1, 0.1, out=array)
        return self.inner(x)


def find_hidden(stage: int) -> list[str]:
    start()
    torch.manual_seed(0)
    model = nn.Sequential(Hidden(), nn.Linear(4, 1))
    warnings: list[str] = []
    zero = KEEPS_NOTHING_WHOLE | {"stage": stage}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "check_parameter_writes": True}
    config |= {"units": ["0", "1"]}
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4) * (1 + engine.rank)).sum())
        engine.step()
    assert engine.full_state_dict()["0.inner.weight"].abs().max() <= 0.1
    engine.close()
    return [text for text in warnings if "check_parameter_writes" in text]


def test_check_parameter_writes_finds_a_write_through_numpy() -> None:
    for warnings in run_ranks(2, find_hidden, 3):
        assert len(warnings) == 1 and "0.inner.weight" in warnings[0]


def write_an_alias(how: str) -> tuple[float, float]:
    start()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": KEEPS_NOTHING_WHOLE | {"stage": 3}}
    # The backward frees the memory of the first unit, which it does not gather again.
    config |= {"units": ["0", "1"]}
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config)
    kept = []
    handle = model[0].register_forward_hook(
        lambda module, *_: kept.append(module.weight.detach() if how == "detach" else module.weight.data)
    )
    loss = engine(torch.ones(1, 4) * (1 + engine.rank)).sum()
    handle.remove()
    before = kept[0].sum().item()
    kept.pop().add_(1)
    # The first weight is needed for no gradient of this loss, so autograd does not mind.
    engine.backward(loss)
    engine.step()
    after = engine.full_state_dict()["0.weight"].sum().item()
    engine.close()
    return before, after


@pytest.mark.parametrize("how", ["detach", "data"])
def test_a_write_to_a_tensor_that_shares_a_released_parameters_memory_counts(how: str) -> None:
    for before, after in run_ranks(2, write_an_alias, how):
        assert after == pytest.approx(before + 16)
