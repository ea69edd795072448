"""Whole gradients, optimizer states and masters, read and replaced, are what plain PyTorch has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, start
from tests.parametrization import TRANSPORTS, in_turn
from zeroengine import (
    ZeroEngineError,
    full_gradient,
    full_master,
    full_optimizer_state,
    set_full_gradient,
    set_full_master,
    set_full_optimizer_state,
)

STAGES = (0, 1, 2, 3)
# Each value of the tests below has one of them, in turn.
STAGE_IN_TURN = [(0,), (3,), (1,), (2,)]


def half_frozen() -> nn.Module:
    model = TinyLM()  # the head is tied to the embedding
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    return model


def two_groups(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    if kind == "adam":
        groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "lr": 1e-3, "betas": (0.8, 0.9)}]
        return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)
    return torch.optim.SGD([{"params": matrices, "nesterov": True}, {"params": vectors, "lr": 0.1}], 0.05, 0.9)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return two_groups(kind, [p for p in model.parameters() if p.requires_grad])


KEYS = {"adam": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}
OPTIMIZERS = pytest.mark.parametrize("kind", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])


def task_of(kind: str, **more: Any) -> Task:
    return Task(half_frozen, optimizer=functools.partial(optimizer_of, kind), **more)


def close(found: torch.Tensor | None, expected: torch.Tensor | None, *what: Any, atol: float = 1e-6) -> None:
    assert (found is None) is (expected is None), what
    if found is not None and expected is not None:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=atol, msg=lambda m: f"{what}: {m}")


def random_like(value: torch.Tensor, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Other values on each rank: those of rank 0 are to hold."""
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    return scale * torch.randn(value.shape, generator=generator)


# -- reading ------------------------------------------------------------------------------------------


def read_beside_plain(kind: str, local: tuple[bool, ...], stages: Sequence[int]) -> None:
    """Trains an engine and, on every rank, plain PyTorch on all ranks' data; compares after every call."""
    rank = start()
    task = task_of(kind, micro_steps=len(local))
    for stage in stages:
        engine = make_engine(task, stage)
        model = build(half_frozen)
        optimizer = task.optimizer(model)
        pairs = list(zip(engine.module.parameters(), model.parameters(), strict=True))
        trained = [pair for pair in pairs if pair[1].requires_grad]
        for step in range(2):
            optimizer.zero_grad()
            assert all(full_gradient(mine) is None for mine, _ in trained)
            for micro_step, stays in enumerate(local):
                number = step * len(local) + micro_step
                for other in range(2):
                    (model(*batch(number, other)) / (2 * len(local))).backward()
                with engine.no_sync() if stays else contextlib.nullcontext():
                    engine.backward(engine(*batch(number, rank)))
                for mine, plain in trained:
                    close(full_gradient(mine), plain.grad, stage, step, micro_step)
                engine.step()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            for mine, plain in pairs:
                close(full_master(mine), plain.detach(), stage, step)
            for mine, plain in trained:
                for key in KEYS[kind]:
                    close(full_optimizer_state(mine, key), optimizer.state[plain][key], stage, step, key)
        assert engine.memory().gathered == 0


NEVER, FIRST, LAST, BOTH = (False, False), (True, False), (False, True), (True, True)


READS = [("adam", NEVER), ("adam", FIRST), ("adam", LAST), ("sgd", LAST), ("sgd", BOTH)]
SLOW_READS = [("adam", FIRST), ("sgd", LAST)]


@in_turn(
    ("read", "stages"),
    [pytest.param(read, id=str(read), marks=pytest.mark.slow if read in SLOW_READS else ()) for read in READS],
    STAGE_IN_TURN,
)
def test_full_values_are_those_of_plain_pytorch(read: tuple[str, tuple[bool, ...]], stages: tuple[int, ...]) -> None:
    """Each case names the optimizer, and which micro-steps of a step run inside ``no_sync``."""
    run_ranks(2, read_beside_plain, *read, stages)


def low_gradients() -> None:
    rank = start()
    for stage in STAGES:
        engine = make_engine(task_of("adam"), stage, bf16={"enabled": True})
        model = build(half_frozen).bfloat16()
        for other in range(2):
            (model(*batch(0, other)) / 2).backward()
        engine.backward(engine(*batch(0, rank)))
        for mine, plain in zip(engine.module.parameters(), model.parameters(), strict=True):
            if plain.grad is not None:
                found, expected = full_gradient(mine), plain.grad.float()
                assert found is not None and found.dtype is torch.float32
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
                assert full_master(mine).dtype is full_optimizer_state(mine, "exp_avg").dtype is torch.float32
        engine.step()


def test_gradients_of_bf16_are_read_in_fp32() -> None:
    run_ranks(2, low_gradients)


