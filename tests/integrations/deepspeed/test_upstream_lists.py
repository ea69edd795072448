"""What the documentation says about DeepSpeed's own tests is what the lists say. ``upstream/run.py`` runs them."""

from __future__ import annotations

import collections
import re

from tests.integrations.deepspeed.upstream import lists
from tests.integrations.environments import ROOT

FOLDERS = (
    "unit/v1/zero",
    "unit/v1/half_precision",
    "unit/runtime/zero",
    "unit/runtime/half_precision",
    "unit/checkpoint",
)


def test_published_counts_are_those_of_the_lists() -> None:
    tests, exclusions = lists.DEEPSPEED.tests(), lists.DEEPSPEED.exclusions()
    assert not set(tests) & set(exclusions)
    counts: collections.defaultdict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for node, heading in (tests | exclusions).items():
        # Schedules and some tests of precision are files in the folder above.
        folder = next((folder for folder in FOLDERS if node.startswith(f"{folder}/")), "unit/runtime")
        for row in (folder, "all"):
            counts[row][0] += node in tests
            counts[row][1] += node in tests and "upstream skips" in heading.text
            counts[row][2] += node in exclusions
    page = (ROOT / "docs" / "integrations" / "deepspeed.md").read_text()
    rows = re.findall(r"^\| `?(unit/[\w/]+|all)`?[^|]*\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert counts == {
        row: [int(passed) + int(failed), int(skipped), int(excluded)] for row, passed, skipped, failed, excluded in rows
    }
    passed = dict((row[0], row[1]) for row in rows)["all"]
    assert f"{passed} of {len(tests)} of DeepSpeed's own tests" in (ROOT / "README.md").read_text()
    assert f"{passed} of {len(tests)} pass" in (ROOT / "CHANGELOG.md").read_text()


def test_each_reason_of_an_exclusion_says_what_its_tests_print() -> None:
    for reason in set(lists.DEEPSPEED.exclusions().values()):
        assert reason.message and re.compile(reason.message), reason.text
