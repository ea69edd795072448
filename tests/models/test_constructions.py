"""The table of models that break others: the same bits at every stage, the numbers of plain PyTorch."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_evaluation import record
from tests.distributed.test_parameters import Net
from tests.distributed.training import STAGES, Task, Trained, assert_close, assert_same_bits, make_engine, start
from tests.models.constructions import TABLE, Construction, loss_of
from tests.parametrization import EVERY_TRANSPORT, SHARED_MEMORY_AND_SLOW_GLOO
from zeroengine import ZeroEngineError

EVERY_STAGE = (0, 1, 2, 3)
PRECISIONS: dict[str, Any] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
HELD_OUT = 99
# What differs little from another construction, or is tested in fp32 beside what it is about.
ONLY_SLOW = (
    "head that reads the embedding",
    "nested, a dict out",
    "nested, a tuple out",
    "integer and complex buffers",
    "forward called by its name",
    "functions with a backward of their own",
    "convolutions, channels last",
    "checkpoints within blocks",
)
# What is tested in fp32 beside its definition.
ONLY_SLOW_IN_BF16 = (
    "adapters beside frozen layers",
    "module called twice",
    "containers between modules",
    "checkpoints of blocks",
)
# The first shows the order of units, the second gathers ahead by it, and the third is as all that follow.
STEPS = 3


def train(engine: zeroengine.Engine, construction: Construction, steps: int) -> Trained:
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(engine(*construction.data(step, engine.rank)))
        engine.backward(loss)
        assert engine.step()
        losses.append(loss.item())
        norms.append(engine.grad_norm)
    if construction.evaluates:
        engine.eval()
        with torch.no_grad():
            losses.append(loss_of(engine(*construction.data(HELD_OUT, engine.rank))).item())
    engine.gatherer.quiesce()
    assert engine.memory().gathered == 0
    return Trained(losses, norms, engine.full_state_dict())


Found = dict[str, dict[int, Trained] | str]  # of one rank: by construction and stage, or what went wrong


def train_all(names: Sequence[str], stages: Sequence[int], steps: int, more: dict[str, Any]) -> Found:
    start()
    found: Found = {}
    for name in names:
        construction = TABLE[name]
        low = "bf16" in more and construction.lowers_buffers
        given = more | ({"data_types": {"buffer_dtype": "bf16"}} if low else {})
        task = Task(construction.factory, construction.data, construction.optimizer)
        try:
            by_stage = found[name] = {}
            for stage in stages:
                engine = make_engine(task, stage, **copy.deepcopy(given))
                by_stage[stage] = train(engine, construction, steps)
                engine.close()
        except Exception:
            found[name] = f"stage {stage}: {traceback.format_exc()}"
    return found


def train_plainly(name: str, world_size: int, steps: int, low: torch.dtype | None = None) -> list[Trained]:
    """What each rank sees in plain data parallelism. ``low``: models compute in it, and an fp32 master is updated."""
    construction = TABLE[name]
    master = build(construction.factory)
    optimizer = construction.optimizer(master)
    models = [build(construction.factory) for _ in range(world_size)]
    if low is not None:
        for model in models:
            lower(model, low, buffers=construction.lowers_buffers)
    wide = list(master.parameters())
    for param in wide:  # as where autocast is done by hand
        if param.dtype is torch.bfloat16 or (low is not None and param.is_floating_point()):
            param.data = param.data.float()

    def loss_at(step: int, rank: int) -> torch.Tensor:
        return loss_of(models[rank](*(lowered(x, low) for x in construction.data(step, rank))))

    losses: list[list[float]] = [[] for _ in models]
    norms = []
    for step in range(steps):
        for rank, model in enumerate(models):
            loss = loss_at(step, rank)
            loss.backward()
            losses[rank].append(loss.item())
            for own, param in zip(model.parameters(), wide, strict=True):
                if own.grad is not None:
                    grad = own.grad.to(param.dtype) / world_size
                    param.grad = grad if param.grad is None else param.grad + grad
                    own.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(wide, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for model in models:
                for own, param in zip(model.parameters(), wide, strict=True):
                    own.copy_(param)
    if construction.evaluates:
        for rank, model in enumerate(models):
            model.eval()
            with torch.no_grad():
                losses[rank].append(loss_at(HELD_OUT, rank).item())
    return [Trained(own, norms, model.state_dict()) for own, model in zip(losses, models, strict=True)]


def lower(model: nn.Module, low: torch.dtype, *, buffers: bool) -> None:
    """Parameters to ``low``, and buffers. Batch norm stays in fp32, as its running statistics do."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
            module.register_forward_hook(lambda module, args, output: output.to(low))
            continue
        for param in module.parameters(recurse=False):
            param.data = lowered(param.data, low)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = lowered(buffer, low if buffers else None)


