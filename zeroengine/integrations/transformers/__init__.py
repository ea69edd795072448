"""The trainers of transformers, and those of TRL, on the engine: `ZeroTrainer` and `ZeroTrainerMixin`."""

from zeroengine.integrations.versions import require_versions

require_versions("transformers", "transformers", "accelerate")

from zeroengine.integrations.transformers.mixin import ZeroTrainerMixin  # noqa: E402
from zeroengine.integrations.transformers.trainer import ZeroTrainer  # noqa: E402

__all__ = ["ZeroTrainer", "ZeroTrainerMixin"]
