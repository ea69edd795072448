"""The update of Muon: momentum and step on shards, the iteration on whole matrices at their owners.

    shards      momentum, direction -+                              +-> decay, step, publish
                                     v  to the owners, in the       |
    owners                           +-> dtype of the iteration ->  +   back to the shards
                                         Newton-Schulz

Momentum stays partitioned as any state of an element, so it is balanced to the byte, and checkpoints load at any stage
and number of ranks. Only directions travel. While a round of matrices is made orthogonal, the next one travels. Where
states are offloaded, the pipeline brings them to both halves on shards, in chunks. Parameters may be split over a model
group: see "Matrices in slices" in ``partition/owners.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from zeroengine import ops
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.pipeline import Operand, PipelineTask
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.backends.moment_state import MomentState
from zeroengine.optim.backends.owner_exchange import NUM_SLOTS, ExchangeRule, OwnerExchange, RoundTrip
from zeroengine.optim.muon import apply_direction, direction, iteration_dtype, orthogonalize, update_cost
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.owners import Matrix, Part

T = TypeVar("T")
# Of each matrix in a chunk of a shard: the matrix, its place in the chunk, and the directions of these elements.
Runs = Sequence[tuple[Matrix, slice, torch.Tensor]]


class MuonUpdate:
    """See ``UpdateRule``."""

    has_moments: ClassVar[bool] = True
    EXCHANGE: ClassVar = ExchangeRule(
        *(update_cost, lambda group: group["num_matrices"]),
        dtypes=lambda group, gradient, master: (iteration_dtype(group, master),),
        num_slots=NUM_SLOTS,
    )

    def __init__(self, parts: BackendParts) -> None:
        self._parts = parts
        self.state = MomentState(parts.shards, ("momentum_buffer",), counts_steps=False)
        self._exchange = OwnerExchange(parts, self.EXCHANGE)
        self.exchange_bytes = self._exchange.kept_bytes
        self._shards = {shard.index: shard for shard in parts.shards}

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateRule``."""
        raise ZeroEngineError("Muon has no methods of its own")

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """See ``UpdateRule``."""
        rounds = self._exchange.rounds
        trips: list[RoundTrip] = []
        # Round n travels to its owners while round n - 1 is computed there and round n - 2 travels back.
        for number in range(len(rounds) + NUM_SLOTS):
            if number >= NUM_SLOTS:
                self._apply(trips[number - NUM_SLOTS], has_grad)
            if number < len(rounds):
                trip = self._exchange.begin(rounds[number], self._dtype(rounds[number].shards[0]), number % NUM_SLOTS)
                self._fill(trip, factor, has_grad)
                trip.send()
                trips.append(trip)
            if 1 <= number <= len(rounds):
                trip = trips[number - 1]
                with self._parts.timer.span("update", label="Newton-Schulz"):
                    trip.send_back(self._orthogonal(trip.matrices(), has_grad))
        self._exchange.end()

    def _fill(self, trip: RoundTrip, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        tasks = []
        for shard, chunk, runs in self._chunks(trip, has_grad):
            (momentum,) = self.state.moments[shard.index]
            operands = Operand(shard.gradient[chunk]), Operand(momentum[chunk], writes=True)
            tasks.append((shard, PipelineTask(operands, partial(self._fill_chunk, factor, shard, runs))))
        self._run(tasks, "momentum")

    def _fill_chunk(self, factor: float, shard: OptimizerShard, runs: Runs, *tensors: torch.Tensor) -> None:
        gradient, momentum = tensors
        for matrix, place, values in runs:
            scaled = gradient[place].to(shard.master.dtype) * factor
            values.copy_(direction(momentum[place], scaled, self._group(shard, matrix.param_index)))

    def _orthogonal(
        self, matrices: Mapping[Matrix, torch.Tensor], has_grad: Sequence[Sequence[bool]]
    ) -> dict[Matrix, torch.Tensor]:
        """Return the orthogonal directions. Matrices of one shape and one group are computed in one batch."""
        results = dict(matrices)
        batches: dict[tuple[int, int, int], list[Matrix]] = {}
        for matrix in matrices:
            if has_grad[matrix.unit][matrix.param_index]:
                group = self._parts.group_of_param[self._shards[matrix.unit].unit.params[matrix.param_index]]
                batches.setdefault((group, matrix.rows, matrix.columns), []).append(matrix)
        for (group, rows, columns), of_batch in batches.items():
            batch = torch.stack([results[matrix].view(rows, columns) for matrix in of_batch])
            orthogonal = orthogonalize(batch, self._parts.base_optimizer.param_groups[group])
            results |= zip(of_batch, orthogonal, strict=True)
        return results

    def _apply(self, trip: RoundTrip, has_grad: Sequence[Sequence[bool]]) -> None:
        trip.wait()
        tasks = []
        for shard, chunk, runs in self._chunks(trip, has_grad):
            operands = [Operand(shard.master[chunk], writes=True)]
            if shard.low_precision_param is not None:
                operands.append(Operand(shard.low_precision_param[chunk], reads=shard.may_be_written, writes=True))
            tasks.append((shard, PipelineTask(operands, partial(self._apply_chunk, shard, runs))))
        self._run(tasks, "update")
        for shard in trip.round.shards:
            self._parts.publish_updates([shard.unit])

    def _apply_chunk(self, shard: OptimizerShard, runs: Runs, master: torch.Tensor, *params: torch.Tensor) -> None:
        for param in params if shard.may_be_written else ():
            ops.reload_written(master, param)
        for matrix, place, values in runs:
            group = self._group(shard, matrix.param_index)
            apply_direction(master[place], values, group, (matrix.rows, matrix.columns))
        for param in params:
            param.copy_(master)

    def _chunks(
        self, trip: RoundTrip, has_grad: Sequence[Sequence[bool]]
    ) -> Iterator[tuple[OptimizerShard, slice, Runs]]:
        """Yield the chunks of shards that have parts with gradients. A shard on the device is one chunk."""
        parts: dict[int, list[tuple[Part, torch.Tensor]]] = {shard.index: [] for shard in trip.round.shards}
        for shard, part, values in trip.parts():
            if has_grad[shard.index][part.matrix.param_index]:
                parts[shard.index].append((part, values))
        for shard in trip.round.shards:
            numel, pipeline = shard.param.numel(), self._parts.pipeline
            size = numel if shard.on_device or pipeline is None else pipeline.chunk_numel
            for start in range(0, numel, size):
                if runs := _runs_within(parts[shard.index], start, start + size):
                    yield shard, slice(start, start + size), runs

    def _run(self, tasks: Sequence[tuple[OptimizerShard, PipelineTask]], label: str) -> None:
        for shard, task in tasks:
            if shard.on_device:
                with self._parts.timer.span("update", label=label):
                    task.compute(*(operand.tensor for operand in task.operands))
        if offloaded := [task for shard, task in tasks if not shard.on_device]:
            assert self._parts.pipeline is not None
            self._parts.pipeline.run(offloaded)

    def _group(self, shard: OptimizerShard, param_index: int) -> dict[str, Any]:
        return self._parts.base_optimizer.param_groups[self._parts.group_of_param[shard.unit.params[param_index]]]

    def _dtype(self, shard: OptimizerShard) -> torch.dtype:
        return iteration_dtype(self._group(shard, 0), shard.master.dtype)


def _runs_within(parts: Sequence[tuple[Part, torch.Tensor]], start: int, stop: int) -> Runs:
    """Return what elements ``start`` to ``stop`` of a shard have of its parts."""
    runs = []
    for part, values in parts:
        low, high = max(part.shard_offset, start), min(part.shard_offset + part.numel, stop)
        if low < high:
            directions = values[low - part.shard_offset : high - part.shard_offset]
            runs.append((part.matrix, slice(low - start, high - start), directions))
    return runs
