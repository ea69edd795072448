"""Which optimizers the fused kernels update: their moments, and what a kernel call takes of their groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.lion import Lion

Group = Mapping[str, Any]


@dataclass(frozen=True)
class FusedRule:
    """How the kernels update as optimizers with one ``step`` method do.

    Attributes:
        moments: The names of the moments, as in the state of the torch optimizer.
        settings: Returns, of an optimizer and one of its groups, the keyword arguments of ``ops.update_step`` that do
            not change with the step, and the rule.
        keeps_step: Whether the state of the torch optimizer has the step count.
        initial_value: Returns, of a group, the value of the moments before the first step.
    """

    moments: tuple[str, ...]
    settings: Callable[[torch.optim.Optimizer, Group], dict[str, Any]]
    keeps_step: bool = False
    initial_value: Callable[[Group], float] = lambda group: 0.0


def fused_rule_of(optimizer: torch.optim.Optimizer) -> FusedRule | None:
    """Return the rule by which the kernels update as ``optimizer`` does; None if they do not."""
    # The kernels have no AMSGrad.
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return None
    # A subclass that overrides ``step`` may update differently. torch wraps every class's ``step`` in a profiling hook,
    # so what is inside is compared.
    step = inspect.unwrap(type(optimizer).step)
    if step is inspect.unwrap(torch.optim.SGD.step) and not any(g["momentum"] for g in optimizer.param_groups):
        return FusedRule((), _sgd)
    return _RULES.get(step)


def settings_of(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    """Return what ``FusedRule.settings`` does, with what all rules share. See ``ops.update_step``.

    Args:
        optimizer: The optimizer, which a fused rule updates.
        group: One of its groups. A learning rate that is a tensor stays one.
    """
    rule = _RULES[inspect.unwrap(type(optimizer).step)]
    shared = {"lr": group["lr"], "weight_decay": float(group["weight_decay"])}
    return {**shared, "maximize": bool(group.get("maximize", False)), **rule.settings(optimizer, group)}


def _adam(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    # Weight decay either multiplies the parameter (AdamW) or adds to the gradient (Adam).
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))
    return {"rule": "adamw" if decoupled else "adam", "eps": float(group["eps"]), **_betas(group)}


def _lion(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    return {"rule": "lion", **_betas(group)}


def _betas(group: Group) -> dict[str, Any]:
    return {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}


def _sgd(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    if not group["momentum"]:
        return {"rule": "sgd"}
    factors = {"beta1": float(group["momentum"]), "beta2": float(group["dampening"])}
    return {"rule": "momentum_sgd", "nesterov": bool(group["nesterov"]), **factors}


def _adagrad(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    return {"rule": "adagrad", "beta1": float(group["lr_decay"]), "eps": float(group["eps"])}


_ADAM = FusedRule(("exp_avg", "exp_avg_sq"), _adam, keeps_step=True)
_RULES = {
    inspect.unwrap(step): rule
    for step, rule in (
        (torch.optim.Adam.step, _ADAM),
        (torch.optim.AdamW.step, _ADAM),
        (Lion.step, FusedRule(("exp_avg",), _lion)),
        (torch.optim.SGD.step, FusedRule(("momentum_buffer",), _sgd)),
        (
            torch.optim.Adagrad.step,
            FusedRule(("sum",), _adagrad, True, lambda group: float(group["initial_accumulator_value"])),
        ),
    )
}

MOMENTS = frozenset(moment for rule in _RULES.values() for moment in rule.moments)


def refuse_new_momentum(name: str) -> None:
    """Raise: a group of SGD has momentum now, and no group had any when the states were made."""
    raise ZeroEngineError(
        f"{name}: momentum was 0 in every group at initialize(), so no momentum is kept. Pass an optimizer with the "
        "momentum that the first steps are to have, above 0."
    )
