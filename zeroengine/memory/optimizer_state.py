"""The bytes of state that a torch optimizer keeps of a parameter, found by one step over a tiny one."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import copy_without_parameters
from zeroengine.optim.choice import rules_of
from zeroengine.optim.elementwise import is_elementwise
from zeroengine.optim.factory import build_optimizer
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.partition.cut import UnitPlan
from zeroengine.utils.tensors import tensors_in

# An optimizer such as Muon takes matrices alone.
PROBE_SHAPE = (2, 3)


@dataclass(frozen=True)
class StateSizes:
    """The state of one parameter, after its first update.

    Attributes:
        element_sizes: For each state with a value per element, the bytes of one element.
        number_sizes: For each other state, such as a step count, the bytes that every part of a parameter has, and of
            which a rule on whole parameters may keep more than a number, such as a value per row.
    """

    element_sizes: tuple[int, ...]
    number_sizes: tuple[int, ...]


class OptimizerProbe:
    """Knows what state an optimizer keeps, without knowing its class.

    An optimizer that raises where it updates a lone parameter counts as one with two states for each element.

    Args:
        optimizer: The optimizer over the model's parameters. None: that of the configuration, or AdamW where it names
            none.
        config: The configuration.
        plans: The units.

    Attributes:
        optimizer: The optimizer.
        rules: Returns the rule of each algorithm, by the largest degree of the optimizer's states. See ``rules_of``.

    Raises:
        ZeroEngineError: There is none, and that of the configuration cannot be made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, config: Config, plans: Sequence[UnitPlan]) -> None:
        if optimizer is None:
            section = config.optimizer
            kind, hyperparameters = ("AdamW", {}) if section is None else (section.type, dict(section.params))
            if kind == "Muon":
                raise ZeroEngineError("pass the optimizer of type Muon with which the units were cut")
            params = [param for plan in plans for _, param in plan.params if plan.trainable]
            optimizer = build_optimizer(kind, params or [param for _, param in plans[0].params], hyperparameters)
        self.optimizer = optimizer
        # To try an optimizer of an unknown class takes a while.
        self.rules = functools.cache(functools.partial(rules_of, optimizer, plans))
        self._places: dict[nn.Parameter, tuple[torch.optim.Optimizer, Mapping[str, Any], bool]] = {
            param: (member, group, is_whole)
            for member, is_whole in ((member, not is_elementwise(member)) for member in members_of(optimizer))
            for group in member.param_groups
            for param in group["params"]
        }
        self._states: dict[tuple[int, torch.dtype, tuple[int, ...]], list[torch.Tensor] | None] = {}

    def sizes(self, param: nn.Parameter, dtype: torch.dtype) -> StateSizes:
        """Return the state of one parameter of the model, whose master has ``dtype``."""
        member, group, is_whole = self._places[param]
        dimensions = tuple(param.shape) if is_whole else PROBE_SHAPE
        # Small numbers stand for the dimensions, each for another one. Dimensions of a state that are no such number
        # are constant.
        shape = tuple(5 + 2 * i if size > 1 else size for i, size in enumerate(dimensions))
        size_of = dict(zip(shape, dimensions, strict=True))
        key = id(group), dtype, shape
        if key not in self._states:
            self._states[key] = self._measure(member, group, dtype, shape)
        if (states := self._states[key]) is None:
            return StateSizes((dtype.itemsize, dtype.itemsize), ())
        others = (state for state in states if state.shape != shape or not shape)
        return StateSizes(
            tuple(state.element_size() for state in states if state.shape == shape and shape),
            tuple(state.element_size() * math.prod(size_of.get(n, n) for n in state.shape) for state in others),
        )

    def _measure(
        self, member: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        """Return the state of a parameter of a shape after a step; None: the optimizer raises."""
        device = next((param.device for param in group["params"] if not param.is_meta), torch.device("cpu"))
        gpus = [device] if device.type == "cuda" else []
        # The caller may build its model inside ``torch.device("meta")``, and an update may draw random numbers.
        try:
            with torch.device(device), torch.random.fork_rng(gpus):
                return self._state_after_step(member, group, torch.zeros(shape, dtype=dtype, device=device))
        # An optimizer of the user may raise anything where a parameter is not one of its model.
        except Exception:
            return None

    def _state_after_step(
        self, member: torch.optim.Optimizer, group: Mapping[str, Any], zeros: torch.Tensor
    ) -> list[torch.Tensor]:
        probe = nn.Parameter(zeros)
        probe.grad = torch.zeros_like(probe)
        # What the update changes besides is a copy.
        clone = copy.deepcopy(copy_without_parameters(member))
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        clone.param_groups = [{**settings, "params": [probe]}]
        # Some optimizers, such as Adagrad, make their state in the constructor.
        with_state = [param for param in group["params"] if param in member.state]
        like = max(with_state, key=torch.Tensor.dim, default=None)
        if like is not None:
            clone.state[probe] = {
                key: torch.zeros_like(probe) if _has_shape_of(value, like) else _with_values(value)
                for key, value in member.state[like].items()
            }
        clone.step()
        return list(tensors_in(dict(clone.state.get(probe, {}))))


def _with_values(value: Any) -> Any:
    """Return a copy, of zeros if ``value`` is a tensor on the meta device."""
    is_meta = isinstance(value, torch.Tensor) and value.is_meta
    return torch.zeros_like(value, device="cpu") if is_meta else copy.deepcopy(value)


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == param.shape
