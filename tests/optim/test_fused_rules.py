"""Each fused rule has the moments of torch's optimizer, and knows which of them may be negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zeroengine.ops import MOMENT_SIGNS, RULES
from zeroengine.optim.fused_rules import fused_rule_of
from zeroengine.optim.lion import Lion

Make = Callable[[Any], torch.optim.Optimizer]

# Of each rule with moments, an optimizer that is updated by it.
OPTIMIZERS: dict[str, Make] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lion": Lion,
    "momentum_sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def test_every_rule_is_tested_with_the_optimizer_that_it_stands_for() -> None:
    assert OPTIMIZERS.keys() == {name for name, rule in RULES.items() if rule.moments}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_have_the_names_and_the_signs_of_torchs_state(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = OPTIMIZERS[name]([param])
    for _ in range(3):
        param.grad = torch.randn(1000, generator=generator)
        optimizer.step()
    state = {key: bool((value < 0).any()) for key, value in optimizer.state[param].items() if key != "step"}
    assert state == RULES[name].moments
    rule = fused_rule_of(optimizer)
    assert rule is not None and rule.moments == tuple(state)
    assert rule.settings(optimizer, optimizer.param_groups[0])["rule"] == name
    assert all(MOMENT_SIGNS[key] == is_signed for key, is_signed in state.items())
