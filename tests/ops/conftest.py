"""Runs a test once for each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroengine import ops
from zeroengine.errors import ZeroEngineError


@pytest.fixture(params=["avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not ops.compiled():
        pytest.skip("zeroengine's CPU library was not built")
    before = ops.cpu_isa()
    try:
        ops.set_cpu_isa(request.param)
    except ZeroEngineError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    ops.set_cpu_isa(before)
