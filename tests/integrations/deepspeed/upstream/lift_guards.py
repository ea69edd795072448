"""A pytest plugin that lets upstream's tests run where they would skip themselves, and writes which ones.

Many of upstream's tests skip themselves on the CPU, or without CUDA and NCCL of some version, though nothing in them
needs a GPU. Whether a test passes is seen only if it runs. So the marks ``skip`` and ``skipif`` have no effect here,
``pytest.skip`` returns, and the check of versions for bf16 passes. Upstream's files stay as they are. The ranks'
forkserver imports this file before the tests, so that it holds in the ranks, too.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
from _pytest.skipping import evaluate_skip_marks
from unit import util


def write_guard(reason: str) -> None:
    """Write that a guard was lifted. Every rank writes, since any of them may have one."""
    with open(os.environ["UPSTREAM_REPORTS"], "a") as file:
        file.write(json.dumps({"guard": reason}) + "\n")


def go_on(reason: str = "", *, allow_module_level: bool = False) -> None:
    """Return, where ``pytest.skip`` ends the test."""
    frame = sys._getframe(1)
    file = frame.f_code.co_filename.rpartition("/")[2]
    write_guard(f"{file}:{frame.f_lineno}: {reason}")


def versions_are_enough(accelerator_check: bool = True) -> bool:
    """Return True, where upstream asks for CUDA and NCCL before it tests bf16."""
    write_guard("bf16 with CUDA and NCCL")
    return True


pytest.skip = go_on  # type: ignore[assignment]
util.bf16_required_version_check = versions_are_enough


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remove the marks that would skip a test."""
    mark = evaluate_skip_marks(item)
    if mark is not None:
        write_guard(f"mark: {mark.reason}")
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in ("skip", "skipif")]
