"""Plan the units of a model, for ``initialize`` and for a change of the configuration."""

from __future__ import annotations

import torch
from torch import nn

from zeroengine.config import Config
from zeroengine.engine import model_checks
from zeroengine.engine.split_models import check_split_model
from zeroengine.optim.algorithms import algorithms_of
from zeroengine.optim.factory import check_optimizer
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.unit_layout import DegreeRules
from zeroengine.runtime import mixed_precision


def plan_units(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, num_ranks: int) -> list[UnitPlan]:
    """Return the units that a configuration cuts a model into, which the optimizer can update.

    Args:
        model: The model.
        optimizer: The optimizer over its own parameters.
        config: The resolved configuration.
        num_ranks: The number of ranks that the units are partitioned over.

    Raises:
        ZeroEngineError: The configuration does not fit the model, or the optimizer does not work on parts of it.
    """
    plans = mixed_precision.units_of_model(model, config, algorithms_of(optimizer, model, config))
    model_checks.check_quantizable(config.zero_optimization, plans, mixed_precision.exact_tensors(model, config))
    # With "auto" only stages are chosen at which the optimizer works.
    check_split_model(config, plans, optimizer)
    rules = DegreeRules.of_settings(config.zero_optimization, num_ranks)
    rules.check_patterns(plans)
    for degrees in rules.all_degrees:
        check_optimizer(optimizer, degrees)
    return plans
