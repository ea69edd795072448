"""The sharded optimizer, and the optimizers and schedules that a configuration names."""

from .caller_optimizer import has_own_step_hooks, redirect_calls
from .device import Verdict
from .factory import OptimizerLike, make_optimizer
from .lion import Lion
from .scaler import LossScaler
from .schedules import LRSchedulerLike, ScheduleGuard, make_scheduler
from .sharded import GradientSummary, ShardedOptimizer, check_optimizer
from .states import UnitStates

__all__ = [
    "GradientSummary",
    "LRSchedulerLike",
    "Lion",
    "LossScaler",
    "OptimizerLike",
    "ScheduleGuard",
    "ShardedOptimizer",
    "UnitStates",
    "Verdict",
    "check_optimizer",
    "has_own_step_hooks",
    "make_optimizer",
    "make_scheduler",
    "redirect_calls",
]