# -- replacing ----------------------------------------------------------------------------------------


def plain_step(engine: zeroengine.Engine, kind: str, clip: float) -> list[tuple[nn.Parameter, dict[str, torch.Tensor]]]:
    """What the optimizer makes, in plain PyTorch, of what the functions show: each master, and its states."""
    params = [p for p in engine.module.parameters() if p.requires_grad]
    plain = [nn.Parameter(full_master(p)) for p in params]
    optimizer = two_groups(kind, plain)
    for mine, theirs in zip(params, plain, strict=True):
        theirs.grad = full_gradient(mine)
        with contextlib.suppress(ZeroEngineError):  # none yet
            optimizer.state[theirs] = {key: full_optimizer_state(mine, key) for key in KEYS[kind]}
    torch.nn.utils.clip_grad_norm_(plain, clip)
    optimizer.step()
    return [(p, optimizer.state[p]) for p in plain]


def replace_and_step(kind: str, more: dict[str, Any], stages: Sequence[int]) -> None:
    rank = start()
    task = task_of(kind, micro_steps=2)
    low = next((dtype for name, dtype in LOW.items() if name in more), None)
    for stage in stages:
        engine = make_engine(task, stage, **more)
        params = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        tied, bias, scale = params["tok.weight"], params["blocks.2.up.bias"], params["norm.weight"]

        def check_step(stage: int = stage, engine: zeroengine.Engine = engine, params: Any = params) -> None:
            expected = plain_step(engine, kind, task.clip)
            assert engine.step()
            for (name, mine), (plain, states) in zip(params.items(), expected, strict=True):
                close(full_master(mine), plain.detach(), stage, name)
                for key in KEYS[kind]:
                    close(full_optimizer_state(mine, key), states[key], stage, name, key)

        def micro_step(number: int, engine: zeroengine.Engine = engine) -> None:
            engine.backward(engine(*batch(number, rank)))

        micro_step(0)
        alone = full_gradient(tied)
        assert alone is not None and not torch.equal(alone, torch.zeros(alone.shape))
        given = random_like(tied, 1, 0.01)
        set_full_gradient(tied, given)
        dist.broadcast(given, 0)
        close(full_gradient(tied), given, stage, atol=2e-4)  # not reduced yet: in the dtype it will be sent in
        assert not engine.step()
        set_full_gradient(bias, torch.ones(72))  # and between two micro-steps
        with engine.no_sync():
            micro_step(1)
        later = full_gradient(bias)
        assert later is not None and 0 < (later - 1).abs().max() < 0.5, "later backwards add to it"
        set_full_gradient(bias, random_like(bias, 2))
        micro_step(2)
        close(full_gradient(tied) - given, (full_gradient(tied) - given).clamp(-0.5, 0.5), stage)
        set_full_gradient(scale, 100 * torch.ones(24))
        assert torch.equal(full_gradient(scale), 100 * torch.ones(24))
        check_step()

        for number in (3, 4):
            micro_step(number)
            engine.step() if number == 3 else None
        for seed, (param, key) in enumerate((param, key) for param in (tied, bias) for key in KEYS[kind]):
            old = full_optimizer_state(param, key)
            new = random_like(old, seed, 0.01).abs() if old.dim() else torch.tensor(7.0 + rank)
            set_full_optimizer_state(param, key, new)
            dist.broadcast(new, 0)
            assert torch.equal(full_optimizer_state(param, key), new), (stage, key)
        value = random_like(scale, 5)
        set_full_master(scale, value)
        dist.broadcast(value, 0)
        assert torch.equal(full_master(scale), value)
        with zeroengine.gathered(scale):
            assert torch.equal(scale.detach(), value.to(low or torch.float32)), stage
        assert engine.memory().gathered == 0
        check_step()


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "predivided": {"prescale_gradients": True, "gradient_predivide_factor": 4.0},
}


WRITES = [*(("adam", precision) for precision in PRECISIONS), ("sgd", "fp32"), ("sgd", "bf16")]
SLOW_WRITES = [("adam", "fp32"), ("adam", "fp16"), ("sgd", "bf16")]


@in_turn(
    ("write", "stages"),
    [pytest.param(write, id=str(write), marks=pytest.mark.slow if write in SLOW_WRITES else ()) for write in WRITES],
    STAGE_IN_TURN,
)
def test_the_next_step_takes_set_values(write: tuple[str, str], stages: tuple[int, ...]) -> None:
    kind, precision = write
    run_ranks(2, replace_and_step, kind, PRECISIONS[precision], stages)


