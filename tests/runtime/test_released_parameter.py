"""A parameter whose values are away: what may be asked of it, and what brings it back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.quantized_models import torchao_linear
from zeroengine.runtime.released_parameter import mark_gathered, mark_released


class Marked(nn.Parameter):
    """Somebody's own class of parameters."""

    mark = "mine"


class Asked(Exception):
    pass


def refuse(param: nn.Parameter, use: str) -> None:
    raise Asked(use)


@pytest.fixture(params=[nn.Parameter, Marked])
def param(request: pytest.FixtureRequest) -> nn.Parameter:
    made = request.param(torch.arange(6.0).view(2, 3))
    mark_released(made, resolver=refuse)
    return made


def test_metadata_of_a_released_parameter_works(param: nn.Parameter) -> None:
    assert param.shape == param.size() == (2, 3) and param.ndim == param.dim() == 2 and len(param) == 2
    assert param.numel() == torch.numel(param) == param.nelement() == 6
    assert param.nbytes == 24 and param.element_size() == param.itemsize == 4
    assert param.dtype is torch.float32 and param.is_floating_point() and torch.is_floating_point(param)
    assert not param.is_complex() and not param.is_sparse
    assert param.device.type == "cpu" and not param.is_cuda and param.layout is torch.strided
    assert param.stride() == (3, 1) and param.is_contiguous()
    assert param.is_leaf and param.grad_fn is None and param.requires_grad
    assert "shape=(2, 3)" in repr(param) == str(param)
    assert isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
    assert {param: 1}[param] == 1 and param in {param}


def test_gradients_and_hooks_of_a_released_parameter_can_be_set(param: nn.Parameter) -> None:
    assert param.grad is None
    param.grad = torch.ones(2, 3)
    assert param.grad.sum() == 6
    del param.grad
    param.requires_grad_(False)
    assert not param.requires_grad
    param.requires_grad = True
    seen: list[torch.Tensor] = []
    param.register_hook(seen.append)
    param.register_post_accumulate_grad_hook(seen.append)
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.zero_grad()
    optimizer.step()
    module = nn.Module()
    module.weight = param
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    module.zero_grad()


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "matmul": lambda p: torch.ones(1, 2) @ p,
    "sum": lambda p: p.sum(),
    "linear": lambda p: nn.functional.linear(torch.ones(3), p),
    "by keyword": lambda p: nn.functional.linear(torch.ones(3), weight=p),
    "stack": lambda p: torch.stack([torch.ones(2, 3), p]),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "where": lambda p: torch.where(torch.tensor(True), 0.0, p),
    "eq": lambda p: p == 0,
    "getitem": lambda p: p[0],
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: torch.empty(2, 3).copy_(p),
    "out": lambda p: torch.add(torch.ones(2, 3), 1, out=p),
    ".data": lambda p: p.data,
    "set .data": lambda p: setattr(p, "data", torch.zeros(2, 3)),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "view": lambda p: p.view(-1),
    "t": lambda p: p.t(),
    ".T": lambda p: p.T,
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "numpy": lambda p: p.numpy(),
    "iteration": lambda p: list(p),
    "bool": lambda p: bool(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "norm": lambda p: torch.nn.utils.get_total_norm([p]),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_released_values_calls_the_resolver_first(param: nn.Parameter, use: str) -> None:
    with pytest.raises(Asked) as asked:
        USES[use](param)
    assert str(asked.value), "and says what the use is"


@pytest.mark.parametrize("use", [name for name in USES if name not in ("item", "bool")])
def test_a_use_works_as_usual_after_the_resolver_gathered_the_values(param: nn.Parameter, use: str) -> None:
    asked = []

    def bring(wanted: nn.Parameter, use: str) -> None:
        asked.append(wanted)
        mark_gathered(wanted)

    mark_released(param, resolver=bring)
    param.requires_grad_(use not in ("numpy", "out", "zero_", "setitem"))
    USES[use](param)
    assert len(asked) == 1 and asked[0] is param


def test_two_parameters_of_one_unit_call_the_resolver_once() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))
    asked = []

    def bring(wanted: nn.Parameter, use: str) -> None:
        asked.append(use)
        mark_gathered(weight)
        mark_gathered(bias)

    mark_released(weight, resolver=bring)
    mark_released(bias, resolver=bring)
    assert nn.functional.linear(torch.ones(3), weight, bias).tolist() == [4.0, 4.0]
    assert len(asked) == 1


def test_a_gathered_parameter_is_an_ordinary_one_of_its_own_class(param: nn.Parameter) -> None:
    mark_released(param, resolver=refuse)  # twice is once
    mark_gathered(param)
    mark_gathered(param)
    assert type(param) in (nn.Parameter, Marked) and getattr(param, "mark", "mine") == "mine"
    assert not [name for name in vars(param) if "zeroengine" in name]
    assert (param + 1).sum().item() == 21


def test_a_released_parameter_is_freed_like_any_other() -> None:
    made = nn.Parameter(torch.ones(3))
    mark_released(made, resolver=refuse)
    reference = weakref.ref(made)
    del made
    gc.collect()
    assert reference() is None


def test_a_use_that_gathers_runs_by_the_rules_of_the_parameters_own_class() -> None:
    linear = torchao_linear(3, 2)
    x = torch.ones(1, 3)
    expected = linear(x)
    mark_released(linear.weight, resolver=lambda param, operation: mark_gathered(param))
    assert type(linear.weight).__name__ == "Int8Tensor", "libraries compare the names of classes"
    assert torch.equal(linear(x), expected)
