"""The moving averages of the weights where no fused rule has updated them in a step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

import torch

from zeroengine import ops
from zeroengine.offload.interfaces import device_memory_for
from zeroengine.offload.pipeline import Operand, PipelineTask
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.segments import Segment, chunks_of, segments_of


class AverageUpdate:
    """Updates averages by "average_only", which reads the masters and changes nothing else.

    Args:
        parts: The parts of the backend.
    """

    def __init__(self, parts: BackendParts) -> None:
        self._parts = parts

    def update(self, number: int, has_grad: Sequence[Sequence[bool]], fused: Container[int]) -> None:
        """Update the averages after the masters.

        Args:
            number: The number of the step.
            has_grad: For each unit and parameter, whether there is a gradient.
            fused: The indices of the shards that a fused rule updates, with the averages of parameters with a gradient.
        """
        tasks: list[PipelineTask] = []
        for shard in self._parts.shards:
            if shard.average is None:
                continue
            unit, same = shard.unit, [0] * len(shard.unit.params)
            remain = [not (flag and shard.index in fused) for flag in has_grad[shard.index]]
            segments = segments_of(unit.layout, unit.rank, same, remain, same)
            if not segments:
                continue
            arrays = ops.UpdateArrays(shard.master, None, average=shard.average)
            # Values that the user wrote into a parameter are in its master after the next update, which may be far.
            if shard.may_be_written:
                arrays = arrays._replace(low_precision_param=shard.low_precision_param)
            if shard.on_device:
                self._run(shard, segments, number, arrays, 0, *arrays.tensors())
            elif (store := shard.store_if_only_param_offloaded) is not None:
                if not unit.has_master:
                    on_device = device_memory_for(store, shard.master)
                    store.read(shard.master, on_device).wait_stream()
                    arrays = arrays._replace(param=on_device)
                self._run(shard, segments, number, arrays, 0, *arrays.tensors())
            else:
                tasks += self._tasks(shard, segments, number, arrays)
        if tasks:
            assert self._parts.pipeline is not None
            self._parts.pipeline.run(tasks)

    def _tasks(
        self, shard: OptimizerShard, segments: Sequence[Segment], number: int, arrays: ops.UpdateArrays
    ) -> list[PipelineTask]:
        """Return the update of an offloaded shard in chunks that fit a buffer."""
        assert self._parts.pipeline is not None
        tasks = []
        for start, stop, inside in chunks_of(segments, shard.param.numel(), self._parts.pipeline.chunk_numel):
            # The chunk is written back as a whole. A master is written where its parameter may have been.
            written = (arrays.average, arrays.param if shard.may_be_written else None)
            operands = [
                Operand(part, writes=any(tensor is state for state in written))
                for tensor, part in zip(arrays.tensors(), arrays.part(start, stop).tensors(), strict=True)
            ]
            tasks.append(PipelineTask(operands, partial(self._run, shard, inside, number, arrays, start)))
        return tasks

    def _run(
        self,
        shard: OptimizerShard,
        segments: Sequence[Segment],
        number: int,
        arrays: ops.UpdateArrays,
        start: int,
        *tensors: torch.Tensor,
    ) -> None:
        """Update segments in ``tensors``, which are those of ``arrays`` from element ``start`` of a shard on."""
        arrays = arrays.like(tensors)
        for segment in segments:
            first, last = max(segment.start, start), min(segment.stop, start + arrays.param.numel())
            ops.update_step(
                "average_only",
                arrays.part(first - start, last - start),
                step=1,
                lr=0.0,
                average_weight=shard.average_weight,
                reload_written=shard.may_be_written,
                # The step counts of these parameters may stand still, so the bits of a rounding depend on the step.
                seed=shard.index << 32 | number,
                offset=shard.offset + first,
            )
