"""The kernels: one pass over memory each, compiled from csrc, or torch's own where there is no compiler."""

from zeroengine.ops._cuda_library import cuda_architectures, cuda_library
from zeroengine.ops._library import DTYPE_CODES, advise_huge_pages, compiled, cpu_isa, library, set_cpu_isa
from zeroengine.ops.adam import adam_step
from zeroengine.ops.cast import cast_copy
from zeroengine.ops.factor import gradient_factor
from zeroengine.ops.norm import squared_norm, squared_norms
from zeroengine.ops.reload import reload_written
from zeroengine.ops.table import AdamBuffer, AdamSegment, AdamTable

__all__ = [
    "DTYPE_CODES",
    "AdamBuffer",
    "AdamSegment",
    "AdamTable",
    "adam_step",
    "advise_huge_pages",
    "cast_copy",
    "compiled",
    "cpu_isa",
    "cuda_architectures",
    "cuda_library",
    "gradient_factor",
    "library",
    "reload_written",
    "set_cpu_isa",
    "squared_norm",
    "squared_norms",
]
