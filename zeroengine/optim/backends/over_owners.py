"""The caller's optimizer over whole parameters: a copy on each rank, with the parameters that this rank owns.

Masters and gradients stay in the shards. For a step they come to the owners, and the updated values go back. The
optimizer's state of a parameter, whatever its shapes, stays at the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.backends.interface import BackendParts
from zeroengine.optim.backends.over_shards import ShardParameter, run_with_settings
from zeroengine.optim.backends.owner_exchange import ExchangeRule, OwnerExchange
from zeroengine.optim.caller_optimizer import copy_without_parameters
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.partition.layout import ShardSpan
from zeroengine.partition.owners import Matrix

T = TypeVar("T")


class OptimizerOverOwners:
    """Runs the step of the caller's optimizer on the parameters that this rank owns.

    Attributes:
        optimizer: The copy. Its state belongs to these parameters, which have memory during a step alone.
        params: For each shard of this rank, by its index, and by the index of a parameter, what the copy updates.
        exchange: Brings parameters to their owners.
    """

    # What a step costs is unknown, but state and time grow with the elements.
    EXCHANGE: ClassVar = ExchangeRule(
        lambda rows, columns: rows * columns, lambda group: 1, lambda _, *dtypes: dtypes, 1
    )

    def __init__(self, parts: BackendParts) -> None:
        self._caller = parts.base_optimizer
        self.optimizer = copy_without_parameters(parts.base_optimizer)
        self.params: dict[int, dict[int, ShardParameter]] = {shard.index: {} for shard in parts.shards}
        self._shards = {shard.index: shard for shard in parts.shards}
        self.exchange = OwnerExchange(parts, self.EXCHANGE)
        for exchange_round in self.exchange.rounds:
            for matrix, _ in exchange_round.owned:
                shard = self._shards[matrix.unit]
                original = shard.unit.params[matrix.param_index]
                param = torch.nn.Parameter(_without_memory(shard, original.shape))
                self.optimizer.param_groups[parts.group_of_param[original]]["params"].append(param)
                span = ShardSpan(matrix.param_index, 0, 0, matrix.numel)
                self.params[shard.index][matrix.param_index] = ShardParameter(shard, span, param)

    def __iter__(self) -> Iterator[ShardParameter]:
        """Yield the parameters that this rank owns."""
        for params in self.params.values():
            yield from params.values()

    def step(self, factor: float, has_grad: Sequence[Sequence[bool]]) -> None:
        """Let the copy take a step. See ``UpdateRule.update``. A collective."""
        for matrix, values in self._send_to_owners(lambda shard: shard.gradient):
            if has_grad[matrix.unit][matrix.param_index]:
                param = self._param(matrix)
                param.grad = values.to(param.dtype, copy=True).mul_(factor).view_as(param)
        for matrix, values in self._send_to_owners(lambda shard: shard.master):
            param = self._param(matrix)
            # A copy, because the memory of the exchange serves the next round.
            param.data = values.clone().view_as(param)
        try:
            run_with_settings(self._caller, self.optimizer, lambda optimizer: optimizer.step())
            self._return_to_shards()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            for shard, _, param in self:
                param.data = _without_memory(shard, param.shape)
            self.exchange.end()

    def run(self, act: Callable[[torch.optim.Optimizer], T]) -> T:
        """Refuse to run methods of the optimizer's own, whose parameters have no memory between steps.

        Raises:
            ZeroEngineError: Always.
        """
        raise ZeroEngineError(
            f"{type(self._caller).__name__} updates whole parameters, which are at their owners during a step alone: "
            "its own methods and properties cannot run between steps. At zero_optimization.stage 0 they can."
        )

    def _send_to_owners(
        self, values_of: Callable[[OptimizerShard], torch.Tensor]
    ) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """Yield the whole values of each parameter that this rank owns. They are valid until the next round."""
        for exchange_round in self.exchange.rounds:
            trip = self.exchange.begin(exchange_round, values_of(exchange_round.shards[0]).dtype)
            for shard, part, values in trip.parts():
                values.copy_(values_of(shard)[part.shard_slice])
            trip.send()
            yield from trip.matrices().items()

    def _return_to_shards(self) -> None:
        for exchange_round in self.exchange.rounds:
            trip = self.exchange.begin(exchange_round, exchange_round.shards[0].master.dtype)
            trip.send_back({matrix: self._param(matrix).detach() for matrix, _ in exchange_round.owned})
            trip.wait()
            for shard, part, values in trip.parts():
                shard.master[part.shard_slice].copy_(values)

    def _param(self, matrix: Matrix) -> torch.nn.Parameter:
        return self.params[matrix.unit][matrix.param_index].param


def _without_memory(shard: OptimizerShard, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of the dtype and device of the master that has a shape but takes no memory."""
    return torch.zeros((), dtype=shard.master.dtype, device=shard.master.device).expand(shape)
