"""Values of one parameter: DeepSpeed's ``safe_get_*`` and ``safe_set_*``, and its attributes of partitioned parameters.

The functions with ``full`` in their name are collectives, as in DeepSpeed. Those with ``local`` work on the elements
that this rank owns, flat; how many these are is zeroengine's choice, and may be none.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroengine.engine.engine import Engine
from zeroengine.engine.gathered import owner_of
from zeroengine.engine.parameter_access import (
    LocatedParameter,
    MissingStateError,
    full_gradient,
    full_master,
    full_optimizer_state,
    set_full_gradient,
    set_full_master,
    set_full_optimizer_state,
)
from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.released_parameter import has_no_values


class ZeroParamStatus(enum.Enum):
    """Whether a parameter has its values on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """How a parameter is partitioned."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class StatusOfParameter:
    """Equals the ``ZeroParamStatus`` that a parameter has at the time of the comparison."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    @property
    def current(self) -> ZeroParamStatus:
        """The present status."""
        param = self._param()
        # Before ``initialize`` a parameter without values is on the meta device.
        has_values = param is None or not (param.is_meta or has_no_values(param))
        return ZeroParamStatus.AVAILABLE if has_values else ZeroParamStatus.NOT_AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.current is (other.current if isinstance(other, StatusOfParameter) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.current)

    def __reduce__(self) -> Any:
        # A parameter that is pickled takes its attributes along, and a weak reference cannot be pickled.
        return ZeroParamStatus, (self.current.value,)


class OwnedElements:
    """The size and dtype of this rank's part of a parameter: ``shape``, ``numel()``, ``ds_numel`` and ``dtype``."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.shape, self.ds_numel, self.dtype = torch.Size([numel]), numel, dtype

    def numel(self) -> int:
        """Return the number of elements that this rank owns."""
        return self.ds_numel


# The attribute of a parameter that ``GatheredParameters`` lets nobody write without a ``modifier_rank``.
_REFUSES_WRITES = "_zeroengine_refuses_writes"
_numbers = itertools.count()


def annotate_deferred_parameter(param: nn.Parameter, refuses_writes: bool) -> None:
    """Give a parameter that is built in ``zero.Init`` the attributes that scripts read of DeepSpeed's.

    No rank owns any of its elements before ``initialize``, so ``ds_tensor`` is empty.

    Args:
        param: A parameter that belongs to no engine.
        refuses_writes: See ``refuses_writes``.
    """
    # Called again, it brings the shape and dtype up to date.
    number = vars(param).get("ds_id")
    attributes = _attributes(param, next(_numbers) if number is None else number, owned=0, persists=False)
    vars(param).update({**attributes, _REFUSES_WRITES: refuses_writes})


def annotate_parameters(engine: Engine, refuses_writes: bool) -> None:
    """Give the parameters of a stage-3 engine the attributes that scripts read of DeepSpeed's, while it lives.

    Args:
        engine: The engine.
        refuses_writes: See ``refuses_writes``.
    """
    numbers = {param: number for number, param in enumerate(engine.module.parameters())}
    for unit in engine.units:
        spans = list(unit.layout.spans(unit.rank, unit.degrees.optimizer))
        for index, param in enumerate(unit.params):
            owned = sum(span.numel for span in spans if span.param_index == index)
            attributes = _attributes(param, numbers.get(param, -1), owned, unit.degrees.parameters == 1)
            vars(param).update({**attributes, _REFUSES_WRITES: refuses_writes})
            engine.call_at_end(remove_attributes, param)


def remove_attributes(param: nn.Parameter) -> None:
    """Remove what the two functions above gave a parameter."""
    for name in [name for name in vars(param) if name.startswith("ds_") or name == _REFUSES_WRITES]:
        del vars(param)[name]


def refuses_writes(param: nn.Parameter) -> bool:
    """Return whether writes in ``GatheredParameters`` without a ``modifier_rank`` are an error."""
    return bool(vars(param).get(_REFUSES_WRITES))


def _attributes(param: nn.Parameter, number: int, owned: int, persists: bool) -> dict[str, Any]:
    """Return DeepSpeed's attributes of a parameter.

    Args:
        param: The parameter.
        number: Its number, which is ``ds_id``.
        owned: The number of its elements that this rank owns.
        persists: Whether it stays gathered.
    """
    return {
        "ds_id": number,
        "ds_shape": torch.Size(param.shape),
        "ds_numel": param.numel(),
        "ds_status": StatusOfParameter(param),
        "ds_persist": persists,
        "ds_param_type": ZeroParamType.PARTITIONED,
        "ds_tensor": OwnedElements(owned, param.dtype),
    }


def is_trainable_here(param: nn.Parameter) -> bool:
    """Return whether a parameter belongs to an engine and has an optimizer's state."""
    if not isinstance(param, nn.Parameter) or owner_of(param) is None:
        return False
    return LocatedParameter(param).shard is not None


