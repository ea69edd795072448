"""Bindings to the kernels of csrc, each one pass over memory. Without a compiler torch's own kernels serve.

update           one step of a fused rule over one flat buffer
update_arrays    the rules, and the arrays that they take
update_parts     such steps of many parts of many buffers
table            such steps of many buffers whose scalars stay on the device
norm             the squared norm of one or many tensors
digest           a number of 64 bits that says which values a tensor has
factor           from the squared norm to the factor of the gradient
packets          integers of 8 or 4 bits with a scale per block, and sums of them
cast             many tensors copied and cast into a buffer
_library         the CPU library, and loading with ctypes; `_cuda_library` and `_aio_library` are csrc/cuda and csrc/aio
_fallback        the same operations on torch's kernels, and `reload_written`
"""

from zeroengine.ops._cuda_library import cuda_architectures, cuda_library, kernels_in_use
from zeroengine.ops._fallback import reload_written
from zeroengine.ops._library import DTYPE_CODES, MOMENT_BLOCK, advise_huge_pages, cpu_isa, library, set_cpu_isa
from zeroengine.ops._packets_fallback import packet_bytes
from zeroengine.ops.cast import cast_copy
from zeroengine.ops.digest import digest, digests
from zeroengine.ops.factor import gradient_factor
from zeroengine.ops.norm import SquaredNorms, squared_norm, squared_norms
from zeroengine.ops.packets import dequantize_sum, quantize
from zeroengine.ops.table import SegmentList, UpdateSegment, UpdateTable
from zeroengine.ops.update import PreparedArrays, decode_moment, encode_moment, prepare_arrays, update_step
from zeroengine.ops.update_arrays import MOMENT_SIGNS, RULES, UpdateArrays
from zeroengine.ops.update_parts import UpdatePart, UpdateParts

__all__ = [
    "DTYPE_CODES",
    "MOMENT_BLOCK",
    "MOMENT_SIGNS",
    "RULES",
    "PreparedArrays",
    "SegmentList",
    "SquaredNorms",
    "UpdateArrays",
    "UpdatePart",
    "UpdateParts",
    "UpdateSegment",
    "UpdateTable",
    "advise_huge_pages",
    "cast_copy",
    "cpu_isa",
    "cuda_architectures",
    "cuda_library",
    "decode_moment",
    "dequantize_sum",
    "digest",
    "digests",
    "encode_moment",
    "gradient_factor",
    "kernels_in_use",
    "library",
    "packet_bytes",
    "prepare_arrays",
    "quantize",
    "reload_written",
    "set_cpu_isa",
    "squared_norm",
    "squared_norms",
    "update_step",
]
