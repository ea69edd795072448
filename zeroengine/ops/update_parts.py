"""Updates of many parts of many buffers, by one call of the CPU library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zeroengine.ops._library import MOMENT_BLOCK, PartPointers, UpdateArgs, library
from zeroengine.ops.update import PreparedArrays, update_step
from zeroengine.ops.update_arrays import RULES


class UpdatePart(NamedTuple):
    """Neighboring elements of a buffer that share hyperparameters and a step count.

    Attributes:
        arrays: What an update of them reads and writes, prepared for the rule of their group.
        group: The index of their hyperparameters.
        step: The number of their first step.
        seed: The seed of stochastic rounding at step s is ``seed + s``.
        offset: The index of the first element among those that share the seed.
    """

    arrays: PreparedArrays
    group: int
    step: int
    seed: int
    offset: int


class UpdateParts:
    """Updates the same parts of buffers, in many steps.

    On the CPU one call of the library updates any number of them. Elsewhere `update_step` does the same part by part.

    Args:
        parts: The parts. They may be used as long as their arrays live.
        rules: The rule of each group.
    """

    def __init__(self, parts: Sequence[UpdatePart], rules: Sequence[str]) -> None:
        self._parts, self._rules = parts, rules
        for part in parts:
            assert part.step >= 1 and 0 <= part.seed < 1 << 62 and 0 <= part.offset < 1 << 62, part
            assert not part.arrays.pointers.scales[0] or part.offset % MOMENT_BLOCK == 0, part
        is_on_cpu = all(part.arrays.device.type == "cpu" for part in parts)
        self._library = library() if is_on_cpu else None
        self._pointers = (PartPointers * len(parts))(
            *(PartPointers(part.arrays.pointers, part.arrays.numel, *part[2:], part.group) for part in parts)
        )

    def set_groups(self, groups: Sequence[Mapping[str, Any]], num_steps: int) -> None:
        """Set what the parts of a step share, before ``update``.

        Args:
            groups: For each group the keyword arguments of `update_step` that do not vary by part, with its rule.
            num_steps: The steps of all parts before this one.
        """
        assert [group["rule"] for group in groups] == self._rules, self._rules
        self._groups, self._num_steps = groups, num_steps
        codes = [RULES[rule].code for rule in self._rules]
        self._args = (UpdateArgs * len(groups))(
            *[UpdateArgs(**{**group, "rule": code}) for group, code in zip(groups, codes, strict=True)]
        )

    def update(self, first: int, stop: int) -> None:
        """Take the step for the parts ``first`` to ``stop``."""
        if self._library is not None:
            parts = ctypes.byref(self._pointers, first * ctypes.sizeof(PartPointers))
            self._library.ze_update_parts(parts, stop - first, self._args, self._num_steps, torch.get_num_threads())
            return
        for part in self._parts[first:stop]:
            step = part.step + self._num_steps
            update_step(
                arrays=part.arrays,
                **self._groups[part.group],
                step=step,
                reload_written=bool(part.arrays.pointers.reload_written),
                seed=part.seed + step,
                offset=part.offset,
            )
