"""Parameters and buffers that share memory are tied, or refused by name, and never separated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, adamw, settings, start, take_steps
from zeroengine import ZeroEngineError


def tied_by_memory() -> nn.Module:
    model = TinyLM(tied=False)
    model.head.weight.data = model.tok.weight.data
    return model


def losses_of(model: nn.Module, stage: int, optimizer: Any = None) -> list[float]:
    engine = zeroengine.initialize(model, optimizer or adamw(model), settings(Task(), stage))
    try:
        return take_steps(engine, range(3))
    finally:
        engine.close()


def tied(stage: int) -> None:
    start()
    expected = losses_of(build(TinyLM), stage)
    model = build(tied_by_memory)
    head, weight = model.head.weight, model.tok.weight
    optimizer = adamw(model)
    engine = zeroengine.initialize(model, optimizer, settings(Task(), stage))
    assert model.head.weight is weight and sum(p is weight for p in optimizer.param_groups[0]["params"]) == 1
    with pytest.raises(ZeroEngineError, match=r"Use the parameter tok\.weight"):
        head.sum()
    assert take_steps(engine, range(3)) == expected
    engine.release()
    assert model.head.weight is head and head.data_ptr() == weight.data_ptr(), "it is as it was"
    assert any(p is head for p in optimizer.param_groups[0]["params"])
    assert torch.equal(head, weight)
    # Models without memory, and an optimizer that is built later, and a part of a compiled model.
    with zeroengine.meta_init():
        deferred = build(tied_by_memory)
    assert losses_of(deferred, stage, torch.optim.AdamW) == losses_of(build(TinyLM), stage, torch.optim.AdamW)
    with torch.device("meta"):
        on_meta = tied_by_memory()
    with zeroengine.gathered(zeroengine.initialize(on_meta, None, config(stage)).module):
        assert on_meta.head.weight is on_meta.tok.weight
    wrapped = torch.compile(build(tied_by_memory), backend="eager", dynamic=True)
    engine = zeroengine.initialize(wrapped, None, config(stage))
    assert wrapped.head.weight is wrapped.tok.weight
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_over_the_same_memory_train_as_one(stage: int) -> None:
    run_ranks(2, tied, stage)


class Plain(nn.Module):
    """Two matrices and whatever a case adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def transposed(model: Any) -> None:
    model.second.weight.data = model.first.weight.data.t()


def slice_of_parameter(model: Any) -> None:
    model.part = nn.Parameter(model.first.weight.data[1:3])


def interlaced(model: Any) -> None:
    model.part = nn.Parameter(model.first.weight.data[:, ::2])


def buffer_of_parameter(model: Any) -> None:
    model.register_buffer("view", model.first.weight.detach())


def buffer_of_row(model: Any) -> None:
    model.register_buffer("view", model.first.weight.data[2])


def buffers_in_part(model: Any) -> None:
    model.register_buffer("a", torch.arange(9.0))
    model.register_buffer("b", model.a[1:])


def other_dtype(model: Any) -> None:
    model.register_buffer("bits", model.first.weight.data.view(torch.int32))


def numpys(model: Any) -> None:
    model.register_buffer("array", torch.from_numpy(model.first.weight.data.numpy()))


def expanded(model: Any) -> None:
    model.scale = nn.Parameter(torch.ones(1, 1).expand(6, 6))


def one_frozen(model: Any) -> None:
    model.second.weight.data = model.first.weight.data
    model.second.weight.requires_grad_(False)


def hooked(model: Any) -> None:
    model.second.weight.data = model.first.weight.data
    model.second.weight.register_hook(lambda grad: grad)


REFUSED: dict[Callable[[Any], None], str] = {
    transposed: "parameter first.weight with parameter second.weight",
    slice_of_parameter: "share a part of their memory",
    interlaced: "share a part of their memory",
    buffer_of_parameter: "buffer view",
    buffer_of_row: "parameter first.weight with buffer view",
    buffers_in_part: "buffer a with buffer b",
    other_dtype: "buffer bits",
    numpys: "buffer array",
    expanded: "parameter scale of shape .* in one place of memory",
    one_frozen: "one of them is frozen",
    hooked: "hooks are registered on second.weight",
}


