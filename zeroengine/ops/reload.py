"""Copies low-precision values that were written beside their fp32 master into the master."""

from __future__ import annotations

from torch import Tensor

from zeroengine.ops import _fallback


def reload_written(param: Tensor, low_precision_param: Tensor) -> None:
    """Copy the values into `param` that were written into `low_precision_param` since it was `param` rounded.

    An element of `param` whose rounded value has the bits of `low_precision_param` keeps its own bits. `adam_step` does
    the same before its update, with `reload_written=True`.

    Args:
        param: float32, 1-D. Updated in place.
        low_precision_param: bfloat16 or float16, as long, on the same device. Not changed.
    """
    # This is for rare use. The kernels do the same within the update, where it costs no pass of its own.
    _fallback.reload_written(param, low_precision_param)
