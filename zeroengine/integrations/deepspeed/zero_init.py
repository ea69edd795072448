"""``deepspeed.zero.Init``: builds models without memory, with DeepSpeed's attributes on their parameters."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from zeroengine.deferred_init.dispatch_modes import is_recording, is_recording_innermost
from zeroengine.deferred_init.meta_init import meta_init
from zeroengine.engine.gathered import owner_of
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed import comm
from zeroengine.integrations.deepspeed.parameters import annotate_deferred_parameter
from zeroengine.integrations.deepspeed.settings import read_settings

_OPTIONS = set(
    "config config_dict_or_path data_parallel_group dtype mem_efficient_linear mpu param_swapper pin_memory "
    "remote_device sequence_data_parallel_group zero_param_parallel_group".split()
)


class _ContextsOfThread(threading.local):
    """The outermost ``Init`` that each thread is inside of."""

    outermost: Init | None = None


_contexts = _ContextsOfThread()


class Init:
    """A context in which modules are built without memory: ``zeroengine.meta_init()``.

    It starts torch.distributed, as DeepSpeed's does. It may be nested, and does nothing with ``enabled=False`` or for
    a ``module`` that is built already. Floating-point parameters get the dtype that is given, or that of the precision
    which the configuration enables. Where they live follows from the configuration of ``initialize``, so the other
    arguments have no effect.

    Args:
        module: A module that is built already, which is left as it is.
        enabled: Whether to do anything.
        options: The other arguments of DeepSpeed's ``Init``.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **options: Any) -> None:
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise ZeroEngineError(f"zero.Init() takes no argument {unknown[0]!r}; it takes {sorted(_OPTIONS)}")
        self._enabled = enabled and module is None
        if self._enabled:
            comm.init_distributed()
        given = options.get("config_dict_or_path") or options.get("config")
        settings = read_settings(given) if given is not None else {}
        self._dtype: torch.dtype | None = options.get("dtype") or _dtype_of(settings)
        self._refuses_writes = (settings.get("zero_optimization") or {}).get("enable_sanity_checks") is True
        self._recording = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._thread = 0
        # The keys are weak, so that a module that is dropped gives its memory back.
        self._params: Any = WeakIdKeyDictionary()

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        self._thread = threading.get_ident()
        # The outermost context records what the inner ones build.
        if not is_recording():
            self._recording.enter_context(meta_init())
            self._recording.callback(setattr, _contexts, "outermost", _contexts.outermost)
            _contexts.outermost = self
        for handle in (
            register_module_parameter_registration_hook(self._note_parameter),
            register_module_module_registration_hook(self._note_module),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        try:
            if error is None:
                self._finish_parameters()
        finally:
            self._recording.__exit__(kind, error, trace)

    def _note_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or threading.get_ident() != self._thread or nn.parameter.is_lazy(param):
            return
        self._params[param] = name
        if owner_of(param) is None:
            annotate_deferred_parameter(param, self._refuses_writes)

    def _note_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Note the parameters of a new child. A deep copy of a module registers none of its parameters."""
        if child is not None and threading.get_ident() == self._thread:
            for key, param in child.named_parameters():
                if param not in self._params:
                    self._note_parameter(child, key, param)

    def _finish_parameters(self) -> None:
        """Cast the parameters that were built inside, and bring their attributes up to date."""
        for param in list(self._params):
            # An engine that was made inside has its own copies in its own dtype.
            if owner_of(param) is not None or nn.parameter.is_lazy(param):
                continue
            casts = self._dtype is not None and param.is_floating_point() and param.dtype != self._dtype
            if casts and not param.is_meta and param.grad is None:
                # While this is recorded, a replay casts the values as well.
                param.data = param.data.to(self._dtype)
            annotate_deferred_parameter(param, self._refuses_writes)


@contextlib.contextmanager
def outside_of_init() -> Iterator[None]:
    """Leave the ``Init`` that this thread is inside of, and enter it again at the end.

    What was built inside so far is on the meta device afterwards, as at the end of ``Init``.
    """
    init = _contexts.outermost
    # Torch's modes end in order. Another one that was entered inside of ``Init`` has to end first.
    if init is None or not is_recording_innermost():
        yield
        return
    init._finish_parameters()
    init._recording.close()
    try:
        yield
    finally:
        init._recording.enter_context(meta_init())
        init._recording.callback(setattr, _contexts, "outermost", _contexts.outermost)
        _contexts.outermost = init


def _dtype_of(settings: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the precision that a configuration enables; None where it enables none, or says "auto"."""
    for names, dtype in ((("bf16", "bfloat16"), torch.bfloat16), (("fp16",), torch.float16)):
        if any((settings.get(name) or {}).get("enabled") is True for name in names):
            return dtype
    return None
