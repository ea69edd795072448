"""Name the parts of a step for profilers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zeroengine.utils.torch_internals import profiler_enabled

_NOTHING: AbstractContextManager[Any] = nullcontext()


def profile_range(label: str, unit: str = "") -> AbstractContextManager[Any]:
    """Return a context that names its contents ``zeroengine: <label> <unit>`` for torch's profiler or ``emit_nvtx``.

    While neither records it does nothing.
    """
    # Recording a range costs microseconds even without a profiler.
    if not profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"zeroengine: {label} {unit}".rstrip())
