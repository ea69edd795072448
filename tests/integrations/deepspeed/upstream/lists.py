"""Lists of upstream tests: those that apply here, and those that do not with the reason."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# Upstream's tests of ZeRO, checkpoints, precision and learning rate schedules, below its folder `tests`.
FILES = (
    "unit/v1/zero",
    "unit/runtime/zero",
    "unit/checkpoint",
    "unit/v1/half_precision",
    "unit/runtime/half_precision",
    "unit/runtime/test_autocast.py",
    "unit/runtime/test_lr_schedulers.py",
    "unit/runtime/test_precision_config_dynamic_scale.py",
    "unit/runtime/test_precision_config_loss_scale.py",
)


@dataclass(frozen=True)
class Heading:
    """The line in brackets above some tests of a list.

    Attributes:
        text: What is in the brackets; of excluded tests the reason.
        message: A regular expression that the message of each of these tests matches when it is run; "" for any.
    """

    text: str
    message: str


@dataclass(frozen=True)
class Lists:
    """The two lists of one project's tests."""

    tests_file: Path
    exclusions_file: Path

    def tests(self) -> dict[str, Heading]:
        """Return the tests that apply, each with its heading."""
        return read_headings(self.tests_file)

    def exclusions(self) -> dict[str, Heading]:
        """Return the excluded tests, each with its heading, which is the reason."""
        return read_headings(self.exclusions_file)


def read_headings(path: Path) -> dict[str, Heading]:
    """Return the tests of a list, each with its heading.

    A heading is a line in brackets. A line below it that begins with ~ has its regular expression. Lines that begin
    with # are comments.
    """
    headings: dict[str, Heading] = {}
    heading = Heading("", "")
    for line in path.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            heading = Heading(line[1:-1], "")
        elif line.startswith("~"):
            heading = Heading(heading.text, line[1:].strip())
        elif line and not line.startswith("#"):
            headings[line] = heading
    return headings


DEEPSPEED = Lists(HERE / "tests.txt", HERE / "exclusions.txt")


def print_table(
    outcomes: Mapping[str, tuple[str, str]], guards: Collection[str], exclusions: Mapping[str, Heading]
) -> bool:
    """Print how many tests of each file passed, and return whether 90 % of all did.

    Args:
        outcomes: What each test did, and its message.
        guards: The tests that would have skipped themselves.
        exclusions: The tests that were not run.
    """
    columns = ("passed", "of these skipped upstream", "failed", "skipped", "excluded")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node, (outcome, _) in outcomes.items():
        counts[node.partition("::")[0]][outcome] += 1
        counts[node.partition("::")[0]][columns[1]] += outcome == "passed" and node in guards
    for node in exclusions:
        counts[node.partition("::")[0]]["excluded"] += 1
    total: collections.Counter[str] = collections.Counter()
    print(f"\n| file | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for file in sorted(counts):
        total += counts[file]
        print(f"| {file} | {' | '.join(str(counts[file][column]) for column in columns)} |")
    print(f"| all | {' | '.join(str(total[column]) for column in columns)} |")
    # A test that skips itself shows nothing, so it does not count as passed.
    listed = total["passed"] + total["failed"] + total["skipped"]
    share = total["passed"] / max(1, listed)
    print(f"\n{total['passed']} of {listed} pass: {100 * share:.1f} %")
    return share >= 0.9


def print_untrue_reasons(outcomes: Mapping[str, tuple[str, str]], exclusions: Mapping[str, Heading]) -> bool:
    """Print the excluded tests that something else stops than their reason says, or nothing, and return if none is."""
    untrue = 0
    for node, (outcome, text) in outcomes.items():
        reason = exclusions[node]
        if outcome == "failed" and re.search(reason.message, text):
            continue
        untrue += 1
        print(f"\n{node}\n  excluded because of: {reason.text}\n  {outcome}: {text[-500:]}")
    print(f"\n{len(outcomes) - untrue} of {len(outcomes)} excluded tests are stopped by what their reason says")
    return untrue == 0
