"""Losses with weights: the gradient of a step is the mean over all tokens of all ranks and micro-steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, Trained, assert_close, assert_same_bits, make_engine, start
from zeroengine.errors import DivergenceError, ZeroEngineError

IGNORED = -100


def uneven(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of which each rank has labels for another number of tokens, and in some steps for none."""
    ids, labels = batch(step, rank)
    present = 0 if rank == 1 and step % 3 == 1 else 1 + (7 * step + 5 * rank) % labels.numel()
    labels = labels.clone()
    labels.view(-1)[present:] = IGNORED
    return ids, labels


def num_tokens(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


TASK = Task(data=uneven, steps=6)
ACCUMULATED = Task(data=uneven, steps=4, micro_steps=3)


def weighted_loop(engine: zeroengine.Engine, task: Task, how: str = "backward") -> list[float]:
    """Train, and return the norms. The weights are numbers or tensors."""
    norms = []
    for micro_step in range(task.steps * task.micro_steps):
        ids, labels = task.data(micro_step, engine.rank)
        loss, weight = engine(ids, labels), num_tokens(labels)
        if how == "scale":
            engine.scale(loss, weight=weight).backward()
        elif how == "no_sync" and (micro_step + 1) % task.micro_steps:
            with engine.no_sync():
                engine.backward(loss, weight=weight)
        else:
            engine.backward(loss, weight=weight if micro_step % 2 else int(weight))
        if engine.step():
            norms.append(engine.grad_norm or 0.0)
    return norms


def train(stages: Sequence[int], task: Task, how: str, more: dict[str, Any]) -> list[Trained]:
    start()
    found = []
    for stage in stages:
        engine = make_engine(task, stage, **more)
        norms = weighted_loop(engine, task, how)
        found.append(Trained([], norms, engine.full_state_dict()))
        engine.close()
    return found


@functools.cache
def train_by_hand(task: Task, world_size: int) -> Trained:
    """Train by plain PyTorch on the mean over all tokens that all ranks see in a step."""
    model = build(task.factory)
    optimizer, norms = task.optimizer(model), []
    for step in range(task.steps):
        optimizer.zero_grad()
        numbers = range(step * task.micro_steps, (step + 1) * task.micro_steps)
        seen = [task.data(number, rank) for number in numbers for rank in range(world_size)]
        total = sum(num_tokens(labels) for _, labels in seen)
        for ids, labels in seen:
            logits = model.head(model.norm(torch.nn.Sequential(*model.blocks)(model.tok(ids))))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / total).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
    return Trained([], norms, {name: value.clone() for name, value in model.state_dict().items()})


@pytest.mark.parametrize(
    "world_size, task, how",
    [
        (1, TASK, "backward"),
        (2, TASK, "backward"),
        (2, ACCUMULATED, "backward"),
        (2, TASK, "scale"),
        (2, ACCUMULATED, "no_sync"),
        pytest.param(4, ACCUMULATED, "backward", marks=pytest.mark.slow),
        pytest.param(3, Task(data=uneven, steps=20), "backward", marks=pytest.mark.slow),
    ],
)
def test_a_step_has_the_mean_over_all_tokens(world_size: int, task: Task, how: str) -> None:
    expected = train_by_hand(task, world_size)
    for ranks in zip(*run_ranks(world_size, train, STAGES, task, how, {}), strict=True):
        assert_close(ranks, expected, 2e-6)


def test_stages_have_the_same_bits() -> None:
    ranks = run_ranks(2, train, STAGES, TASK, "backward", {})
    for found in ranks:
        for other in found[1:]:
            assert_same_bits(found[0], other)


def train_in_fp16(large: bool) -> tuple[int, list[float]]:
    start()
    engine = make_engine(TASK, 3, fp16={"enabled": True, "initial_scale_power": 8})
    norms = []
    for step in range(6):
        ids, labels = uneven(step, engine.rank)
        loss = engine(ids, labels)
        # The same multiple of each weight changes nothing, and must not overflow. Nor must weights that grow.
        weight = int(num_tokens(labels)) * (1_000_000 * (1 + step) if large else 1)
        engine.backward(loss * (math.inf if step == 3 and engine.rank == 1 else 1), weight=weight)
        if engine.step():
            norms.append(engine.grad_norm or 0.0)
    skipped = engine.skipped_steps
    engine.close()
    return skipped, norms


