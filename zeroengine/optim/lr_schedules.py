"""DeepSpeed's learning-rate schedules by name, on torch's LambdaLR.

A schedule counts optimizer updates. Formulas, counting and defaults follow ``deepspeed.runtime.lr_schedules`` of
DeepSpeed 0.19.8, whose warm-ups stay at their start for the first two updates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from zeroengine.config import Config
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.optim.mixed_optimizer import members_of
from zeroengine.utils.formats import counted
from zeroengine.utils.torch_internals import OPTIMIZER_STEPPED

LRSchedulerLike = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Raise what ``make_scheduler`` would raise, as far as no schedule has to be made for that.

    Args:
        scheduler: As of ``make_scheduler``.
        optimizer: The optimizer that was passed to ``initialize``.
        config: The resolved configuration.
    """
    if scheduler is None and config.scheduler is not None:
        params_of_groups(config.scheduler.params, len(optimizer.param_groups))
    elif scheduler is not None and not _makes_schedule(scheduler):
        _check(scheduler, optimizer)


def make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """Return the LR schedule of an engine, or None.

    Args:
        scheduler: A schedule, a callable that makes one of ``optimizer``, or None for the one that ``config`` names.
        optimizer: The optimizer whose groups hold the learning rates.
        config: The resolved configuration.

    Raises:
        ZeroEngineError: ``scheduler`` is something else, or drives another optimizer, or needs a metric; or the
            configuration lists parameters of another number of param groups.
    """
    if scheduler is not None:
        schedule = scheduler(optimizer) if _makes_schedule(scheduler) else scheduler
        _check(schedule, optimizer)
        return schedule
    if config.scheduler is None:
        return None
    kind = config.scheduler.type
    params = params_of_groups(config.scheduler.params, len(optimizer.param_groups))
    # OneCycle also moves the momentum, which a LambdaLR cannot.
    if kind == "OneCycle":
        return _OneCycle(optimizer, params)
    # As in torch, a rate that an earlier schedule of this optimizer has moved is not the base.
    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    # LambdaLR multiplies the base rate, and these schedules name rates: so divide by it, where it is not 0.
    for group, base in zip(optimizer.param_groups, bases, strict=True):
        group["initial_lr"] = base or 1.0
    return LambdaLR(optimizer, [_relative(RATES[kind], *pair) for pair in zip(params, bases, strict=True)])


def params_of_groups(params: Mapping[str, Any], num_groups: int) -> list[dict[str, Any]]:
    """Return the schedule's parameters for each param group; a number counts for all of them.

    Raises:
        ConfigError: A list has another length than there are groups.
    """
    for name, value in params.items():
        if isinstance(value, list) and len(value) != num_groups:
            groups = counted(num_groups, "param group")
            raise ConfigError(
                f"scheduler.params.{name}: found {len(value)} values, and the optimizer has {groups}; write a list of "
                f"{num_groups}, in the order of optimizer.param_groups, or one number for all of them"
            )
    return [
        {name: value[index] if isinstance(value, list) else value for name, value in params.items()}
        for index in range(num_groups)
    ]


def _makes_schedule(scheduler: Any) -> bool:
    # A scheduler class has no attribute `optimizer`, so it is called like any other callable.
    return callable(scheduler) and not hasattr(scheduler, "optimizer")


