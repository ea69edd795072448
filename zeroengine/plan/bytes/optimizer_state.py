"""The bytes of state that a torch optimizer keeps for each element, found by one step over a tiny parameter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.optim.backends.adam_state import has_adam_rule
from zeroengine.optim.caller_optimizer import copy_without_parameters
from zeroengine.optim.choice import can_offload
from zeroengine.optim.factory import build_optimizer

# An optimizer such as Muon takes matrices alone.
PROBE_SHAPE = (2, 3)


@dataclass(frozen=True)
class StateSizes:
    """The state of one parameter, after its first update.

    Attributes:
        element_sizes: For each state with a value per element, the bytes of one element.
        number_sizes: For each other state, such as a step count, the bytes that every part of a parameter has.
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
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
        if optimizer is None:
            section = config.optimizer
            probe = [nn.Parameter(torch.zeros(PROBE_SHAPE, device="cpu"))]
            kind, params = ("AdamW", {}) if section is None else (section.type, dict(section.params))
            with torch.device("cpu"):
                optimizer = build_optimizer(kind, probe, params)
        self._optimizer = optimizer
        # The parameter of an optimizer that is built here is none of the model.
        self._group_of = {param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
        self._sizes: dict[tuple[int, torch.dtype], StateSizes] = {}
        # Every unit is updated by one backend, and the fused kernels take fp32 masters alone.
        self.has_adam_rule, self.can_offload = has_adam_rule(optimizer), can_offload(optimizer)

    def sizes(self, param: nn.Parameter, dtype: torch.dtype) -> StateSizes:
        """Return the state of one parameter of the model, whose master has ``dtype``."""
        group = self._group_of.get(param, 0)
        if (group, dtype) not in self._sizes:
            self._sizes[group, dtype] = self._measure(self._optimizer.param_groups[group], dtype)
        return self._sizes[group, dtype]

    def _measure(self, group: Mapping[str, Any], dtype: torch.dtype) -> StateSizes:
        device = next((param.device for param in group["params"] if not param.is_meta), torch.device("cpu"))
        gpus = [device] if device.type == "cuda" else []
        # The caller may build its model inside ``torch.device("meta")``, and an update may draw random numbers.
        try:
            with torch.device(device), torch.random.fork_rng(gpus):
                state = self._state_after_step(group, dtype, device)
        # An optimizer of the user may raise anything where a parameter is not one of its model.
        except Exception:
            return StateSizes((dtype.itemsize, dtype.itemsize), ())
        # State of another shape, as Adafactor's, is at most this.
        return StateSizes(
            tuple(value.element_size() for value in state if value.dim()),
            tuple(value.nbytes for value in state if not value.dim()),
        )

    def _state_after_step(
        self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        probe = nn.Parameter(torch.zeros(PROBE_SHAPE, dtype=dtype, device=device))
        probe.grad = torch.zeros_like(probe)
        # What the update changes besides is a copy.
        clone = copy.deepcopy(copy_without_parameters(self._optimizer))
        settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        clone.param_groups = [{**settings, "params": [probe]}]
        # Some optimizers, such as Adagrad, make their state in the constructor.
        with_state = [param for param in group["params"] if param in self._optimizer.state]
        like = max(with_state, key=torch.Tensor.dim, default=None)
        if like is not None:
            clone.state[probe] = {
                key: torch.zeros_like(probe) if _has_shape_of(value, like) else _with_values(value)
                for key, value in self._optimizer.state[like].items()
            }
        clone.step()
        return [value for value in clone.state.get(probe, {}).values() if isinstance(value, torch.Tensor)]


def _with_values(value: Any) -> Any:
    """Return a copy, of zeros if ``value`` is a tensor on the meta device."""
    is_meta = isinstance(value, torch.Tensor) and value.is_meta
    return torch.zeros_like(value, device="cpu") if is_meta else copy.deepcopy(value)


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == param.shape
