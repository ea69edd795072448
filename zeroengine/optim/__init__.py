"""The sharded optimizer, and the optimizers and schedules that a configuration names."""

from .device import Verdict
from .factory import OptimizerLike, make_optimizer
from .lion import Lion
from .scaler import LossScaler
from .schedules import LRSchedulerLike, make_scheduler
from .sharded import ShardedOptimizer, check_optimizer
from .states import UnitStates

__all__ = [
    "LRSchedulerLike",
    "Lion",
    "LossScaler",
    "OptimizerLike",
    "ShardedOptimizer",
    "UnitStates",
    "Verdict",
    "check_optimizer",
    "make_optimizer",
    "make_scheduler",
]
