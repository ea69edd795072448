"""The outer step of ``local_steps``: what becomes of the parameters that replicas have trained apart.

With ``average`` the new parameters are the mean of the replicas' parameters: local SGD (arXiv 1805.09767, algorithm 1).
With ``nesterov`` they are a step from the *anchor*, which is what all replicas started the round from: DiLoCo (arXiv
2311.08105, algorithm 1). Its gradient is how far the mean has moved, and its optimizer is SGD with Nesterov momentum as
in torch:

    gradient = anchor - mean
    momentum = mu * momentum + gradient
    anchor   = anchor - rate * (gradient + mu * momentum)

All of it happens on the master weights. The state of the inner optimizer stays with its replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import Medium
from zeroengine.offload.state_offloader import resident_bytes
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.replica_mean import Region, ReplicaMean, as_real, sum_dtype
from zeroengine.partition.degrees import ranks_of_level
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.unit import Unit


@dataclass(frozen=True)
class Nesterov:
    """The hyperparameters of the outer step.

    Attributes:
        learning_rate: Multiplies the outer gradient.
        momentum: The part of the momentum that stays at each outer step.
    """

    learning_rate: float
    momentum: float


class OuterState(NamedTuple):
    """What a rank keeps for its piece of a shard between outer steps. 1-D, where masters and moments live.

    Attributes:
        anchor: The parameters that all replicas started the round from.
        momentum: The momentum of the outer step.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor


class OuterShard:
    """The masters of one optimizer shard, and this rank's piece of them.

    Args:
        shard: The optimizer's shard.
        ranks_per_replica: The ranks of the replica.
        keeps_state: Whether the outer step has state.

    Attributes:
        region: The masters, for ``ReplicaMean``.
        state: The state of the outer step for this rank's piece, if it has any.
    """

    def __init__(self, shard: OptimizerShard, ranks_per_replica: int, *, keeps_state: bool) -> None:
        self.shard = shard
        self.region = Region(shard.master, *owners_of(shard, ranks_per_replica), shard.store)
        # Where the piece begins within the shard, in elements.
        self._start = self.region.position * self.region.piece_numel
        self.state: OuterState | None = None
        if keeps_state:
            master = shard.master
            dtype = master.dtype if master.is_complex() else sum_dtype(master.dtype)
            numel = self.region.piece_numel
            self.state = OuterState(shard.empty(dtype, numel), shard.empty(dtype, numel))
            self.set_anchor()
            self.clear_momentum()

    def spans(self, within: tuple[int, int] | None = None) -> Iterator[tuple[ShardSpan, slice]]:
        """Yield the parts of parameters in this rank's piece, each with its place in the tensors of ``state``.

        Args:
            within: A range of the piece, in elements. None: all of it.
        """
        start, stop = within or (0, self.region.piece_numel)
        first, unit = self.shard.offset + self._start, self.shard.unit
        for span in unit.layout.spans(unit.rank, unit.degrees.optimizer, (first + start, first + stop)):
            begin = span.shard_offset - self._start
            yield span, slice(begin, begin + span.numel)

    def set_anchor(self, left_out: Collection[str] = ()) -> None:
        """Let the masters be what the replicas start from, except for the parameters named in ``left_out``."""
        if self.state is None:
            return
        slots = self.shard.unit.layout.slots
        whole = [slice(0, self.region.piece_numel)]
        parts = [at for span, at in self.spans() if slots[span.param_index].name not in left_out] if left_out else whole
        for at in parts:
            anchor, master = self.state.anchor[at], self.region.values[self._start + at.start : self._start + at.stop]
            populate(master)
            populate(anchor, write=True)
            anchor.copy_(master)
            self._evict(anchor, master)

    def clear_momentum(self) -> None:
        """Let the momentum restart from zero."""
        if self.state is not None:
            populate(self.state.momentum, write=True)
            self.state.momentum.zero_()
            self._evict(self.state.momentum)

    def take_step(self, start: int, stop: int, means: torch.Tensor, nesterov: Nesterov) -> None:
        """Turn the means of elements ``start`` to ``stop`` of the piece into new parameters. See the formulas above.

        Args:
            start: The first element.
            stop: The element after the last.
            means: Of ``sum_dtype``, 1-D, complex numbers as pairs; receives the new parameters.
            nesterov: The hyperparameters.
        """
        assert self.state is not None
        own_state = [as_real(tensor[start:stop]) for tensor in self.state]
        for tensor in own_state:
            populate(tensor, write=True)
        # Offloaded state is copied to the device of the sum; state on the device is changed in place.
        anchor, momentum = (tensor.to(means.device) for tensor in own_state)
        gradient = anchor - means
        momentum.mul_(nesterov.momentum).add_(gradient)
        anchor.sub_(gradient.add_(momentum, alpha=nesterov.momentum), alpha=nesterov.learning_rate)
        means.copy_(anchor)
        for tensor, value in zip(own_state, (anchor, momentum), strict=True):
            if tensor.device != value.device:
                tensor.copy_(value)
        self._evict(*own_state)

    def _evict(self, *tensors: torch.Tensor) -> None:
        if self.shard.store is not None:
            self.shard.store.evict(*tensors)


