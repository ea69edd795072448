"""Adam's update by the fused kernel, over states where they are, and over states that are brought to it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zeroengine import ops
from zeroengine.offload.disk_store import poison_on_error
from zeroengine.offload.offloaded_shards import OffloadedShards
from zeroengine.offload.pipeline import Piece, Pipeline, Stream
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.segments import Segment, segments_of
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.profiling import profile_range
from zeroengine.utils.work import Work

SEGMENT_TABLES = 16  # remembered of each unit
SHARDS_LEAVING = 3  # at once


@dataclass(frozen=True)
class _Part:
    """A run of elements of a shard, and where its tensors begin."""

    start: int
    stop: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    published: torch.Tensor | None  # None: the master is

    def slices(self, segment: Segment) -> tuple[slice, int]:
        """What of the tensors is in ``segment``, and where that begins in the shard."""
        start = max(segment.start, self.start)
        return slice(start - self.start, min(segment.stop, self.stop) - self.start), start


def runs_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the rule is Adam's own: a subclass with a ``step`` of its own is another rule."""
    rules = {inspect.unwrap(cls.step) for cls in (torch.optim.Adam, torch.optim.AdamW)}
    plain = inspect.unwrap(type(optimizer).step) in rules
    return plain and not any(group.get("amsgrad") for group in optimizer.param_groups)


