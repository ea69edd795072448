"""An optimizer that looks at other elements would train otherwise on shards, and is refused there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zeroengine.optim.elementwise import is_elementwise

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


def normalize_each(params: Params) -> None:
    for param in params:
        assert param.grad is not None
        param.sub_(param.grad / param.grad.norm())


def normalize_all(params: Params) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    for param, grad in zip(params, grads, strict=True):
        param.sub_(grad / norm)


def add_noise(params: Params) -> None:
    for param in params:
        param.add_(torch.randn_like(param))


def raise_for_small(params: Params) -> None:
    raise ValueError("too small")


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
    # What cannot be decided is not refused.
    "noise": lambda params: Written(params, add_noise),
    "cannot be tried": lambda params: Written(params, raise_for_small),
}
OTHERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "by name": torch.optim.Adafactor,
    "a norm of each parameter": lambda params: Written(params, normalize_each),
    "a norm of all": lambda params: Written(params, normalize_all),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *OTHERS])
def test_an_update_that_looks_at_other_elements_is_found(name: str) -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = (ELEMENTWISE | OTHERS)[name](params)
    random_state, num_states = torch.get_rng_state(), len(optimizer.state)
    assert is_elementwise(optimizer) == (name in ELEMENTWISE)
    # The trial leaves no trace.
    assert len(optimizer.state) == num_states and [group["params"] for group in optimizer.param_groups] == [params]
    assert all(torch.equal(param, torch.ones_like(param)) and param.grad is None for param in params)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"]
