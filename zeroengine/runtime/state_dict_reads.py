"""What ``model.state_dict()`` holds, found without gathering what it only names.

[Note: Stand-ins]
The model's own ``state_dict()`` runs, with its hooks and overrides, and a mode records which tensor each ``.detach()``
and ``.data`` came from. So a value that was renamed, moved or dropped is still known to be a certain parameter. That of
a released parameter is a *stand-in*: it has shape and dtype, and no values. Code that reads values, such as a hook that
transposes a weight, gathers the units of that operation, and releases those of the operation before. Every rank runs
the same code, and so gathers the same units.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroengine.errors import ReleasedParameterError, ZeroEngineError
from zeroengine.partition.cut import plain_name
from zeroengine.partition.storages import WRAPPER_ATTRIBUTE, storages_of
from zeroengine.runtime.full_buffer import placeholder_of
from zeroengine.runtime.gatherer import Gatherer
from zeroengine.runtime.released_parameter import has_no_values, mark_gathered, mark_released
from zeroengine.runtime.unit import Unit
from zeroengine.utils.tensors import map_tensors, tensors_in
from zeroengine.utils.torch_internals import DisableTorchFunction, copy_state_dict_metadata, version_of

# A detached tensor, its original, the placeholder that it has while it is released, and its version at first.
_Detached = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]
_DETACHING = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ModelState:
    """What ``model.state_dict()`` holds.

    Attributes:
        values: The state dict. A value that is a parameter or a buffer, detached or copied, is that tensor itself,
            which may be released. Others are what the model's code computed, such as extra state.
        tensors: The keys that hold a parameter or a buffer, with that tensor.
        wrappers: By key, the quantized weights of which ``values`` has the storages alone, each under a key of its own.
    """

    values: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    wrappers: Mapping[str, nn.Parameter]

    def like(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` as a dict of the same class, with the versions of the modules that torch attaches."""
        state: OrderedDict[str, Any] = OrderedDict(values)
        copy_state_dict_metadata(self.values, state)
        return state


def read_model_state(model: nn.Module, units: Sequence[Unit], gatherer: Gatherer) -> ModelState:
    """Return what ``model.state_dict()`` holds. Call it on every rank.

    Units are gathered one after another, and only where the model's code reads values of their parameters.

    Raises:
        ZeroEngineError: A hook wrote in place to the values of a released parameter.
    """
    params = {s.name: param for unit in units for param, s in zip(unit.params, unit.layout.slots, strict=True)}
    values: OrderedDict[str, Any] = OrderedDict()
    wrappers: dict[str, nn.Parameter] = {}
    with StandIns(model, units, gatherer) as stand_ins:
        state = model.state_dict()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                value = stand_ins.original_of(value)
            else:
                value = map_tensors(lambda tensor: tensor.detach().clone(), value)
            if stand_ins.is_wrapper(value):
                wrappers[key] = value
                values |= {key + suffix: storage for suffix, storage in storages_of(value)}
                continue
            param = params.get(plain_name(key))
            # A copy, such as that of a hook that moves values to the CPU, is the parameter as well.
            is_copy = param is not None and value is not param and stand_ins.is_copy(value, param)
            values[key] = param if is_copy else value
    copy_state_dict_metadata(state, values)
    tensors = {key: value for key, value in values.items() if stand_ins.knows(value)}
    return ModelState(values, tensors, wrappers)


