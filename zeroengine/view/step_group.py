"""Add up consecutive steps, so that a run of millions of steps is read in bounded memory.

A `StepGroup` holds sums, counts and extremes of the numbers of its steps, so any number of groups can be merged without
an error in the totals. The keys are the paths of a record's numbers, joined by dots: `split.forward`, `memory.peak`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroengine.view.clean_values import MAX_NUMBER

Numbers = npt.NDArray[np.float64]
# These parts of a record hold one number for each rank or unit.
ARRAY_SECTIONS = ("ranks", "units")
# Of these numbers, and of all bytes of memory, the least and the most are kept as well.
# The parts of a step that are no work of training. Rates leave them out.
OUTSIDE_TRAINING = ("checkpoint", "evaluation")
EXTREMES = ("loss", "grad_norm", "seconds")


@dataclass
class Delay:
    """How often and how long one rank was the slowest, for one cause."""

    steps: int = 0
    seconds: float = 0.0
    worst_seconds: float = 0.0
    worst_step: int = 0
    text: str = ""  # of the worst step


@dataclass
class StepGroup:
    """Consecutive steps of a run, added up."""

    first_step: int
    last_step: int
    start: float  # Unix seconds at which the first step began
    end: float  # Unix seconds at which the last step ended
    num_steps: int = 1
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of the steps that have the number
    minima: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, Numbers] = field(default_factory=dict)  # sums by rank (`ranks.compute`) or unit (`units.gather`)
    delays: dict[tuple[int, str], Delay] = field(default_factory=dict)  # by rank and cause

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> StepGroup:
        """Return the group of one step.

        Args:
            record: A line of steps.jsonl.

        Raises:
            KeyError: The record has no `step` or no `time`.
            TypeError: One of them is no number.
            ValueError: One of them is no number.
        """
        step, end = int(record["step"]), float(record["time"])
        if not (abs(step) < MAX_NUMBER and abs(end) < MAX_NUMBER):
            raise ValueError("the step or the time is no sensible number")
        group = StepGroup(step, step, end, end)
        for key, value in record.items():
            if key in ARRAY_SECTIONS and isinstance(value, dict):
                for name, numbers in value.items():
                    if isinstance(numbers, list):
                        group.arrays[f"{key}.{name}"] = to_array(numbers)
            elif key not in ("step", "time", "slowest"):
                # Text and other values that this code does not know are passed over.
                group._add_numbers(key, value)
        group.start = end - group.sums.get("seconds", 0.0)
        slowest = record.get("slowest")
        if isinstance(slowest, dict):
            seconds = number_or_zero(slowest.get("seconds"))
            rank, cause = int(number_or_zero(slowest.get("rank"))), str(slowest.get("cause", "other"))
            group.delays[rank, cause] = Delay(1, seconds, seconds, step, str(slowest.get("text", "")))
        return group

    def _add_numbers(self, key: str, value: object) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                self._add_numbers(f"{key}.{name}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                self._add_numbers(f"{key}.{index}", inner)
        elif isinstance(value, (int, float)) and abs(value) < MAX_NUMBER:
            self.sums[key] = float(value)
            self.counts[key] = 1
            # The maximum of a memory is what had to fit. Every further number kept slows the reading of long runs.
            if key in EXTREMES or key.startswith("memory."):
                self.minima[key] = self.maxima[key] = float(value)

    def merge(self, later: StepGroup) -> None:
        """Add the steps of another group, which come after those of this one."""
        self.first_step, self.last_step = min(self.first_step, later.first_step), later.last_step
        self.start, self.end = min(self.start, later.start), max(self.end, later.end)
        self.num_steps += later.num_steps
        for key, value in later.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, count in later.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        for key, value in later.minima.items():
            self.minima[key] = min(self.minima.get(key, math.inf), value)
        for key, value in later.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, -math.inf), value)
        for key, array in later.arrays.items():
            self.arrays[key] = add_padded(self.arrays.get(key, np.zeros(0)), array)
        for key_of_delay, delay in later.delays.items():
            self._merge_delay(key_of_delay, delay)

    def _merge_delay(self, key: tuple[int, str], later: Delay) -> None:
        delay = self.delays.setdefault(key, Delay())
        delay.steps += later.steps
        delay.seconds += later.seconds
        if later.worst_seconds >= delay.worst_seconds:
            delay.worst_seconds, delay.worst_step, delay.text = later.worst_seconds, later.worst_step, later.text

    def mean(self, key: str) -> float | None:
        """Return the mean over the steps that have the number, or None if none has it."""
        count = self.counts.get(key)
        return self.sums[key] / count if count else None

    def rate(self, key: str) -> float | None:
        """Return the number per second of training, over the steps that have it; None if that is unknown."""
        seconds = self.sums.get("seconds", 0.0) - sum(self.sums.get(f"split.{kind}", 0.0) for kind in OUTSIDE_TRAINING)
        # Steps without the number, such as those before the first batch was seen, must not lower the rate.
        seconds *= self.counts.get(key, 0) / self.num_steps
        return self.sums[key] / seconds if key in self.sums and seconds > 0 else None

    def section(self, prefix: str) -> dict[str, float]:
        """Return the means of all numbers of one part of the record, such as `split`, by their names."""
        names = [key.removeprefix(f"{prefix}.") for key in self.counts if key.startswith(f"{prefix}.")]
        return {name: self.sums[f"{prefix}.{name}"] / self.counts[f"{prefix}.{name}"] for name in names}

    def mean_array(self, key: str) -> Numbers:
        """Return the mean over the steps, by rank or by unit; empty if no step has it."""
        return self.arrays.get(key, np.zeros(0)) / self.num_steps


def merge_groups(groups: Iterable[StepGroup]) -> StepGroup:
    """Return the sum of groups in order of their steps, a group of its own; there is at least one."""
    groups = iter(groups)
    first = next(groups)
    total = StepGroup(first.first_step, first.last_step, first.start, first.end, num_steps=0)
    total.merge(first)
    for group in groups:
        total.merge(group)
    return total


def number_or_zero(value: object) -> float:
    """Return the value if it is a sensible number, else 0."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < MAX_NUMBER else 0.0


def to_array(values: list[Any]) -> Numbers:
    """Return the values as an array, with 0 for those that are no sensible numbers."""
    try:
        array: Numbers = np.array(values, dtype=np.float64)
        if array.ndim == 1 and (np.abs(array) < MAX_NUMBER).all():
            return array
    except (TypeError, ValueError, OverflowError):
        # Some values are no numbers.
        pass
    return np.array([number_or_zero(value) for value in values])


def add_padded(left: Numbers, right: Numbers) -> Numbers:
    """Return the sum of two arrays; the shorter one, of a run with fewer ranks, counts as 0 beyond its end."""
    if len(left) == len(right):
        return left + right
    longer, shorter = (left, right) if len(left) > len(right) else (right, left)
    total = longer.copy()
    total[: len(shorter)] += shorter
    return total
