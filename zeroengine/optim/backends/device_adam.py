"""Adam's update on a GPU, issued by a host that does not know the step's result yet.

[Note: A step without waiting]
    squared norm, flags -> sum over ranks -> factor, overflow -> step counts, factors -> update, all-gather, by unit
                                                   |
                                               StepResult
All of it is issued to the device, and the host goes on. On overflow the kernels write nothing and count nothing, and
units are all-gathered all the same, with the values they had. The few numbers that the host wants to know are copied
to it before the update, so that a host that waits for them leaves the device the update to do.

The update obeys the device's step counts. Those of the host, for checkpoints and for reading the state, follow when the
step's result is known. Where the host's were set from outside, the device's follow them at the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from zeroengine import ops
from zeroengine.errors import DivergenceError
from zeroengine.ops import AdamBuffer, AdamSegment, AdamTable
from zeroengine.optim.backends.adam_state import AdamState, has_decoupled_decay, runs_fused_adam
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.utils.profiling import profile_range
from zeroengine.utils.small_transfers import HostCopy, to_device


class DeviceAdam:
    """See ``UpdateBackend``. Gives the same bits as ``HostAdam``, without knowing factor and flags on the host."""

    supports_offload: ClassVar[bool] = False
    supports_bf16_moments: ClassVar[bool] = True
    issues_without_waiting: ClassVar[bool] = True

    @classmethod
    def serves(cls, parts: BackendParts) -> bool:
        """Return whether the fused kernels update as the optimizer does, on a device that holds every state."""
        shards = parts.shards
        if not (shards and runs_fused_adam(parts.base_optimizer, shards) and all(s.on_device for s in shards)):
            return False
        # Tests ask for this path on the CPU, where it gives the same numbers.
        if parts.without_waiting is not None:
            return parts.without_waiting
        device = parts.gradient_norm.device
        return device.type == "cuda" and ops.cuda_library(device) is not None

    def __init__(self, parts: BackendParts) -> None:
        self.state = AdamState(parts.shards, parts.moments_dtype)
        self._parts = parts
        self._device = parts.shards[0].master.device
        # The step counts that the table on the device has, as far as the host knows.
        self._device_counts = self._host_counts()
        self._table = AdamTable(
            list(_buffers(parts.shards, parts.group_of_param)),
            len(parts.base_optimizer.param_groups),
            len(self._device_counts),
            self._device,
        )
        # The result of the last step and the values copied with it, until the host's counts have followed.
        self._pending: tuple[StepResult, HostCopy] | None = None

    def norm(self, divisor: float, label: str) -> torch.Tensor:
        """See ``UpdateBackend``."""
        return ops.gradient_factor(self._parts.gradient_norm.sum_on_device(label)[0], divisor=divisor)[1]

    def step(self, settings: StepSettings) -> StepResult:
        """See ``UpdateBackend``."""
        # The last step's result must be known before another one is issued: its counts are those that this step
        # continues.
        self.sync_step_counts()
        counts = self._host_counts()
        if counts != self._device_counts:
            # Step counts were set on the host, as by a checkpoint.
            self._table.steps.copy_(to_device(counts, self._device, torch.int64))
            self._device_counts = counts
        self._table.set_groups([self._hyperparameters(group) for group in self._parts.optimizer.param_groups])
        total = self._parts.gradient_norm.sum_on_device(settings.label)
        factor = settings.factor(total[0])
        # The copy to the host is issued here, before the update: a host that waits for it leaves the device the update
        # to do.
        values = HostCopy(torch.cat([factor, total[1:]]))
        # `prepare` counts the step and folds the factor into every segment, unless the factor says overflow.
        self._table.prepare(factor, total[1 : 1 + len(self._device_counts)])
        for shard in self._parts.shards:
            with profile_range("update", shard.unit.name):
                self._table.update(
                    shard.index,
                    shard.master,
                    shard.gradient,
                    *self.state.moments[shard.index],
                    low_precision_param=shard.low_precision_param,
                    reload_written=shard.may_be_written,
                )
            # The all-gather of this unit may start now, behind its update on the stream and beside the next update.
            self._parts.after_update(shard.unit)

        def read() -> tuple[float, bool]:
            _, grad_norm, overflow, *_ = values.read()
            return grad_norm, not overflow

        result = StepResult(read)
        self._pending = result, values
        return result

    def sync_step_counts(self) -> None:
        """Wait until the host's step counts are those of the device.

        Raises:
            DivergenceError: The ranks wrote different values before that step. This is known only now, so it also
                refuses equal values that one rank wrote and another received: they cannot be compared any more.
        """
        if self._pending is None:
            return
        # The attribute is cleared first, because reading the result may come back here through the engine.
        (result, values), self._pending = self._pending, None
        # The truth value tells the engine, too, which takes back its LR schedule if the step was skipped.
        updated = bool(result)
        # Behind the factor's three values: a flag for each parameter, then the checksums of outside writes.
        sums = values.read()[3:]
        # On overflow the device counted no step, so the host's counts stay as well.
        if updated:
            has_grad = iter(sums)
            self.state.steps = [[step + (next(has_grad) > 0) for step in steps] for steps in self.state.steps]
            self._device_counts = self._host_counts()
        suspects = self._parts.writes.suspects(sums[len(self._device_counts) :])
        if suspects:
            raise DivergenceError(self._parts.writes.message(suspects))

    def _host_counts(self) -> list[int]:
        return [step for steps in self.state.steps for step in steps]

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        decoupled = has_decoupled_decay(self._parts.base_optimizer, group)
        return {key: value for key, value in group.items() if key != "params"} | {"decoupled": decoupled}


def _buffers(shards: Sequence[OptimizerShard], group_of_param: Mapping[torch.Tensor, int]) -> Iterator[AdamBuffer]:
    """Return a segment for each parameter in a shard, with a step count for each parameter of all units."""
    num_params = 0
    for shard in shards:
        params = shard.unit.params
        segments = [
            AdamSegment(
                span.shard_offset,
                span.shard_offset + span.numel,
                group_of_param[params[span.param_index]],
                num_params + span.param_index,
            )
            for span in shard.spans()
        ]
        # Step counts stay below 2**32, so that no two units share the seed of a step, `seed + step`.
        yield AdamBuffer(segments, seed=shard.index << 32, offset=shard.offset)
        # Slots run through the parameters of all units, those outside of this rank's shards included, so that the flags
        # of all ranks have one order.
        num_params += len(params)