class PendingWriteback:
    """Updated parameter shards on their way from the device, a few at once."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[OffloadedShards, Work]] = deque()

    def take(self, stored: OffloadedShards, update: Callable[[], Work]) -> None:
        """Runs ``update``, which sends a shard to where it is ``stored``."""
        with poison_on_error(stored):
            self._transfers.append((stored, update()))
        if len(self._transfers) >= SHARDS_LEAVING:
            self._wait()

    def settle(self) -> None:
        """Returns when all are where they belong."""
        while self._transfers:
            self._wait()

    def _wait(self) -> None:
        stored, transfer = self._transfers.popleft()
        with poison_on_error(stored):
            transfer.wait_host()


class FusedAdam:
    """Adam (Kingma and Ba, algorithm 1) and AdamW by the rule of ``inner``'s groups.

    Args:
        optimizer: whose ``param_groups`` hold the hyperparameters.
        group_of: from a parameter to its group's number.
        pipeline: what brings states that live elsewhere to the update; None where there are none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        group_of: dict[torch.Tensor, int],
        pipeline: Pipeline | None,
    ) -> None:
        self._optimizer, self._group_of, self._pipeline = optimizer, group_of, pipeline
        self._decoupled = isinstance(inner, torch.optim.AdamW)

    def update(
        self,
        units: Sequence[OptimizerShard],
        factor: float,
        used: Sequence[Sequence[bool]],
        publish: Callable[[UnitGradients], None],
    ) -> None:
        """Updates every unit with ``factor * gradient``, then publishes it."""
        leaving, elsewhere = PendingWriteback(), []
        for states, flags in zip(units, used, strict=True):
            for i, flag in enumerate(flags):
                states.steps[i] += flag
            if states.on_device:
                self._update(states, flags, factor, *self._tensors(states))
                publish(states.grads)
            elif (stored := states.param_only_offloaded) is not None:
                leaving.take(stored, partial(self._with_the_shard, states, stored, flags, factor))
                publish(states.grads)
            else:
                elsewhere.append((states, flags))
        leaving.settle()
        if elsewhere:
            assert self._pipeline is not None
            self._pipeline.run(
                piece for states, flags in elsewhere for piece in self._pieces(states, flags, factor, publish)
            )

    def _update(self, states: OptimizerShard, flags: Sequence[bool], factor: float, *tensors: torch.Tensor) -> None:
        part = self._part(states, 0, states.param.numel(), *tensors)
        with profile_range("update", states.unit.name):
            for segment in self._segments_of(states, flags):
                self._adam(states, part, segment, factor)

    def _with_the_shard(
        self, states: OptimizerShard, stored: OffloadedShards, flags: Sequence[bool], factor: float
    ) -> Work:
        """The update on the device where the parameter shard alone is elsewhere. Gives what takes that back."""
        shard = states.param
        here = stored.staging_buffer(shard)
        if states.mixed and all(flags):
            here.zero_()  # the padding, for all the rest is written
        else:
            stored.read(shard, here).wait_stream()
        tensors = [here if tensor is states.param else tensor for tensor in self._tensors(states)]
        self._update(states, flags, factor, *tensors)
        return stored.write(here, shard)

    @staticmethod
    def _tensors(states: OptimizerShard) -> list[torch.Tensor]:
        tensors = [states.master, states.gradient, *states.adam_moments()]
        return [*tensors, states.param] if states.mixed else tensors

    @staticmethod
    def _part(states: OptimizerShard, start: int, stop: int, *tensors: torch.Tensor) -> _Part:
        master, gradient, exp_avg, exp_avg_sq, *published = tensors
        return _Part(start, stop, master, gradient, exp_avg, exp_avg_sq, published[0] if published else None)

    def _pieces(
        self,
        states: OptimizerShard,
        flags: Sequence[bool],
        factor: float,
        publish: Callable[[UnitGradients], None],
    ) -> Iterator[Piece]:
        """The update of a unit whose states are elsewhere, in pieces that fit a buffer; the last one publishes."""
        assert self._pipeline is not None
        segments = self._segments_of(states, flags)
        tensors = self._tensors(states)
        numel, size = states.param.numel(), self._pipeline.piece_numel
        for start in range(0, numel, size):
            stop = min(start + size, numel)
            mine = [segment for segment in segments if segment.start < stop and start < segment.stop]
            if not mine:
                continue
            whole = sum(min(s.stop, stop) - max(s.start, start) for s in mine) == stop - start
            streams = [
                Stream(tensor[start:stop], reads=i < 4 or not whole or states.may_be_written, writes=i != 1)
                for i, tensor in enumerate(tensors)
            ]
            yield Piece(streams, partial(self._compute, states, mine, factor, start, stop))
        yield Piece((), partial(self._land, states, publish))  # in the units' order: it may be a collective

    def _land(self, states: OptimizerShard, publish: Callable[[UnitGradients], None]) -> None:
        assert self._pipeline is not None
        self._pipeline.wait_stream()
        publish(states.grads)

    def _compute(
        self,
        states: OptimizerShard,
        segments: list[Segment],
        factor: float,
        start: int,
        stop: int,
        *tensors: torch.Tensor,
    ) -> None:
        part = self._part(states, start, stop, *tensors)
        for segment in segments:
            self._adam(states, part, segment, factor)

    def _adam(self, states: OptimizerShard, part: _Part, segment: Segment, factor: float) -> None:
        group = self._optimizer.param_groups[segment.group]
        where, start = part.slices(segment)
        ops.adam_step(
            part.master[where],
            part.gradient[where],
            part.exp_avg[where],
            part.exp_avg_sq[where],
            step=segment.step,
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=self._decoupled or bool(group.get("decoupled_weight_decay", False)),
            grad_scale=factor,
            maximize=bool(group.get("maximize", False)),
            low_precision=None if part.published is None else part.published[where],
            reload_written=states.may_be_written,
            seed=states.number << 32 | segment.step,
            offset=states.offset + start,
        )

    def _segments_of(self, states: OptimizerShard, flags: Sequence[bool]) -> list[Segment]:
        """The runs of the shard that one kernel call updates; steps count from the unit's own."""
        last = max(states.steps, default=0)
        behind = tuple(last - step for step in states.steps)
        key = (tuple(flags), behind)
        if key not in states.segments:
            if len(states.segments) >= SEGMENT_TABLES:
                states.segments.clear()
            groups = [self._group_of[param] for param in states.unit.params]
            states.segments[key] = segments_of(states.unit.layout, states.unit.rank, groups, flags, behind)
        return [segment.at(last) for segment in states.segments[key]]