class StandIns(TorchFunctionMode):
    """Records which parameter or buffer a tensor is the detached form of, while the model's own code runs.

    Code inside may read values of released parameters. Enter it on every rank. See "Stand-ins".

    Args:
        model: The model.
        units: Its units.
        gatherer: Gathers them.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], gatherer: Gatherer) -> None:
        super().__init__()
        self._gatherer, self._exits = gatherer, ExitStack()
        self._unit_of = {param: unit for unit in units for param in unit.params}
        self._originals: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in self._unit_of}
        self._originals |= {id(buffer): buffer for buffer in model.buffers()}
        # Quantized weights without memory of their own: they are their own stand-ins.
        self._wrappers = {id(w) for param in self._unit_of if (w := param.__dict__.get(WRAPPER_ATTRIBUTE)) is not None}
        # By the id of the detached tensor.
        self._detached: dict[int, _Detached] = {}
        self._pinned: dict[Unit, None] = {}
        # The arguments of the operation that is running.
        self._arguments: Any = ()
        self._is_over = False

    def __enter__(self) -> StandIns:
        """Record from here on."""
        self._gatherer.gather_on_demand = self._gather_for
        self._exits.enter_context(torch.no_grad())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Release what was gathered, and refuse later uses of stand-ins."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.close()
        for unit in list(self._pinned):
            self._unpin(unit)
        self._gatherer.gather_on_demand = None
        self._is_over = True
        detached = list(self._detached.values())
        # Nothing may alias the full buffers any more.
        self._detached.clear()
        if error[0] is None:
            self._refuse_writes(detached)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, or give a stand-in for what it would return."""
        if func in _DETACHING and self.is_wrapper(args[0]):
            return args[0]
        if func in _DETACHING and self.knows(self.original_of(args[0])):
            return self.stand_in(self.original_of(args[0]))
        self._arguments = (args, kwargs)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._arguments = ()

    def knows(self, tensor: object) -> bool:
        """Return whether ``tensor`` is a parameter or buffer of the model."""
        return id(tensor) in self._originals

    def is_wrapper(self, tensor: object) -> bool:
        """Return whether ``tensor`` is a quantized weight whose storages alone have memory."""
        return id(tensor) in self._wrappers

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the parameter or buffer that ``tensor`` is the detached form of, or else ``tensor``."""
        return self._detached[id(tensor)][1] if id(tensor) in self._detached else tensor

    def is_copy(self, value: object, param: nn.Parameter) -> bool:
        """Return whether ``value`` is a tensor with the bits of ``param``, which is gathered for that."""
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (param.shape, param.dtype):
            return False
        self._gather_for(param, "state_dict")
        with DisableTorchFunction():
            # Bytes are compared, because NaN differs from itself.
            own, other = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (param, value.to(param.device)))
            return torch.equal(own, other)

    def stand_in(self, original: torch.Tensor) -> torch.Tensor:
        """Return the detached form of a parameter or buffer, without values while it is released."""
        unit = self._unit_of.get(original)  # type: ignore[call-overload]
        placeholder = None
        with DisableTorchFunction():
            if unit is None or not (unit.is_releasable or has_no_values(original)):
                detached = original.detach()
            else:
                # It has a version of its own, which shows a write to it.
                detached, placeholder = original.data, placeholder_of(original)
        if has_no_values(original):
            mark_released(detached, resolver=self._resolve)  # type: ignore[arg-type]
        self._detached[id(detached)] = detached, original, placeholder, version_of(detached)
        return detached

    def _resolve(self, stand_in: torch.Tensor, operation: str) -> None:
        """Give a stand-in its values."""
        if self._is_over:
            raise ReleasedParameterError(
                f"a tensor of a state dict is used (`{operation}`) after state_dict() has ended, and the parameter is "
                "released: keep a copy, such as tensor.clone(), in the hook"
            )
        self._gather_for(self.original_of(stand_in), operation)

    def _gather_for(self, param: Any, operation: str) -> None:
        unit = self._unit_of[param]
        needed = {self._unit_of.get(self.original_of(tensor)) for tensor in tensors_in(self._arguments)}  # type: ignore
        with DisableTorchFunction():
            # One unit at a time is gathered, unless an operation reads several.
            for other in [other for other in self._pinned if other is not unit and other not in needed]:
                self._unpin(other)
            if unit not in self._pinned:
                self._gatherer.pin(unit)
                self._pinned[unit] = None
            for tensor, original, _, _ in self._detached.values():
                if self._unit_of.get(original) is unit and has_no_values(tensor):  # type: ignore[call-overload]
                    mark_gathered(tensor)  # type: ignore[arg-type]
                    tensor.data = original.detach()

    def _unpin(self, unit: Unit) -> None:
        with DisableTorchFunction():
            for tensor, original, placeholder, _ in self._detached.values():
                if placeholder is not None and self._unit_of.get(original) is unit:  # type: ignore[call-overload]
                    mark_gathered(tensor)  # type: ignore[arg-type]
                    tensor.data = placeholder
                    mark_released(tensor, resolver=self._resolve)  # type: ignore[arg-type]
            del self._pinned[unit]
            self._gatherer.unpin(unit)

    def _refuse_writes(self, detached: Sequence[_Detached]) -> None:
        for tensor, original, placeholder, version in detached:
            if placeholder is not None and version_of(tensor) != version:
                unit = self._unit_of[original]  # type: ignore[index]
                index = next(i for i, param in enumerate(unit.params) if param is original)
                raise ZeroEngineError(
                    f"a state dict hook writes in place to {unit.layout.slots[index].name}, which is released: in "
                    "plain PyTorch this changes the model itself. Make a new tensor in the hook, such as "
                    "`state_dict[key] = state_dict[key] * 2`."
                )
