"""The result of one optimizer step, which the host may not know yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from zeroengine.utils.host_copies import HostCopy


class StepResult:
    """What became of a step: true if it updated parameters. Whoever looks waits for the norm, not for the rest.

    Equal to the bool that it stands for, and pickled as that.

    Attributes:
        on_query: Called when its truth is first asked for.
    """

    def __init__(self, values: HostCopy, num_params: int = 0) -> None:
        self._copy, self._num_params = values, num_params
        self.on_query: Callable[[StepResult], None] | None = None

    @cached_property
    def _values(self) -> list[float]:
        return self._copy.read()

    def __bool__(self) -> bool:
        on_query, self.on_query = self.on_query, None
        if on_query is not None:
            on_query(self)
        return not self._values[2]

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (bool(self),)

    def __repr__(self) -> str:
        return "updated" if self else "skipped"

    @property
    def grad_norm(self) -> float:
        """Of the mean gradient, before clipping."""
        return self._values[1]

    @property
    def used(self) -> list[bool]:
        """Which parameters, over all units, got a gradient on any rank."""
        return [flag > 0 for flag in self._values[3 : 3 + self._num_params]]

    @property
    def write_sums(self) -> list[float]:
        """``OutsideWrites.sums`` over the ranks."""
        return self._values[3 + self._num_params :]
