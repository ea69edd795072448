"""Which rank owns what: degrees, flat layouts, and the cut of a model into units. No communication."""

from .boxes import Box, boxes_of_run
from .cut import UnitPlan, cut_units, plain_name
from .degrees import STAGES, Degrees, degrees_of_stage
from .layout import FlatLayout, ParamSlot, ShardSpan, round_up

__all__ = [
    "STAGES",
    "Box",
    "Degrees",
    "FlatLayout",
    "ParamSlot",
    "ShardSpan",
    "UnitPlan",
    "boxes_of_run",
    "cut_units",
    "degrees_of_stage",
    "plain_name",
    "round_up",
]
