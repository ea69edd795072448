"""Lists of upstream tests: those that apply here, and those that do not with the reason."""

from __future__ import annotations

import collections
from collections.abc import Mapping
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
class Lists:
    """The two lists of one project's tests."""

    tests_file: Path
    exclusions_file: Path

    def tests(self) -> list[str]:
        """Return the ids of the tests that apply. Lines that begin with # say where they come from."""
        return [line for line in self.tests_file.read_text().splitlines() if line and not line.startswith("#")]

    def exclusions(self) -> dict[str, str]:
        """Return the reason of each excluded test. In the file a reason is a line in brackets above its tests."""
        exclusions: dict[str, str] = {}
        reason = ""
        for line in self.exclusions_file.read_text().splitlines():
            if line.startswith("[") and line.endswith("]"):
                reason = line[1:-1]
            elif line and not line.startswith("#"):
                exclusions[line] = reason
        return exclusions


DEEPSPEED = Lists(HERE / "tests.txt", HERE / "exclusions.txt")


def print_table(outcomes: Mapping[str, tuple[str, str]], exclusions: Mapping[str, str]) -> bool:
    """Print passed, failed, skipped and excluded tests by file, and return whether 90 % of the tests passed."""
    columns = ("passed", "failed", "skipped", "excluded")
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node, (outcome, _) in outcomes.items():
        counts[node.partition("::")[0]][outcome] += 1
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
