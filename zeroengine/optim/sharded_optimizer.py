"""The optimizer over shards, for every stage: a torch optimizer that delegates to an update backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zeroengine.errors import ZeroEngineError
from zeroengine.offload.interfaces import Medium
from zeroengine.offload.state_offloader import resident_bytes
from zeroengine.optim.backends.interface import ShardState, SpanState, UpdateBackend
from zeroengine.optim.caller_optimizer import (
    PartitionedStateDict,
    add_param_group,
    check_step_call,
    deep_copy,
    load_hyperparameters,
    refuse_copy,
)
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_reduction import StepReduction
from zeroengine.partition.layout import ShardSpan


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the model's parameters that updates this rank's shards.

    ``param_groups`` hold the model's own parameters and hyperparameters. They are shared with the optimizer that was
    passed in, so its LR schedulers keep working. Change them at any time.

    Args:
        base_optimizer: The caller's optimizer. Its class says how to update.
        backend: Computes norms and runs the updates.
        shards: The optimizer shard of every trainable unit, in the order of registration.
        reduction: Sums norms and flags over the ranks.
        step: Called by ``step()``. Ends the step of the engine.
        zero_grad: Called by ``zero_grad()``. Drops the gradients since the last step.

    Attributes:
        shards, backend, reduction: See above.
        base_optimizer_name: The class of the caller's optimizer, or the classes that it joins.
    """

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        backend: UpdateBackend,
        shards: Sequence[OptimizerShard],
        reduction: StepReduction,
        *,
        step: Callable[[], None],
        zero_grad: Callable[[bool], None],
    ) -> None:
        self._step, self._zero_grad = step, zero_grad
        self.base_optimizer_name = " and ".join(type(member).__name__ for member in members_of(base_optimizer))
        self.backend, self.shards, self.reduction = backend, shards, reduction
        # torch's constructor adds the groups through `add_param_group`, which is refused from then on.
        self._constructed = False
        super().__init__(base_optimizer.param_groups, base_optimizer.defaults)
        self._constructed = True
        # The two optimizers share these objects, so that schedulers and users of either one change both.
        self.param_groups = base_optimizer.param_groups
        # Only from here on attributes that this object lacks are those of the caller's optimizer.
        self._base_optimizer = base_optimizer

    def drop_parts(self) -> None:
        """Refer to no shard any more, until others are assigned with their backend and their reduction."""
        self.shards = ()
        del self.backend, self.reduction

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
        """Drop the gradients of the step so far, or set them to zero, as ``Engine.zero_grad`` does."""
        self._zero_grad(set_to_none)

    # Methods, properties and attributes of the caller's class serve here, too. See "Methods of an optimizer's own" in
    # ``optim/own_methods.py``.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that only the caller's optimizer has."""
            if name.startswith("_") or "_base_optimizer" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(self._base_optimizer, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute: that of the caller's optimizer where only that one has it."""
            base = vars(self).get("_base_optimizer")
            if base is not None and name == "param_groups":
                # Both optimizers, the update and the schedule hold this list.
                base.param_groups[:] = value
                return
            is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
            if base is None or is_own or not (name in vars(base) or hasattr(type(base), name)):
                object.__setattr__(self, name, value)
            else:
                setattr(base, name, value)

    __reduce_ex__, __deepcopy__ = refuse_copy, deep_copy

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
        self.reduction.move_writes()
        for shard in self.shards:
            if shard.may_be_written:
                shard.reload_master()

    def state_of(self, shard: OptimizerShard) -> ShardState:
        """Return the state of one of this rank's shards. It includes the last step, so it may wait for the device."""
        self.backend.await_step_counts()
        return self.backend.state_of(shard)

    def state_shapes(self, shard: OptimizerShard, param_index: int) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each state of a parameter on this rank; None for a state with a value per element."""
        shapes: dict[str, tuple[int, ...] | None] = {}
        for _, state in self._states_of_param(shard, param_index):
            shapes |= dict.fromkeys(state.elements) | {key: tuple(n.shape) for key, n in state.numbers.items()}
        return shapes

    def state_values(self, shard: OptimizerShard, param_index: int, key: str) -> list[tuple[ShardSpan, torch.Tensor]]:
        """Return the values of the state ``key`` of a parameter, with the elements that they belong to.

        They are views of the state, except for numbers and for moments of 8 bits, which are copies.
        """
        values = []
        for span, state in self._states_of_param(shard, param_index):
            if key in state.elements:
                values.append((span, state.read(key)))
            elif key in state.numbers:
                values.append((span, state.numbers[key]))
        return values

    def set_state_values(self, shard: OptimizerShard, param_index: int, key: str, value: torch.Tensor) -> None:
        """Set the state ``key`` of a parameter. Call it on every rank.

        Args:
            value: A tensor of the parameter's shape if the state has a value per element, else the number.
        """
        # The shard may hold no part of the parameter. Other ranks set theirs.
        for span, state in self._states_of_param(shard, param_index):
            if key not in state.elements:
                # A number such as a step count belongs to the parameter as a whole, and each rank with a part of it
                # keeps a copy.
                self.state_of(shard).set_numbers(shard, span, {key: value})
            else:
                state.write(key, value.view(-1)[span.param_slice])
                # A first step would ignore the momentum where torch's optimizer keeps no step count.
                rule_state = self.state_of(shard)
                if "step" not in (rule_state.keys(shard) or {"step"}) and not state.numbers.get("step", 1):
                    rule_state.set_numbers(shard, span, {"step": torch.ones((), device="cpu")})

    def _states_of_param(self, shard: OptimizerShard, param_index: int) -> Iterator[tuple[ShardSpan, SpanState]]:
        state = self.state_of(shard)
        return ((span, state.of(shard, span)) for span in state.spans(shard) if span.param_index == param_index)

    def bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Return the bytes of masters, optimizer state and averages on this rank in one medium; None: device memory."""
        shards = [shard for shard in self.shards if shard.medium == medium]
        state = [tensor for shard in shards for tensor in self._state_tensors(shard)]
        # A master that is the parameter shard takes no memory of its own.
        masters = (shard.master for shard in shards if shard.unit.has_master)
        return {"master": sum(map(resident_bytes, masters)), "optimizer": sum(map(resident_bytes, state))}

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the masters, the moments (all state of the rule) and the averages that are on the device."""
        shards = [shard for shard in self.shards if shard.store is None]
        return {
            "masters": [shard.master for shard in shards if shard.unit.has_master],
            "moments": [tensor for shard in shards for tensor in self.backend.state_of(shard).tensors(shard)],
            "averages": [shard.average for shard in shards if shard.average is not None],
        }

    def _state_tensors(self, shard: OptimizerShard) -> list[torch.Tensor]:
        return self.backend.state_of(shard).tensors(shard) + ([] if shard.average is None else [shard.average])
