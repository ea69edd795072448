"""The optimizer over shards: one norm, one fused update, one publish, for every stage.

[Note: Same numbers]
At every stage a rank's norm covers the same elements (its slice at the world size) and the partial norms
add in rank order in float64; the update is element-wise, and where it rounds stochastically it does so by
the unit's number, the step and the element's place in the unit. So the losses are the same bits at every stage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from zeroengine import ops
from zeroengine.comm.interfaces import Transport
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import ZeroEngineError
from zeroengine.offload.disk_store import Medium, OffloadStore
from zeroengine.offload.offload_states import resident_bytes
from zeroengine.offload.pipeline import Pipeline
from zeroengine.optim.backends.device_adam import DeviceAdam
from zeroengine.optim.backends.host_adam import FusedAdam, runs_fused
from zeroengine.optim.caller_optimizer import (
    PartitionedStateDict,
    check_step_call,
    copy_without_parameters,
    load_hyperparameters,
)
from zeroengine.optim.factory import add_param_group
from zeroengine.optim.optimizer_shard import OptimizerShard
from zeroengine.optim.step_result import StepResult
from zeroengine.partition.degrees import Degrees
from zeroengine.partition.layout import ParamSlot, ShardSpan
from zeroengine.runtime.outside_writes import OutsideWrites
from zeroengine.runtime.unit_gradients import UnitGradients
from zeroengine.utils.host_copies import to_device

# Optimizers whose update of an element looks at other elements: wrong on a shard.
NOT_ELEMENTWISE = {"Adafactor", "Muon", "SparseAdam", "Shampoo", "LAMB", "Lamb", "LARS"}


class GradientSummary(NamedTuple):
    """What the ranks know together of the gradients that an update is to be made of."""

    norm: float  # of the summed gradients, before any division
    used: list[list[bool]]  # for each unit and parameter, whether any rank computed a gradient
    any_late: bool  # whether gradients still wait on some rank, see ``Reducer.reduce_late_gradients``


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` over the model's parameters that updates this rank's shards.

    ``param_groups`` hold the model's own parameters and hyperparameters (shared with the optimizer that
    was handed in, so its LR schedulers keep working); change them at any time.

    Args:
        inner: the optimizer that says the rule and the groups. Adam and AdamW run on the fused kernel,
            any other element-wise one runs on the shards.
        gradients: every trainable unit's gradients, in forward order.
        publish: called with a unit right after its update: its parameters have new values on their owner.
        step: ends the step of the engine.
        zero_grad: drops the gradients since the last step.
        writes: what is written into the parameters beside the updates.
        moments_dtype: of Adam's moments; bf16 is rounded stochastically.
        stores: where each unit's states live, if not on the device.
        pipeline: what brings states that live elsewhere to the update.
        on_device: whether a step is issued without waiting for its norm, where the fused kernel runs and every state
            is on the device. None: on a GPU that zeroengine's kernels serve.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        gradients: Sequence[UnitGradients],
        transport: Transport,
        *,
        publish: Callable[[UnitGradients], None],
        step: Callable[[], None],
        zero_grad: Callable[[], None],
        writes: OutsideWrites,
        moments_dtype: torch.dtype = torch.float32,
        stores: Sequence[OffloadStore | None] = (),
        pipeline: Pipeline | None = None,
        on_device: bool | None = None,
    ) -> None:
        self._transport, self._publish, self._writes = transport, publish, writes
        self._step, self._zero_grad = step, zero_grad
        self._groups = _group_of_param(inner.param_groups)
        self.units = [
            OptimizerShard(number, grads, moments_dtype, store)
            for number, (grads, store) in enumerate(zip_longest(gradients, stores))
        ]
        self._built = False
        super().__init__(inner.param_groups, inner.defaults)
        self._built = True
        self.param_groups = inner.param_groups  # the very same list and dicts
        fused = runs_fused(inner) and all(u.master.dtype is torch.float32 for u in self.units)
        if moments_dtype is not torch.float32 and not fused:
            raise ZeroEngineError(
                f"optimizer_state_dtype: only Adam and AdamW on fp32 masters keep moments in bf16, not "
                f"{type(inner).__name__}; remove the key"
            )
        if not fused and any(u.unit.offloaded_shards is not None or u.store is not None for u in self.units):
            raise ZeroEngineError(
                f"offload: only Adam and AdamW on fp32 masters update states that are not on the device, not "
                f'{type(inner).__name__}; write "device": "none"'
            )
        self._inner = inner
        self._fused = FusedAdam(self, inner, self._groups, pipeline) if fused else None
        self._on_shards = None if fused else self._make_inner()
        if fused:
            for states in self.units:
                states.adam_moments()
        here = fused and bool(self.units) and all(states.on_device for states in self.units)
        wanted = (here and _served(self.computes_on)) if on_device is None else on_device
        self._device: DeviceAdam | None = None
        if here and wanted:
            self._device = DeviceAdam(self, inner, self._groups, self.units, transport, writes)

    @property
    def computes_on(self) -> torch.device:
        """The device that gradients are on when their norm is taken."""
        return self.units[0].unit.full_buffer.device if self.units else torch.device("cpu")

    @property
    def on_device(self) -> bool:
        """Whether ``issue`` takes a step, rather than ``summarise`` and ``update``."""
        return self._device is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise ZeroEngineError("groups cannot be added after initialize(): put every parameter into one before")
        add_param_group(self, param_group)

    # GradScaler then calls step() instead of asserting that there are gradients, and `check_step_call` explains.
    _step_supports_amp_scaling = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End the step: reduce, clip and update, as ``engine.step()`` does after the last micro-step.

        Raises:
            ZeroEngineError: a closure was given, or fewer than ``gradient_accumulation_steps`` backwards have come, or
                ``engine.step()`` ends steps in this loop.
        """
        check_step_call(self, closure)
        self._step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``Engine.zero_grad``. Gradients are overwritten by the first micro-step after a step."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' hyperparameters; saving or copying the dict raises, for the state is not in it."""
        return PartitionedStateDict(super().state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over hyperparameters.

        Raises:
            ZeroEngineError: there is a state, too.
        """
        load_hyperparameters(self, state_dict)

    # -- norm -------------------------------------------------------------------------------------

    def summarise(self, label: str, *, late: bool) -> GradientSummary:
        """Return the norm of the summed gradients, which parameters got any, and whether some are still to come.

        One collective of a float64 vector: the squared norm of this rank's slices, whether gradients wait on this rank,
        then a flag for each parameter, then what says whether the ranks wrote the same values from outside.

        Args:
            label: names the collective; ranks that differ in it are refused.
            late: whether gradients wait on this rank.

        Raises:
            DivergenceError: on every rank, where they did not. Nothing has changed.
        """
        flags = [float(used) for states in self.units for used in states.grads.has_grad]
        values = to_device([0.0, late, *flags, *self._writes.sums()], self.computes_on)
        world = self._transport.world_size
        for states in self.units:
            known = states.grads.squared_norm
            values[0] += _squared_norm(states.gradient_for_norm(world)) if known is None else known
        total = self._transport.all_reduce_scalars(values, label).tolist()
        self._transport.check_order()
        used, at = [], 2
        for states in self.units:
            used.append([flag > 0 for flag in total[at : at + len(states.steps)]])
            at += len(states.steps)
        self._writes.confirm(self._writes.suspects(total[at:]))
        return GradientSummary(math.sqrt(total[0]) if total[0] >= 0 else math.nan, used, total[1] > 0)

    def norm(self, divisor: float, label: str) -> torch.Tensor:
        """Return the norm that ``issue`` would find, 0-d float64 on the device."""
        assert self._device is not None
        return self._device.norm(divisor, label)

    def first_not_finite(self) -> str | None:
        """The first parameter, in forward order, whose summed gradient is not finite; the same on every rank."""
        flags = []
        for states in self.units:
            layout, unit = states.unit.layout, states.unit
            bad = [False] * len(layout.slots)
            for span in layout.spans(unit.rank, unit.degrees.optimizer):
                gradient = states.gradient[span.shard_offset : span.shard_offset + span.numel]
                populate(gradient)
                bad[span.param_index] = bad[span.param_index] or not bool(torch.isfinite(gradient).all())
            flags += bad
        names = [slot.name for states in self.units for slot in states.unit.layout.slots]
        total = self._transport.all_reduce_scalars(
            torch.tensor(flags, dtype=torch.float64, device=self.computes_on), "where not finite"
        )
        return next((name for name, flag in zip(names, total.tolist(), strict=True) if flag), None)

    # -- update -----------------------------------------------------------------------------------

    def update(self, factor: float, used: Sequence[Sequence[bool]]) -> None:
        """Updates every unit with ``factor * gradient`` and publishes it.

        A parameter that got no gradient on any rank keeps its value, moments and step count, as in torch.
        """
        if self._fused is None:
            assert self._on_shards is not None
            self._update_on_shards(self._on_shards, factor, used)
            return
        self._fused.update(self.units, factor, used, self._publish)

    def issue(self, divisor: float, limit: float, skip: bool, label: str = "norm") -> StepResult:
        """A whole step: norm, clipping, update and publish. See ``DeviceAdam.step``."""
        assert self._device is not None
        return self._device.step(divisor, limit, skip, label, self._publish)

    def reload_masters(self) -> None:
        """Take what was written into low-precision parameters since the last step over into their masters."""
        for states in self.units:
            if states.may_be_written:
                states.reload_master()

    def settle(self) -> None:
        """Returns with the step counts of ``units`` up to date: after ``issue`` they lag behind."""
        if self._device is not None:
            self._device.settle()

    def _update_on_shards(
        self, on_shards: torch.optim.Optimizer, factor: float, used: Sequence[Sequence[bool]]
    ) -> None:
        """Any element-wise optimizer: its own ``step`` over parameters that are views of the shards."""
        self.reload_masters()
        for mine, theirs in zip(on_shards.param_groups, self.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        for states, flags in zip(self.units, used, strict=True):
            for span, piece in self._pieces[id(states)]:
                if flags[span.param_index]:
                    gradient = states.gradient[span.shard_offset : span.shard_offset + span.numel]
                    piece.grad = gradient.to(piece.dtype, copy=True).mul_(factor).view_as(piece)
        on_shards.step()
        on_shards.zero_grad(set_to_none=True)
        for mine, theirs in zip(on_shards.param_groups, self.param_groups, strict=True):  # some keep state there
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        for states in self.units:
            if states.mixed:
                states.param.copy_(states.master)
            self._publish(states.grads)

    def _make_inner(self) -> torch.optim.Optimizer:
        self._pieces: dict[int, list[tuple[Any, torch.nn.Parameter]]] = {}
        groups: list[list[torch.nn.Parameter]] = [[] for _ in self.param_groups]
        inner = copy_without_parameters(self._inner)
        for states in self.units:
            pieces = self._pieces[id(states)] = []
            for span in states.unit.layout.spans(states.unit.rank, states.unit.degrees.optimizer):
                param = states.unit.params[span.param_index]
                shape = param.shape if span.numel == param.numel() else (span.numel,)
                flat = states.master[span.shard_offset : span.shard_offset + span.numel]
                piece = torch.nn.Parameter(flat.view(shape))
                groups[self._groups[param]].append(piece)
                pieces.append((span, piece))
                if param in self._inner.state:
                    inner.state[piece] = {k: _part(v, param, span, piece) for k, v in self._inner.state[param].items()}
        self._inner.state.clear()
        for group, params in zip(inner.param_groups, groups, strict=True):
            group["params"] = params
        return inner

    # -- looking and surgery ----------------------------------------------------------------------

    def shapes(self, states: OptimizerShard, slot: ParamSlot) -> dict[str, tuple[int, ...] | None]:
        """What is kept of a parameter on this rank, by name: None for a value of each element, else its shape."""
        found: dict[str, tuple[int, ...] | None] = {}
        for _, shape, kept in self._kept(states, slot):
            for key, value in kept.items():
                if isinstance(value, (torch.Tensor, int, float)):
                    found[key] = None if (its := tuple(as_tensor(value).shape)) == shape else its
        return found

    def values(self, states: OptimizerShard, slot: ParamSlot, key: str) -> list[tuple[slice, torch.Tensor]]:
        """What is kept under ``key``: where in the shard, and the values."""
        found = [(where, as_tensor(kept[key])) for where, _, kept in self._kept(states, slot) if key in kept]
        for _, values in found:
            populate(values)
        return found

    def set_values(self, states: OptimizerShard, slot: ParamSlot, key: str, value: torch.Tensor) -> None:
        """Call it on every rank.

        Args:
            value: as long as this rank's shard where each element has one, else the value itself.
        """
        if self._on_shards is None and key == "step":
            self.settle()
            states.steps[states.unit.layout.slots.index(slot)] = int(value.item())
            return
        for where, shape, kept in self._kept(states, slot):
            mine = kept[key]
            if not isinstance(mine, torch.Tensor):
                kept[key] = type(mine)(value.item())
            elif tuple(mine.shape) == shape:
                populate(mine, write=True)
                mine.copy_(value[where].view(shape))
            else:
                mine.copy_(value)

    def _kept(
        self, states: OptimizerShard, slot: ParamSlot
    ) -> Iterator[tuple[slice, tuple[int, ...], MutableMapping[str, Any]]]:
        """Each piece of a parameter that this rank owns: where in the shard, its shape, the optimizer's state of it."""
        layout, unit = states.unit.layout, states.unit
        index = layout.slots.index(slot)
        self.settle()
        for number, span in enumerate(layout.spans(unit.rank, unit.degrees.optimizer)):
            if span.param_index != index:
                continue
            where = slice(span.shard_offset, span.shard_offset + span.numel)
            if self._on_shards is not None:
                piece = self._pieces[id(states)][number][1]
                yield where, tuple(piece.shape), self._on_shards.state.get(piece, {})
            else:
                first, second = (moment[where] for moment in states.adam_moments())
                kept = {"exp_avg": first, "exp_avg_sq": second, "step": float(states.steps[index])}
                yield where, (span.numel,), kept

    def bytes_in(self, medium: Medium | None) -> dict[str, int]:
        """Bytes of masters and of moments (or of whatever the optimizer keeps) on this rank; None: on the device."""
        parts = [states.bytes_in(medium) for states in self.units]
        found = {name: sum(part[name] for part in parts) for name in ("master", "optimizer")}
        if medium is None:
            found["optimizer"] += sum(map(resident_bytes, self._state_tensors()))
        return found

    def tensors(self) -> list[torch.Tensor]:
        """What is in memory of the optimizer on this rank: masters that are not parameters, and its state."""
        here = [states for states in self.units if states.store is None]
        found = [states.master for states in here if states.mixed] + [m for states in here for m in states.moments]
        return found + self._state_tensors()

    def _state_tensors(self) -> list[torch.Tensor]:
        states = self._on_shards.state.values() if self._on_shards is not None else ()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _served(device: torch.device) -> bool:
    return device.type == "cuda" and ops.cuda_library(device) is not None


def as_tensor(value: Any) -> torch.Tensor:
    """A number on the CPU, whatever torch's default device is; a tensor as it is."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")


def _part(value: Any, param: torch.Tensor, span: ShardSpan, piece: torch.Tensor) -> Any:
    """What ``value``, an optimizer's first state of ``param`` (Adagrad has one), is for a piece of it."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or not value.dim():
        return copy.deepcopy(value)
    return value.flatten()[span.param_offset :][: span.numel].to(piece.dtype, copy=True).view_as(piece)


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    gradient = torch.view_as_real(gradient).flatten() if gradient.is_complex() else gradient
    return gradient.dot(gradient) if gradient.dtype is torch.float64 else ops.squared_norm(gradient)


def _group_of_param(groups: Iterable[dict[str, Any]]) -> dict[torch.Tensor, int]:
    return {param: i for i, group in enumerate(groups) for param in group["params"]}


def check_optimizer(optimizer: torch.optim.Optimizer, degrees: Degrees) -> None:
    """Whether ``ShardedOptimizer`` can run ``optimizer``'s rule.

    Raises:
        ZeroEngineError: it needs a closure, or whole parameters where there are shards, or holds another optimizer, or
            has taken steps.
    """
    name = type(optimizer).__name__
    for attribute, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise ZeroEngineError(
                f"{name} updates through another optimizer, its attribute {attribute} ({type(value).__name__}), which "
                "would still have the whole parameters. Pass that one to initialize()."
            )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ZeroEngineError(
            f"{name} does not call super().__init__() of torch.optim.Optimizer, and so has no step hooks, which the "
            "engine needs. Call it in the constructor."
        )
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if "LBFGS" in names:
        raise ZeroEngineError(
            f"{name} calls the model several times in a step, through a closure, and engine.step() takes none. Use an "
            "optimizer such as AdamW."
        )
    if degrees.optimizer > 1 and names & NOT_ELEMENTWISE:
        raise ZeroEngineError(
            f"{name} is not element-wise: its update of one element looks at others, so it cannot run on shards. Use "
            "zero_optimization.stage 0, or an element-wise optimizer such as AdamW."
        )
    if any(float(state.get("step", 1)) != 0 for state in optimizer.state.values()):
        raise ZeroEngineError(
            f"the {name} passed to initialize() has already taken steps: its state cannot be partitioned. Call "
            "initialize() before training."
        )
