"""Names for what a profiler shows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING: AbstractContextManager[Any] = nullcontext()


def profile_range(what: str, unit: str = "") -> AbstractContextManager[Any]:
    """A range ``zeroengine: <what> <unit>`` while torch's profiler records, or its ``emit_nvtx``; else nothing."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"zeroengine: {what} {unit}".rstrip())
