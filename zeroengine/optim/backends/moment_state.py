"""The state of optimizers with moments: some values for each element, and perhaps a step count for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.backends.interface import SpanState, StateKeys
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan


class MomentState:
    """See ``ShardState``.

    Args:
        shards: The shards.
        names: The names of the moments, as in the state of a torch optimizer.
        dtype: The dtype of the moments, such as bf16, which the kernels of Adam round stochastically. None: that of
            the masters.
        counts_steps: Whether each parameter has a step count.

    Attributes:
        moments: For each shard, by its index, the moments in the order of ``names``.
        steps: For each shard, by its index, the step count of every parameter of its unit, if steps are counted.
    """

    def __init__(
        self, shards: Sequence[OptimizerShard], names: Sequence[str], dtype: torch.dtype | None, *, counts_steps: bool
    ) -> None:
        self._names, self._counts_steps = names, counts_steps
        # Moments exist from the start, so that too little memory fails in ``initialize`` and not in the first step.
        self.moments = {shard.index: [shard.zeros(dtype or shard.master.dtype) for _ in names] for shard in shards}
        self.steps = {shard.index: [0] * len(shard.unit.params) for shard in shards}

    def keys(self, shard: OptimizerShard) -> frozenset[str]:
        """See ``ShardState``."""
        return frozenset(self._names) | {"step"} if self._counts_steps else frozenset(self._names)

    def spans(self, shard: OptimizerShard) -> Iterator[ShardSpan]:
        """See ``ShardState``."""
        return shard.spans()

    def is_whole(self, shard: OptimizerShard) -> bool:
        """See ``ShardState``."""
        return False

    def of(self, shard: OptimizerShard, span: ShardSpan) -> SpanState:
        """See ``ShardState``."""
        moments = (moment[span.shard_slice] for moment in self.moments[shard.index])
        # A float on the CPU, as torch's Adam keeps it, whatever torch's default device is.
        step = torch.tensor(float(self.steps[shard.index][span.param_index]), device="cpu")
        return SpanState(dict(zip(self._names, moments, strict=True)), {"step": step} if self._counts_steps else {})

    def create(self, shard: OptimizerShard, span: ShardSpan, keys: StateKeys) -> None:
        """Do nothing: moments and step counts exist from the start."""

    def set_numbers(self, shard: OptimizerShard, span: ShardSpan, numbers: Mapping[str, torch.Tensor]) -> None:
        """See ``ShardState``."""
        # A parameter without a step count starts as if it was never updated.
        self.steps[shard.index][span.param_index] = int(numbers["step"].item()) if "step" in numbers else 0

    def clear(self, shard: OptimizerShard, span: ShardSpan) -> None:
        """See ``ShardState``."""
        for moment in self.moments[shard.index]:
            populate(moment[span.shard_slice], write=True)
            moment[span.shard_slice].zero_()
        self.steps[shard.index][span.param_index] = 0

    def tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        """See ``ShardState``."""
        return list(self.moments[shard.index])

    whole_shard_tensors = tensors
