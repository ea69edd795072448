"""Teach a language model to answer questions about Python, with TRL's SFTTrainer on the engine.

The questions are the topics of Python's language reference, the answers its help texts. Without ``--model`` this trains
a small model of random weights; ``--model`` takes the name of a model of the hub, or a folder.

    torchrun --nproc-per-node 2 examples/trl_sft.py --stage 2
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from python_topics import model_and_tokenizer, topics
from trl import SFTConfig, SFTTrainer

from zeroengine.integrations.transformers import ZeroTrainerMixin


class ZeroSFTTrainer(ZeroTrainerMixin, SFTTrainer):
    """TRL's trainer for supervised fine-tuning, on the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder; without it, a small random model")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="the ZeRO stage")
    parser.add_argument("--steps", type=int, default=100, help="the number of updates")
    parser.add_argument("--output", default="sft-out", help="a folder for the model")
    options = parser.parse_args()

    model, tokenizer = model_and_tokenizer(options.model)
    texts = topics(length=300)
    data = Dataset.from_dict(
        {
            "prompt": [f"What does Python's reference say about {name}?\n" for name in texts],
            "completion": list(texts.values()),
        }
    )
    arguments = SFTConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=3e-3 if options.model is None else 2e-5,
        bf16=torch.cuda.is_available(),
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ZeroSFTTrainer(
        model,
        arguments,
        train_dataset=data,
        processing_class=tokenizer,
        zero_config={"zero_optimization": {"stage": options.stage}},
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"loss at first {losses[0]:.4f}, at last {losses[-1]:.4f}; the model is in {options.output}")


if __name__ == "__main__":
    main()
