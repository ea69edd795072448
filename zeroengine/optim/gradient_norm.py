"""The norm of the summed gradients, and the few facts that the ranks sum in the same collective.

[Note: Same numbers]
At every stage a rank's norm covers the same elements (its slice at the world size), and the partial norms add in rank
order in float64. The update is element-wise, and where it rounds stochastically it does so by the unit's number, the
step and the element's place in the unit. So in fp32 on CPUs the losses are the same bits
at every stage, but for the order in which accumulation adds micro-steps and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult, StepSettings
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.profiling import profile_range
from zeroengine.utils.small_transfers import to_device


class GradientSource(Protocol):
    """The owner of the gradients: the reducer, as far as the optimizer needs it."""

    @property
    def gradients(self) -> Sequence[UnitGradients]:
        """The gradients of every trainable unit, in the order of registration."""

    @property
    def has_late_gradients(self) -> bool:
        """Whether gradients came after their unit was reduced, and wait on this rank."""

    def reduce_late_gradients(self) -> None:
        """Reduce the gradients that wait. Call it on every rank if any rank has some."""


class GradientNorm:
    """Sums the squared norm over the ranks, with one flag for each parameter and the checksums of outside writes.

    Args:
        shards: The optimizer shard of every trainable unit, in the order of registration.
        source: Owns the gradients.
        transport: Sums over the ranks.
        writes: Tells which parameters were written beside the updates.
    """

    def __init__(
        self, shards: Sequence[OptimizerShard], source: GradientSource, transport: Transport, writes: OutsideWrites
    ) -> None:
        self._shards, self._source, self._transport, self._writes = shards, source, transport, writes
        self._flags: list[float] = []
        # The values of ``_flags``, on the device.
        self._device_flags = torch.empty(0, device="cpu")

    @property
    def device(self) -> torch.device:
        """The device that gradients are on when their norm is taken."""
        return self._shards[0].unit.full_buffer.device if self._shards else torch.device("cpu")

    def summarize(self, label: str) -> tuple[float, list[list[bool]]]:
        """Return what all ranks know of the gradients, once those that wait on some rank have been reduced.

        A collective.

        Args:
            label: Names the collective; ranks that differ in it are refused.

        Returns:
            The squared norm of the summed gradients, before any division; and for each unit and parameter whether any
            rank computed a gradient.

        Raises:
            DivergenceError: On every rank, where the ranks wrote different values. Nothing has changed.
        """
        # No rank knows whether another one has late gradients, and all must reduce them together. So the first sum
        # carries the question with it.
        squared_norm, any_late, *flags = self._sum_on_host(label, late=self._source.has_late_gradients)
        if any_late:
            self._source.reduce_late_gradients()
            squared_norm, _, *flags = self._sum_on_host(label, late=False)
        remaining = iter(flags)
        has_grad = [[flag > 0 for flag in islice(remaining, len(shard.unit.params))] for shard in self._shards]
        return squared_norm, has_grad

    def _sum_on_host(self, label: str, *, late: bool) -> list[float]:
        """Return sums over the ranks: squared norms, whether gradients wait, and a flag for each parameter.

        One collective of a float64 vector carries everything: the squared norm of this rank's slices, whether gradients
        wait on this rank, a flag for each parameter, and the checksums of what was written from outside.
        """
        values = to_device([0.0, late, *self._local_facts()], self.device)
        world_size = self._transport.world_size
        for shard in self._shards:
            # Where gradients have left the device, their norm was taken before they left.
            squared_norm = shard.grads.squared_norm
            if squared_norm is None:
                squared_norm = _squared_norm(shard.gradient_for_norm(world_size))
            # The sum stays on the gradients' device, in the order of the units, which is the same at every stage.
            values[0] += squared_norm
        sums = self._transport.all_reduce_scalars(values, label).tolist()
        # Ranks that ran different collectives are reported here, before anything is updated.
        self._transport.check_order()
        checksums = 2 + sum(len(shard.unit.params) for shard in self._shards)
        # This comes before the result is used: nothing has been updated where the ranks differ.
        self._writes.raise_if_different(self._writes.suspects(sums[checksums:]))
        return sums[:checksums]

    def norm_on_host(self, divisor: float, label: str) -> torch.Tensor:
        """Return the norm of the gradients over ``divisor``, 0-d float64 on their device. A collective."""
        # The division comes after the root, as in ``ops.gradient_factor``, so that both give the same bits.
        norm = math.sqrt(self.summarize(label)[0]) / divisor
        return torch.tensor(norm, dtype=torch.float64, device=self.device)

    def sum_on_device(self, label: str) -> torch.Tensor:
        """Return the squared norm, the flags and the checksums over all ranks, without waiting for them. A collective.

        Gradients that came late are reduced where this rank has some, on the assumption that all ranks do or none:
        asking them would make the host wait.

        Returns:
            1-D float64 on the device.
        """
        if self._source.has_late_gradients:
            self._source.reduce_late_gradients()
        with profile_range("norm"):
            world_size = self._transport.world_size
            norm = ops.squared_norms([shard.gradient_for_norm(world_size) for shard in self._shards])
            flags = self._local_facts()
            # The flags seldom change, and a copy to the device costs a launch.
            if flags != self._flags:
                self._flags, self._device_flags = flags, to_device(flags, self.device)
            return self._transport.all_reduce_scalars(torch.cat([norm.view(1), self._device_flags]), label)

    def _local_facts(self) -> list[float]:
        """Return whether this rank has a gradient of each parameter, then its checksums of outside writes."""
        flags = [float(flag) for shard in self._shards for flag in shard.grads.has_grad]
        return flags + self._writes.checksums_to_sum()

    def first_not_finite(self) -> str | None:
        """Return the first parameter, in the order of registration, whose summed gradient is not finite. A collective.

        Returns:
            The same name on every rank, or None where every gradient is finite.
        """
        flags, names = [], []
        for shard in self._shards:
            slots = shard.unit.layout.slots
            not_finite = [False] * len(slots)
            for span in shard.spans():
                gradient = shard.gradient[span.shard_slice]
                # The gradient may be part of a mapped file, whose disk may fail.
                populate(gradient)
                not_finite[span.param_index] = not bool(torch.isfinite(gradient).all())
            flags += not_finite
            names += [slot.name for slot in slots]
        # A parameter may be cut across ranks, so each rank looks at its own part and the flags are summed.
        total = self._transport.all_reduce_scalars(
            torch.tensor(flags, dtype=torch.float64, device=self.device), "where not finite"
        )
        return next((name for name, flag in zip(names, total.tolist(), strict=True) if flag), None)


def step_on_host(
    gradient_norm: GradientNorm, settings: StepSettings, update: Callable[[float, Sequence[Sequence[bool]]], None]
) -> StepResult:
    """Take a step with its scalars on the host.

    Args:
        update: Updates every shard, unless the step is skipped. It gets the factor of the gradient, and for each unit
            and parameter whether there is a gradient.
    """
    squared_norm, has_grad = gradient_norm.summarize(settings.label)
    result = settings.factor(torch.tensor(squared_norm, dtype=torch.float64, device="cpu"))
    factor, grad_norm, overflow = result.tolist()
    # All ranks have the same sum and so the same answer: either all of them update or none does.
    if not overflow:
        update(factor, has_grad)
    return StepResult(lambda: (grad_norm, not overflow))


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    # The kernels take real numbers up to fp32. Complex and fp64 parameters are rare, so torch serves them.
    gradient = torch.view_as_real(gradient).flatten() if gradient.is_complex() else gradient
    return gradient.dot(gradient) if gradient.dtype is torch.float64 else ops.squared_norm(gradient)
