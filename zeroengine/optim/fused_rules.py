"""Which optimizers the fused kernels update: their moments, and what a kernel call takes of their groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.ops import RULES
from zeroengine.optim.lion import Lion

Group = Mapping[str, Any]


@dataclass(frozen=True)
class FusedRule:
    """How the kernels update as optimizers with one ``step`` method do.

    Attributes:
        name: The rule in ``ops.RULES`` whose moments are kept. A group may be updated by another rule with the same
            moments, or with none of them.
        settings: Returns, of an optimizer and one of its groups, the keyword arguments of ``ops.update_step`` that do
            not change with the step, and the rule.
        keeps_step: Whether the state of the torch optimizer has the step count.
        initial_value: Returns, of a group, the value of the moments before the first step.
    """

    name: str
    settings: Callable[[torch.optim.Optimizer, Group], dict[str, Any]]
    keeps_step: bool = False
    initial_value: Callable[[Group], float] = lambda group: 0.0

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the moments, as in the state of the torch optimizer."""
        return tuple(RULES[self.name].moments)


def fused_rule_of(optimizer: torch.optim.Optimizer) -> FusedRule | None:
    """Return the rule by which the kernels update as ``optimizer`` does; None if they do not."""
    # The kernels have no AMSGrad.
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        return None
    # A subclass that overrides ``step`` may update differently. torch wraps every class's ``step`` in a profiling hook,
    # so what is inside is compared.
    step = inspect.unwrap(type(optimizer).step)
    if step is inspect.unwrap(torch.optim.SGD.step) and not any(g["momentum"] for g in optimizer.param_groups):
        return FusedRule("sgd", _sgd)
    return _RULE_OF_STEP.get(step)


def class_rule_of(optimizer: torch.optim.Optimizer) -> FusedRule:
    """Return the rule of the class of ``optimizer``, of which ``fused_rule_of`` was not None, whatever its groups."""
    return _RULE_OF_STEP[inspect.unwrap(type(optimizer).step)]


def settings_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return of each group what ``FusedRule.settings`` does, with what all rules share. See ``ops.update_step``.

    Args:
        optimizer: The optimizer, which a fused rule updates. A learning rate that is a tensor stays one.
        names: The moments that are kept.

    Raises:
        ZeroEngineError: A group has a setting that needs a state that is not kept.
    """
    rule, settings = class_rule_of(optimizer), []
    for group in optimizer.param_groups:
        if group.get("amsgrad") or (group.get("momentum") and not names):
            key = "amsgrad" if group.get("amsgrad") else "momentum"
            raise ZeroEngineError(
                f"{type(optimizer).__name__}: a group has {key} = {group[key]} now, which no group had at "
                f"initialize(), so the state for it is not kept. Pass an optimizer that has {key} from the first step."
            )
        shared = {"lr": group["lr"], "weight_decay": float(group["weight_decay"])}
        shared["maximize"] = bool(group.get("maximize", False))
        settings.append({**shared, **rule.settings(optimizer, group)})
    return settings


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


_ADAM = FusedRule("adam", _adam, keeps_step=True)
_RULE_OF_CLASS: dict[type[torch.optim.Optimizer], FusedRule] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    Lion: FusedRule("lion", _lion),
    torch.optim.SGD: FusedRule("momentum_sgd", _sgd),
    torch.optim.Adagrad: FusedRule("adagrad", _adagrad, True, lambda group: float(group["initial_accumulator_value"])),
}
_RULE_OF_STEP = {inspect.unwrap(kind.step): rule for kind, rule in _RULE_OF_CLASS.items()}
# The classes that fused kernels update, by name.
FUSED_NAMES = tuple(kind.__name__ for kind in _RULE_OF_CLASS)