# -- whole values ---------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master weights; None for a frozen parameter. A collective."""
    return full_master(param) if is_trainable_here(param) else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the fp32 master weights by rank 0's ``value``. A collective."""
    set_full_master(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the mean gradient, between backward and step; None where there is none. A collective."""
    if not is_trainable_here(param):
        return param.grad if isinstance(param, nn.Parameter) else None
    return full_gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the mean gradient by rank 0's ``value``. A collective."""
    set_full_gradient(param, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor | None, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, param)``. A collective."""
    for param in param_list:
        safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return the optimizer's state of that name; None where it keeps none yet. A collective."""
    if not is_trainable_here(param):
        return None
    try:
        return full_optimizer_state(param, optim_state_key)
    except MissingStateError:
        return None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace the optimizer's state of that name by rank 0's ``value``. A collective."""
    set_full_optimizer_state(param, optim_state_key, value)


# -- this rank's elements -------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of the master weights, 1-D; None for a frozen parameter."""
    return _local(param, _master)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the master weights. The next update starts from them."""
    _set_local(param, value, _master)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of the mean gradient, 1-D, between backward and step."""
    gradient = _local(param, _reduced_gradient)
    return None if gradient is None else gradient.div(LocatedParameter(param).engine.reducer.divisor())


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's elements of the mean gradient."""
    divisor = LocatedParameter(param).engine.reducer.divisor()
    _set_local(param, value * divisor, _reduced_gradient)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's elements of the optimizer's state of that name, 1-D; None where it keeps none yet.

    A rank without an element of the parameter has an empty tensor where others have values, so that a script that
    checks for None takes the same branch on every rank.
    """
    if not is_trainable_here(param):
        return None
    located = LocatedParameter(param, "safe_get_local_optimizer_state()", ("moments",))
    shard, optimizer = located.trainable_shard(), located.engine.optimizer
    values = optimizer.state_values(shard, located.index, optim_state_key)
    if values:
        return torch.cat([value.flatten() for _, value in values])
    if any(True for _ in located.owned_parts(shard.master)):
        return None
    # The states of other parameters tell which ones the optimizer keeps by now.
    kept = {
        key
        for other in optimizer.shards
        for index in range(len(other.unit.params))
        for key in optimizer.state_shapes(other, index)
    }
    exists = optim_state_key in kept if kept else located.engine.global_steps > 0
    return located.zeros((0,)) if exists else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of the optimizer's state of that name."""
    located = LocatedParameter(param, "safe_set_local_optimizer_state()", ("moments",))
    optimizer, shard = located.engine.optimizer, located.trainable_shard()
    spans = [span for span, _ in optimizer.state_values(shard, located.index, optim_state_key)]
    # Moments of 8 bits have no views of their values.
    values = located.zeros(located.slot.shape)
    _copy_parts(located, value, [(span, values.view(-1)[span.param_slice]) for span in spans])
    if spans:
        located.set_state_values(shard, optim_state_key, values)


def _master(located: LocatedParameter, shard: Any) -> torch.Tensor:
    located.check_has_weights("the fp32 values of a rank")
    master: torch.Tensor = shard.master
    return master


def _reduced_gradient(located: LocatedParameter, shard: Any) -> torch.Tensor:
    located.engine.reducer.launcher.wait()
    if not shard.unit_grads.launched_in_step:
        raise ZeroEngineError(
            f"the local gradient of {located.slot.name}: it is not reduced yet; call this at stages 2 and 3, "
            "between backward and step, or use safe_get_full_grad"
        )
    gradient: torch.Tensor = shard.gradient
    return gradient


def _local(param: nn.Parameter, shard_of: Callable[[LocatedParameter, Any], torch.Tensor]) -> torch.Tensor | None:
    if not is_trainable_here(param):
        return None
    located = LocatedParameter(param, "the values of a rank", ("parameters", "masters", "gradients"))
    parts = [values for _, values in located.owned_parts(shard_of(located, located.trainable_shard()))]
    flat = torch.cat(parts) if parts else located.zeros((0,))
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def _set_local(
    param: nn.Parameter, value: torch.Tensor, shard_of: Callable[[LocatedParameter, Any], torch.Tensor]
) -> None:
    located = LocatedParameter(param, "the values of a rank", ("parameters", "masters", "gradients"))
    _copy_parts(located, value, located.owned_parts(shard_of(located, located.trainable_shard()), write=True))


def _copy_parts(located: LocatedParameter, value: torch.Tensor, parts: Iterable[tuple[Any, torch.Tensor]]) -> None:
    """Copy the elements of ``value`` into the parts of a parameter that this rank owns, one after another."""
    owned = sum(values.numel() for _, values in located.owned_parts(located.trainable_shard().master))
    if value.numel() != owned:
        raise ZeroEngineError(
            f"this rank owns {owned} elements of {located.slot.name}, and the value has {value.numel()}; read the "
            "number from param.ds_tensor.shape"
        )
    start = 0
    for _, part in parts:
        part.copy_(value.flatten()[start : start + part.numel()])
        start += part.numel()
