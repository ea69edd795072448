"""A pytest plugin that writes what each test did as a line of JSON, and starts ranks quickly.

The file is named by the variable ``UPSTREAM_REPORTS``. It is loaded with ``-p``, so that upstream's files stay as they
are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let a forkserver that has imported these start the ranks of each test in a fraction of a second."""
    guards = ["lift_guards"] if config.pluginmanager.has_plugin("lift_guards") else []
    multiprocessing.set_forkserver_preload(["reference_on_cpu", *guards, "torch", "deepspeed", "unit.simple_model"])


def write_line(**values: Any) -> None:
    with open(os.environ["UPSTREAM_REPORTS"], "a") as file:
        file.write(json.dumps(values) + "\n")


def most_ranks(item: pytest.Item) -> int:
    """Return how many ranks a test starts at most, without starting it; 1 for a test without ranks."""
    sizes: list[Any] = [getattr(getattr(item, "cls", None), "world_size", 1)]
    for mark in item.iter_markers("world_size"):
        sizes = [mark.args[0]]
        break
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    sizes += [parameters[name] for name in ("world_size",) if name in parameters]
    sizes += [getattr(fixture, "world_size", 1) for fixture in fixture_classes(item)]
    return max(max(size) if isinstance(size, list) else int(size) for size in sizes)


def fixture_classes(item: pytest.Item) -> list[Any]:
    """Return the fixtures of a test that are ranks of their own (upstream's DistributedFixture)."""
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).values()
    functions = [definition.func for several in definitions for definition in several]
    return [function for function in functions if getattr(function, "is_dist_fixture", False)]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        for item in session.items:
            write_line(node=item.nodeid, ranks=most_ranks(item))


def pytest_runtestloop(session: pytest.Session) -> None:
    """With ``UPSTREAM_REUSE_RANKS`` let the tests of this process share their ranks.

    That is upstream's own feature, and several times faster. But a test that fails on one rank alone leaves the ranks
    out of step, and then the tests after it may fail, too: run those again without the variable.
    """
    if os.environ.get("UPSTREAM_REUSE_RANKS"):
        from unit import common

        common.DistributedExec.reuse_dist_env = True
        for item in session.items:
            # These tests start torch.distributed themselves, and in ranks that others had it would be there already.
            if not getattr(getattr(item, "cls", None), "init_distributed", True):
                item.cls.reuse_dist_env = False  # type: ignore[attr-defined]


def pytest_runtest_logstart(nodeid: str) -> None:
    write_line(node=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # A test's call counts. Its setup and teardown count where they end it, or fail after it.
    if report.when == "call" or report.outcome != "passed":
        write_line(
            node=report.nodeid,
            outcome=report.outcome,
            when=report.when,
            text=str(report.longreprtext)[-6000:] if report.failed else skip_reason(report),
        )


def skip_reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""


def pytest_runtest_logfinish(nodeid: str) -> None:
    write_line(node=nodeid, outcome="finished")