def test_in_fp16_the_size_of_the_weights_is_no_matter() -> None:
    small, large = (run_ranks(2, train_in_fp16, large)[0] for large in (False, True))
    assert small[0] == large[0] == 1
    assert large[1] == pytest.approx(small[1], rel=1e-2)


def refuse() -> list[str]:
    start()
    engine = make_engine(TASK, 3)
    found = []

    def attempt(act: Any) -> None:
        with pytest.raises(ZeroEngineError) as raised:
            act()
        found.append(str(raised.value))

    def loss() -> torch.Tensor:
        return engine(*batch(0, engine.rank))

    attempt(lambda: engine.backward(loss(), weight=1, inputs=list(engine.module.norm.parameters())))
    for weight in (-1, math.nan, "many", torch.ones(2)):
        attempt(lambda weight=weight: engine.backward(loss(), weight=weight))
    engine.backward(loss(), weight=3)
    attempt(lambda: engine.backward(loss()))
    attempt(lambda: loss().backward())
    engine.zero_grad()
    engine.backward(loss())
    attempt(lambda: engine.backward(loss(), weight=3))
    engine.step()
    # A step whose batches do not count changes nothing.
    before = engine.full_state_dict()
    engine.backward(loss(), weight=0)
    assert not engine.step() and engine.skipped_steps == 1
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, before[name])
    engine.backward(loss(), weight=2)
    assert engine.step()
    engine.close()
    return found


def test_what_has_no_mean_is_refused() -> None:
    for found in run_ranks(2, refuse):
        assert all("weight=" in text for text in found[:5])
        assert all("engine.scale(loss, weight=n)" in text for text in found[5:])
        assert len(found) == 8


def habits() -> dict[str, float]:
    """Return the norm of a step whose only gradient is that of one loss, whatever came before."""
    start()
    found = {}

    def loss_of(engine: zeroengine.Engine, number: int = 1) -> torch.Tensor:
        return engine(*batch(number, engine.rank))

    def grad(engine: zeroengine.Engine) -> None:
        scaled = engine.scale(loss_of(engine), weight=5)
        torch.autograd.grad(scaled, [engine.module.norm.weight], retain_graph=True)
        scaled.backward()

    def raise_first(engine: zeroengine.Engine) -> None:
        loss = engine.scale(loss_of(engine, 0), weight=16)

        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("a hook of the user")

        loss.register_hook(fail)
        with pytest.raises(RuntimeError, match="a hook of the user"):
            loss.backward()
        engine.backward(loss_of(engine), weight=5)

    def raise_within(engine: zeroengine.Engine) -> None:
        handle = engine.module.blocks[0].norm.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(loss_of(engine, 0), weight=16)
        handle.remove()
        engine.backward(loss_of(engine), weight=5)

    def drop(engine: zeroengine.Engine, how: Any) -> None:
        engine.backward(loss_of(engine, 0), weight=16)
        how(engine)
        engine.backward(loss_of(engine), weight=5)

    def of_inputs(engine: zeroengine.Engine) -> None:
        scaled = engine.scale(loss_of(engine), weight=5)
        scaled.backward(inputs=[torch.zeros(1, requires_grad=True)], retain_graph=True)
        scaled.backward()

    cases = {
        "alone": lambda engine: engine.backward(loss_of(engine), weight=5),
        "autograd.grad": grad,
        "raises first": raise_first,
        "raises within": raise_within,
        "model.zero_grad()": lambda engine: drop(engine, lambda engine: engine.module.zero_grad()),
        "engine.zero_grad()": lambda engine: drop(engine, lambda engine: engine.zero_grad()),
        "zeros": lambda engine: drop(engine, lambda engine: engine.zero_grad(set_to_none=False)),
        "inputs": of_inputs,
    }
    for more in ({}, {"gradient_allreduce_op": "sum"}):
        for name, act in cases.items():
            engine = make_engine(Task(), 3, gradient_accumulation_steps="manual", **more)
            act(engine)
            engine.step()
            found[f"{name} {more}"] = engine.grad_norm or 0.0
            engine.close()
    return found


