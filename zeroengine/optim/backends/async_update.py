"""The fused rules, issued without waiting for the norm. Every state is on the device.

[Note: A step without waiting]
    squared norm, flags -> sum over ranks -> factor, overflow -> step counts, factors -> updates, all-gathers
                                                   |
                                               StepResult
The host issues all of it to the device and goes on. On overflow the kernels write nothing and count nothing, and the
units are still all-gathered, with their previous values. The few numbers that the host needs are copied to it before
the update is issued, so that the device runs the update while the host waits for them.

The update uses the device's step counts. The host's counts serve checkpoints and reads of the state, and follow when
the step's result is known. Counts that were set on the host are copied to the device at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

import torch

from zeroengine.errors import DivergenceError
from zeroengine.ops import SegmentList, UpdateSegment, UpdateTable
from zeroengine.optim.backends.fused_state import fused_state, run_over_state
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.backends.moment_state import MomentState
from zeroengine.optim.fused_rules import settings_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import GradientFactor, StepResult, StepSettings
from zeroengine.utils.tensors import Addresses, HostCopy, to_device

T = TypeVar("T")
# A step copies to the host the values of ``GradientFactor``, then ``has_grad`` and ``digests`` of ``StepSums``.
HAS_GRAD_OFFSET = len(GradientFactor._fields)


class AsyncUpdate:
    """See ``UpdateBackend``. Gives the same bits as ``FusedUpdate``."""

    is_async: ClassVar[bool] = True
    exchange_bytes = 0

    def __init__(self, parts: BackendParts) -> None:
        self.state = fused_state(parts)
        self._parts = parts
        self._device = parts.shards[0].master.device
        # The step counts of the table on the device, as far as the host knows them.
        self._device_counts = self.state.steps.copy()
        self._table = UpdateTable(
            list(_segment_lists(parts.shards, parts.group_of_param)),
            len(parts.base_optimizer.param_groups),
            len(self._device_counts),
            self._device,
        )
        self._addresses = Addresses([x for shard in parts.shards for x in self.state.arrays(shard).tensors()])
        # The result of the last step and the values copied to the host, until its counts are up to date.
        self._pending: tuple[StepResult, HostCopy] | None = None

    def step(self, settings: StepSettings) -> StepResult:
        """See ``UpdateBackend``."""
        # The last step's result must be known first, because this step continues its counts.
        self.await_step_counts()
        if self.state.steps != self._device_counts:
            # Something set step counts on the host, such as a checkpoint.
            self._table.steps.copy_(to_device(self.state.steps, self._device, torch.int64))
            self._device_counts = self.state.steps.copy()
        if self._addresses.have_changed():
            for number, shard in enumerate(self._parts.shards):
                self._table.set_arrays(number, self.state.arrays(shard), shard.may_be_written)
        average = {"average_weight": self._parts.shards[0].average_weight}
        groups = settings_of(self._parts.base_optimizer, self.state.names)
        self._table.set_groups([group | average for group in groups])
        sums = self._parts.reduction.reduce_on_device(settings.label)
        factor = self._parts.reduction.factor(settings, sums)
        # The copy is issued before the update, so that the device runs the update while the host waits for the copy.
        values = HostCopy(torch.cat([factor, sums.has_grad, sums.digests]))
        # `prepare` counts the step and folds the factor into every segment, unless the gradient overflowed.
        self._table.prepare(factor, sums.has_grad)
        for first, stop in self._parts.launches():
            units = [shard.unit for shard in self._parts.shards[first:stop]]
            with self._parts.timer.span("update", units[0].name if len(units) == 1 else "", "update"):
                self._table.update(first, stop)
            # The all-gather of the last unit may start now: it runs after this update and overlaps the next one.
            self._parts.publish_updates(units)

        result = StepResult(lambda: GradientFactor(*values.read()[:HAS_GRAD_OFFSET]))
        self._pending = result, values
        return result

    def state_of(self, shard: OptimizerShard) -> MomentState:
        """See ``UpdateBackend``."""
        return self.state

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateBackend``."""
        return run_over_state(self._parts, self.state, act)

    def await_step_counts(self) -> None:
        """Wait until the host's step counts are those of the device.

        Raises:
            DivergenceError: The ranks wrote different values before that step. The error comes one step late, so it
                also refuses values that one rank wrote and another received: they can no longer be compared.
        """
        if self._pending is None:
            return
        # The attribute is cleared first, because reading the result may come back here through the engine.
        (result, values), self._pending = self._pending, None
        # Reading the bool calls ``on_query``, by which the engine takes back its LR schedule after a skipped step.
        updated = bool(result)
        numbers = values.read()
        # On overflow the device counted no step.
        if updated:
            has_grad = numbers[HAS_GRAD_OFFSET : HAS_GRAD_OFFSET + len(self.state.steps)]
            self.state.steps = [step + (flag > 0) for step, flag in zip(self.state.steps, has_grad, strict=True)]
            self._device_counts = self.state.steps.copy()
        suspects = self._parts.writes.suspects(numbers[HAS_GRAD_OFFSET + len(self._device_counts) :])
        if suspects:
            raise DivergenceError(self._parts.writes.message(suspects))


def _segment_lists(
    shards: Sequence[OptimizerShard], group_of_param: Mapping[torch.Tensor, int]
) -> Iterator[SegmentList]:
    """Yield the segments of each shard: one for each parameter in it, with the slot of that parameter's step count."""
    num_params = 0
    for shard in shards:
        params = shard.unit.params
        segments = [
            UpdateSegment(
                span.shard_offset,
                span.shard_offset + span.numel,
                group_of_param[params[span.param_index]],
                num_params + span.param_index,
            )
            for span in shard.spans()
        ]
        # Step counts stay below 2**32, so that no two units share the seed of a step, `seed + step`.
        yield SegmentList(segments, seed=shard.index << 32, offset=shard.offset)
        # There is a slot for every parameter of a unit, also for those outside of this rank's shard, so that the slots
        # are in the order of the flags, which is the same on all ranks.
        num_params += len(params)
