"""Digests of tensors, which show changes and differences between ranks without keeping or sending values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroengine.ops import _cuda_library, _fallback
from zeroengine.ops._fallback import PLACE_STRIDE, signed
from zeroengine.ops._library import library

# The words of the rows that are copied at a time.
_ROWS_WORDS = 1 << 18


def digest(values: Tensor, first: int = 0, stride: int = 0) -> Tensor:
    """Return a number of 64 bits that says which values a tensor has, and where. On CUDA this does not wait.

    It is the sum modulo 2^64, over the words of 8 bytes of the tensor's contiguous bytes, of `mix(word + (place + 1) *
    0x9e3779b97f4a7c15)`. The last word is padded with zero bytes. `place` counts words from the first byte of the whole
    tensor, and `mix` is the finalizer of splitmix64. Shape and dtype have no part in it. So
    - a change of one word always changes the digest, and several changes cancel with a probability of about 2^-64;
    - the digests of parts that begin at multiples of 8 bytes of the whole tensor add up, as int64, to that of the
      whole. So the digest of a parameter is the sum over its shards, however it is sharded;
    - it is the same on every device, for any number of threads and without the library.

    Args:
        values: Of any dtype. One that is not contiguous is copied.
        first: The index of the first element of `values` in the whole tensor. It must lie at a multiple of 8 bytes.
        stride: Of `values`, 2-D, whose rows lie apart in the whole tensor, as columns of a matrix do: the elements from
            the beginning of a row to that of the next one. Its bytes and those of a row are multiples of 8. 0: they lie
            one behind the other.

    Returns:
        A 0-d int64 tensor on the device of `values`; 0 if there are no elements.
    """
    # The memory of a lazy conjugate or negative has other values than the tensor.
    values = values.detach().resolve_conj().resolve_neg().contiguous()
    if stride and len(values) > 1:
        return _digest_rows(values, first, stride)
    first_word, remainder = divmod(first * values.element_size(), 8)
    assert not remainder, (first, values.dtype)
    arguments = (values.data_ptr(), values.nbytes, first_word)
    if (cuda := _cuda_library.cuda_library(values.device)) is not None:
        result = torch.zeros((), dtype=torch.int64, device=values.device)
        _cuda_library.call(cuda, "ze_cuda_digest", values.device, *arguments, result.data_ptr())
        return result
    handle = library() if values.device.type == "cpu" else None
    if handle is None:
        return _fallback.digest(values.view(-1).view(torch.uint8), first_word)
    return torch.tensor(handle.ze_digest(*arguments, torch.get_num_threads()), device="cpu")


def _digest_rows(rows: Tensor, first: int, stride: int) -> Tensor:
    words, item = rows.view(torch.int64), rows.element_size()
    # The kernel counts places on from row to row. The places between two rows are added to the words instead: a word
    # and its place are one sum in `mix`.
    skipped = signed((stride * item // 8 - words.shape[1]) * PLACE_STRIDE % (1 << 64), 64)
    result = torch.zeros((), dtype=torch.int64, device=rows.device)
    for number, part in enumerate(words.split(size := max(_ROWS_WORDS // words.shape[1], 1))):
        index = torch.arange(number * size, number * size + len(part), device=rows.device)
        moved = part + (index * skipped)[:, None]
        result += digest(moved, first * item // 8 + number * size * words.shape[1])
    return result


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return the `digest` of each of several tensors of one device, reading the results from the device once."""
    return torch.stack([digest(tensor) for tensor in tensors]).tolist() if tensors else []
