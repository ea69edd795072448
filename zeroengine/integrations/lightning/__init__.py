"""Train with Lightning: ``strategy="zeroengine"`` for ``Trainer`` and ``Fabric``, registered when this is imported.

- `trainer_strategy`, `trainer_precision`: the strategy of a Trainer.
- `fabric_strategy`: the strategy of a Fabric.
- `engine_group`: the engines of a strategy, one for each optimizer.
- `configuration`: stage, precision and accumulation, of which Lightning has its own settings.
- `checkpoints`: what is saved beside an engine.
- `registration`: the names of the strategies.
"""

from zeroengine.integrations.versions import require_versions

# A version that is too old would fail below with an error that does not say so.
require_versions("lightning", "lightning")

from zeroengine.integrations.lightning.fabric_strategy import ZeroFabricStrategy  # noqa: E402
from zeroengine.integrations.lightning.registration import register  # noqa: E402
from zeroengine.integrations.lightning.trainer_strategy import ZeroStrategy  # noqa: E402

__all__ = ["ZeroFabricStrategy", "ZeroStrategy"]

register()