def lowered(value: Any, low: torch.dtype | None) -> Any:
    floating = low is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(low) if floating else value


@functools.cache
def trained(
    world_size: int, steps: int, precision: str, transport: str, stages: tuple[int, ...], only_slow: bool = False
) -> list[Found]:
    """Train those of `ONLY_SLOW` or the others, so that the normal run leaves the former out."""
    names = [name for name, c in TABLE.items() if c.in_fp32 or precision == "bf16" or world_size > 2]
    if precision == "bf16" and stages != EVERY_STAGE:
        names = [name for name in names if not TABLE[name].in_fp32 and name not in ONLY_SLOW_IN_BF16]
    names = [name for name in names if (name in ONLY_SLOW) is only_slow]
    more = {"comm": {"transport": transport}} | PRECISIONS[precision]
    return run_ranks(world_size, train_all, names, stages, steps, more, timeout=300)


def same_at_every_stage(ranks: list[Found], name: str) -> list[Trained]:
    """What each rank saw."""
    seen = []
    for found in ranks:
        by_stage = found[name]
        assert not isinstance(by_stage, str), by_stage
        first = next(iter(by_stage.values()))
        for stage, other in by_stage.items():
            assert_same_bits(first, other, f"stage {stage}")
        seen.append(first)
    return seen


def check(name: str, world_size: int, steps: int, transport: str, stages: tuple[int, ...]) -> None:
    ranks = same_at_every_stage(trained(world_size, steps, "fp32", transport, stages, name in ONLY_SLOW), name)
    for found, plain in zip(ranks, train_plainly(name, world_size, steps), strict=True):
        assert_close([found], plain, TABLE[name].tolerance)


@SHARED_MEMORY_AND_SLOW_GLOO
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ONLY_SLOW else ()) for name, c in TABLE.items() if c.in_fp32],
)
def test_fp32_constructions_match_plain_pytorch_and_the_same_bits_at_every_stage(name: str, transport: str) -> None:
    check(name, 2, STEPS, transport, STAGES)


@pytest.mark.slow  # those above and below have two ranks; test_degrees has four
@EVERY_TRANSPORT
@pytest.mark.parametrize("name", TABLE)
def test_constructions_match_plain_pytorch_on_4_ranks(name: str, transport: str) -> None:
    check(name, 4, 2, transport, (0, 3))


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *((name, (0, 3)) for name, c in TABLE.items() if not c.in_fp32 and name not in ONLY_SLOW_IN_BF16),
        *(pytest.param(name, EVERY_STAGE, marks=pytest.mark.slow) for name in TABLE),
    ],
)
def test_bf16_constructions_follow_plain_pytorch_and_the_same_bits_at_every_stage(
    name: str, stages: tuple[int, ...]
) -> None:
    """The same bits at every stage; and a path that leaves that of plain PyTorch by less than 5 % of its length."""
    before = build(TABLE[name].factory).state_dict()
    ranks = same_at_every_stage(trained(2, STEPS, "bf16", "gloo", stages, name in ONLY_SLOW), name)
    for found, plain in zip(ranks, train_plainly(name, 2, STEPS, torch.bfloat16), strict=True):
        assert found.losses == pytest.approx(plain.losses, rel=2e-2)
        off = moved = 0.0
        for key, value in plain.state.items():
            assert found.state[key].dtype is value.dtype, key
            if value.is_floating_point() or value.is_complex():
                off += (found.state[key] - value).abs().square().sum().item()
                moved += (before[key] - value).abs().square().sum().item()
            else:
                assert torch.equal(found.state[key], value), key
        assert off < 0.05**2 * moved


