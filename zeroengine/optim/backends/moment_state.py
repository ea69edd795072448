"""The state of optimizers with moments: some values for each element, and perhaps a step count for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.backends.interface import SpanState, StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.cut import Algorithm
from zeroengine.partition.layout import ShardSpan


def moments_dtype(algorithm: Algorithm, master_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of moments: that of the algorithm, but no narrower than masters that are wider than fp32."""
    is_wide = master_dtype.itemsize > torch.float32.itemsize
    wide = max(algorithm.moments_dtype, master_dtype, key=lambda dtype: dtype.itemsize)
    return wide if is_wide else algorithm.moments_dtype


def scales_name(moment: str) -> str:
    """Return the name in ``Unit.moved_states`` of the scales of a moment of 8 bits."""
    return f"{moment}.scales"


class MomentState:
    """See ``ShardState``.

    The dtype of the moments is that of ``UnitPlan.algorithm``. Where masters are wider than fp32, moments are as wide.

    Args:
        shards: The shards.
        names: The names of the moments, as in the state of a torch optimizer.
        counts_steps: Whether each parameter has a step count.
        needs_steps: Whether a checkpoint must have it. Torch optimizers whose rule does not depend on it save none.
        initial_values: By parameter, the values of its moments before the first step, where they are not 0.

    Attributes:
        names: See above.
        moments: For each shard, by its index, the moments in the order of ``names``. Those of 8 bits are uint8.
        scales: For each shard, by its index, the scales of moments of 8 bits, a value for each block.
        steps: The step count of every parameter of the units of all shards, in their order.
    """

    def __init__(
        self,
        shards: Sequence[OptimizerShard],
        names: Sequence[str],
        *,
        counts_steps: bool,
        needs_steps: bool = False,
        initial_values: Mapping[torch.Tensor, float] = MappingProxyType({}),
    ) -> None:
        self.names, self._counts_steps, self._initial_values = names, counts_steps, initial_values
        self._needs_steps = needs_steps
        # Moments exist from the start, so that too little memory fails in ``initialize`` and not in the first step.
        self.moments: dict[int, list[torch.Tensor]] = {}
        self.scales: dict[int, list[torch.Tensor]] = {}
        for shard in shards:
            algorithm, moved = shard.unit.algorithm, shard.unit.moved_states
            dtype = moments_dtype(algorithm, shard.master.dtype)
            is_moved = bool(names) and names[0] in moved
            self.moments[shard.index] = [moved.pop(name) if is_moved else shard.zeros(dtype) for name in names]
            blocks = shard.param.numel() // algorithm.block
            self.scales[shard.index] = [
                moved.pop(scales_name(name)) if is_moved else shard.zeros(torch.float32, blocks)
                for name in names
                if algorithm.block > 1
            ]
            for span in shard.spans() if initial_values and not is_moved else ():
                self._fill(shard, span)
        self.steps: list[int] = []
        # For each shard, by its index, the place of its unit's first parameter in ``steps``.
        self._first_step: dict[int, int] = {}
        for shard in shards:
            self._first_step[shard.index] = len(self.steps)
            self.steps += [0] * len(shard.unit.params)

    def keys(self, shard: OptimizerShard) -> frozenset[str]:
        """See ``ShardState``."""
        return frozenset(self.names) | {"step"} if self._needs_steps else frozenset(self.names)

    def spans(self, shard: OptimizerShard) -> Iterator[ShardSpan]:
        """See ``ShardState``."""
        return shard.spans()

    def is_whole(self, shard: OptimizerShard) -> bool:
        """See ``ShardState``."""
        return False

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """See ``ShardState``."""
        moments = (moment[span.shard_slice] for moment in self.moments[shard.index])
        block = shard.unit.algorithm.block
        blocks = slice(span.shard_offset // block, -(-(span.shard_offset + span.numel) // block))
        has_scales = len(self.scales[shard.index]) > 0
        scales = {name: scale[blocks] for name, scale in zip(self.names, self.scales[shard.index], strict=has_scales)}
        # A float on the CPU, as torch's Adam keeps it, whatever torch's default device is.
        step = torch.tensor(float(self.steps[self._place(shard, span)]), device="cpu")
        numbers = {"step": step} if self._counts_steps else {}
        return SpanState(dict(zip(self.names, moments, strict=True)), numbers, scales)

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """Do nothing: moments and step counts exist from the start."""

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """See ``ShardState``."""
        # A parameter without a step count starts as if it was never updated.
        self.steps[self._place(shard, span)] = int(numbers["step"].item()) if "step" in numbers else 0

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """See ``ShardState``."""
        self._fill(shard, span)
        self.steps[self._place(shard, span)] = 0

    def set_steps(self, shard: OptimizerShard, steps: Sequence[int]) -> None:
        """Set the step count of every parameter of a shard's unit."""
        first = self._first_step[shard.index]
        self.steps[first : first + len(steps)] = steps

    def steps_of(self, shard: OptimizerShard) -> list[int]:
        """Return the step count of every parameter of a shard's unit."""
        first = self._first_step[shard.index]
        return self.steps[first : first + len(shard.unit.params)]

    def _place(self, shard: OptimizerShard, span: ShardSpan) -> int:
        return self._first_step[shard.index] + span.param_index

    def _fill(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """Give the moments of a span the values that they have before the first step."""
        value = self._initial_values.get(shard.unit.params[span.param_index], 0.0)
        scales = self.scales[shard.index]
        # The largest number of 8 bits stands for the scale itself.
        fill = value if not scales or not value else 255
        for moment in self.moments[shard.index]:
            populate(moment[span.shard_slice], write=True)
            moment[span.shard_slice].fill_(fill)
        start, stop, block = span.shard_offset, span.shard_offset + span.numel, shard.unit.algorithm.block
        for scale in scales if value else ():
            blocks = scale[start // block : -(-stop // block)]
            populate(blocks, write=True)
            blocks.fill_(value)

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return [*self.moments[shard.index], *self.scales[shard.index]]

    def whole_shard_tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return list(self.moments[shard.index])
