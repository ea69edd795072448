"""The update of any element-wise torch optimizer, run over parameters that are views of the shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from zeroengine.optim.backends.interface import BackendParts, SpanState, StateKeys
from zeroengine.optim.backends.over_shards import OptimizerOverShards
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.partition.layout import ShardSpan

T = TypeVar("T")


class TorchOptimizer:
    """See ``UpdateBackend`` and ``ShardState``. The state is that of a copy of the caller's optimizer."""

    is_async: ClassVar[bool] = False
    keys = None

    def __init__(self, parts: BackendParts) -> None:
        self._parts = parts
        self._over_shards = OptimizerOverShards(parts)
        caller_state = parts.base_optimizer.state
        for shard, span, on_shard in self._over_shards:
            param = shard.unit.params[span.param_index]
            if param in caller_state:
                self._state[on_shard] = {
                    key: _initial_state(value, param, span, on_shard) for key, value in caller_state[param].items()
                }

    @property
    def _state(self) -> Any:
        # A method of the optimizer may replace it.
        return self._over_shards.optimizer.state

    @property
    def state(self) -> TorchOptimizer:
        """See ``UpdateBackend``."""
        return self

    def step(self, settings: StepSettings) -> StepResult:
        """See ``UpdateBackend``."""
        return self._parts.reduction.step_on_host(settings, self._update)

    def await_step_counts(self) -> None:
        """Do nothing: step counts are on the host."""

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateBackend``."""
        return self._over_shards.run(act)

    def _update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        # The update starts from the masters, which lack values written into the parameters since the last step.
        for shard in self._parts.shards:
            if shard.may_be_written:
                shard.reload_master()
        for shard, span, param in self._over_shards:
            # The optimizer skips a parameter without a gradient, as in plain torch.
            if has_grad[shard.index][span.param_index]:
                gradient = shard.gradient[span.shard_slice]
                param.grad = gradient.to(param.dtype, copy=True).mul_(factor).view_as(param)
        self._over_shards.run(lambda optimizer: optimizer.step())
        # The copies of the gradients would take memory until the next step.
        self._over_shards.optimizer.zero_grad(set_to_none=True)
        for shard in self._parts.shards:
            if shard.low_precision_param is not None:
                # This also rounds parameters without a gradient. Their masters were reloaded above, so they keep values
                # that were written into them.
                shard.low_precision_param.copy_(shard.master)
            self._parts.publish_update(shard.unit)

    # -- the state of spans -----------------------------------------------------------------------

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """See ``ShardState``."""
        _, whole_span, param = self._over_shards.params[shard.index][span.param_index]
        # ``span`` may be a part of the rank's span, as when reading a checkpoint of another number of ranks.
        start = span.param_offset - whole_span.param_offset
        state = SpanState({}, {})
        for key, value in self._state.get(param, {}).items():
            # The step count has the shape of the parameter, too, if that is 0-d.
            if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
                state.elements[key] = value.view(-1)[start : start + span.numel]
            elif isinstance(value, (torch.Tensor, float, int)):
                # On the CPU, whatever torch's default device is.
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
                state.numbers[key] = tensor.detach().clone()
        return state

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """See ``ShardState``."""
        param = self._over_shards.params[shard.index][span.param_index].param
        state = self._state[param]
        for key in [key for key in state if key not in keys]:
            # A state that the checkpoint lacks would keep its previous value.
            del state[key]
        for key, (dtype, number_shape) in keys.items():
            if number_shape is None:
                if key not in state:
                    state[key] = torch.zeros_like(param)
            # The checkpoint's number is read into a tensor of its own shape.
            elif key not in state or tuple(getattr(state[key], "shape", ())) != number_shape:
                state[key] = torch.zeros(number_shape, dtype=dtype, device="cpu")

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """See ``ShardState``."""
        state = self._state[self._over_shards.params[shard.index][span.param_index].param]
        for key, value in numbers.items():
            present = state[key]
            if isinstance(present, torch.Tensor):
                state[key] = value.to(present).reshape(present.shape)
            else:
                state[key] = type(present)(value.item())

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """See ``ShardState``."""
        self._state.pop(self._over_shards.params[shard.index][span.param_index].param, None)

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        states = (self._state.get(param, {}) for _, _, param in self._over_shards.params[shard.index].values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def whole_shard_tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return []


def _initial_state(value: Any, param: torch.Tensor, span: ShardSpan, on_shard: torch.Tensor) -> Any:
    """Return a span's part of a state that exists before the first step, as in Adagrad."""
    # A number belongs to the whole parameter. Each span copies it, because the optimizer changes it in place.
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.dim():
        return copy.deepcopy(value)
    return value.flatten()[span.param_offset :][: span.numel].to(on_shard.dtype, copy=True).view_as(on_shard)
