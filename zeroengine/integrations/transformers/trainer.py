"""The Trainer of transformers on the engine."""

from __future__ import annotations

from transformers import Trainer

from zeroengine.integrations.transformers.mixin import ZeroTrainerMixin


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """A `transformers.Trainer` that trains on the engine.

        trainer = ZeroTrainer(model, args, train_dataset=dataset, zero_config="zero3.json")
        trainer.train()

    See `ZeroTrainerMixin`.
    """