# -- what it costs ------------------------------------------------------------------------------------


def adapters_cost() -> list[tuple[int, zeroengine.Memory, int, int]]:
    """By stage: the memory after a step, and the elements that are frozen and trained."""
    start()
    construction = TABLE["adapters beside frozen layers"]
    found = []
    for stage in EVERY_STAGE:
        task = Task(construction.factory, construction.data, construction.optimizer)
        engine = make_engine(task, stage, comm={"transport": "gloo"})  # does not round up to pages
        engine.backward(engine(*construction.data(0, engine.rank)))
        engine.step()
        engine.gatherer.quiesce()
        params = list(engine.module.parameters())
        trained = sum(param.numel() for param in params if param.requires_grad)
        found.append((stage, engine.memory(), sum(param.numel() for param in params) - trained, trained))
    return found


def test_frozen_layers_beside_adapters_cost_their_own_bytes_alone() -> None:
    """No gradient and no optimizer state; at stage 3 they are partitioned as the others are."""
    for found in run_ranks(2, adapters_cost):
        for stage, memory, frozen, trained in found:
            padding = 2048  # of a frozen and a trainable unit for each of three blocks, and the rest
            assert memory.gradients <= 4 * trained / (1 if stage < 2 else 2) + padding
            assert memory.optimizer <= 8 * trained / (1 if stage < 1 else 2) + padding
            assert 0 <= memory.parameters - 4 * (frozen + trained) / (1 if stage < 3 else 2) <= padding < 2 * frozen
            assert memory.master == memory.gathered == 0


def gathers(names: Sequence[str], transport: str) -> list[list[str]]:
    """The units of a step's all-gathers."""
    start()
    found = []
    for name in names:
        construction = TABLE[name] if name in TABLE else Construction(Net)
        task = Task(construction.factory, construction.data, construction.optimizer)
        engine = make_engine(task, 3, comm={"transport": transport})
        issued: list[str] = []
        record(engine.gatherer._transport.gather, ["all_gather"], issued)
        for step in range(3):
            issued.clear()
            engine.backward(loss_of(engine(*construction.data(step, engine.rank))))
            engine.step()
        found.append(sorted(issued))
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
def test_checkpoints_within_blocks_gather_no_unit_again(transport: str) -> None:
    names = ["without", "checkpoints within blocks", "reentrant checkpoints within blocks"]
    for without, *others in run_ranks(2, gathers, names, transport):
        assert max(without.count(name) for name in without) == 2, "for the forward and for the backward"
        assert others == [without, without]


# -- what is refused ----------------------------------------------------------------------------------


def script() -> list[str]:
    start()
    messages = []
    for stage in (1, 2, 3):
        model = Net()
        model.blocks[0] = torch.jit.script(model.blocks[0])
        with pytest.raises(ZeroEngineError) as error:
            make_engine(Task(lambda: model), stage)  # noqa: B023
        messages.append(str(error.value))
    return messages


def test_script_modules_are_refused_with_the_remedy() -> None:
    for messages in run_ranks(2, script):
        for message in messages:
            assert message.startswith("torch allows no hooks on a ScriptModule, such as ")
            assert message.endswith(": pass the model as it was before torch.jit. torch.compile serves instead.")
