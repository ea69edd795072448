"""The kernels: one pass over memory each, compiled from csrc, or torch's own where there is no compiler."""

from zeroengine.ops._library import DTYPE_CODES, advise_huge_pages, compiled, cpu_isa, library, set_cpu_isa
from zeroengine.ops.adam import adam_step
from zeroengine.ops.norm import squared_norm

__all__ = [
    "DTYPE_CODES",
    "adam_step",
    "advise_huge_pages",
    "compiled",
    "cpu_isa",
    "library",
    "set_cpu_isa",
    "squared_norm",
]
