"""Every fault that benchmarks/faults.py knows is told in time and recovered from, again and again.

ZEROENGINE_FAULT_RUNS=30 makes it thirty times each.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest

from tests.launch import hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
RUNS = int(os.environ.get("ZEROENGINE_FAULT_RUNS", "1"))
SOON = 30.0  # seconds: for a report


def load() -> Any:
    spec = importlib.util.spec_from_file_location("faults", hosts.ROOT / "benchmarks/faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faults"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


faults = load()


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: f"{fault.name} {fault.options}".strip())
def test_a_fault_is_told_and_recovered_from(fault: Any) -> None:
    """The run itself sees that no process stays and no checkpoint is lost."""
    times, _ = faults.attempt(fault, RUNS)
    assert len(times) == RUNS and all(report_s < SOON for report_s, _ in times), times
