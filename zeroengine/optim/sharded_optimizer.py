"""The optimizer over shards, for every stage: a torch optimizer that chooses an update backend and delegates to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.offload.interfaces import Medium, OffloadStore
from zeroengine.offload.pipeline import Pipeline
from zeroengine.offload.state_offloader import resident_bytes
from zeroengine.optim.backends.async_adam import AsyncAdam
from zeroengine.optim.backends.blocking_adam import BlockingAdam
from zeroengine.optim.backends.interface import BackendParts, ShardState, SpanState, UpdateBackend
from zeroengine.optim.backends.torch_optimizer import TorchOptimizer
from zeroengine.optim.caller_optimizer import PartitionedStateDict, check_step_call, load_hyperparameters
from zeroengine.optim.factory import add_param_group
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_reduction import GradientReducer, StepReduction
from zeroengine.partition.layout import ShardSpan
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit import Unit

# The first backend that serves an optimizer runs it; the last one serves any.
BACKENDS: tuple[type[UpdateBackend], ...] = (AsyncAdam, BlockingAdam, TorchOptimizer)


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the model's parameters that updates this rank's shards.

    ``param_groups`` hold the model's own parameters and hyperparameters. They are shared with the optimizer that was
    passed in, so its LR schedulers keep working. Change them at any time.

    Args:
        base_optimizer: The caller's optimizer. Its class says how to update.
        reducer: Owns the gradients.
        transport: Sums the norm over the ranks.
        after_update: Called with a unit right after the update of its shard: this rank's part of the unit's
            parameters has new values.
        step: Called by ``step()``. Ends the step of the engine.
        zero_grad: Called by ``zero_grad()``. Drops the gradients since the last step.
        writes: Knows which parameters were written from outside.
        moments_dtype: The dtype of Adam's moments; bf16 is rounded stochastically.
        stores: For each unit, where its masters and optimizer state live. None: on the device.
        pipeline: Brings offloaded states to the update.
        timer: Times the norm and the updates.
        async_step: See ``BackendParts``.

    Attributes:
        shards: The optimizer shard of every trainable unit, in the order of registration.
        backend: Computes norms and runs the updates.
        reduction: Sums norms and flags over the ranks.
        base_optimizer_name: The class of the caller's optimizer.

    Raises:
        ZeroEngineError: The optimizer's backend cannot keep states in bf16, or not outside the device's memory.
    """

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        transport: Transport,
        *,
        after_update: Callable[[Unit], None],
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        writes: OutsideWrites,
        timer: Timer,
        moments_dtype: torch.dtype = torch.float32,
        stores: Sequence[OffloadStore | None] = (),
        pipeline: Pipeline | None = None,
        async_step: bool | None = None,
    ) -> None:
        self._step, self._zero_grad = step, zero_grad
        self.base_optimizer_name = type(base_optimizer).__name__
        self.shards = [
            OptimizerShard(index, unit_grads, store)
            for index, (unit_grads, store) in enumerate(zip_longest(reducer.gradients, stores))
        ]
        # torch's constructor adds the groups through `add_param_group`, which is refused from then on.
        self._constructed = False
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)
        self._constructed = True
        # The two optimizers share these objects, so that schedulers and users of either one change both.
        self.param_groups = base_optimizer.param_groups
        self.reduction = StepReduction(self.shards, reducer, transport, writes, timer)
        parts = BackendParts(
            optimizer=self,
            base_optimizer=base_optimizer,
            group_of_param={p: i for i, group in enumerate(self.param_groups) for p in group["params"]},
            shards=self.shards,
            reduction=self.reduction,
            writes=writes,
            after_update=after_update,
            moments_dtype=moments_dtype,
            pipeline=pipeline,
            async_step=async_step,
            timer=timer,
        )
        # These checks come before the backend allocates the state, which may be most of the memory.
        backend = next(backend for backend in BACKENDS if backend.serves(parts))
        name = self.base_optimizer_name
        if moments_dtype is not torch.float32 and not backend.supports_bf16_moments:
            raise ZeroEngineError(
                f"optimizer_state_dtype: only Adam and AdamW on fp32 masters keep moments in bf16, not {name}; remove "
                "the key"
            )
        offloaded = any(shard.unit.offloaded_shards is not None or shard.store is not None for shard in self.shards)
        if offloaded and not backend.supports_offload:
            raise ZeroEngineError(
                f"offload: only Adam and AdamW on fp32 masters update states that are not on the device, not {name}; "
                'write "device": "none"'
            )
        self.backend = backend(parts)

    # -- as a torch optimizer ---------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups.

        Raises:
            ZeroEngineError: The optimizer is constructed.
        """
        if self._constructed:
            raise ZeroEngineError("groups cannot be added after initialize(): put every parameter into one before")
        add_param_group(self, param_group)

    # GradScaler then calls step() instead of asserting that there are gradients, and `check_step_call` explains.
    _step_supports_amp_scaling = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End the step: reduce, clip and update, as ``engine.step()`` does after the last micro-step.

        Raises:
            ZeroEngineError: A closure was given, or fewer than ``gradient_accumulation_steps`` backwards have run, or
                this loop ends steps by ``engine.step()``.
        """
        check_step_call(self, closure)
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, as ``Engine.zero_grad`` does."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' hyperparameters. Saving or copying the dict raises, because it lacks the state."""
        return PartitionedStateDict(super().state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        """Set the hyperparameters to those of ``state_dict``.

        Raises:
            ZeroEngineError: The dict has a state, or other groups.
        """
        load_hyperparameters(self, state_dict)

    # -- the optimizer's state --------------------------------------------------------------------

    def reload_masters(self) -> None:
        """Copy into shards and masters the values that were written into parameters since the last step."""
        self.reduction.keep_writes()
        for shard in self.shards:
            if shard.may_be_written:
                shard.reload_master()

    @property
    def shard_state(self) -> ShardState:
        """The state of this rank's shards by spans. It includes the last step, so it may wait for the device."""
        self.backend.await_step_counts()
        return self.backend.state

    def state_shapes(self, shard: OptimizerShard, param_index: int) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each state of a parameter on this rank; None for a state with a value per element."""
        shapes: dict[str, tuple[int, ...] | None] = {}
        for _, state in self._states_of_param(shard, param_index):
            shapes |= dict.fromkeys(state.elements) | {key: tuple(n.shape) for key, n in state.numbers.items()}
        return shapes

    def state_values(self, shard: OptimizerShard, param_index: int, key: str) -> list[tuple[ShardSpan, torch.Tensor]]:
        """Return the values of the state ``key`` of a parameter, with the elements that they belong to."""
        values = []
        for span, state in self._states_of_param(shard, param_index):
            value = state.elements.get(key, state.numbers.get(key))
            if value is not None:
                # The state may be a mapped file, which this caller reads in place.
                populate(value)
                values.append((span, value))
        return values

    def set_state_values(self, shard: OptimizerShard, param_index: int, key: str, value: torch.Tensor) -> None:
        """Set the state ``key`` of a parameter. Call it on every rank.

        Args:
            value: A tensor of the parameter's shape if the state has a value per element, else the number.
        """
        # The shard may hold no part of the parameter. Other ranks set theirs.
        for span, state in self._states_of_param(shard, param_index):
            target = state.elements.get(key)
            if target is None:
                # A number such as a step count belongs to the parameter as a whole, and each rank with a part of it
                # keeps a copy.
                self.backend.state.set_numbers(shard, span, {key: value})
            else:
                populate(target, write=True)
                target.copy_(value.view(-1)[span.param_slice])

    def _states_of_param(self, shard: OptimizerShard, param_index: int) -> Iterator[tuple[ShardSpan, SpanState]]:
        state = self.shard_state
        return ((span, state.of(shard, span)) for span in shard.spans() if span.param_index == param_index)

    def bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Return the bytes of masters and optimizer state on this rank in one medium; None: device memory."""
        shards = [shard for shard in self.shards if shard.medium == medium]
        state = (tensor for shard in shards for tensor in self.backend.state.tensors(shard))
        # A master that is the parameter shard takes no memory of its own.
        masters = (shard.master for shard in shards if shard.unit.is_mixed_precision)
        return {"master": sum(map(resident_bytes, masters)), "optimizer": sum(map(resident_bytes, state))}

    def tensors(self) -> list[torch.Tensor]:
        """Return the masters and the optimizer state that are on the device."""
        shards = [shard for shard in self.shards if shard.store is None]
        masters = [shard.master for shard in shards if shard.unit.is_mixed_precision]
        return masters + [tensor for shard in shards for tensor in self.backend.state.tensors(shard)]
