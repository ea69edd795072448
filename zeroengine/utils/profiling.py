"""Name the parts of a step for profilers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def profile_range(label: str, unit: str = "") -> AbstractContextManager[Any]:
    """Return a context that names its contents ``zeroengine: <label> <unit>`` for torch's profiler or ``emit_nvtx``.

    While neither records it does nothing.
    """
    # Recording a range costs microseconds even without a profiler.
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"zeroengine: {label} {unit}".rstrip())
