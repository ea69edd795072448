"""Write the digests of steps to a run folder: lines of JSON in ``digests.jsonl``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroengine.monitor.run_folder import append_line, open_lines
from zeroengine.utils.run_files import DIGEST_FORMAT, DIGESTS


class DigestFile:
    """Appends to ``digests.jsonl``, so that a restarted run continues it.

    The file has a line for each start of an engine: ``format``, ``units``, ``world_size`` and ``time``. A line for each
    step has, for each kind of state, 16 hexadecimal digits for each unit, and for ``inputs`` and ``generators`` 16 for
    each rank. 0 stands for what is not there, or not known.

    Args:
        folder: The run folder.
        units: The names of the units.
        world_size: The number of ranks that hold the states.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, units: Sequence[str], world_size: int) -> None:
        self._descriptor = open_lines(folder / DIGESTS)
        header = {"format": DIGEST_FORMAT, "units": list(units), "world_size": world_size, "time": time.time()}
        append_line(self._descriptor, header)

    def append(self, step: int, digests: Mapping[str, str]) -> None:
        """Append the digests of a step, by kind.

        Raises:
            OSError: The disk is full or fails.
        """
        append_line(self._descriptor, {"step": step, **digests})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
