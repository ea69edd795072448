"""Which buffer of a pool is used next, and when there is another one."""

from __future__ import annotations

import math

import pytest
import torch

from zeroengine.comm.buffer_pool import BufferPool
from zeroengine.errors import ZeroEngineError


class LastUse:
    """What is over at once, or when somebody waits for it, or never; or raises."""

    def __init__(self, ends: str) -> None:
        self.ends = ends

    def is_over(self, timeout_s: float) -> bool:
        if self.ends == "raises":
            raise ZeroEngineError("lost")
        return self.ends == "at once" or (self.ends == "when awaited" and timeout_s > 0)


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def put_back(pool: BufferPool[LastUse], *sizes_and_ends: tuple[int, str]) -> list[int]:
    """Take buffers, put them back in order, and return their addresses."""
    taken = [pool.take(size) for size, _ in sizes_and_ends]
    for memory, (_, ends) in zip(taken, sizes_and_ends, strict=True):
        pool.put_back(memory, LastUse(ends))
    return [memory.data_ptr() for memory in taken]


def test_a_buffer_in_use_is_not_taken_again_and_one_that_is_free_is() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros)
    first, second = pool.take(3, torch.float32), pool.take(12)
    assert first.data_ptr() != second.data_ptr() and pool.nbytes == 24
    pool.put_back(first[1:])
    assert pool.take(6, torch.bfloat16).data_ptr() == first.data_ptr() and pool.nbytes == 24


def test_sizes_must_be_equal_or_within_the_multiple() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros)
    (exact,) = put_back(pool, (8, "at once"))
    assert pool.take(4).data_ptr() != exact and pool.take(8).data_ptr() == exact
    pool = BufferPool(zeros, largest_multiple=2)
    large, small = put_back(pool, (8, "at once"), (5, "at once"))
    assert pool.take(2).data_ptr() not in (large, small)
    assert pool.take(4).data_ptr() == small and pool.take(4).data_ptr() == large


def test_nothing_at_all_needs_no_other_buffer_where_any_larger_one_fits() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, largest_multiple=math.inf)
    (address,) = put_back(pool, (8, "at once"))
    assert pool.take(0).numel() == 0 and pool.nbytes == 8
    assert pool.take(8).data_ptr() != address


@pytest.mark.parametrize("num", [1, 2])
def test_the_oldest_is_awaited_once_there_are_enough(num: int) -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over, enough=2)
    addresses = put_back(pool, *[(8, "when awaited")] * num)
    assert (pool.take(8).data_ptr() == addresses[0]) == (num == 2)
    assert pool.nbytes == 16


def test_buffers_in_use_and_of_other_sizes_count_where_all_count() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over, enough=3, counts_all=True, largest_multiple=math.inf)
    pool.take(100)
    _, fits = put_back(pool, (1, "when awaited"), (8, "when awaited"))
    assert pool.take(8).data_ptr() == fits
    pool.take(8)
    assert pool.nbytes == 100 + 1 + 8 + 8


def test_there_is_another_one_where_a_peer_is_slow() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over, enough=1)
    (slow,) = put_back(pool, (8, "never"))
    assert pool.take(8).data_ptr() != slow


def test_an_error_of_a_last_use_is_raised_once() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over)
    (address,) = put_back(pool, (8, "raises"))
    with pytest.raises(ZeroEngineError, match="lost"):
        pool.take(8)
    assert pool.take(8).data_ptr() == address


def test_what_is_cleared_is_forgotten_and_what_is_in_use_stays() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over)
    used = pool.take(4)
    (address,) = put_back(pool, (8, "at once"))
    assert [memory.data_ptr() for memory in pool.clear()] == [address] and pool.nbytes == 4
    pool.put_back(used)
    assert pool.take(4).data_ptr() == used.data_ptr()


def test_memory_that_is_not_kept_is_new_each_time() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, keeps=False)
    first = pool.take(8)
    pool.put_back(first)
    assert pool.take(8).data_ptr() != first.data_ptr() and pool.nbytes == 0


def test_the_first_buffer_is_the_largest_and_serves_those_who_need_less() -> None:
    pool: BufferPool[LastUse] = BufferPool(zeros, LastUse.is_over)
    first, second = (pool.take(3, largest=8, enough=2) for _ in range(2))
    assert (first.nbytes, second.nbytes, pool.nbytes) == (3, 3, 8 + 3)
    pool.put_back(first, LastUse("when awaited"))
    pool.put_back(second, LastUse("when awaited"))
    # One buffer is enough for whoever needs the largest.
    assert pool.take(8, largest=8, enough=1).data_ptr() == first.data_ptr()
    # The other one is not enough for those who may use both.
    assert pool.take(3, largest=8, enough=2).data_ptr() != second.data_ptr()
    assert pool.nbytes == 8 + 3 + 3
