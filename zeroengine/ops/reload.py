"""Take over low-precision values that were written beside their fp32 master."""

from __future__ import annotations

from torch import Tensor

from zeroengine.ops import _fallback


def reload_written(param: Tensor, low_precision_param: Tensor) -> None:
    """Copy what was written into ``low_precision_param`` since it was ``param`` rounded.

    Where the two agree, param keeps its bits: rounding to nearest even gives the very bits of ``low_precision_param``.
    ``adam_step`` does the same on its way, with ``reload_written=True``.

    Args:
        param: float32, 1-D; updated in place.
        low_precision_param: bfloat16 or float16, as long, on the same device; not changed.
    """
    _fallback.reload_written(param, low_precision_param)