def test_a_weight_counts_with_its_gradient() -> None:
    for found in run_ranks(2, habits):
        assert found == pytest.approx(dict.fromkeys(found, found["alone {}"]), rel=1e-6)


def differ() -> str:
    start()
    engine = make_engine(TASK, 3)
    engine.backward(engine(*batch(0, engine.rank)), weight=3 if engine.rank else None)
    with pytest.raises(DivergenceError) as raised:
        engine.step()
    return str(raised.value)


def test_ranks_of_which_one_gives_weights_are_named() -> None:
    for text in run_ranks(2, differ):
        assert "weighted losses" in text


def read_gradient() -> list[torch.Tensor]:
    start()
    found = []
    for stage in STAGES:
        engine = make_engine(ACCUMULATED, stage, gradient_accumulation_steps=2)
        for number in range(2):
            ids, labels = uneven(number + 1, engine.rank)
            engine.backward(engine(ids, labels), weight=num_tokens(labels))
            if not number:
                engine.step()
        gradient = zeroengine.full_gradient(engine.module.blocks[1].up.weight)
        assert gradient is not None
        found.append(gradient)
        engine.close()
    return found


def test_a_gradient_that_is_read_has_the_same_mean() -> None:
    model = build()
    seen = [uneven(number + 1, rank) for number in range(2) for rank in range(2)]
    total = sum(num_tokens(labels) for _, labels in seen)
    for ids, labels in seen:
        if num_tokens(labels):
            (model(ids, labels) * num_tokens(labels) / total).backward()
    for found in run_ranks(2, read_gradient):
        for gradient in found:
            assert torch.allclose(gradient, model.blocks[1].up.weight.grad, atol=1e-6)


def norms_and_updates(more: dict[str, Any]) -> tuple[float, list[bool]]:
    """Return the norm of a step of two backwards, and what the calls of ``step`` returned."""
    start()
    engine = make_engine(Task(micro_steps=2), 2, **more)
    counts = engine.config.managed_gradient_accumulation
    updated = []
    for micro_step in range(2):
        engine.backward(engine(*batch(micro_step, engine.rank)))
        if micro_step or counts:
            updated.append(bool(engine.step()))
    norm = engine.grad_norm or 0.0
    engine.backward(engine(*batch(2, engine.rank)))
    updated.append(bool(engine.step()))
    engine.close()
    return norm, updated


def test_steps_end_and_gradients_add_up_as_the_keys_of_deepspeed_say() -> None:
    counted, summed, unmanaged = (
        run_ranks(2, norms_and_updates, more)[0]
        for more in ({}, {"gradient_allreduce_op": "SUM"}, {"managed_gradient_accumulation": False})
    )
    assert counted[1] == [False, True, False] and unmanaged[1] == [True, True]
    assert summed[0] == pytest.approx(2 * counted[0], rel=1e-6) and unmanaged[0] == counted[0]


def reduce_metrics() -> tuple[float, float, str]:
    start()
    engine = make_engine(Task(), 1)
    hits = (3.0, math.nan)[engine.rank]
    means = engine.reduce({"accuracy": hits, "loss": torch.tensor(2.0)}, weight=5 * (1 - engine.rank))
    other = engine.reduce({"accuracy": float(engine.rank)}, weight=torch.tensor(1 + 2 * engine.rank))
    with pytest.raises(ZeroEngineError) as raised:
        engine.reduce({"accuracy": "high"})
    engine.close()
    return float(means["accuracy"]), float(other["accuracy"]), str(raised.value)


def test_metrics_have_weighted_means() -> None:
    for first, second, text in run_ranks(2, reduce_metrics):
        assert (first, second) == (3.0, 0.75)
        assert "accuracy is str" in text
