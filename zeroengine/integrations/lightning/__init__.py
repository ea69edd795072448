"""Train with Lightning: ``strategy="zeroengine"`` for ``Trainer`` and ``Fabric``, registered when this is imported.

- `trainer_strategy`, `trainer_precision`: the strategy of a Trainer.
- `fabric_strategy`: the strategy of a Fabric.
- `engine_group`: the engines of a strategy, one for each optimizer.
- `configuration`: stage, precision and accumulation, of which Lightning has its own settings.
- `checkpoints`: what is saved beside an engine.
"""

from zeroengine.integrations.versions import require_versions

# A version that is too old would fail below with an error that does not say so.
require_versions("lightning", "lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from zeroengine.integrations.lightning.fabric_strategy import ZeroFabricStrategy  # noqa: E402
from zeroengine.integrations.lightning.trainer_strategy import ZeroStrategy  # noqa: E402

__all__ = ["ZeroFabricStrategy", "ZeroStrategy"]

# "zeroengine", whose configuration has the stage, and "zeroengine_stage_0" to "zeroengine_stage_3".
for registry, strategy in ((StrategyRegistry, ZeroStrategy), (STRATEGY_REGISTRY, ZeroFabricStrategy)):
    registry.register("zeroengine", strategy, description="ZeRO, as the configuration says", override=True)
    for stage in range(4):
        registry.register(f"zeroengine_stage_{stage}", strategy, f"ZeRO stage {stage}", override=True, stage=stage)
