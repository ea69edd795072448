"""The fused rules, which wait for the norm and then update states wherever they live.

[Note: Where the kernel runs]
- Everything is on the device: one kernel call there for each segment of the shard.
- Only the parameter shard is offloaded, to CPU memory of a GPU: it is copied to the device, updated there with the rest
  of its shard, and copied back while the next shards are updated.
- Anything else is offloaded: the pipeline brings the states in chunks to host buffers, and the kernel runs on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar

import torch

from zeroengine import ops
from zeroengine.offload.interfaces import OffloadStore, device_memory_for, poison_on_error
from zeroengine.offload.pipeline import Operand, PipelineTask
from zeroengine.ops import UpdateArrays
from zeroengine.optim.backends.fused_state import fused_state, run_over_state
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.fused_rules import settings_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.segments import Segment, chunks_of, segments_of
from zeroengine.utils.work import Work

T = TypeVar("T")
# Of each param group the arguments of ``ops.update_step`` that do not vary by parameter.
Groups = Sequence[Mapping[str, Any]]
# The lists of segments that are cached for each shard: one for each set of parameters that had a gradient. Without a
# limit, a model whose branches keep varying would fill the memory.
MAX_CACHED_LISTS = 16
# The parameter shards that are copied from the device at the same time. Each of them takes a staging buffer.
MAX_WRITEBACKS = 3


class FusedUpdate:
    """See ``UpdateRule``. Runs the rules of ``optim/fused_rules.py``."""

    has_moments: ClassVar[bool] = True
    exchange_bytes = 0

    def __init__(self, parts: BackendParts) -> None:
        self.state = fused_state(parts)
        self._parts = parts
        # For each shard a function of which parameters have a gradient, and of how far each is behind the unit's
        # largest step count. Neither depends on the step itself, so results are reused from step to step.
        self.segments_of_shard = {
            shard.index: lru_cache(MAX_CACHED_LISTS)(
                partial(segments_of, unit.layout, unit.rank, [parts.group_of_param[param] for param in unit.params])
            )
            for shard, unit in ((shard, shard.unit) for shard in parts.shards)
        }
        # By shard, if all of it is on the device: the addresses of its arrays, and the arrays of each segment and rule
        # as the kernel takes them, which are those of the last step nearly always.
        self._prepared: dict[int, tuple[list[int], dict[tuple[Segment, str], ops.PreparedArrays]]] = {}

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateRule``."""
        return run_over_state(self._parts, self.state, act)

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """See ``UpdateRule``."""
        # Settings that cannot be are found before anything changes.
        settings = settings_of(self._parts.base_optimizer, self.state.names)
        groups = [{**group, "lr": float(group["lr"]), "grad_scale": factor} for group in settings]
        # Updated parameter shards on their way from the device to their store, and shards for the pipeline.
        writebacks: deque[tuple[OffloadStore, Work]] = deque()
        offloaded = []
        for shard in self._parts.shards:
            flags = has_grad[shard.index]
            # Steps are counted before the update, because the kernels count from 1.
            steps = [step + flag for step, flag in zip(self.state.steps[shard.index], flags, strict=True)]
            self.state.steps[shard.index] = steps
            last_step = max(steps, default=0)
            steps_behind = tuple(last_step - step for step in steps)
            segments = self.segments_of_shard[shard.index](tuple(flags), steps_behind)
            if shard.on_device:
                self._update_on_device(shard, segments, groups)
                self._parts.publish_update(shard.unit)
            elif (store := shard.store_if_only_param_offloaded) is not None:
                # An update that fails half way leaves the shard without its old values.
                with poison_on_error(store):
                    writeback = self._update_with_offloaded_param(shard, store, segments, groups, all(flags))
                writebacks.append((store, writeback))
                if len(writebacks) >= MAX_WRITEBACKS:
                    self._wait_for_first(writebacks)
                self._parts.publish_update(shard.unit)
            else:
                offloaded.append((shard, segments))
        # The pipeline may use the same stores, and the next gather reads the shards that were written back.
        while writebacks:
            self._wait_for_first(writebacks)
        if offloaded:
            assert self._parts.pipeline is not None
            self._parts.pipeline.run(
                task for shard, segments in offloaded for task in self._tasks(shard, segments, groups)
            )

    def _update_on_device(self, shard: OptimizerShard, segments: Sequence[Segment], groups: Groups) -> None:
        arrays = self.state.arrays(shard)
        addresses = [tensor.data_ptr() for tensor in arrays.tensors()]
        known, prepared = self._prepared.get(shard.index, ([], {}))
        if known != addresses or len(prepared) > MAX_CACHED_LISTS * len(shard.unit.params):
            prepared = {}
            self._prepared[shard.index] = addresses, prepared
        with self._parts.timer.span("update", shard.unit.name, "update"):
            for segment in segments:
                key = segment, groups[segment.group]["rule"]
                if key not in prepared:
                    part = arrays.part(segment.start, segment.stop).of_rule(key[1])
                    prepared[key] = ops.prepare_arrays(key[1], part, shard.may_be_written)
                self._run_kernel(shard, segment, groups, segment.start, prepared[key])

    def _update_with_offloaded_param(
        self,
        shard: OptimizerShard,
        store: OffloadStore,
        segments: Sequence[Segment],
        groups: Groups,
        all_elements: bool,
    ) -> Work:
        """Update a shard of which only the parameters are offloaded, and start to write them back.

        Args:
            all_elements: Whether every parameter has a gradient.
        """
        param = shard.param
        on_device = device_memory_for(store, param)
        if shard.unit.has_master and all_elements:
            # The update writes every parameter, so only the padding between them has to be set.
            on_device.zero_()
        else:
            with self._parts.timer.span("offload", shard.unit.name):
                store.read(param, on_device).wait_stream()
        moved = [on_device if tensor is param else tensor for tensor in self.state.arrays(shard).tensors()]
        with self._parts.timer.span("update", shard.unit.name, "update"):
            self._run_on_parts(shard, segments, groups, 0, param.numel(), *moved)
        return store.write(on_device, param)

    def _tasks(self, shard: OptimizerShard, segments: Sequence[Segment], groups: Groups) -> Iterator[PipelineTask]:
        """Return the update of an offloaded shard in chunks that fit a buffer, then a task that ends the shard."""
        assert self._parts.pipeline is not None
        arrays = self.state.arrays(shard)
        for start, stop, inside in chunks_of(segments, shard.param.numel(), self._parts.pipeline.chunk_numel):
            # The chunk is written back as a whole, so elements that no segment covers must be read first.
            all_written = sum(min(s.stop, stop) - max(s.start, start) for s in inside) == stop - start
            reads_param = not all_written or shard.may_be_written
            operands = [
                Operand(
                    part, reads=tensor is not shard.low_precision_param or reads_param, writes=tensor is not arrays.grad
                )
                for tensor, part in zip(arrays.tensors(), arrays.part(start, stop).tensors(), strict=True)
            ]
            yield PipelineTask(operands, partial(self._run_on_parts, shard, inside, groups, start, stop))
        # This task runs in the order of the units, because it may launch a collective.
        yield PipelineTask((), partial(self._finish_offloaded, shard))

    def _finish_offloaded(self, shard: OptimizerShard) -> None:
        assert self._parts.pipeline is not None
        # The all-gather reads the shard on the device's stream, behind the copies that the pipeline issued.
        self._parts.pipeline.wait_stream()
        self._parts.publish_update(shard.unit)

    def _run_on_parts(
        self,
        shard: OptimizerShard,
        segments: Sequence[Segment],
        groups: Groups,
        start: int,
        stop: int,
        *tensors: torch.Tensor,
    ) -> None:
        """Update elements ``start`` to ``stop`` of a shard, which are those of ``tensors``, ordered as its arrays."""
        arrays = self.state.arrays(shard).like(tensors)
        for segment in segments:
            first, last = max(segment.start, start), min(segment.stop, stop)
            part = arrays.part(first - start, last - start).of_rule(groups[segment.group]["rule"])
            self._run_kernel(shard, segment, groups, first, part)

    def _run_kernel(
        self,
        shard: OptimizerShard,
        segment: Segment,
        groups: Groups,
        first: int,
        arrays: UpdateArrays | ops.PreparedArrays,
    ) -> None:
        """Update a part of a segment, which begins with element ``first`` of the shard."""
        step = max(self.state.steps[shard.index], default=0) - segment.steps_behind
        ops.update_step(
            arrays=arrays,
            **groups[segment.group],
            step=step,
            average_weight=shard.average_weight,
            reload_written=shard.may_be_written,
            # Stochastic rounding depends only on the unit, the step and the element's place in the unit, so it is the
            # same at every stage and in chunks of any size.
            seed=shard.index << 32 | step,
            offset=shard.offset + first,
        )

    def _wait_for_first(self, writebacks: deque[tuple[OffloadStore, Work]]) -> None:
        store, writeback = writebacks.popleft()
        with self._parts.timer.span("offload"), poison_on_error(store):
            writeback.wait_host()
