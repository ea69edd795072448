"""What a node's answers mean before anything is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.preflight import find_problems, problem_table

OWN = {"Python": "3.11.7", "torch": "2.13.0", "zeroengine": "0.1.0 (sources aa)"}


def node(slots: int | None = None, lost: str | None = None, python: str = "3.11.7", **facts: Any) -> Any:
    hello = {"python": python}
    answers = {"versions": OWN, "gpus": 0, "missing": [], **facts}
    return SimpleNamespace(host=Host("me@b", slots), loss=lost, hello=hello, facts=answers)


@pytest.mark.parametrize(
    ("answers", "nproc", "expected"),
    [
        ({}, "auto", []),
        ({"python": "3.11.9"}, "auto", []),
        ({"python": "3.12.1", "lost": "zeroengine cannot be imported"}, "auto", ["Python 3.12.1, and 3.11.7 here"]),
        ({"lost": "Connection refused"}, "auto", ["Connection refused"]),
        (
            {
                "versions": {**OWN, "torch": "2.12.0", "zeroengine": "0.1.0 (sources bb)"},
                "missing": ["t.py: not there"],
            },
            "auto",
            [
                "torch 2.12.0, and 2.13.0 here",
                "zeroengine 0.1.0 (sources bb), and 0.1.0 (sources aa) here",
                "t.py: not there",
            ],
        ),
        ({"slots": 4, "gpus": 2}, "auto", ["4 slots in the hostfile, but 2 GPUs"]),
        ({"slots": 2, "gpus": 2}, "auto", []),
        ({"slots": 4, "gpus": 0}, "4", []),
        ({"gpus": 2}, "4", ["--nproc 4, but 2 GPUs; --cpu uses none"]),
    ],
)
def test_every_problem_of_a_node_is_named(answers: dict[str, Any], nproc: str, expected: list[str]) -> None:
    assert find_problems(node(**answers), OWN, nproc) == expected


def test_a_table_names_each_host_once() -> None:
    problems = {"a": ["one", "two"], "long": ["three"]}
    assert str(problem_table(problems, 3)).splitlines() == [
        "2 of 3 nodes cannot take part:",
        "  a     one",
        "        two",
        "  long  three",
    ]
