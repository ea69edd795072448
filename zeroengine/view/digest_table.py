"""Read the digests that a run wrote into its folder: digests.jsonl.

The file has a header whenever an engine starts (`format`, `units`, `world_size`), and after it a line for each step
with digests. Each kind of state has 16 hexadecimal digits for each unit, in the header's order; zeros where the unit
has no such state. A restarted run may take steps again, and the later line of a step counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import DIGEST_FORMAT, DIGESTS, GIVEN
from zeroengine.utils.progress import progress
from zeroengine.view.run_reader import LONG_READ_BYTES, GrowingLines

# The kinds of states, in the order in which a step computes them.
KINDS = ("gradients", "moments", "parameters")
HOW_TO_WRITE = 'write "digests": {"every": 100} in the configurations of both runs'


class MissingDigestsError(ZeroEngineError):
    """The two have no digests to compare; what else they have recorded may still be compared."""


@dataclass(frozen=True)
class DigestTable:
    """The digests of a run, or of one checkpoint.

    Attributes:
        units: The names of the units.
        kinds: Those of ``KINDS`` that there are.
        steps: The steps with digests, rising.
        world_sizes: The number of ranks at each step; 0 if it is not known.
        values: The digests, [steps, kinds, units]; 0 where a unit has no such state.
        notices: Sentences about damaged lines.
        given: By step, the digests of what each rank was given, by the names in ``GIVEN``: 16 digits for each rank.
    """

    units: Sequence[str]
    kinds: Sequence[str]
    steps: npt.NDArray[np.int64]
    world_sizes: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint64]
    notices: Sequence[str] = ()
    given: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


def read_digests(folder: Path) -> DigestTable:
    """Return the digests of a run folder. Its units are those that every engine of the run had.

    Raises:
        MissingDigestsError: It has none.
        ZeroEngineError: They are of another format.
    """
    path = folder / DIGESTS
    if not path.exists():
        advice = "For a checkpoint, write its own folder, as in runs/a/step-100"
        raise MissingDigestsError(f"{folder} has no {DIGESTS}, so its states are not known: {HOW_TO_WRITE}. {advice}")
    size, lines = path.stat().st_size, GrowingLines(path)
    # Of the engine that wrote a line: the places of its units, and its number of ranks.
    places: dict[str, int] = {}
    world_size = 0
    # By step, those of the engine, and the digests.
    rows: dict[int, tuple[dict[str, int], int, npt.NDArray[Any]]] = {}
    given: dict[int, dict[str, str]] = {}
    with progress(f"reading {path}", size, shown=size > LONG_READ_BYTES) as report:
        for line in lines.read(report):
            if "units" in line and line.get("format") != DIGEST_FORMAT:
                raise ZeroEngineError(
                    f"{path} has digests of format {line.get('format')}, and this zeroengine knows format "
                    f"{DIGEST_FORMAT}. Different formats do not compare: install the version that wrote both"
                )
            try:
                if "units" in line:
                    places = {str(name): place for place, name in enumerate(line["units"])}
                    world_size = int(line["world_size"])
                    continue
                words = np.frombuffer(bytes.fromhex("".join(line[kind] for kind in KINDS)), ">u8")
                step, row = int(np.int64(line["step"])), words.reshape(len(KINDS), len(places))
                rows[step] = places, world_size, row
                given[step] = {kind: str(line[kind]) for kind in GIVEN if kind in line}
            except (LookupError, TypeError, ValueError, OverflowError):
                lines.note_damaged()
    if not rows:
        raise MissingDigestsError(f"{path} has no digests of a step yet: wait for the first, or lower digests.every")
    steps = sorted(rows)
    units = [name for name in rows[steps[-1]][0] if all(name in rows[step][0] for step in steps)]
    values = np.stack([row[:, [own[name] for name in units]] for own, _, row in map(rows.__getitem__, steps)])
    world_sizes = np.array([rows[step][1] for step in steps])
    notices = [f"{folder}/{notice}." for notice in lines.notices()]
    return DigestTable(units, KINDS, np.array(steps), world_sizes, values, notices, given)


def table_of_checkpoint(digests: Mapping[str, Any], step: int, world_size: int) -> DigestTable:
    """Return the digests in the manifest of a checkpoint.

    Args:
        digests: `units`, and hexadecimal digits by kind of state.
        step: The checkpoint's step.
        world_size: The number of ranks that saved it.
    """
    kinds, units = [kind for kind in KINDS if kind in digests], digests["units"]
    words = np.frombuffer(bytes.fromhex("".join(digests[kind] for kind in kinds)), ">u8")
    values = words.astype(np.uint64).reshape(1, len(kinds), len(units))
    return DigestTable(units, kinds, np.array([step]), np.array([world_size]), values)
