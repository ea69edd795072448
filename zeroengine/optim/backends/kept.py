"""What a sharded optimizer keeps of each span of its shards, as tensors that a checkpoint can hold and fill."""

from __future__ import annotations

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer, as_tensor
from zeroengine.partition.layout import ShardSpan

Keys = dict[str, tuple[torch.dtype, bool]]  # by name: the dtype, and whether it is one number for the parameter


class KeptState:
    """The state of ``optimizer`` by spans."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def rule(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer._inner).__name__

    def expected_keys(self) -> set[str] | None:
        """What must be known of each parameter that has any state; None where the rule decides as it goes."""
        return {"exp_avg", "exp_avg_sq", "step"} if self._optimizer._on_shards is None else None

    def of(self, states: OptimizerShard, span: ShardSpan) -> dict[str, torch.Tensor]:
        """What is kept of a span, or of part of one, of this rank's shard: 1-D views, and copies of 0-d numbers."""
        on_shards = self._optimizer._on_shards
        if on_shards is None:
            where = slice(span.shard_offset, span.shard_offset + span.numel)
            moments = states.adam_moments()
            step = torch.tensor(float(states.steps[span.param_index]), device="cpu")
            return {"step": step, "exp_avg": moments[0][where], "exp_avg_sq": moments[1][where]}
        whole, piece = self._piece(states, span)
        at = span.param_offset - whole.param_offset
        found = {}
        for key, value in on_shards.state[piece].items():
            if isinstance(value, torch.Tensor) and value.shape == piece.shape and key != "step":
                found[key] = value.view(-1)[at : at + span.numel]
            elif isinstance(value, (torch.Tensor, float, int)):
                found[key] = as_tensor(value).detach().clone()
        return found

    def make(self, states: OptimizerShard, span: ShardSpan, keys: Keys) -> None:
        """Before loading into a span: there is a state of just these keys to load into."""
        on_shards = self._optimizer._on_shards
        if on_shards is None:
            return
        _, piece = self._piece(states, span)
        kept = on_shards.state[piece]
        for key in [key for key in kept if key not in keys]:
            del kept[key]
        for key, (dtype, is_number) in keys.items():
            if key not in kept:
                kept[key] = torch.zeros((), dtype=dtype, device="cpu") if is_number else torch.zeros_like(piece)

    def take_numbers(self, states: OptimizerShard, span: ShardSpan, numbers: dict[str, torch.Tensor]) -> None:
        """The 0-d numbers that were loaded for a span."""
        if self._optimizer._on_shards is None:
            states.steps[span.param_index] = int(numbers["step"]) if "step" in numbers else 0
            return
        _, piece = self._piece(states, span)
        kept = self._optimizer._on_shards.state[piece]
        for key, value in numbers.items():
            kept[key] = value.to(kept[key]) if isinstance(kept[key], torch.Tensor) else type(kept[key])(value.item())

    def clear(self, states: OptimizerShard, span: ShardSpan) -> None:
        """A span of which a checkpoint keeps nothing: as before its first step."""
        if self._optimizer._on_shards is None:
            where = slice(span.shard_offset, span.shard_offset + span.numel)
            for moment in states.adam_moments():
                populate(moment[where], write=True)
                moment[where].zero_()
            states.steps[span.param_index] = 0
        else:
            self._optimizer._on_shards.state.pop(self._piece(states, span)[1], None)

    def _piece(self, states: OptimizerShard, span: ShardSpan) -> tuple[ShardSpan, torch.nn.Parameter]:
        """The whole span of this rank's shard that ``span`` is in, and its parameter on shards."""
        pieces = self._optimizer._pieces[id(states)]
        return next((whole, piece) for whole, piece in pieces if whole.param_index == span.param_index)
