"""The torch modes through which the recorder sees every access to a tensor in its thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroengine.deferred_init.trace import tensors_of
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import DisableTorchFunction, TorchDispatchMode, dispatch_modes, function_modes

_T = torch.Tensor
# Functions that read values, or give an address away, without an operation that a dispatch mode would see.
_READS = {getattr(_T, name) for name in "__repr__ __format__ tolist __deepcopy__ __reduce_ex__".split()}
_ADDRESSES = {
    getattr(_T, name)
    for name in "numpy __array__ data_ptr storage untyped_storage _typed_storage share_memory_ __dlpack__".split()
}
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]


class OperationMode(TorchDispatchMode):
    """Passes every operation to a function.

    Args:
        run: Called with an operation and its arguments in place of it. Returns the operation's result.
    """

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's own way to skip the compiler imports it, which costs 70 MB and a second. `disable_compile` serves.
        return False

    @disable_compile
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation on."""
        # The recorder reads shapes, versions and storages. ``OpaqueAccessMode`` must not take these for uses by the
        # model.
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})


class OpaqueAccessMode(TorchFunctionMode):
    """Tells of accesses to values that are no operations, and skips initialization that is not needed.

    Args:
        before_access: Called with tensors that are about to be read by something that is no operation, and with the
            function that gives away their address, or "" where it only reads values.
        data_assigned: Called with a parameter after an assignment to its ``data``.
        skips_init: Returns whether a tensor needs no initial values, because others will be loaded.
    """

    def __init__(
        self,
        before_access: Callable[[list[torch.Tensor], str], None],
        data_assigned: Callable[[torch.Tensor], None],
        skips_init: Callable[[Any], bool],
    ) -> None:
        super().__init__()
        self._before_access, self._data_assigned, self._skips_init = before_access, data_assigned, skips_init

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, after telling if it accesses values."""
        kwargs = kwargs or {}
        # Values must be in memory before the function runs, since no operation of it will ask for them.
        if func in _ADDRESSES or func in _READS:
            self._before_access(tensors_of(args[:1]), func.__name__ if func in _ADDRESSES else "")
        elif getattr(func, "__module__", None) == nn.init.__name__:
            target = args[0] if args else kwargs.get("tensor")
            if self._skips_init(target):
                return target
        result = func(*args, **kwargs)
        # The parameter lies in its new storage only after the assignment.
        if func is _SET_DATA:
            self._data_assigned(args[0])
        return result


def is_recording() -> bool:
    """Return whether a recorder is active in this thread."""
    return any(isinstance(mode, OperationMode) for mode in dispatch_modes())


def is_recording_innermost() -> bool:
    """Return whether a recorder is active in this thread, and no other mode of torch was entered after it."""
    operations, functions = dispatch_modes(), function_modes()
    return (
        bool(operations and functions)
        and isinstance(operations[-1], OperationMode)
        and isinstance(functions[-1], OpaqueAccessMode)
    )
