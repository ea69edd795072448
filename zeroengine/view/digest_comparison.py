"""Compare the digests of two runs: where they differ first, and a picture of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroengine.utils.files import GIVEN
from zeroengine.utils.formats import counted, listed
from zeroengine.view.digest_table import HOW_TO_WRITE, KINDS, DigestTable, MissingDigestsError

# The most columns and rows of the heat map, and names in a sentence.
MAX_COLUMNS, MAX_ROWS, MAX_NAMES = 400, 400, 3


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which digests differ.

    Attributes:
        step: Its number.
        before: The compared step before it; None if there is none.
        units: The units that differ, by kind of state, in the order of ``KINDS``, without kinds that are equal.
        world_sizes: The number of ranks of each side at this step; 0 if it is not known.
    """

    step: int
    before: int | None
    units: dict[str, list[str]]
    world_sizes: list[int]


class DigestComparison:
    """The digests of two runs side by side, at the steps, for the units and kinds of states that both have.

    Args:
        tables: The digests of both.
        names: What messages call the two.

    Attributes:
        steps: The compared steps, rising.
        units: The compared units, in the order of the first run.
        kinds: The compared kinds of states, in the order of ``KINDS``.
        differs: Whether the digests differ, [steps, kinds, units].
        different_steps: The steps at which anything differs, rising.

    Raises:
        MissingDigestsError: The two have no step or no unit in common.
    """

    def __init__(self, tables: Sequence[DigestTable], names: Sequence[str]) -> None:
        (a, b), self._named = tables, list(zip(names, tables, strict=True))
        self.units = [name for name in a.units if name in b.units]
        self.kinds = [kind for kind in KINDS if kind in a.kinds and kind in b.kinds]
        self.steps, *rows = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
        if not len(self.steps):
            have = " and ".join(f"{name} has {span_of(table.steps)}" for name, table in self._named)
            advice = f"{HOW_TO_WRITE}, with one number for both, and save at a step with digests"
            raise MissingDigestsError(f"no step has digests in both: {have}. So {advice}")
        if not self.units:
            have = " and ".join(f"{name} has {listed(table.units, MAX_NAMES)}" for name, table in self._named)
            raise MissingDigestsError(f'no unit is in both: {have}. Write the same "units" in both configurations')
        self._world_sizes = [table.world_sizes[own] for table, own in zip(tables, rows, strict=True)]
        left, right = (self._select(table, own) for table, own in zip(tables, rows, strict=True))
        self.differs: npt.NDArray[np.bool_] = left != right
        # 0 where nothing differs, else 1 + the first kind that does, [steps, units].
        self._codes = np.where(self.differs.any(1), self.differs.argmax(1) + 1, 0).astype(np.uint8)
        self.different_steps = self.steps[self._codes.any(1)]

    def _select(self, table: DigestTable, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        selected = table.values[rows][:, list(map(table.kinds.index, self.kinds))]
        return selected[:, :, list(map(table.units.index, self.units))]

    def first(self) -> FirstDifference | None:
        """Return the first difference, or None if everything is equal."""
        if not len(self.different_steps):
            return None
        row = int(self._codes.any(1).argmax())
        found = [[self.units[unit] for unit in np.flatnonzero(differs)] for differs in self.differs[row]]
        units = {kind: names for kind, names in zip(self.kinds, found, strict=True) if names}
        before = int(self.steps[row - 1]) if row else None
        return FirstDifference(int(self.steps[row]), before, units, [int(sizes[row]) for sizes in self._world_sizes])

    def given(self, step: int) -> Iterator[str]:
        """Yield sentences about what ranks were given at a step, where both runs have as many ranks."""
        a, b = (table.given.get(step, {}) for _, table in self._named)
        for kind, words in GIVEN.items():
            digits = a.get(kind, ""), b.get(kind, "")
            if len(digits[0]) == len(digits[1]) and digits[0] != digits[1]:
                ranks = [str(i // 16) for i in range(0, len(digits[0]), 16) if digits[0][i:][:16] != digits[1][i:][:16]]
                yield f"The {words} of step {step:,} differ on rank{'s' * (len(ranks) > 1)} {listed(ranks, MAX_NAMES)}."

    def heat(self) -> dict[str, Any]:
        """Return the picture of units by steps, as JSON types.

        Returns:
            `kinds`, `units`, the `first` and the `last` step of each column, and in `rows` a digit for each column: 0
            where nothing differs, else 1 + the index of the kind that differs at the first different step.
        """
        size = -(-len(self.steps) // MAX_COLUMNS)
        starts = range(0, len(self.steps), size)
        blocks = [self._codes[start : start + size] for start in starts]
        columns = np.stack([block[block.astype(bool).argmax(0), np.arange(len(self.units))] for block in blocks])
        # Of very many units, those that differ are shown rather than others.
        shown = np.sort(np.argsort(columns.max(0) == 0, kind="stable")[:MAX_ROWS])
        return {
            "kinds": self.kinds,
            "units": [self.units[unit] for unit in shown],
            "first": self.steps[::size].tolist(),
            "last": [int(self.steps[start : start + size][-1]) for start in starts],
            "rows": ["".join(map(str, columns[:, unit])) for unit in shown],
        }

    def coverage(self) -> list[str]:
        """Return sentences about what is compared, and what is not because one of the two lacks it."""
        sentences = [
            f"Compared: {', '.join(self.kinds)} of {counted(len(self.units), 'unit')} at {span_of(self.steps)}."
        ]
        alone = [(name, [unit for unit in table.units if unit not in self.units]) for name, table in self._named]
        sentences += [f"Only {name} has the units {listed(own, MAX_NAMES)}." for name, own in alone if own]
        for name, table in self._named:
            if len(table.steps) > len(self.steps):
                sentences.append(
                    f"{name} alone has digests of {counted(len(table.steps) - len(self.steps), 'other step')}."
                )
            sentences += table.notices
        return sentences


def span_of(steps: npt.NDArray[np.int64]) -> str:
    """Return in words how many steps there are, and from where to where."""
    gaps = set(np.diff(steps).tolist())
    every = f", every {gaps.pop():,}" if len(gaps) == 1 and gaps != {1} else ""
    return f"{len(steps):,} steps ({steps[0]:,} to {steps[-1]:,}{every})" if len(steps) > 1 else f"step {steps[0]:,}"
