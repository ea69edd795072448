"""The fused rules, which wait for the norm and then update states wherever they live.

[Note: Where the kernel runs]
- Everything is on the device: one call updates all segments of all such shards, or of those up to one whose update is
  all-gathered.
- Only the parameter shard is offloaded, to CPU memory of a GPU: it is copied to the device, updated there with the rest
  of its shard, and copied back while the next shards are updated.
- Anything else is offloaded: the pipeline brings the states in chunks to host buffers, and the kernel runs on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import add
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from zeroengine import ops
from zeroengine.offload.interfaces import OffloadStore, device_memory_for, poison_on_error
from zeroengine.offload.pipeline import Operand, PipelineTask
from zeroengine.optim.backends.fused_state import fused_state, run_over_state
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.fused_rules import settings_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.segments import Segment, chunks_of, segments_of
from zeroengine.utils.tensors import Addresses
from zeroengine.utils.work import Work

T = TypeVar("T")
# Of each param group the arguments of ``ops.update_step`` that do not vary by parameter.
Groups = Sequence[Mapping[str, Any]]
# The lists of segments that are cached for each shard: one for each set of parameters that had a gradient. Without a
# limit, a model whose branches keep varying would fill the memory.
MAX_CACHED_LISTS = 16
# The parameter shards that are copied from the device at the same time. Each of them takes a staging buffer.
MAX_WRITEBACKS = 3


class UpdatePlan(NamedTuple):
    """What a step updates. Later steps do the same as long as their facts are equal.

    Attributes:
        flags: For each parameter, whether it has a gradient.
        rules: The rule of each param group.
        segments: Of each shard.
        parts: What is updated on the device.
        first_parts: For each shard, where its parts begin in those of all shards, and their end.
    """

    flags: list[bool]
    rules: list[str]
    segments: list[list[Segment]]
    parts: ops.UpdateParts
    first_parts: list[int]


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
        on_device = [shard for shard in parts.shards if shard.on_device]
        self._addresses = Addresses([x for shard in on_device for x in self.state.arrays(shard).tensors()])
        # The arrays of segments on the device as the kernel takes them, by shard and rule.
        self._prepared: dict[tuple[int, Segment, str], ops.PreparedArrays] = {}
        self._plan: UpdatePlan | None = None
        # The steps of the plan before this one, and the step counts after the last step.
        self._num_steps, self._last_steps = 0, list[int]()
        self._average_weight = parts.shards[0].average_weight if parts.shards else 0.0

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """See ``UpdateRule``."""
        return run_over_state(self._parts, self.state, act)

    def update(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """See ``UpdateRule``."""
        # Settings that cannot be are found before anything changes.
        settings = settings_of(self._parts.base_optimizer, self.state.names)
        shared = {"grad_scale": factor, "average_weight": self._average_weight}
        groups = [{**group, "lr": float(group["lr"]), **shared} for group in settings]
        shards = self._parts.shards
        plan = self._count_step([flag for shard in shards for flag in has_grad[shard.index]], groups)
        plan.parts.set_groups(groups, self._num_steps)
        # Updated parameter shards on their way from the device to their store, and shards for the pipeline.
        writebacks: deque[tuple[OffloadStore, Work]] = deque()
        offloaded = []
        for first, stop in self._parts.launches():
            shard, segments = shards[first], plan.segments[first]
            if shard.on_device:
                with self._parts.timer.span("update", shard.unit.name if stop == first + 1 else "", "update"):
                    plan.parts.update(plan.first_parts[first], plan.first_parts[stop])
                self._parts.publish_updates([shard.unit for shard in shards[first:stop]])
            elif (store := shard.store_if_only_param_offloaded) is not None:
                # An update that fails half way leaves the shard without its old values.
                with poison_on_error(store):
                    all_elements = all(has_grad[shard.index])
                    writeback = self._update_with_offloaded_param(shard, store, segments, groups, all_elements)
                writebacks.append((store, writeback))
                if len(writebacks) >= MAX_WRITEBACKS:
                    self._wait_for_first(writebacks)
                self._parts.publish_updates([shard.unit])
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

    def _count_step(self, flags: list[bool], groups: Groups) -> UpdatePlan:
        """Count a step for each parameter that has a gradient, and return what it updates.

        Args:
            flags: For each parameter, whether it has a gradient.
            groups: The settings of the step.
        """
        steps, rules = self.state.steps, [group["rule"] for group in groups]
        # A load may have set step counts, and states that were away may have got other memory.
        if has_moved := self._addresses.have_changed():
            self._prepared.clear()
        plan = self._plan
        if plan is None or has_moved or (plan.flags, plan.rules, self._last_steps) != (flags, rules, steps):
            self._plan = plan = self._plan_step(flags, rules)
            self._num_steps = 0
        else:
            self._num_steps += 1
        # Steps are counted before the update, because the kernels count from 1.
        self.state.steps = list(map(add, steps, flags))
        # A load changes counts in place.
        self._last_steps = self.state.steps.copy()
        return plan

    def _plan_step(self, flags: list[bool], rules: list[str]) -> UpdatePlan:
        """Return what a step updates after the present step counts."""
        if len(self._prepared) > MAX_CACHED_LISTS * len(flags):
            self._prepared.clear()
        segments_of_shards, parts, first_parts, num_params = [], list[ops.UpdatePart](), [0], 0
        for shard in self._parts.shards:
            counts = self.state.steps_of(shard)
            of_params = tuple(flags[num_params : num_params + len(counts)])
            num_params += len(counts)
            steps = [count + flag for count, flag in zip(counts, of_params, strict=True)]
            last_step = max(steps, default=0)
            segments = self.segments_of_shard[shard.index](of_params, tuple([last_step - step for step in steps]))
            for segment in segments if shard.on_device else ():
                key = shard.index, segment, rules[segment.group]
                if key not in self._prepared:
                    part = self.state.arrays(shard).part(segment.start, segment.stop).of_rule(key[2])
                    self._prepared[key] = ops.prepare_arrays(key[2], part, shard.may_be_written)
                step, place = last_step - segment.steps_behind, (self._seed(shard), shard.offset + segment.start)
                parts.append(ops.UpdatePart(self._prepared[key], segment.group, step, *place))
            segments_of_shards.append(segments)
            first_parts.append(len(parts))
        return UpdatePlan(flags, rules, segments_of_shards, ops.UpdateParts(parts, rules), first_parts)

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
        self._parts.publish_updates([shard.unit])

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
        arrays, last_step = self.state.arrays(shard).like(tensors), max(self.state.steps_of(shard), default=0)
        for segment in segments:
            group, step = groups[segment.group], last_step - segment.steps_behind
            first, last = max(segment.start, start), min(segment.stop, stop)
            ops.update_step(
                arrays=arrays.part(first - start, last - start).of_rule(group["rule"]),
                **group,
                step=step,
                reload_written=shard.may_be_written,
                seed=self._seed(shard) + step,
                offset=shard.offset + first,
            )

    @staticmethod
    def _seed(shard: OptimizerShard) -> int:
        # Stochastic rounding depends only on the unit, the step and the element's place in the unit, so it is the same
        # at every stage and in chunks of any size. Step counts stay below 2**32.
        return shard.index << 32

    def _wait_for_first(self, writebacks: deque[tuple[OffloadStore, Work]]) -> None:
        store, writeback = writebacks.popleft()
        with self._parts.timer.span("offload"), poison_on_error(store):
            writeback.wait_host()
