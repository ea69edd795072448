"""Parameters and buffers that share memory are refused by name, and never separated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, start
from zeroengine import ZeroEngineError


class Plain(nn.Module):
    """Two matrices and whatever a case adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def transposed(model: Any) -> None:
    model.second.weight.data = model.first.weight.data.t()


def adapters_of_peft(model: Any) -> None:
    model.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.rand(2, 6))})
    model.lora_B = nn.Linear(2, 6, bias=False)
    model.lora_B.weight = nn.Parameter(model.lora_embedding_A["default"].t())


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


def same_parameters(model: Any) -> None:
    model.second.weight.data = model.first.weight.data


def loaded_by_assignment(model: Any) -> None:
    model.second.weight = model.first.weight
    model.load_state_dict(model.state_dict(), assign=True)


def same_buffers(model: Any) -> None:
    model.register_buffer("a", torch.zeros(3))
    model.register_buffer("b", model.a.view(3))


REFUSED: dict[Callable[[Any], None], str] = {
    transposed: "parameter first.weight with parameter second.weight",
    adapters_of_peft: r"lora_embedding_A\.default with .*compute_transposes\(\).*ensure_weight_tying=False",
    slice_of_parameter: "share memory",
    interlaced: "share memory",
    buffer_of_parameter: "buffer view",
    buffer_of_row: "parameter first.weight with buffer view",
    buffers_in_part: "buffer a with buffer b",
    other_dtype: "buffer bits",
    numpys: "buffer array",
    expanded: "parameter scale of shape .* in one place of memory",
    same_parameters: r"first.weight with parameter second.weight.*`head.weight = embedding.weight`",
    loaded_by_assignment: r"first.weight with parameter second.weight.*assign=True",
    same_buffers: "buffer a with buffer b",
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
    for case in (same_parameters, slice_of_parameter, buffer_of_row):
        with zeroengine.meta_init():
            model = model_of(case)
        with pytest.raises(ZeroEngineError, match=REFUSED[case]):
            zeroengine.initialize(model, None, config(3))


def test_what_overlaps_is_refused_by_name_and_nothing_changes() -> None:
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
    for case in (columns, halves, frozen_expanded, empty, lstm):
        for stage in STAGES:
            model = model_of(case)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            engine = zeroengine.initialize(model, None, config(stage))
            state = engine.full_state_dict()
            assert all(torch.equal(value, state[name]) for name, value in expected.items()), case
            engine.backward(engine(torch.ones(6)))
            engine.step()
            engine.close()


def test_slices_of_one_storage_work_as_before() -> None:
    run_ranks(2, ordinary)