def masters_everywhere(more: dict[str, Any], transports: Sequence[str]) -> None:
    rank = start()
    for stage in STAGES:
        for transport in transports:
            engine = make_engine(task_of("adam"), stage, comm={"transport": transport}, **more)
            engine.backward(engine(*batch(0, rank)))
            engine.step()
            before = engine.full_state_dict()
            changed = {}
            for number, name in enumerate(("tok.weight", "blocks.0.up.weight", "blocks.2.down.bias", "norm.bias")):
                param = engine.module.get_parameter(name)  # blocks.0 and norm.bias are frozen
                value = random_like(param, number)
                set_full_master(param, value)
                dist.broadcast(value, 0)
                changed[name] = value.to(param.dtype)
                kept = value if param.requires_grad else value.to(param.dtype).float()
                assert torch.equal(full_master(param), kept)
            changed["head.weight"] = changed["tok.weight"]
            state = engine.full_state_dict()
            for name, value in (before | changed).items():
                assert torch.equal(state[name], value), (stage, name)
            assert engine.memory().gathered == 0
            seen = engine(*batch(1, rank)).item()
            plain = build(half_frozen).to(engine.module.norm.weight.dtype)
            plain.load_state_dict(before | changed)
            assert seen == plain(*batch(1, rank)).item(), "every rank computes with it"
            engine.close()