def model_of(case: Callable[[Any], None]) -> Any:
    torch.manual_seed(0)
    model = Plain()
    case(model)
    return model


def refused() -> None:
    start()
    for case, message in REFUSED.items():
        model = model_of(case)
        before = {name: (value.data_ptr(), value.tolist()) for name, value in model.state_dict().items()}
        with pytest.raises(ZeroEngineError, match=message):
            zeroengine.initialize(model, None, config(3))
        assert before == {name: (value.data_ptr(), value.tolist()) for name, value in model.state_dict().items()}
    # A parameter is on the meta device, and its buffer is not.
    for case in (slice_of_parameter, buffer_of_row):
        with zeroengine.meta_init():
            model = model_of(case)
        with pytest.raises(ZeroEngineError, match=REFUSED[case]):
            zeroengine.initialize(model, None, config(3))
    # Two groups of other settings cannot hold what is one parameter.
    model = model_of(lambda model: setattr(model.second.weight, "data", model.first.weight.data))
    groups = [{"params": [model.first.weight], "lr": 0.1}, {"params": [model.second.weight], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    with pytest.raises(ZeroEngineError, match=r"first.weight are in param_groups\[0\] and \[1\]"):
        zeroengine.initialize(model, optimizer, config(3, optimizer=None))
    assert model.second.weight.data_ptr() == model.first.weight.data_ptr()
    assert model.second.weight is optimizer.param_groups[1]["params"][0] is not model.first.weight
    assert torch.isfinite(model(torch.ones(6)))


def test_what_overlaps_in_part_is_refused_by_name_and_nothing_changes() -> None:
    run_ranks(2, refused)


def columns(model: Any) -> None:
    both = torch.rand(6, 12)
    model.first.weight.data, model.second.weight.data = both[:, :6], both[:, 6:]


def halves(model: Any) -> None:
    flat = torch.rand(72)
    model.first.weight.data, model.second.weight.data = flat[:36].view(6, 6), flat[36:].view(6, 6)


def frozen_expanded(model: Any) -> None:
    model.scale = nn.Parameter(torch.ones(1, 1).expand(6, 6), requires_grad=False)
    model.register_buffer("positions", torch.arange(6).expand(2, -1))


def same_buffers(model: Any) -> None:
    model.register_buffer("a", torch.zeros(3))
    model.register_buffer("b", model.a.view(3))


def empty(model: Any) -> None:
    model.nothing, model.more = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0))


def lstm(model: Any) -> None:
    model.lstm = nn.LSTM(3, 3, 2)
    flat = torch.rand(sum(p.numel() for p in model.lstm.parameters()))
    start = 0
    for param in model.lstm.parameters():
        param.data = flat[start : start + param.numel()].view(param.shape)
        start += param.numel()


def ordinary() -> None:
    start()
    for case in (columns, halves, frozen_expanded, same_buffers, empty, lstm):
        for stage in STAGES:
            model = model_of(case)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            engine = zeroengine.initialize(model, None, config(stage))
            state = engine.full_state_dict()
            assert all(torch.equal(value, state[name]) for name, value in expected.items()), case
            engine.backward(engine(torch.ones(6)))
            engine.step()
            if case is same_buffers:
                model.a.add_(1)
                assert torch.equal(model.b, torch.ones(3))
            engine.close()
            if case is same_buffers:
                model.b.add_(1)
                assert torch.equal(model.a, model.b) and float(model.a[0]) == 2


def test_slices_of_one_storage_and_shared_buffers_work_as_before() -> None:
    run_ranks(2, ordinary)


def test_a_retired_parameter_is_forgotten_with_a_failed_initialize() -> None:
    model = build(tied_by_memory)
    head = model.head.weight
    before = head.detach().clone()

    def fail(optimizer: torch.optim.Optimizer) -> Any:
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            zeroengine.initialize(model, adamw(model), settings(Task(), 3), lr_scheduler=fail)
        assert model.head.weight is head and torch.equal(head, before)
        assert head.data_ptr() == model.tok.weight.data_ptr() and head.shape == (VOCAB, WIDTH)
    model(*batch(0, 0)).backward()
    assert head.grad is not None
