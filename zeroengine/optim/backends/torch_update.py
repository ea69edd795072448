"""The update of torch optimizers of any class, run over parts of parameters in shards, or over whole ones at owners."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.backends.interface import BackendParts, SpanState, StateKeys
from zeroengine.optim.backends.over_owners import OptimizerOverOwners
from zeroengine.optim.backends.over_shards import OptimizerOverShards
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan

T = TypeVar("T")
# The dtype of a number that stands for None, or for an empty list if it is 0.
MARKER = torch.int8


class TorchUpdate:
    """See ``UpdateRule`` and ``ShardState``. The state is that of a copy of the caller's optimizer.

    Args:
        parts: The parts of the backend.
        over_shards: The copy.
    """

    has_moments: ClassVar[bool] = False
    exchange_bytes = 0

    def __init__(self, parts: BackendParts, over_shards: OptimizerOverShards | OptimizerOverOwners) -> None:
        self._parts, self._over_shards = parts, over_shards
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
    def state(self) -> TorchUpdate:
        """See ``UpdateRule``."""
        return self

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateRule``."""
        return self._over_shards.run(act)

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """See ``UpdateRule``."""
        # The update starts from the masters, which lack values written into the parameters since the last step.
        for shard in self._parts.shards:
            if shard.may_be_written:
                shard.reload_master()
        self._over_shards.step(factor, has_grad)
        for shard in self._parts.shards:
            if shard.low_precision_param is not None:
                # This also rounds parameters without a gradient. Their masters were reloaded above, so they keep values
                # that were written into them.
                shard.low_precision_param.copy_(shard.master)
            self._parts.publish_updates([shard.unit])

    # -- the state of spans -----------------------------------------------------------------------

    def keys(self, shard: OptimizerShard) -> None:
        """See ``ShardState``."""

    def spans(self, shard: OptimizerShard) -> list[ShardSpan]:
        """See ``ShardState``."""
        return [span for _, span, _ in self._over_shards.params[shard.index].values()]

    def is_whole(self, shard: OptimizerShard) -> bool:
        """See ``ShardState``."""
        return isinstance(self._over_shards, OptimizerOverOwners)

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """See ``ShardState``."""
        _, whole_span, param = self._over_shards.params[shard.index][span.param_index]
        # ``span`` may be a part of the rank's span, as when reading a checkpoint of another number of ranks.
        start = span.param_offset - whole_span.param_offset
        state = SpanState({}, {})
        for key, value in _flat(self._state.get(param, {})).items():
            # The step count has the shape of the parameter, too, if that is 0-d.
            if _is_elementwise(value, param) and key != "step":
                state.elements[key] = value.view(-1)[start : start + span.numel]
            elif isinstance(value, (torch.Tensor, float, int)):
                # On the CPU, whatever torch's default device is.
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
                state.numbers[key] = tensor.detach().clone()
            elif value is None or (isinstance(value, (list, tuple)) and not value):
                state.numbers[key] = torch.tensor(value is None, dtype=MARKER, device="cpu")
            else:
                description = (
                    f"{type(self._parts.base_optimizer).__name__} keeps a {type(value).__name__} as state {key!r}"
                )
                raise ZeroEngineError(f"{description}: a checkpoint takes tensors, numbers, None, and lists of these")
        return state

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """See ``ShardState``."""
        param = self._over_shards.params[shard.index][span.param_index].param
        # A state that the checkpoint lacks would keep its previous value.
        flat = {key: value for key, value in _flat(self._state[param]).items() if key in keys}
        for key, (dtype, number_shape) in keys.items():
            present = flat.get(key)
            if number_shape is None:
                if not _is_elementwise(present, param):
                    # Some optimizers keep states in a lower precision than that of masters.
                    flat[key] = torch.zeros_like(param, dtype=param.dtype if dtype.itemsize > 2 else dtype)
            # The checkpoint's number is read into a tensor of its own shape.
            elif not isinstance(present, (torch.Tensor, float, int)) or getattr(present, "shape", ()) != number_shape:
                # Optimizers keep step counts on the CPU.
                flat[key] = torch.zeros(number_shape, dtype=dtype, device=param.device if number_shape else "cpu")
        self._state[param] = _nested(flat)

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """See ``ShardState``."""
        param = self._over_shards.params[shard.index][span.param_index].param
        flat = _flat(self._state[param])
        for key, value in numbers.items():
            present = flat[key]
            if value.dtype is MARKER:
                flat[key] = None if value.item() else []
            elif isinstance(present, torch.Tensor):
                flat[key] = value.to(present).reshape(present.shape)
            else:
                flat[key] = type(present)(value.item())
        self._state[param] = _nested(flat)

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """See ``ShardState``."""
        self._state.pop(self._over_shards.params[shard.index][span.param_index].param, None)

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        states = (self._state.get(param, {}) for _, _, param in self._over_shards.params[shard.index].values())
        return [value for state in states for value in _flat(state).values() if isinstance(value, torch.Tensor)]

    def whole_shard_tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return []


class ElementwiseUpdate(TorchUpdate):
    """See ``UpdateRule``. The optimizer updates what is in the shards: an element at a time, or whole units."""

    def __init__(self, parts: BackendParts) -> None:
        super().__init__(parts, OptimizerOverShards(parts))


class WholeUpdate(TorchUpdate):
    """See ``UpdateRule``. The optimizer updates whole parameters at their owners."""

    def __init__(self, parts: BackendParts) -> None:
        super().__init__(parts, over_owners := OptimizerOverOwners(parts))
        self.exchange_bytes = over_owners.exchange.kept_bytes


def _is_elementwise(value: Any, param: torch.Tensor) -> bool:
    """Return whether a state has a value for each element, in their order."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.is_contiguous()


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the items of its lists by name, such as "GG.0"."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        flat |= {f"{key}.{place}": item for place, item in enumerate(value)} if is_list else {key: value}
    return flat


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that ``_flat`` made ``flat`` of."""
    state: dict[str, Any] = {}
    for key, value in flat.items():
        name, _, place = key.rpartition(".")
        if name and place.isdigit():
            state.setdefault(name, {})[int(place)] = value
        else:
            state[key] = value
    return {
        key: [value[i] for i in sorted(value)] if isinstance(value, dict) else value for key, value in state.items()
    }


def _initial_state(value: Any, param: torch.Tensor, span: ShardSpan, on_shard: torch.Tensor) -> Any:
    """Return a span's part of a state that exists before the first step, as in Adagrad."""
    # A number belongs to the whole parameter. Each span copies it, because the optimizer changes it in place.
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.dim():
        return copy.deepcopy(value)
    return value.flatten()[span.param_offset :][: span.numel].to(on_shard.dtype, copy=True).view_as(on_shard)
