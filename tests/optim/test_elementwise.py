"""An optimizer that looks at other elements would train otherwise on shards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.elementwise import check_looks_at_one_parameter, is_elementwise
from zeroengine.optim.factory import build_optimizer
from zeroengine.optim.muon import Muon

Params = list[torch.nn.Parameter]


def of_own_class(base: type[torch.optim.Optimizer], **options: Any) -> Callable[[Params], torch.optim.Optimizer]:
    """An optimizer whose class is not torch's, so that it is tried."""
    return lambda params: type(f"My{base.__name__}", (base,), {})(params, **options)


class Written(torch.optim.Optimizer):
    """An optimizer with an update of its own."""

    def __init__(self, params: Params, update: Callable[[Params], None]) -> None:
        super().__init__(params, {"lr": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.update([param for group in self.param_groups for param in group["params"] if param.grad is not None])


class Normalized(Written):
    """As a configuration names it, by its import path."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, normalize_each)


class WithModes(torch.optim.SGD):
    """As schedule-free optimizers, which begin in evaluation mode."""

    mode = "evaluation"

    def train(self) -> None:
        self.mode = "training"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.mode == "training"
        print("a step")
        warnings.warn("a step", stacklevel=1)
        super().step()


class WithInitialState(Written):
    """Momentum that exists before the first step."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, normalize_each)
        for param in params:
            self.state[param] = {"sum": torch.full_like(param, 0.1), "count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / self.state[param]["sum"].add_(param.grad.square()).sqrt())


class Late(Written):
    """As some kinds of Shampoo, which begin with another rule."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 20:
            super().step()


class Adapted(torch.optim.Optimizer):
    """As D-adaptation: tiny steps at first, by a rate that grows with the progress of all parameters together."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"rate": 1e-6, "sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                start = self.state[param].setdefault("start", param.clone())
                group["sum"] += float((param.grad * (start - param)).sum())
            group["rate"] = max(group["rate"] * 1.1, abs(group["sum"]))
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["rate"])


def normalize_each(params: Params, size: float = 1.0) -> None:
    for param in params:
        assert param.grad is not None
        param.sub_(param.grad / param.grad.norm(), alpha=size)


def normalize_matrices(params: Params) -> None:
    assert all(param.ndim == 2 for param in params)
    normalize_each(params)


def normalize_all(params: Params) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    for param, grad in zip(params, grads, strict=True):
        param.sub_(grad / norm)


def add_noise(params: Params) -> None:
    for param in params:
        param.add_(torch.randn_like(param))


def refuse_small(params: Params) -> None:
    if any(param.numel() < 100 for param in params):
        raise ValueError("too small")
    normalize_each(params)


def normalize_heads(params: Params) -> None:
    for param in params:
        assert param.grad is not None
        for head, grad in zip(param.unflatten(0, (3, -1)), param.grad.unflatten(0, (3, -1)), strict=True):
            head.sub_(grad / grad.norm())


def raise_always(params: Params) -> None:
    raise KeyError("scale")


ELEMENTWISE: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "sgd": of_own_class(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": of_own_class(torch.optim.AdamW, amsgrad=True),
    "radam": of_own_class(torch.optim.RAdam),
    "nadam": of_own_class(torch.optim.NAdam),
    "adagrad": of_own_class(torch.optim.Adagrad),
    "rmsprop": of_own_class(torch.optim.RMSprop, centered=True),
    "rprop": of_own_class(torch.optim.Rprop),
    "adadelta": of_own_class(torch.optim.Adadelta),
    "asgd": of_own_class(torch.optim.ASGD),
    "a rate of 0": of_own_class(torch.optim.SGD, lr=0.0),
    "torch's own": torch.optim.SGD,
    "modes": WithModes,
    "state before the first step": WithInitialState,
}
ONE_PARAMETER: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "by name": torch.optim.Adafactor,
    "a norm of each parameter": lambda params: Written(params, normalize_each),
    "of a configuration": lambda params: build_optimizer(f"{__name__}.Normalized", params, {}),
    "for matrices alone": lambda params: Written(params, normalize_matrices),
    "at later steps": lambda params: Late(params, normalize_each),
    "tiny steps": lambda params: Written(params, lambda params: normalize_each(params, 1e-9)),
    # What cannot be decided is right on whole parameters.
    "noise": lambda params: Written(params, add_noise),
    "three heads": lambda params: Written(params, normalize_heads),
    "muon of three matrices": lambda params: Muon([{"params": params[:1], "num_matrices": 3}]),
    "not for small parameters": lambda params: Written(params, refuse_small),
}
SEVERAL: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "a norm of all": lambda params: Written(params, normalize_all),
    "a rate from all": Adapted,
}
ALL = ELEMENTWISE | ONE_PARAMETER | SEVERAL


@pytest.mark.parametrize("name", ALL)
def test_what_an_update_looks_at_is_found(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = ALL[name](params)
    random_state, num_states = torch.get_rng_state(), len(optimizer.state)
    assert is_elementwise(optimizer) == (name in ELEMENTWISE)
    with pytest.raises(ZeroEngineError, match="several parameters") if name in SEVERAL else contextlib.nullcontext():
        check_looks_at_one_parameter(optimizer)
    # The trial leaves no trace.
    assert capfd.readouterr() == ("", "") and getattr(optimizer, "mode", "") in ("evaluation", "")
    assert (
        len(optimizer.state) == num_states
        and optimizer.param_groups[0]["params"] == params[: 1 if "muon" in name else 2]
    )
    assert all(torch.equal(param, torch.ones_like(param)) and param.grad is None for param in params)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.param_groups[0].get("lr") == optimizer.defaults.get("lr")


def test_an_optimizer_that_cannot_be_tried_is_refused_with_the_exception_of_its_step() -> None:
    optimizer = Written([torch.nn.Parameter(torch.ones(2, 2))], raise_always)
    assert not is_elementwise(optimizer)
    with pytest.raises(ZeroEngineError, match=r"Written .* raised KeyError: 'scale'\. Before initialize\(\)") as caught:
        check_looks_at_one_parameter(optimizer)
    assert isinstance(caught.value.__cause__, KeyError)


def try_one_with_a_collective() -> tuple[bool, int]:
    def average(params: Params) -> None:
        for param in params:
            dist.all_reduce(param.grad)
            param.sub_(param.grad)
            reduced.append(param)

    start()
    reduced: Params = []
    optimizer = Written([torch.nn.Parameter(torch.ones(2, 2))], average)
    with pytest.raises(ZeroEngineError, match="collectives of its own"):
        check_looks_at_one_parameter(optimizer)
    return is_elementwise(optimizer), len(reduced)


def test_a_collective_of_an_optimizer_waits_for_no_other_rank() -> None:
    """Such as the first Muon, whose ranks divide the matrices: in a trial, a rank may raise where another one waits."""
    assert run_ranks(1, try_one_with_a_collective) == [(False, 0)]
