"""The names of the strategies in Lightning's registries."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zeroengine.integrations.lightning.fabric_strategy import ZeroFabricStrategy
from zeroengine.integrations.lightning.trainer_strategy import ZeroStrategy

NAME = "zeroengine"


def register() -> None:
    """Register "zeroengine", whose configuration has the stage, and "zeroengine_stage_0" to "zeroengine_stage_3"."""
    for registry, strategy in ((StrategyRegistry, ZeroStrategy), (STRATEGY_REGISTRY, ZeroFabricStrategy)):
        registry.register(NAME, strategy, description="ZeRO, as the configuration says", override=True)
        for stage in range(4):
            registry.register(f"{NAME}_stage_{stage}", strategy, f"ZeRO stage {stage}", override=True, stage=stage)
