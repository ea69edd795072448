"""An `initialize` that fails, wherever it does, leaves model, optimizer and schedule as they were."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, start
from zeroengine import ZeroEngineError
from zeroengine.engine.assembly import build_parts
from zeroengine.engine.parts import build_states, connect_passes, partition_model
from zeroengine.engine.ranks import connect_ranks
from zeroengine.engine.reports import start_reports

BF16 = {"bf16": {"enabled": True}}
# The functions that build the parts of an engine, each a record.
BUILDERS = (build_parts, connect_ranks, start_reports, partition_model, connect_passes, build_states)


class InjectedError(Exception):
    """Raised in the midst of the construction of an engine."""


def model_with_extras() -> nn.Module:
    """A model with a frozen part, a parameter in fp64, one in channels-last order, and buffers."""
    model = build(lambda: TinyLM(blocks=2))
    model.wide = nn.Parameter(torch.rand(3).double())
    model.filter = nn.Parameter(torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    model.blocks[0].up.requires_grad_(False)
    # Frozen parameters have no masters, so in bf16 only such values survive; a master has no more than 32 bits.
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.bfloat16().float()
    model.blocks[0].up.bias.data = model.blocks[0].up.bias.data.bfloat16().float()
    model.register_buffer("scale", torch.rand(3))
    model.register_forward_hook(lambda *_: None)
    return model


def facts(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """What must be the same before and after: plain values, so that they can be compared by ``==``."""

    def tensor(value: torch.Tensor) -> Any:
        return type(value), value.dtype, value.requires_grad, value.is_contiguous(), value.tolist()

    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    return {
        "tensors": {name: tensor(value) for name, value in [*model.named_parameters(), *model.named_buffers()]},
        "identities": [id(param) for param in model.parameters()],
        "hooks": {name: [dict(getattr(m, hook)) for hook in hooks] for name, m in model.named_modules()},
        "hooks of parameters": [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        "groups": [{k: list(map(id, v)) if k == "params" else v for k, v in g.items()} for g in optimizer.param_groups],
        "state": [{k: v.tolist() for k, v in state.items()} for state in optimizer.state.values()],
        "attributes": {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}.keys(),
        "hooks of the optimizer": [
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_state_dict_post_hooks),
        ],
        "schedule": None if schedule is None else (type(schedule), schedule.state_dict()),
    }


@contextmanager
def raising_before_line(number: int) -> Iterator[list[int]]:
    """Raise before the line of this number that the functions of `BUILDERS` run; yield how many they ran."""
    sources, lines = {builder.__code__: inspect.getsourcelines(builder) for builder in BUILDERS}, [0]

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code not in sources:
            return None
        source, first = sources[frame.f_code]
        line = source[frame.f_lineno - first].strip()
        # Nothing can fail between a line that makes something and the next one, which notes how to undo it.
        if event == "line" and not line.startswith(("undo.", "setup.undo.", "for handle in ")):
            lines[0] += 1
            if lines[0] == number:
                raise InjectedError(f"before line {frame.f_lineno} of {frame.f_code.co_name}: {line}")
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(
    ("precision", "every"),
    [
        pytest.param(BF16, 3, id="bf16, every third line"),
        pytest.param(BF16, 1, id="bf16", marks=pytest.mark.slow),
        pytest.param({}, 1, id="fp32", marks=pytest.mark.slow),
    ],
)
def test_a_failure_before_each_line_of_the_construction_changes_nothing(precision: dict[str, Any], every: int) -> None:
    model = model_with_extras()
    # Adagrad has state from its construction on.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    schedule = ConstantLR(optimizer, factor=0.5)
    before = facts(model, optimizer, schedule)
    number = 1 - every
    while True:
        number += every
        settings = config(3, optimizer=None, **precision)
        try:
            with raising_before_line(number) as lines:
                engine = zeroengine.initialize(model, optimizer, settings, lr_scheduler=schedule)
            break
        except InjectedError as error:
            assert facts(model, optimizer, schedule) == before, error
    assert number > lines[0] > 40, "all functions were tried"
    engine.backward(engine(*batch(0, 0)))
    assert engine.step(), "and after all failures it trains"
    engine.close()


def raise_injected(optimizer: torch.optim.Optimizer) -> Any:
    raise InjectedError


def refused(case: str, stage: int) -> tuple[str, bool]:
    """Whether a refusal leaves the model as it was, though its parameters are partitioned by then or not."""
    start()
    model = model_with_extras()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = dict(BF16)
    schedule: Any = None
    if case == "moments":
        optimizer, more["optimizer_state_dtype"] = torch.optim.RAdam(model.parameters()), "bf16"
    elif case == "other schedule":
        schedule = ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
    elif case == "plateau":
        schedule = ReduceLROnPlateau(optimizer)
    elif case == "script":
        more, model.extra = {}, torch.jit.script(nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        schedule = raise_injected
    known = schedule if hasattr(schedule, "state_dict") else None
    before = facts(model, optimizer, known)
    with pytest.raises((ZeroEngineError, InjectedError)) as caught:
        zeroengine.initialize(model, optimizer, config(stage, optimizer=None, **more), lr_scheduler=schedule)
    return str(caught.value), facts(model, optimizer, known) == before


CASES = {
    "moments": "keep moments in bf16 and int8, not RAdam",
    "other schedule": "drives another optimizer",
    "plateau": "needs a metric",
    "script": "no hooks on a ScriptModule",
    "raising schedule": "",
}


def refuse_all(stage: int) -> dict[str, tuple[str, bool]]:
    # At stage 0 nothing needs hooks on a part of the model.
    return {case: refused(case, stage) for case in CASES if stage or case != "script"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_refusal_leaves_model_and_optimizer_as_they_were(stage: int) -> None:
    for results in run_ranks(2, refuse_all, stage):
        for case, (message, unchanged) in results.items():
            assert CASES[case] in message, case
            assert unchanged, case
