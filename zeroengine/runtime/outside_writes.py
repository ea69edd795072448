"""Find parameters that were written after ``initialize``, and ranks that wrote different values.

[Note: Values written into the model]
Where the full buffer stays between uses (stages 0 to 2, and small units at stage 3) a user may write a parameter at any
time: ``load_state_dict``, ``p.copy_``, ``p.data.clamp_``, ``nn.init``. The next update starts from what was written.
- In fp32 the parameter is its own master, so the write has reached the master already.
- In bf16 and fp16 the update compares the parameter with its rounded master, bit by bit (``ops.update_step``,
  ``reload_written``), which finds every write. Code that reads masters at other times, such as a checkpoint, reloads
  them first (``OptimizerShard.reload_master``). A parameter without a gradient keeps the written values, because its
  master is not published.
- Every rank must write the same values. Autograd's version counters show which parameters a rank wrote since the last
  step, and the step sums a digest of these together with its norm. This takes no additional collective, and almost no
  time if nothing was written. ``.data`` hides a write from the counters. If only one rank writes in that way, its own
  shard takes the values (stages 1 and 2) or its replica drifts away (stage 0). Only ``check_parameter_writes`` detects
  this, which takes the digest of every parameter in every step.

Units that are released can be written while they are gathered, inside a forward or a backward, as
``gathered_writes.py`` says. Their digests travel in the same sum. Elsewhere they can be written only inside
``gathered``, where the values of one rank count for all.

So writes are looked for in three ways, which ask three questions. The update asks which elements of its own shard
differ from their master, since it may take over no others. This file asks what a rank wrote since the last step, when
all ranks agreed. ``gathered_writes.py`` asks what was written since the unit was gathered, whose memory is about to go:
its baseline moves at each gather, and never counts for a unit that stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.errors import DivergenceError
from zeroengine.ops import digest
from zeroengine.runtime.dtensors import local_tensor
from zeroengine.runtime.gathered_writes import versions_of
from zeroengine.runtime.unit import Unit
from zeroengine.utils.formats import listed

# The number of parameters that a message names.
NUM_SHOWN = 5
# Stands for a digest where there are no values. Digests are numbers of 64 bits, so none is equal to it.
NO_VALUES = 1 << 64


class OutsideWrites:
    """Compares what the ranks wrote into the model.

    What is compared has a number: first each parameter of the units that are never released, then each other unit, of
    which seldom anything is written.

    Args:
        units: All units of the engine. Experts that are split over ranks are not compared.
        group: The ranks that must agree. A single rank has nothing to compare.
        gradient_digests: By parameter, digests of gradients that user code assigned in this step. They are compared
            with the values. See ``Reducer.assigned_digests``.
        checks_writes: Whether every parameter counts as written in each step, which finds all differences.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        group: Group,
        gradient_digests: Mapping[nn.Parameter, torch.Tensor | None],
        checks_writes: bool = False,
        data_ranks: int | None = None,
        slice_number: int = 0,
    ) -> None:
        self._group, self._gradient_digests, self._checks_writes = group, gradient_digests, checks_writes
        self._num_summed, self._slice_number = group.world_size if data_ranks is None else data_ranks, slice_number
        units = list(units)
        self._moved = [unit for unit in units if unit.is_releasable]
        units = [unit for unit in units if not unit.expert_ranks]
        self._releasable = [unit for unit in units if unit.is_releasable]
        never_released = [unit for unit in units if not unit.is_releasable] if group.world_size > 1 else []
        self._params = [param for unit in never_released for param in unit.params]
        self._names = [slot.name for unit in never_released for slot in unit.layout.slots]
        compared = [unit for unit in never_released for _ in unit.params] + self._releasable
        # For each parameter, and then each releasable unit, whether it is split over ranks.
        self._is_split = [unit.is_split for unit in compared] if group.world_size > 1 else []
        self._split_names = {slot.name for unit in units if unit.is_split for slot in unit.layout.slots}
        self._zeros = [0.0] * (2 * len(self._is_split))
        self._versions = versions_of(self._params)

    def reset_baseline(self, unit: Unit | None = None) -> None:
        """Count writes from now on. The ranks are known to agree at this point.

        Args:
            unit: Forget the earlier writes to this unit's parameters. None forgets those to all parameters.
        """
        versions = versions_of(self._params)
        if unit is None:
            self._versions = versions
            return
        # Writes to other units since the last step must still be compared.
        params = set(unit.params)
        for index, param in enumerate(self._params):
            if param in params:
                self._versions[index] = versions[index]

    def move_to_shards(self) -> set[Unit]:
        """Write into the shards what was written into gathered parameters. The ranks are known to agree on it.

        Call it where no rank computes with parameters.

        Returns:
            The units whose shards have changed.
        """
        return {unit for unit in self._moved if unit.writes.values and unit.move_writes_to_shard()}

    def digests_to_sum(self) -> list[float]:
        """Return the numbers to sum over ranks: a short digest c of each parameter (0 if unwritten), then each c * c.

        Units that are released have one c for all of their parameters. All ranks have the same c if and only if
        world_size * sum(c * c) = sum(c) ** 2 (Cauchy-Schwarz). The numbers are small enough to be exact in float64 on
        up to two million ranks.
        """
        written = self._written() if self._zeros else []
        if not written:
            return self._zeros
        sums = list(self._zeros)
        for index, by_name in zip(written, self._digests(written), strict=True):
            # The short digest is at least 1, so that a written parameter differs from an unwritten one. It is at most
            # 65,521, so that the sum of its squares over two million ranks is below 2**53.
            number = 0
            for value in by_name.values():
                number = (31 * number + value) % 65521
            sums[index] = float(number + 1)
            sums[len(sums) // 2 + index] = sums[index] ** 2
        return sums

    def suspects(self, sums: Sequence[float]) -> list[int]:
        """Return the numbers of what not every rank wrote with the same values.

        Args:
            sums: The results of ``digests_to_sum``, summed over the ranks; of a split model, over a data group.
        """
        return _unequal(sums, self._num_summed)

    def facts_of_data_group(self, sums: Sequence[float]) -> list[float]:
        """Return the numbers to sum over a model group, of which the ranks of each data group have the same.

        Args:
            sums: See ``suspects``.
        """
        found = self.suspects(sums)
        count = len(sums) // 2
        # Of what is split, the data groups wrote different values.
        totals = [0.0 if is_split else c for c, is_split in zip(sums[:count], self._is_split, strict=True)]
        return [*(float(i in found) for i in range(count)), *totals, *(c * c for c in totals)]

    def suspects_of_all(self, sums: Sequence[float], num_data_groups: int) -> list[int]:
        """Return the suspects of all data groups, and what two of them wrote differently although it is not split.

        Args:
            sums: The results of ``facts_of_data_group``, summed over a model group.
            num_data_groups: The ranks of a model group.
        """
        count = len(sums) // 3
        return sorted({i for i in range(count) if sums[i]} | {*_unequal(sums[count:], num_data_groups)})

    def raise_if_different(self, suspects: Sequence[int]) -> None:
        """Compare the values of ``suspects`` over the ranks. This is a collective if there are any.

        A suspect may turn out to be equal, because a rank may have taken the same values by a write that no version
        counter shows.

        Raises:
            DivergenceError: The values differ. Raised on every rank.
        """
        if not suspects:
            return
        own = {name: value for by_name in self._digests(suspects) for name, value in by_name.items()}
        of_ranks = self._group.all_gather_object((self._slice_number, own), "of digests of parameters")
        different = []
        for name in dict.fromkeys(name for _, by_name in of_ranks for name in by_name):
            # Ranks with different slices of a parameter have different values of it.
            keys = [number if name in self._split_names else 0 for number, _ in of_ranks]
            found = {(key, by_name.get(name)) for key, (_, by_name) in zip(keys, of_ranks, strict=True)}
            if len(found) > len(set(keys)):
                different.append(name)
        if different:
            raise DivergenceError(self._message(different))

    def compare(self) -> None:
        """Check that the ranks wrote the same values since the last step. This is a collective.

        Raises:
            DivergenceError: They wrote different values. Raised on every rank.
        """
        # All ranks have the same units, so all of them return here or none does.
        if not self._zeros:
            return
        # Every rank compares the parameters that any rank wrote, because the others may lack exactly that write.
        written = self._group.all_gather_object(self._written(), "of names of written parameters")
        self.raise_if_different(sorted(set().union(*written)))
        self.reset_baseline()

    def message(self, suspects: Sequence[int]) -> str:
        """Return the text of an error about suspects, which cannot be compared any more."""
        return self._message([name for index in suspects for name in self._names_of(index)])

    def _message(self, names: Sequence[str]) -> str:
        own_names = {name for index in self._written() for name in self._pending_digests(index)}
        wrote = "some of them" if set(names) & own_names else "none of them"
        return (
            f"the ranks have different values of {listed(names, NUM_SHOWN)}, which were written since the "
            f"last step (rank {self._group.rank} wrote {wrote}). Write the same values on every rank. The values of "
            "one rank count for all inside `with zeroengine.gathered(module_or_params):` and in "
            "zeroengine.set_full_gradient(param, value)."
        )

    def _written(self) -> list[int]:
        """Return the numbers of what this rank wrote since the last step."""
        num_params, versions = len(self._params), versions_of(self._params)
        numbers = {num_params + i for i, unit in enumerate(self._releasable) if unit.writes.values}
        if self._checks_writes:
            numbers.update(range(num_params))
        elif versions != self._versions:
            pairs = zip(versions, self._versions, strict=True)
            numbers.update(i for i, (now, then) in enumerate(pairs) if now != then)
        if self._gradient_digests:
            numbers.update(i for i, param in enumerate(self._params) if param in self._gradient_digests)
            units = enumerate(self._releasable, num_params)
            numbers.update(i for i, unit in units if any(p in self._gradient_digests for p in unit.params))
        return sorted(numbers)

    def _digests(self, indices: Sequence[int]) -> list[dict[str, int]]:
        """Return for each number the digests of what has it, by name. They are read from the device together."""
        pending = [self._pending_digests(index) for index in indices]
        tensors = [value for by_name in pending for value in by_name.values() if value is not None]
        read = iter(torch.stack(tensors).tolist() if tensors else [])
        return [{name: NO_VALUES if x is None else next(read) for name, x in by_name.items()} for by_name in pending]

    def _pending_digests(self, index: int) -> dict[str, torch.Tensor | None]:
        """Return the digest of a parameter, or of each parameter of a unit that was written, and of gradients."""
        if index < len(self._params):
            params, names = [self._params[index]], [self._names[index]]
            values = {names[0]: local_tensor(params[0]).detach()}
        else:
            unit = self._releasable[index - len(self._params)]
            params, names = list(unit.params), [slot.name for slot in unit.layout.slots]
            values = {names[i]: value for i, value in sorted(unit.writes.values.items())}
        digests = {name: digest(value) for name, value in values.items()}
        gradients = {f"{name}.grad": param for name, param in zip(names, params, strict=True)}
        return digests | {k: self._gradient_digests[p] for k, p in gradients.items() if p in self._gradient_digests}

    def _names_of(self, index: int) -> list[str]:
        if index < len(self._params):
            return [self._names[index]]
        unit = self._releasable[index - len(self._params)]
        # Values that the shards have taken are not kept any longer.
        return [unit.layout.slots[i].name for i in sorted(unit.writes.values)] or [f"parameters of {unit.name}"]


def _unequal(sums: Sequence[float], num_ranks: int) -> list[int]:
    """Return the numbers of the values c that are not equal on all ranks, by the sums of each c and then each c * c."""
    count = len(sums) // 2
    pairs = zip(sums[:count], sums[count:], strict=True)
    # The sums are whole numbers, so Python's integers are exact, whereas the square of a float may be rounded.
    return [i for i, (c, squares) in enumerate(pairs) if num_ranks * int(squares) != int(c) ** 2]
