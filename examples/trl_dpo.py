"""Prefer right answers to wrong ones, with TRL's DPOTrainer and two engines: the policy and its frozen reference.

A question about Python comes with the help text of its topic, which is chosen, and that of another topic, which is
rejected. Without ``--model`` this trains a small model of random weights; ``--model`` takes the name of a model of the
hub, or a folder.

    torchrun --nproc-per-node 2 examples/trl_dpo.py --stage 3
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from python_topics import model_and_tokenizer, topics
from trl import DPOConfig, DPOTrainer

import zeroengine
from zeroengine.integrations.transformers import ZeroTrainerMixin


class ZeroDPOTrainer(ZeroTrainerMixin, DPOTrainer):
    """TRL's trainer for direct preference optimization, on the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder; without it, a small random model")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
    parser.add_argument("--steps", type=int, default=60, help="the number of updates")
    parser.add_argument("--output", default="dpo-out", help="a folder for the model")
    options = parser.parse_args()

    model, tokenizer = model_and_tokenizer(options.model)
    reference, _ = model_and_tokenizer(options.model)
    texts = topics(length=120)
    answers = list(texts.values())
    data = Dataset.from_dict(
        {
            "prompt": [f"What does Python's reference say about {name}?\n" for name in texts],
            "chosen": answers,
            "rejected": answers[1:] + answers[:1],
        }
    )
    arguments = DPOConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3 if options.model is None else 1e-6,
        bf16=torch.cuda.is_available(),
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ZeroDPOTrainer(
        model,
        reference,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        zero_config={"zero_optimization": {"stage": options.stage}},
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"the policy:\n{trainer.engine.memory()}\nthe reference:\n{zeroengine.engine_of(reference).memory()}")
        print(f"loss at first {losses[0]:.4f}, at last {losses[-1]:.4f}; the model is in {options.output}")


if __name__ == "__main__":
    main()
