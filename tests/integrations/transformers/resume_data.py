"""Trains up to a step, and saves there; from another step if one is given. Reports which samples this rank trained.

The arguments are "plain" or "zero", a folder that all runs share, the last step, and the step to resume from or 0.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.integrations.transformers import ZeroTrainer

KIND, FOLDER = sys.argv[1:3]
LAST, FIRST = map(int, sys.argv[3:])


class NumberedTokens(Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


class SaveAndStop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == LAST


class NoteSamples:
    """Keeps the numbers of the samples of this rank."""

    seen: list[int]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        self.seen += inputs.pop("index").tolist()
        return super().training_step(model, inputs, *args)  # type: ignore[misc]


def main() -> None:
    kind, keys = (
        (Trainer, {}) if KIND == "plain" else (ZeroTrainer, {"zero_config": {"zero_optimization": {"stage": 1}}})
    )
    arguments = training_arguments(
        output_dir=FOLDER, gradient_accumulation_steps=1, num_train_epochs=1, remove_unused_columns=False
    )
    trainer = type("Noting", (NoteSamples, kind), {})(
        tiny_llama(), arguments, train_dataset=NumberedTokens(32), callbacks=[SaveAndStop()], **keys
    )
    trainer.seen = []
    trainer.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-{FIRST}" if FIRST else None)
    report({"seen": trainer.seen, "step": trainer.state.global_step, "rate": trainer.lr_scheduler.get_last_lr()[0]})


if __name__ == "__main__":
    main()
