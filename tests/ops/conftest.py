"""Runs a test once for each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zeroengine import ops
from zeroengine.errors import ZeroEngineError


@pytest.fixture(params=["avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the CPU kernels by the instruction set ``name``, or skip the test where this CPU has none such."""
    if ops.library() is None:
        pytest.skip("zeroengine's CPU library was not built")
    before = ops.cpu_isa()
    try:
        ops.set_cpu_isa(name)
    except ZeroEngineError:
        pytest.skip(f"this CPU has no {name}")
    yield
    ops.set_cpu_isa(before)
