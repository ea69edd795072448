"""The collective of a step: the norm of the summed gradients, and the few facts that the ranks sum with it.

[Note: Same numbers]
At every stage a rank's norm covers the same elements (its slice at the world size), and the partial norms add in rank
order in float64. The update is element-wise, and its stochastic rounding depends only on the unit's number, the step
and the element's place in the unit. So in fp32 on CPUs the losses are the same bits at every stage, except for the
order in which accumulation adds micro-steps and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.comm.replicas import Replicas
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import DivergenceError
from zeroengine.monitor.timer import Timer
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.outlier_steps import OutlierSteps
from zeroengine.optim.step_result import GradientFactor, StepResult, StepSettings
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.reducer import Reducer
from zeroengine.utils.formats import listed
from zeroengine.utils.tensors import to_device

# Gradients of which all ranks have a copy may differ by rounding, by this share of their square at most.
MAX_VARIANCE = 1e-6
# The squared norm of a parameter's gradient that counts in this comparison, over that of all.
MIN_SHARE = 1e-12
# The parameters that an error names.
NUM_SHOWN = 5


class StepSums(NamedTuple):
    """The sums over the ranks that a step needs, on the device.

    Attributes:
        squared_norm: The squared norm of the summed gradients, before any division. 0-d.
        has_grad: For each parameter of all units, the number of ranks that computed a gradient. 1-D.
        digests: The digests of outside writes. 1-D. See ``OutsideWrites``.
        weights: The weights of all losses. 0-d. See ``StepLosses``.
        loss: The mean loss, if steps are judged by it (``OutlierSteps``). 0-d.
    """

    squared_norm: torch.Tensor
    has_grad: torch.Tensor
    digests: torch.Tensor
    weights: torch.Tensor
    loss: torch.Tensor


class HostSums(NamedTuple):
    """``StepSums`` on the host, where the digests were compared. ``has_grad``: for each unit and parameter."""

    squared_norm: float
    has_grad: list[list[bool]]
    weights: float
    loss: float


class StepReduction:
    """Sums the squared norm over the ranks, with one flag for each parameter and the digests of outside writes.

    Args:
        shards: The optimizer shard of every trainable unit, in the order of registration.
        reducer: Owns the gradients.
        transport: Sums over the ranks.
        writes: Knows which parameters were written from outside.
        timer: Times the norm, and the wait for the other ranks.
        split_over: The ranks that the model is split over are the counterparts; None: it is not split.
        outliers: Which steps are outliers; None: none is.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        reducer: Reducer,
        transport: Transport,
        writes: OutsideWrites,
        timer: Timer,
        split_over: Replicas | None = None,
        outliers: OutlierSteps | None = None,
    ) -> None:
        self._outliers = outliers
        # What follows the digests in the sum: the weights of losses, and the losses and their weights in the mean.
        self._num_last = 1 if outliers is None else 3
        # Sums over the model group.
        self._between = None if split_over is None else split_over.between
        # The ranks that have the gradient of what is not split.
        self._num_copies = 1 if split_over is None else split_over.layout.num_replicas
        self._shards, self._reducer, self._transport, self._writes = shards, reducer, transport, writes
        # The shards whose gradients every rank of the model group has, in order.
        copied = shards if split_over is not None else ()
        self._copied = dict.fromkeys(shard for shard in copied if not shard.unit.is_split)
        self._timer = timer
        # Whether the kernel for several tensors takes all gradients.
        dtypes = {shard.unit_grads.flat_grads.dtype for shard in shards}
        self._are_plain = bool(dtypes) and dtypes <= ops.DTYPE_CODES.keys()
        # The number of this rank's part of every unit, where it is not the rank's own number.
        degrees = next((shard.unit.degrees for shard in shards if not shard.unit.expert_ranks), None)
        piece = transport.rank if degrees is None else degrees.piece(transport.rank, transport.world_size)
        is_ordered = degrees is None or degrees.numbers_in_order_of_ranks(transport.world_size)
        self._piece = None if is_ordered else piece
        # Where the flags of each unit's parameters begin in those of all units, and their end.
        self._first_flags = list(accumulate((len(shard.unit.params) for shard in shards), initial=0))
        self._num_params = self._first_flags[-1]
        self._norms_alone = ops.SquaredNorms([s.gradient_for_norm() for s in shards if s not in self._copied])
        self._norms_copied = ops.SquaredNorms([shard.gradient_for_norm() for shard in self._copied])
        # The norm of offloaded gradients was computed before they left the device.
        self._are_offloaded = any(shard.unit_grads.store is not None for shard in shards)
        self._flags: list[float] = []
        # The values of ``_flags``, on the device.
        self._device_flags = torch.empty(0, device="cpu")

    @property
    def device(self) -> torch.device:
        """The device on which the norm of the gradients is computed."""
        return self._shards[0].unit.full_buffer.tensor.device if self._shards else torch.device("cpu")

    def reduce_on_host(self, label: str) -> HostSums:
        """Reduce the late gradients of all ranks, and wait for the norm, the flags and the losses. A collective.

        Args:
            label: Names the collective; ranks that differ in it are refused.

        Raises:
            DivergenceError: On every rank, where the ranks wrote different values. Nothing has changed.
        """
        # No rank knows whether another one has late gradients, and all ranks must reduce them together. So the first
        # sum carries that flag, too.
        (squared_norm, any_late, *flags), last = self._sum_on_host(label, late=self._reducer.has_late_gradients)
        if any_late:
            self._reducer.reduce_late_gradients()
            (squared_norm, _, *flags), last = self._sum_on_host(label, late=False)
        self.move_writes()
        of_params = [flag > 0 for flag in flags]
        has_grad = [of_params[first:stop] for first, stop in pairwise(self._first_flags)]
        weights, total, weight = last if self._outliers is not None else (last[0], 0.0, 0.0)
        return HostSums(squared_norm, has_grad, weights, total / weight if weight else math.nan)

    def _sum_on_host(self, label: str, *, late: bool) -> tuple[list[float], list[float]]:
        """Return sums over the ranks: squared norm, flag for late gradients, flags of parameters; and those of losses.

        One collective of a float64 vector carries all of them. The digests of outside writes are in it as well, and are
        compared here.
        """
        values = self._with_losses(to_device([late, *self._local_facts()], self.device))
        squared_norm_of_rank = self._squared_norm_of_rank().view(1)
        num_values, first_digest = len(values), 2 + self._num_params
        values = torch.cat([self._in_order_of_pieces(squared_norm_of_rank), values, *self._facts_of_copies()])
        with self._timer.span("reduce"):
            summed = self._sum_pieces(self._transport.all_reduce_scalars(values, label))
            summed, copies = summed[: 1 + num_values], summed[1 + num_values :]
            sums: list[float] = summed.tolist()
            if self._between is None:
                names_of_copies, suspects = [], self._writes.suspects(sums[first_digest : -self._num_last])
            else:
                digests = sums[first_digest : -self._num_last]
                writes = to_device(self._writes.facts_of_data_group(digests), self.device)
                # Where one slice of a parameter has a gradient, the others have one of zeros, as the whole one would.
                facts = torch.cat([summed[:first_digest], copies, copies * copies, writes])
                of_model = self._between.all_reduce_scalars(facts, label)
                sums[:first_digest] = of_model[:first_digest].tolist()
                _, of_copies, of_writes = of_model.split([first_digest, 2 * len(copies), len(writes)])
                names_of_copies = self._names_that_differ(of_copies)
                suspects = self._writes.suspects_of_all(of_writes.tolist(), self._num_copies)
            # Ranks that ran different collectives are reported here, before anything is updated.
            self._transport.check_order()
        # These checks come before any update, so a rank that raises has changed nothing.
        self._writes.raise_if_different(suspects)
        self._reducer.check_frozen()
        if names_of_copies:
            raise DivergenceError(_different_copies(names_of_copies))
        return sums[:first_digest], sums[-self._num_last :]

    def _squared_norm_of_rank(self) -> torch.Tensor:
        """Return the squared norm of this rank's part of the gradients, 0-d, float64, added in the order of units.

        The order is the same at every stage.
        """
        if self.device.type == "cpu" and not self._copied and self._are_plain and not self._are_offloaded:
            return self._norms_alone.sum()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self._shards:
            squared_norm = shard.unit_grads.squared_norm
            if squared_norm is None:
                squared_norm = _squared_norm(shard.gradient_for_norm())
            total += squared_norm.view(()) / self._num_copies if shard in self._copied else squared_norm.view(())
        return total

    def step_on_host(
        self, settings: StepSettings, update: Callable[[float, Sequence[Sequence[bool]]], None]
    ) -> StepResult:
        """Wait for the norm, then update unless the gradient overflowed. A collective.

        Args:
            settings: The settings of the step.
            update: Updates every shard. It takes the factor of the gradient, and for each unit and parameter whether
                there is a gradient.
        """
        sums = self.reduce_on_host(settings.label)
        self._reducer.losses.adapt(sums.weights / self._transport.world_size)
        values = torch.tensor([sums.squared_norm, sums.weights, sums.loss], dtype=torch.float64, device="cpu")
        result = GradientFactor(*self._factor(settings, *values).tolist())
        # All ranks have the same sum and so the same answer: either all of them update or none does.
        if not result.skip:
            update(result.factor, sums.has_grad)
        return StepResult(lambda: result)

    def factor(self, settings: StepSettings, sums: StepSums) -> torch.Tensor:
        """Return the three values of ``GradientFactor``, in float64 on the device, without waiting for them."""
        return self._factor(settings, sums.squared_norm, sums.weights, sums.loss)

    def _factor(
        self, settings: StepSettings, squared_norm: torch.Tensor, weights: torch.Tensor, loss: torch.Tensor
    ) -> torch.Tensor:
        factor = settings.factor(squared_norm, weights)
        return factor if self._outliers is None else self._outliers.judge(factor, loss)

    def _with_losses(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, which end in ``StepLosses.number``, with what else the sum takes of this rank's losses."""
        losses = self._reducer.losses
        losses.add_to(values)
        if self._outliers is None:
            return values
        mean = losses.mean(self._reducer.micro_steps_in_mean)
        if mean is None:
            return torch.cat([values, values.new_zeros(2)])
        return torch.cat([values, torch.stack([mean[0] * mean[1], mean[1]]).to(self.device, non_blocking=True)])

    def norm(self, divisor: float, label: str, *, waits: bool) -> torch.Tensor:
        """Return the norm of the gradients over ``divisor``, before clipping. A collective.

        Args:
            divisor: Divides the summed gradient, as does the sum of the weights of losses, if they have some.
            label: Names the collective.
            waits: Whether the host waits for it, as in the backends that are not asynchronous.

        Returns:
            0-d float64 on the gradients' device.
        """
        is_weighted = self._reducer.losses.is_weighted
        if not waits:
            sums = self.reduce_on_device(label)
            return ops.gradient_factor(
                sums.squared_norm, divisor=divisor, weight=sums.weights if is_weighted else None
            )[1]
        sums_on_host = self.reduce_on_host(label)
        # The division comes after the root, as in ``ops.gradient_factor``, so that both give the same bits.
        divisor *= sums_on_host.weights if is_weighted else 1
        norm = math.sqrt(sums_on_host.squared_norm) / divisor if divisor else 0.0
        return torch.tensor(norm, dtype=torch.float64, device=self.device)

    def reduce_on_device(self, label: str) -> StepSums:
        """Return the squared norm, the flags and the digests, in float64, without waiting for them. A collective.

        Late gradients are reduced if this rank has some, on the assumption that all ranks have some or none has:
        asking them would make the host wait.
        """
        self._reducer.check_frozen()
        if self._reducer.has_late_gradients:
            self._reducer.reduce_late_gradients()
        with self._timer.span("update", label="norm"):
            norm = self._squared_norms()
            flags = self._local_facts()
            # The flags seldom change, and a copy to the device costs a launch.
            if flags != self._flags:
                self._flags, self._device_flags = flags, to_device(flags, self.device)
            values = torch.cat([self._in_order_of_pieces(norm.view(1)), self._device_flags])
            values = self._with_losses(values)
            with self._timer.span("reduce"):
                sums = self._sum_pieces(self._transport.all_reduce_scalars(values, label))
                if self._between is not None:
                    norm_and_flags = self._between.all_reduce_scalars(sums[: 1 + self._num_params], label)
                    sums = torch.cat([norm_and_flags, sums[1 + self._num_params :]])
            self.move_writes()
            facts, last = sums[: -self._num_last], sums[-self._num_last :]
            loss = last[0] if self._outliers is None else last[1] / last[2]
            return StepSums(facts[0], facts[1 : 1 + self._num_params], facts[1 + self._num_params :], last[0], loss)

    def move_writes(self) -> None:
        """Move into shards and masters what was written into gathered parameters. See ``OutsideWrites``."""
        written = self._writes.move_to_shards()
        for shard in self._shards:
            if shard.unit in written:
                shard.reload_master()

    def _in_order_of_pieces(self, squared_norm: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of this rank's part of every unit, 1-D, so that a sum over ranks keeps the order.

        Between hybrid degrees and others the ranks have different parts of the units. The norms of the parts are added
        in the order of the parts, whichever ranks have them, so that the sum has the same bits.
        """
        if self._piece is None:
            return squared_norm
        norms = squared_norm.new_zeros(self._transport.world_size)
        norms[self._piece] = squared_norm[0]
        return norms

    def _sum_pieces(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over ranks with the norms of all parts, which come first, added to one number."""
        if self._piece is None:
            return sums
        num_pieces = self._transport.world_size
        return torch.cat([sums[:num_pieces].cumsum(0)[-1:], sums[num_pieces:]])

    def _squared_norms(self) -> torch.Tensor:
        """Return the squared norm of this rank's part of the gradients."""
        alone = self._norms_alone.sum() if len(self._copied) < len(self._shards) else None
        if not self._copied:
            assert alone is not None
            return alone
        copied = self._norms_copied.sum() / self._num_copies
        return copied if alone is None else alone + copied

    def _facts_of_copies(self) -> list[torch.Tensor]:
        """Return two numbers of this rank's part of the gradient of each parameter that every rank has, in float64.

        They are the squared norms of all, and then for each the sum of its elements with alternating signs, which
        differs where elements have changed places or signs. Each is 1-D.
        """
        norms, sums = [], []
        for shard in self._copied:
            of_params = [torch.zeros(2, dtype=torch.float64, device=self.device) for _ in shard.unit.params]
            for span in shard.spans():
                part = shard.gradient[span.shard_slice]
                # The real parts of complex numbers.
                part, first = part.real, span.param_slice.start % 2
                even, odd = (part[start::2].sum(dtype=torch.float64) for start in (first, 1 - first))
                facts = torch.stack([_squared_norm(part).view(()).double(), even - odd])
                of_params[span.param_index] += facts.to(self.device)
            norms += [pair[:1] for pair in of_params]
            sums += [pair[1:] for pair in of_params]
        return norms + sums

    def _names_that_differ(self, facts: torch.Tensor) -> list[str]:
        """Return the parameters of which ranks of a model group have different gradients, but for rounding.

        Args:
            facts: The sums over these ranks of ``_facts_of_copies``, after those over data groups, and then of their
                squares.
        """
        norms, totals, square_norms, squares = facts.chunk(4)
        of_all = norms * norms
        # Variances, over the square of the mean norm, where this is no rounding error of zero. What is not finite is an
        # overflow, of which the norm tells.
        differ = self._num_copies * square_norms - of_all > MAX_VARIANCE * of_all
        differ |= self._num_copies * squares - totals * totals > MAX_VARIANCE * self._num_copies * norms
        differ &= norms > MIN_SHARE * norms.sum()
        names = [slot.name for shard in self._copied for slot in shard.unit.layout.slots]
        return [name for name, is_wrong in zip(names, differ.tolist(), strict=True) if is_wrong]

    def _local_facts(self) -> list[float]:
        """Return this rank's flag for each parameter, its digests of outside writes, and weights on the host."""
        flags = [flag for shard in self._shards for flag in shard.unit_grads.has_grad]
        return [*flags, *self._writes.digests_to_sum(), self._reducer.losses.number]

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
        if self._between is not None:
            total = self._between.all_reduce_scalars(total, "where not finite")
        return next((name for name, flag in zip(names, total.tolist(), strict=True) if flag), None)


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    # The kernels take real numbers up to fp32. Complex and fp64 parameters are rare, so torch serves them.
    gradient = torch.view_as_real(gradient).flatten() if gradient.is_complex() else gradient
    return gradient.dot(gradient) if gradient.dtype is torch.float64 else ops.squared_norm(gradient)


def _different_copies(names: Sequence[str]) -> str:
    return (
        f"the ranks that hold one model together have different gradients of {listed(names, NUM_SHOWN)}, which are "
        "not split. If they were given different inputs, give them the same: engine.dataloader(dataset), or "
        "DistributedSampler(dataset, engine.num_sample_groups, engine.sample_group). If they drew different random "
        "numbers, as of dropout, seed them alike: torch.manual_seed(seed + engine.sample_group). If each has computed "
        "a part of these gradients, as of a norm that sees its heads alone, let them sum the parts: "
        "param.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group)), with group = "
        "mesh.get_group(). With an mpu they may be slices that no pattern of tensor_parallel.slices names."
    )
