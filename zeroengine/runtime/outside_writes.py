"""Find parameters that were written after ``initialize``, and ranks that wrote different values.

[Note: Values written into the model]
Where the full buffer stays between uses (stages 0 to 2, and small units at stage 3) a user may write a parameter at any
time: ``load_state_dict``, ``p.copy_``, ``p.data.clamp_``, ``nn.init``. The next update starts from what was written.
- In fp32 the parameter is its own master, so the write has reached the master already.
- In bf16 and fp16 the update compares the parameter with its rounded master, bit by bit (``ops.adam_step``,
  ``reload_written``), which finds every write. Code that reads masters at other times, such as a checkpoint, reloads
  them first (``OptimizerShard.reload_master``). A parameter without a gradient keeps the written values, because its
  master is not published.
- Every rank must write the same values. Autograd's version counters show which parameters a rank wrote since the last
  step, and the step sums a checksum of these together with its norm. This takes no additional collective, and almost no
  time if nothing was written. ``.data`` hides a write from the counters. If only one rank writes in that way, its own
  shard takes the values (stages 1 and 2) or its replica drifts away (stage 0), and nothing detects this.
Released units can be written only inside ``gathered``, where the values of one rank count for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

from zeroengine.comm.group import Group
from zeroengine.errors import DivergenceError
from zeroengine.runtime.unit import Unit
from zeroengine.utils.checksum import checksum
from zeroengine.utils.listed import listed

# The number of parameters that a message names.
NUM_SHOWN = 5

# With ``map``, an ``attrgetter`` reads thousands of versions at each step without a Python frame for each.
_version_of = attrgetter("_version")


class OutsideWrites:
    """Compares writes to the parameters of units that are never released.

    Args:
        units: All units of the engine.
        group: The ranks that must agree. A single rank has nothing to compare.
    """

    def __init__(self, units: Iterable[Unit], group: Group) -> None:
        self._group = group
        # Released units can be written only inside ``gathered``, where one rank's values count for all.
        never_released = [unit for unit in units if not unit.is_releasable] if group.world_size > 1 else []
        self._params = [param for unit in never_released for param in unit.params]
        self._names = [slot.name for unit in never_released for slot in unit.layout.slots]
        self._zeros = [0.0] * (2 * len(self._params))
        self._versions = self._current_versions()

    def reset_baseline(self, unit: Unit | None = None) -> None:
        """Count writes from now on. The ranks are known to agree at this point.

        Args:
            unit: Forget the earlier writes to this unit's parameters. None forgets those to all parameters.
        """
        versions = self._current_versions()
        if unit is None:
            self._versions = versions
            return
        # Writes to other units since the last step must still be compared.
        params = set(unit.params)
        for index, param in enumerate(self._params):
            if param in params:
                self._versions[index] = versions[index]

    def checksums_to_sum(self) -> list[float]:
        """Return the numbers to sum over ranks: a checksum c of each parameter (0 if unwritten), then each c * c.

        All ranks have the same c if and only if world_size * sum(c * c) = sum(c) ** 2 (Cauchy-Schwarz). The numbers are
        small enough to be exact in float64 on up to two million ranks.
        """
        written = self._written()
        if not written:
            return self._zeros
        sums = list(self._zeros)
        for index in written:
            # The checksum is at least 1, so that a written parameter differs from an unwritten one. It is at most
            # 65,521, so that the sum of its squares over two million ranks is below 2**53.
            first, total = self._checksum(index)
            sums[index] = float((31 * first + total) % 65521 + 1)
            sums[len(self._params) + index] = sums[index] ** 2
        return sums

    def suspects(self, sums: Sequence[float]) -> list[int]:
        """Return the indices of parameters that not every rank wrote with the same values.

        Args:
            sums: The results of ``checksums_to_sum``, summed over the ranks.
        """
        count, size = len(self._params), self._group.world_size
        pairs = zip(sums[:count], sums[count:], strict=True)
        # The sums are whole numbers, so Python's integers are exact, whereas the square of a float may be rounded.
        return [i for i, (c, squares) in enumerate(pairs) if size * int(squares) != int(c) ** 2]

    def raise_if_different(self, suspects: Sequence[int]) -> None:
        """Compare the values of ``suspects`` over the ranks. This is a collective if there are any.

        A suspect may turn out to be equal, because a rank may have taken the same values by a write that no version
        counter shows.

        Raises:
            DivergenceError: The values differ. Raised on every rank.
        """
        if not suspects:
            return
        checksums = self._group.all_gather_object(
            [self._checksum(index) for index in suspects], "of checksums of parameters"
        )
        different = [index for index, *sums in zip(suspects, *checksums, strict=True) if len(set(sums)) > 1]
        if different:
            raise DivergenceError(self.message(different))

    def compare(self) -> None:
        """Check that the ranks wrote the same values since the last step. This is a collective.

        Raises:
            DivergenceError: They wrote different values. Raised on every rank.
        """
        # All ranks have the same units, so all of them return here or none does.
        if not self._params:
            return
        # Every rank compares the parameters that any rank wrote, because the others may lack exactly that write.
        written = self._group.all_gather_object(self._written(), "of names of written parameters")
        self.raise_if_different(sorted(set().union(*written)))
        self.reset_baseline()

    def message(self, different: Sequence[int]) -> str:
        """Return the text of an error about parameters that the ranks wrote differently."""
        names = [self._names[index] for index in different]
        own_names = [self._names[index] for index in self._written()]
        wrote = "some of them" if set(names) & set(own_names) else "none of them"
        return (
            f"the ranks have different values of {listed(names, NUM_SHOWN)}, which were written since the "
            f"last step (rank {self._group.rank} wrote {wrote}). Write the same values on every rank, or write inside "
            "`with zeroengine.gathered(module_or_params):`, where those of one rank count for all."
        )

    def _written(self) -> list[int]:
        versions = self._current_versions()
        if versions == self._versions:
            return []
        return [i for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then]

    def _current_versions(self) -> list[int]:
        # Reading a version reads no value, so it must not wait for a gather in progress.
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_version_of, self._params))

    def _checksum(self, index: int) -> tuple[int, int]:
        return checksum(self._params[index].detach().flatten())
