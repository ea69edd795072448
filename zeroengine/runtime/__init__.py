"""A model's units at work: storage, the gatherer of parameters, the reducer of gradients."""

from .eager import eager
from .gathered import claim, gathered, owner_of
from .gatherer import Gatherer
from .gradients import UnitGradients
from .outside_writes import OutsideWrites
from .reducer import Reducer
from .unit import State, Unit

__all__ = [
    "Gatherer",
    "OutsideWrites",
    "Reducer",
    "State",
    "Unit",
    "UnitGradients",
    "claim",
    "eager",
    "gathered",
    "owner_of",
]
