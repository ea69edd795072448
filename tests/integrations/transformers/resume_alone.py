"""On one rank, resumes a run of two ranks from its third step, and reports the loss of what it loaded.

The argument is the folder of that run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments
from zeroengine.integrations.transformers import ZeroTrainer

FOLDER = Path(sys.argv[1])


class EvaluateFirst(TrainerCallback):
    """Keeps the loss of the model as it was when training began."""

    def __init__(self) -> None:
        self.trainer: Trainer = None

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.eval_loss = self.trainer.evaluate(Tokens(10, seed=1))["eval_loss"]


def main() -> None:
    checkpoint = FOLDER / "checkpoint-3"
    arguments = training_arguments(max_steps=6, ignore_data_skip=True, output_dir=str(FOLDER / "alone"))
    callback = EvaluateFirst()
    trainer = ZeroTrainer(
        tiny_llama(attention_dropout=0.2),
        arguments,
        train_dataset=Tokens(28),
        callbacks=[callback],
        zero_config={"zero_optimization": {"stage": 2}},
    )
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=str(checkpoint))
    plain = Trainer(LlamaForCausalLM.from_pretrained(checkpoint), arguments, eval_dataset=Tokens(10, seed=1))
    report(
        {
            "steps": [entry["step"] for entry in trainer.state.log_history if "loss" in entry][-3:],
            "eval_loss": callback.eval_loss,
            "expected": plain.evaluate()["eval_loss"],
        }
    )


if __name__ == "__main__":
    main()
