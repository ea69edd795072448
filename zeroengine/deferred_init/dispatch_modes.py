"""torch's modes through which a recorder sees what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from zeroengine.deferred_init.trace import tensors_of
from zeroengine.utils.compiler_disable import disable_compile

_T = torch.Tensor
# No operation shows that these read values, or give an address away.
_READS = {getattr(_T, name) for name in "__repr__ __format__ tolist __deepcopy__ __reduce_ex__".split()}
_ADDRESSES = {
    getattr(_T, name)
    for name in "numpy __array__ data_ptr storage untyped_storage _typed_storage share_memory_ __dlpack__".split()
}
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]


class Watcher(Protocol):
    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation."""

    def before_unseen(self, tensors: list[torch.Tensor], address: str) -> None:
        """Something that is no operation reads ``tensors``, or (its name is ``address``) learns where they are."""

    def given_data(self, param: torch.Tensor) -> None:
        """``param.data`` was assigned to."""

    def is_unset(self, tensor: Any) -> bool:
        """Whether nobody will see the values of ``tensor``."""


class Operations(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own way to skip it imports it: 70 MB and a second. `eager` does it, too

    @disable_compile
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._watcher.run(func, args, kwargs or {})


class Unseen(TorchFunctionMode):
    """Sees what touches values and is no operation."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDRESSES or func in _READS:
            self._watcher.before_unseen(tensors_of(args[:1]), func.__name__ if func in _ADDRESSES else "")
        elif getattr(func, "__module__", None) == nn.init.__name__:
            target = args[0] if args else kwargs.get("tensor")
            if self._watcher.is_unset(target):
                return target
        result = func(*args, **kwargs)
        if func is _SET_DATA:
            self._watcher.given_data(args[0])
        return result


def is_recording() -> bool:
    """Whether a recorder is at work in this thread."""
    return any(isinstance(mode, Operations) for mode in _get_current_dispatch_mode_stack())