def _check(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(schedule, type) or not callable(getattr(schedule, "step", None)):
        raise ZeroEngineError(
            f"lr_scheduler is a scheduler object, or a callable that takes the optimizer and returns one; found "
            f"{schedule!r}. Write for example lr_scheduler=lambda opt: torch.optim.lr_scheduler.ConstantLR(opt)"
        )
    driven = getattr(schedule, "optimizer", None)
    # A schedule over one of several optimizers drives its groups, and the rates of the others stay.
    if driven is not None and not {*map(id, driven.param_groups)} <= {*map(id, optimizer.param_groups)}:
        raise ZeroEngineError(
            "lr_scheduler drives another optimizer than the one passed to initialize(): build it over that one, or "
            "pass a callable that takes the optimizer"
        )
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ZeroEngineError(
            "ReduceLROnPlateau needs a metric at each step: do not pass it, build it over engine.optimizer and call "
            "its step(metric) yourself"
        )


def load_schedule_state(schedule: Any, state: Any) -> None:
    """Load a state of this schedule, or of one that counts as torch's or as DeepSpeed's schedules do.

    DeepSpeed's schedules keep the number of the last step, from 0, and torch's the number of steps. So a checkpoint
    loads whether DeepSpeed's class or the configuration makes the schedule.
    """
    count, iteration = "last_epoch", "last_batch_iteration"
    own = schedule.state_dict() if isinstance(state, Mapping) and {count, iteration} & state.keys() else {}
    if iteration in own and iteration not in state:
        state = {iteration: state[count] - 1}
    elif count in own and count not in state:
        steps, rates = state[iteration] + 1, [group["lr"] for group in schedule.optimizer.param_groups]
        state = own | {count: steps, "_step_count": steps + 1, "_last_lr": rates}
    schedule.load_state_dict(state)


class LRSchedule:
    """Steps the LR schedule of an engine, and refuses calls of ``schedule.step()``, which would step it twice.

    The schedule's class is replaced by a subclass until ``close``, so its ``state_dict`` has nothing new in it.

    Args:
        schedule: An object with a ``step`` method, or None.
        optimizer: The optimizer of the engine.
        base_optimizer: The optimizer that was passed to ``initialize``, which torch's schedules may be bound to.

    Attributes:
        current: The schedule that each update steps, or None.
    """

    def __init__(self, schedule: Any, optimizer: torch.optim.Optimizer, base_optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._base_optimizer, self._guarded = optimizer, base_optimizer, False
        self.replace(schedule)

    def replace(self, schedule: Any) -> None:
        """Step ``schedule`` from now on, and leave the previous one to the caller."""
        self._release()
        self.current = schedule
        self._own_class: Any = type(schedule)
        # A schedule whose `step` is an attribute of the instance, or whose class is fixed, stays as it is.
        if schedule is not None and "step" not in getattr(schedule, "__dict__", {"step": None}):
            with contextlib.suppress(TypeError):
                schedule.__class__ = _refusing_class(self._own_class)  # type: ignore[arg-type]
                self._guarded = True

    @property
    def is_reversible(self) -> bool:
        """Whether a step of the schedule can be reverted."""
        return self.current is None or all(hasattr(self.current, name) for name in ("state_dict", "load_state_dict"))

    def step(self) -> None:
        """Step the schedule, if there is one."""
        # torch's schedulers warn unless they see that their optimizer has stepped.
        for optimizer in (self._optimizer, self._base_optimizer, *members_of(self._base_optimizer)):
            setattr(optimizer, OPTIMIZER_STEPPED, True)
        if self._guarded:
            # The schedule's class refuses ``step``, so the method of its own class is called.
            self._own_class.step(self.current)
        elif self.current is not None:
            self.current.step()

    def close(self) -> None:
        """Leave the schedule to the caller, because no step will follow."""
        self._release()
        # A schedule that the configuration made drives the engine's optimizer, which would keep all states in memory.
        if getattr(self.current, "optimizer", None) is self._optimizer:
            self.current.optimizer = self._base_optimizer

    def _release(self) -> None:
        if self._guarded:
            self.current.__class__ = self._own_class
            self._guarded = False

    # The engine may go without having been closed.
    __del__ = _release


@cache
def _refusing_class(cls: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ZeroEngineError(
            f"{cls.__name__}.step(): the engine steps this schedule after each update, for it was passed to "
            "initialize() or named in the configuration, and this call would step it once more. Remove this line. To "
            "step it yourself, each epoch for example, do not pass it to initialize(): build it over the optimizer and "
            "keep this line."
        )

    # A copy or a pickle of the schedule is of its own class.
    def reduce(self: Any, protocol: Any) -> Any:
        # The refusing class cannot be imported, and another process has no engine that steps the schedule.
        function, arguments, *rest = super(refusing, self).__reduce_ex__(protocol)
        return (function, tuple(cls if value is type(self) else value for value in arguments), *rest)

    members = {"step": step, "__reduce_ex__": reduce, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    refusing: Any = type(cls.__name__, (cls,), members)
    return refusing


# Of a group's parameters, its own rate, and the number of updates so far.
Rate = Callable[[Mapping[str, Any], Any, int], Any]


def _relative(rate: Rate, params: Mapping[str, Any], base: float) -> Callable[[int], float]:
    return lambda updates: rate(params, base, updates) / (base or 1.0)


def _warmup_steps(params: Mapping[str, Any]) -> int:
    """Return the number of steps of the warm-up; 0 for none. DeepSpeed takes 1 for 2."""
    steps: int = params["warmup_num_steps"]
    return max(2, steps) if steps else 0


def _rise(params: Mapping[str, Any], step: int) -> float:
    """Return how far the warm-up has come, from 0 to 1."""
    total = _warmup_steps(params)
    if step >= total:
        return 1.0
    return math.log(step + 1) / math.log(total) if params["warmup_type"] == "log" else float(step / total)


def _between(low: Any, high: Any, part: float) -> Any:
    return low + (high - low) * part


def _warmup_rate(params: Mapping[str, Any], base: Any, part: float) -> Any:
    """Return the rate that lies a part of the way from the start of the warm-up to its end."""
    peak = params["warmup_max_lr"]
    return _between(params["warmup_min_lr"], base if peak is None else peak, part)


def _warmup(params: Mapping[str, Any], base: Any, updates: int) -> Any:
    return _warmup_rate(params, base, _rise(params, max(0, updates - 1)))


def _warmup_decay(params: Mapping[str, Any], base: Any, updates: int) -> Any:
    step, warm, total = max(0, updates - 1), _warmup_steps(params), params["total_num_steps"]
    decay = max(0.0, (total - step) / max(1.0, total - warm))
    return _warmup_rate(params, base, _rise(params, step) if step < warm else decay)


def _warmup_cosine(params: Mapping[str, Any], base: Any, updates: int) -> Any:
    step, warm, total = max(0, updates - 1), _warmup_steps(params), params["total_num_steps"]
    # In DeepSpeed the first update has a rate of 0, whatever ``warmup_min_ratio`` is.
    if not updates and warm:
        return base * 0.0
    if step < warm:
        return base * _between(params["warmup_min_ratio"], 1.0, _rise(params, step))
    # The added 1 is DeepSpeed's.
    part = min(1.0, (step - warm + 1) / max(1, total - warm))
    return base * _between(params["cos_min_ratio"], 1.0, (1 + math.cos(math.pi * part)) / 2)


def _range_test(params: Mapping[str, Any], base: Any, updates: int) -> Any:
    interval = updates / params["lr_range_test_step_size"]
    if params["lr_range_test_staircase"]:
        interval = float(math.floor(interval))
    return params["lr_range_test_min_lr"] * (1 + interval * params["lr_range_test_step_rate"])


def _one_cycle(params: Mapping[str, Any], base: Any, updates: int) -> Any:
    after = _decay_intervals(params, updates)
    if after is not None:
        return params["cycle_min_lr"] / (1 + params["decay_lr_rate"] * after)
    return _between(params["cycle_min_lr"], params["cycle_max_lr"], _cycle_part(params, updates))


def one_cycle_momentum(params: Mapping[str, Any], updates: int) -> float:
    """Return the momentum of OneCycle after a number of updates."""
    low, high = params["cycle_min_mom"], params["cycle_max_mom"]
    after = _decay_intervals(params, updates)
    if after is not None:
        # A momentum of 1 or more would diverge.
        return float(min(0.999, high * (1 + params["decay_mom_rate"] * after)))
    return float(_between(high, low, _cycle_part(params, updates)))


def write_one_cycle_momentum(group: dict[str, Any], params: Mapping[str, Any], updates: int) -> None:
    """Write the momentum of the update that follows a number of updates into a param group, if it is cycled.

    As in DeepSpeed, the first update has the low momentum, and the second one goes on from the high one.
    """
    if not params["cycle_momentum"]:
        return
    momentum = one_cycle_momentum(params, updates) if updates else float(params["cycle_min_mom"])
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    elif "momentum" in group:
        group["momentum"] = momentum


def _cycle_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of steps of the rising and of the falling half."""
    first, second = params["cycle_first_step_size"], params["cycle_second_step_size"]
    return first, first if second is None else second


def _decay_intervals(params: Mapping[str, Any], updates: int) -> float | None:
    """Return the decay intervals since the cycle ended, 0 where nothing decays; None within the cycle."""
    after, size = updates - sum(_cycle_sizes(params)), params["decay_step_size"]
    if after < 0:
        return None
    return after / size if size else 0.0


def _cycle_part(params: Mapping[str, Any], updates: int) -> float:
    """Return how high in the cycle an update lies, from 0 to 1."""
    first, second = _cycle_sizes(params)
    stairs, falling_stairs = params["cycle_first_stair_count"], params["cycle_second_stair_count"]
    done, length = updates, first
    if updates > first:
        stairs = stairs if falling_stairs is None else falling_stairs
        done, length = first + second - updates, second
    # With stairs the rate moves in that many equal steps, otherwise without steps.
    return math.floor(done * stairs / length) / stairs if stairs else done / length


RATES: dict[str, Rate] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "LRRangeTest": _range_test,
    "OneCycle": _one_cycle,
}


class _OneCycle(LRScheduler):
    """Rate up and down, momentum down and up, then decay (arXiv 1803.09820, DeepSpeed's OneCycle)."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: list[dict[str, Any]]) -> None:
        self._params = params
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        for group, params in zip(self.optimizer.param_groups, self._params, strict=True):
            write_one_cycle_momentum(group, params, self.last_epoch)
        return [float(_one_cycle(params, None, self.last_epoch)) for params in self._params]