def owners_of(shard: OptimizerShard, ranks_per_replica: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks of the replica that hold copies of ``shard``, in the order of their pieces, and its place.

    Args:
        shard: The optimizer's shard.
        ranks_per_replica: The ranks of the replica.
    """
    unit, degrees = shard.unit, shard.unit.degrees
    copies = ranks_of_level(unit.rank, degrees.optimizer, ranks_per_replica)
    owners = tuple(sorted(copies, key=lambda rank: degrees.piece(rank, ranks_per_replica)))
    # A rank alone needs no number within its replica.
    return (owners, owners.index(unit.rank)) if len(owners) > 1 else ((0,), 0)


class OuterStep:
    """Takes the outer steps of one rank. Its shards are those of the optimizer.

    Args:
        shards: The optimizer's shards.
        transport: Moves bytes between the ranks of the replica.
        between: Moves bytes between the counterparts.
        nesterov: The hyperparameters. None: the mean alone.
        timer: Times the exchange.
        device: The device that the model computes on.

    Attributes:
        shards: The shards, with the state of the outer step.
        mean: Averages values over the replicas.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        transport: Transport,
        between: Transport,
        nesterov: Nesterov | None,
        timer: Timer,
        device: torch.device,
    ) -> None:
        self._nesterov, size = nesterov, transport.world_size
        self.shards = [OuterShard(shard, size, keeps_state=nesterov is not None) for shard in shards]
        numel = sum(outer.region.piece_numel for outer in self.shards)
        has_copies = any(len(outer.region.owners) > 1 for outer in self.shards)
        self.mean = ReplicaMean(transport, between, timer, numel, device, has_copies)

    def run(self, label: str) -> None:
        """Replace the masters by the result of an outer step: the same bits on every replica. A collective."""
        regions = {id(outer.region): outer for outer in self.shards}
        nesterov = self._nesterov

        def take_step(region: Region, start: int, stop: int, means: torch.Tensor) -> None:
            assert nesterov is not None
            regions[id(region)].take_step(start, stop, means, nesterov)

        self.mean.run([outer.region for outer in self.shards], label, None if nesterov is None else take_step)

    def set_anchor(self, left_out: Collection[str] = (), unit: Unit | None = None) -> None:
        """Let the present masters be what the replicas start from.

        Args:
            left_out: Names of parameters whose anchor stays.
            unit: The unit whose masters count. None: all units.
        """
        for outer in self.shards:
            if unit is None or outer.shard.unit is unit:
                outer.set_anchor(left_out)

    def clear_momentum(self) -> None:
        """Let the momentum of every shard restart from zero."""
        for outer in self.shards:
            outer.clear_momentum()

    def bytes_in(self, medium: Medium | None) -> int:
        """Return the bytes of anchors and momenta in one medium; None: device memory."""
        return sum(
            resident_bytes(tensor)
            for outer in self.shards
            if outer.shard.medium == medium
            for tensor in outer.state or ()
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the anchors and momenta that are on the device."""
        return [tensor for outer in self.shards if outer.shard.store is None for tensor in outer.state or ()]
