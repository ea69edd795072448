"""Adam's step where the states are: issued at once, by a host that does not know yet what comes of it.

[Note: A step without waiting]
    squared norm, use flags -> sum over ranks -> factor, overflow -> counts and factors -> update, publish, by unit
                                                        |
                                                     StepResult
All of it is issued to the device, and the host goes on. On overflow the kernels write nothing and count nothing; units
are published all the same, with the values they had. What the host wants to know is copied to it before the update, so
that whoever waits for it leaves the device the update to do.

The device's step counts are the ones that the update obeys. Those of the host, for checkpoints and surgery, follow
with the result; where they were written from outside, the device's follow them at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.errors import DivergenceError
from zeroengine.ops import AdamBuffer, AdamSegment, AdamTable
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.host_copies import HostCopy, to_device
from zeroengine.utils.profiling import profile_range


class DeviceAdam:
    """Adam and AdamW, as ``FusedAdam`` in memory to the last bit, without knowing factor and flags on the host.

    Args:
        optimizer: whose ``param_groups`` hold the hyperparameters.
        inner: the optimizer that says which of the two it is.
        group_of: from a parameter to its group's number.
        units: all on one device, none on disk.
        writes: what is written beside the updates, to be compared over the ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        group_of: dict[torch.Tensor, int],
        units: Sequence[OptimizerShard],
        transport: Transport,
        writes: OutsideWrites,
    ) -> None:
        self._optimizer, self._units, self._transport, self._writes = optimizer, units, transport, writes
        self._decoupled = isinstance(inner, torch.optim.AdamW)
        self._device = units[0].master.device
        self._counts = [0] * sum(len(states.steps) for states in units)  # as the table has them
        self._table = AdamTable(
            list(_buffers(units, group_of)), len(inner.param_groups), len(self._counts), self._device
        )
        self._flags: list[float] = []
        self._flags_there = torch.empty(0, device="cpu")  # the same, on the device
        self._result: StepResult | None = None  # until the host's counts have followed

    def step(
        self, divisor: float, limit: float, skip: bool, label: str, publish: Callable[[UnitGradients], None]
    ) -> StepResult:
        """Issues norm, clipping, update and publish.

        Args:
            divisor, limit, skip: as of ``ops.gradient_factor``.
            label: of the norm's collective.
            publish: called with each unit right after its update.
        """
        self.settle()
        self._follow_the_host()
        self._table.set_groups([self._hyperparameters(group) for group in self._optimizer.param_groups])
        count = len(self._counts)
        total = self._sum_over_ranks(label)
        factor = ops.gradient_factor(total[0], divisor=divisor, limit=limit, skip=skip)
        self._result = result = StepResult(HostCopy(torch.cat([factor, total[1:]])), count)
        self._table.prepare(factor, total[1 : 1 + count])
        for i, states in enumerate(self._units):
            published = states.param if states.mixed else None
            with profile_range("update", states.unit.name):
                arrays = (states.master, states.gradient, *states.adam_moments(), published)
                self._table.update(i, *arrays, reload_written=states.may_be_written)
            publish(states.grads)
        return result

    def norm(self, divisor: float, label: str) -> torch.Tensor:
        """Return the norm that ``step`` would find, 0-d float64 on the device."""
        return ops.gradient_factor(self._sum_over_ranks(label)[0], divisor=divisor)[1]

    def _sum_over_ranks(self, label: str) -> torch.Tensor:
        """Return the squared norm over all ranks, then the sums of ``_facts``. 1-D float64 on the device."""
        with profile_range("norm"):
            world = self._transport.world_size
            norm = ops.squared_norms([states.gradient_for_norm(world) for states in self._units])
            return self._transport.all_reduce_scalars(torch.cat([norm.view(1), self._facts()]), label)

    def settle(self) -> None:
        """Returns with the host's step counts those of the device.

        Raises:
            DivergenceError: the ranks wrote different values before that step. It is known only now, so values that
                one rank wrote and another was sent are refused, too: they cannot be compared any more.
        """
        result, self._result = self._result, None
        if result is None:
            return
        if result:
            used = iter(result.used)
            for states in self._units:
                states.steps = [step + next(used) for step in states.steps]
            self._counts = self._counts_of_the_host()
        suspects = self._writes.suspects(result.write_sums)
        if suspects:
            raise DivergenceError(self._writes.message(suspects))

    def _counts_of_the_host(self) -> list[int]:
        return [step for states in self._units for step in states.steps]

    def _follow_the_host(self) -> None:
        counts = self._counts_of_the_host()
        if counts != self._counts:
            self._table.steps.copy_(to_device(counts, self._device, torch.int64))
            self._counts = counts

    def _facts(self) -> torch.Tensor:
        """What the ranks sum beside the norm: which parameters got a gradient, and what was written from outside."""
        flags = [float(used) for states in self._units for used in states.grads.has_grad] + self._writes.sums()
        if flags != self._flags:
            self._flags, self._flags_there = flags, to_device(flags, self._device)
        return self._flags_there

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        decoupled = self._decoupled or bool(group.get("decoupled_weight_decay", False))
        return {key: value for key, value in group.items() if key != "params"} | {"decoupled": decoupled}


def _buffers(units: Sequence[OptimizerShard], group_of: dict[torch.Tensor, int]) -> Iterator[AdamBuffer]:
    """A segment for each parameter in a unit's shard, and a step count for each parameter of all units."""
    first = 0
    for states in units:
        unit = states.unit
        segments = [
            AdamSegment(
                s.shard_offset, s.shard_offset + s.numel, group_of[unit.params[s.param_index]], first + s.param_index
            )
            for s in unit.layout.spans(unit.rank, unit.degrees.optimizer)
        ]
        yield AdamBuffer(segments, seed=states.number << 32, offset=states.offset)
        first += len(unit.params)