@pytest.mark.parametrize(
    ("world_size", "precision", "transports"),
    [
        (2, "fp32", ["gloo"]),
        (3, "bf16", ["shm"]),
        *(
            pytest.param(*case, TRANSPORTS, marks=pytest.mark.slow)
            for case in ((2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
        ),
    ],
)
def test_a_master_reaches_every_rank_and_frozen_parameters_too(
    world_size: int, precision: str, transports: Sequence[str]
) -> None:
    run_ranks(world_size, masters_everywhere, PRECISIONS[precision], transports)


# -- parameters without gradients, states that are no values of elements --------------------------------


class Sometimes(nn.Module):
    """``a`` is always used, ``b`` on rank 1, ``c`` never; ``number`` has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.number = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        y = self.a(x) * self.number
        return (self.b(y) if rank else y).square().mean()


def make(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=1e-2)


def sometimes() -> None:
    rank = start()
    x = torch.arange(10.0).view(2, 5) / 10
    for name, key in (("AdamW", "exp_avg"), ("NAdam", "mu_product"), ("NAdam", "exp_avg"), ("Adagrad", "sum")):
        for stage in STAGES:
            model = build(Sometimes)
            engine = make_engine(Task(Sometimes, optimizer=functools.partial(make, name)), stage)
            optimizer = make(name, model)
            for _ in range(2):
                optimizer.zero_grad()
                for other in range(2):
                    (model(x + other, other) / 2).backward()
                engine.backward(engine(x + rank, rank))
                for mine, plain in zip(engine.module.parameters(), model.parameters(), strict=True):
                    close(full_gradient(mine), plain.grad, name, stage)
                engine.step()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            for mine, plain in zip(engine.module.parameters(), model.parameters(), strict=True):
                if key in optimizer.state[plain]:
                    close(full_optimizer_state(mine, key), optimizer.state[plain][key], name, key, stage, atol=1e-5)
            number = engine.module.number
            set_full_optimizer_state(number, key, torch.tensor(0.25))
            assert full_optimizer_state(number, key) == 0.25
            set_full_master(number, torch.tensor(-3.0))
            assert full_master(number) == -3 and full_master(number).dim() == 0
            bias = engine.module.c.bias
            engine.backward(engine(x + rank, rank))
            set_full_gradient(bias, torch.ones(7))  # as if it had been used
            before = full_master(bias)
            engine.step()
            assert (full_master(bias) < before).all(), (name, stage)


def test_full_values_of_unused_parameters_numbers_and_optimizers_on_shards() -> None:
    run_ranks(2, sometimes)


def factored() -> None:
    """Adafactor runs at stage 0 alone, where a state may have any shape."""
    rank = start()
    engine = make_engine(Task(optimizer=functools.partial(make, "Adafactor")), 0)
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    weight = engine.module.blocks[0].up.weight
    row = full_optimizer_state(weight, "row_var")
    assert row.shape == (72, 1) and row.all()
    set_full_optimizer_state(weight, "row_var", torch.full((72, 1), 2.0 + rank))
    assert torch.equal(full_optimizer_state(weight, "row_var"), torch.full((72, 1), 2.0))


def test_an_optimizer_state_of_any_shape_is_read_and_set_where_it_is_unpartitioned() -> None:
    run_ranks(2, factored)


# -- errors -------------------------------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ZeroEngineError) as error:
        call()
    return str(error.value)


def wrong_calls(kind: str) -> list[dict[str, str]]:
    rank = start()
    found = []
    for stage in STAGES:
        engine, untouched = (make_engine(task_of(kind), stage) for _ in range(2))
        weight, bias = engine.module.blocks[2].up.weight, engine.module.blocks[2].up.bias
        frozen = engine.module.norm.bias
        first = KEYS[kind][0]
        messages = {}
        for each in (engine, untouched):
            each.backward(each(*batch(0, rank)))
            each.step()
            each.backward(each(*batch(1, rank)))
        calls = {
            "no engine": lambda: full_gradient(nn.Parameter(torch.ones(3))),
            "no parameter": lambda: full_master(torch.ones(3)),  # type: ignore[arg-type]
            "a module": lambda engine=engine: full_master(engine.module),
            "frozen": lambda p=frozen: full_gradient(p),
            "frozen, set": lambda p=frozen: set_full_gradient(p, torch.ones(24)),
            "frozen, state": lambda p=frozen, k=first: full_optimizer_state(p, k),
            "frozen, set state": lambda p=frozen, k=first: set_full_optimizer_state(p, k, torch.ones(24)),
            "frozen, shape": lambda p=frozen: set_full_master(p, torch.ones(23)),
            "gradient's shape": lambda p=weight: set_full_gradient(p, torch.ones(24, 72)),
            "state's shape": lambda p=weight, k=first: set_full_optimizer_state(p, k, torch.tensor(1.0)),
            "master's shape": lambda p=weight: set_full_master(p, torch.ones(72 * 24)),
            "no tensor": lambda p=bias: set_full_master(p, 3.0),  # type: ignore[arg-type]
            "key": lambda p=weight: full_optimizer_state(p, "exp_av"),
            "key, set": lambda p=weight: set_full_optimizer_state(p, "exp_av", torch.ones(72, 24)),
            "rank 1's shape": lambda p=bias: set_full_master(p, torch.ones(72 + rank)),
            "rank 0's shape": lambda p=bias: set_full_gradient(p, torch.ones(73 - rank)),
            "rank 1's key": lambda p=bias, k=first: full_optimizer_state(p, "nothing" if rank else k),
            "other parameters": lambda w=weight, b=bias: full_gradient(w if rank else b),
            "other calls": lambda w=weight: full_master(w) if rank else full_gradient(w),
        }
        if kind == "adam":
            calls["number's shape"] = lambda p=bias: set_full_optimizer_state(p, "step", torch.ones(72))
        messages |= {what: error_of(call) for what, call in calls.items()}

        inside: list[str] = []

        def hook(_: Any, inside: list[str] = inside, bias: nn.Parameter = bias) -> None:
            inside.append(error_of(lambda: full_gradient(bias)))

        handle = engine.module.head.register_forward_hook(lambda m, a, out, hook=hook: out.register_hook(hook) and None)
        for each in (engine, untouched):
            assert each.step()
            each.backward(each(*batch(2, rank)))
            assert each.step()
        handle.remove()
        (messages["inside a backward"],) = inside
        for mine, theirs in zip(engine.module.parameters(), untouched.module.parameters(), strict=True):
            assert torch.equal(full_master(mine), full_master(theirs)), "wrong calls changed nothing"
        found.append(messages)
    return found


@OPTIMIZERS
def test_wrong_calls_are_errors_on_every_rank_and_change_nothing(kind: str) -> None:
    for rank, found in enumerate(run_ranks(2, wrong_calls, kind)):
        for messages in found:
            for what in ("no engine", "no parameter", "a module"):
                assert "that was passed to zeroengine.initialize()" in messages[what]
            for what in ("frozen", "frozen, set", "frozen, state", "frozen, set state"):
                assert messages[what] == "parameter norm.bias is frozen: it has no gradient and no optimizer state"
            assert "norm.bias: the value is to have shape (24,), the one given has (23,)" in messages["frozen, shape"]
            assert "shape (72, 24), the one given has (24, 72)" in messages["gradient's shape"]
            assert "shape (72, 24), the one given has ()" in messages["state's shape"]
            assert "shape (72, 24), the one given has (1728,)" in messages["master's shape"]
            assert "found 3.0" in messages["no tensor"]
            for what in ("key", "key, set"):
                keys = "exp_avg, exp_avg_sq, step" if kind == "adam" else "momentum_buffer"
                assert f"no state 'exp_av' of blocks.2.up.weight; it keeps: {keys}" in messages[what]
            other = "rank {} failed in set_full_{} of blocks.2.up.bias: "
            assert messages["rank 1's shape"].startswith(other.format(1, "master")) is (rank == 0)
            assert messages["rank 0's shape"].startswith(other.format(0, "gradient")) is (rank == 1)
            for what in ("rank 1's key", "other parameters", "other calls"):
                assert messages[what].startswith("the ranks make different calls: rank 0 in full_"), messages[what]
            assert "not during one" in messages["inside a backward"]
            if kind == "adam":
                assert "shape (), the one given has (72,)" in messages["number's shape"]
