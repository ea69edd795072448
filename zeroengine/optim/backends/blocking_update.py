"""The backend that waits for the norm, and then lets a rule update the units of each algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.backends.average_update import AverageUpdate
from zeroengine.optim.backends.fused_update import FusedUpdate
from zeroengine.optim.backends.interface import BackendParts, ShardState, UpdateRule
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult, StepSettings

T = TypeVar("T")


class BlockingUpdate:
    """See ``UpdateBackend``.

    Args:
        parts: The parts of the backend.
        rules: The rule of each algorithm, in the order of ``members_of``.

    Attributes:
        rules: The rules, each over the shards of its algorithm.
    """

    is_async: ClassVar[bool] = False

    def __init__(self, parts: BackendParts, rules: Sequence[type[UpdateRule]]) -> None:
        self._parts, self._averages = parts, AverageUpdate(parts)
        self.rules: list[UpdateRule] = []
        self._rule_of: dict[int, UpdateRule] = {}
        for member, rule_type in zip(members_of(parts.base_optimizer), rules, strict=True):
            params = {param for group in member.param_groups for param in group["params"]}
            # A unit is of one algorithm: see ``cut_units``.
            shards = [shard for shard in parts.shards if shard.unit.params[0] in params]
            rule = rule_type(dataclasses.replace(parts, base_optimizer=member, shards=shards))
            self.rules.append(rule)
            self._rule_of |= {shard.index: rule for shard in shards}
        # These rules also update the averages of the parameters that have a gradient.
        self._fused = [index for index, rule in self._rule_of.items() if isinstance(rule, FusedUpdate)]
        self.exchange_bytes = sum(rule.exchange_bytes for rule in self.rules)

    def state_of(self, shard: OptimizerShard) -> ShardState:
        """See ``UpdateBackend``."""
        return self._rule_of[shard.index].state

    def step(self, settings: StepSettings) -> StepResult:
        """See ``UpdateBackend``."""
        return self._parts.reduction.step_on_host(settings, partial(self._update, settings.number))

    def _update(self, number: int, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        # The rules look at the groups of the members, which take them over here.
        members_of(self._parts.base_optimizer)
        for rule in self.rules:
            rule.update(factor, has_grad)
        self._averages.update(number, has_grad, self._fused)

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateBackend``."""
        if len(self.rules) != 1:
            raise ZeroEngineError("a method of the optimizer's own cannot run where groups have several algorithms")
        return self.rules[0].run(act)

    def await_step_counts(self) -> None:
        """Do nothing: step counts are on the host."""
