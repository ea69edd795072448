"""Find parameters that were written after ``initialize``, and ranks that wrote different values.

[Note: Values written into the model]
Where the full buffer stays between uses (stages 0 to 2, and small units at stage 3) a user may write a parameter at any
time: ``load_state_dict``, ``p.copy_``, ``p.data.clamp_``, ``nn.init``. The next update starts from what was written.
- In fp32 the parameter is its own master, so a write is there already.
- In bf16 and fp16 the update compares the parameter with its rounded master, bit by bit (``ops.adam_step``,
  ``reload_written``), which finds every write. What reads masters at other times, such as a checkpoint, has them
  reloaded first (``OptimizerShard.reload_master``). A parameter without a gradient keeps what was written, for its
  master is not published.
- Every rank must write the same. Autograd's version counters say which parameters a rank wrote since the last step, and
  the step sums a checksum of those with its norm: no further collective, and next to no cost where nobody wrote.
  ``.data`` hides a write from the counters. Where one rank alone writes in that way its own shard takes the
  values (stages 1 and 2), or its replica drifts away (stage 0), and nobody can tell.
Released units are written inside ``gathered`` alone, which settles whose values count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from zeroengine.comm.group import Group
from zeroengine.errors import DivergenceError
from zeroengine.runtime.unit import Unit
from zeroengine.utils.checksum import checksum

SHOWN = 5  # names in a message

_version_of = attrgetter("_version")


class OutsideWrites:
    """Parameters of units that are never released, and the version that autograd counts of each.

    Args:
        units: all of the engine's.
        group: the ranks that must agree; one alone has nobody to disagree with.
    """

    def __init__(self, units: Iterable[Unit], group: Group) -> None:
        self._group = group
        kept = [unit for unit in units if not unit.releasable] if group.world_size > 1 else []
        self._params = [param for unit in kept for param in unit.params]
        self._names = [slot.name for unit in kept for slot in unit.layout.slots]
        self._nothing = [0.0] * (2 * len(self._params))
        self._versions = self._current_versions()

    def remember(self, unit: Unit | None = None) -> None:
        """Count writes from here on, where the ranks are known to agree.

        Args:
            unit: forget those of its parameters alone; None: of all.
        """
        versions = self._current_versions()
        if unit is None:
            self._versions = versions
            return
        params = set(unit.params)
        for index, param in enumerate(self._params):
            if param in params:
                self._versions[index] = versions[index]

    def sums(self) -> list[float]:
        """Return what the ranks are to sum: for each parameter c and then for each c * c, c = 0 where not written.

        All ranks have the same c exactly where world_size * sum(c * c) = sum(c) ** 2 (Cauchy and Schwarz), and the
        numbers are small enough to be exact in float64 on up to two million ranks.
        """
        written = self._written()
        if not written:
            return self._nothing
        sums = list(self._nothing)
        for index in written:
            first, total = self._checksum(index)
            sums[index] = float((31 * first + total) % 65521 + 1)
            sums[len(self._params) + index] = sums[index] ** 2
        return sums

    def suspects(self, sums: Sequence[float]) -> list[int]:
        """Return the parameters that not every rank wrote, or not with the same values, by ``sums`` over the ranks."""
        count, size = len(self._params), self._group.world_size
        pairs = zip(sums[:count], sums[count:], strict=True)
        return [i for i, (c, squares) in enumerate(pairs) if size * int(squares) != int(c) ** 2]

    def confirm(self, suspects: Sequence[int]) -> None:
        """Compare the values of ``suspects`` over the ranks. A collective, if there are any.

        A rank may have been sent what another wrote, in a way that no version counter sees.

        Raises:
            DivergenceError: on every rank, where they differ.
        """
        if not suspects:
            return
        found = self._group.all_gather_object(
            [self._checksum(index) for index in suspects], "of checksums of parameters"
        )
        different = [index for index, *sums in zip(suspects, *found, strict=True) if len(set(sums)) > 1]
        if different:
            raise DivergenceError(self.message(different))

    def compare(self) -> None:
        """Find out whether the ranks wrote the same since the last step. A collective.

        Raises:
            DivergenceError: on every rank, where they did not.
        """
        if not self._params:
            return
        written = self._group.all_gather_object(self._written(), "of names of written parameters")
        self.confirm(sorted(set().union(*written)))
        self.remember()

    def message(self, different: Sequence[int]) -> str:
        """Return an error's text about parameters that the ranks wrote differently."""
        names = [self._names[index] for index in different]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        mine = [self._names[index] for index in self._written()]
        wrote = "some of them" if set(names) & set(mine) else "none of them"
        return (
            f"the ranks have different values of {', '.join(names[:SHOWN])}{more}, which were written since the last "
            f"step (rank {self._group.rank} wrote {wrote}). Write the same values on every rank, or write inside `with "
            "zeroengine.gathered(module_or_params):`, where those of one rank count for all."
        )

    def _written(self) -> list[int]:
        versions = self._current_versions()
        if versions == self._versions:
            return []
        return [i for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then]

    def _current_versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # a gather may be under way, and a version is no value
            return list(map(_version_of, self._params))

    def _checksum(self, index: int) -> tuple[int, int]:
        return checksum(self._params[index].detach().flatten())
