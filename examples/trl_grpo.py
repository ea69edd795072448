"""Reward completions for plain text, with TRL's GRPOTrainer or RLOOTrainer.

A prompt asks about a topic of Python's reference. The reward of a completion is the share of its characters that are
lower-case letters or spaces. Without ``--model`` this trains a small model of random weights; ``--model`` takes
the name of a model of the hub, or a folder.

    torchrun --nproc-per-node 2 examples/trl_grpo.py --stage 3
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from python_topics import model_and_tokenizer, topics
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from zeroengine.integrations.transformers import ZeroTrainerMixin


class ZeroGRPOTrainer(ZeroTrainerMixin, GRPOTrainer):
    """TRL's trainer for group relative policy optimization, on the engine."""


class ZeroRLOOTrainer(ZeroTrainerMixin, RLOOTrainer):
    """TRL's trainer for REINFORCE leave-one-out, on the engine."""


def share_of_plain_text(completions: list[str], **columns: Any) -> list[float]:
    """Return for each completion how many of its characters are lower-case letters or spaces, from 0 to 1."""
    return [sum(c.islower() or c == " " for c in text) / max(len(text), 1) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder; without it, a small random model")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
    parser.add_argument("--method", default="grpo", choices=["grpo", "rloo"], help="which trainer")
    parser.add_argument("--vllm", choices=["server", "colocate"], help="generate with vLLM in this mode")
    parser.add_argument("--steps", type=int, default=60, help="the number of updates")
    parser.add_argument("--output", default="grpo-out", help="a folder for the model")
    options = parser.parse_args()

    model, tokenizer = model_and_tokenizer(options.model)
    data = Dataset.from_dict({"prompt": [f"What does Python's reference say about {name}?\n" for name in topics(1)]})
    trainer_type: Any = ZeroGRPOTrainer if options.method == "grpo" else ZeroRLOOTrainer
    arguments = (GRPOConfig if options.method == "grpo" else RLOOConfig)(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=24,
        learning_rate=1e-2 if options.model is None else 1e-6,
        use_vllm=options.vllm is not None,
        vllm_mode=options.vllm or "server",
        bf16=torch.cuda.is_available(),
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = trainer_type(
        model,
        share_of_plain_text,
        arguments,
        train_dataset=data,
        processing_class=tokenizer,
        zero_config={"zero_optimization": {"stage": options.stage}},
    )
    trainer.train()
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if trainer.is_world_process_zero():
        print(trainer.engine.memory())
        print(f"reward at first {rewards[0]:.3f}, at last {rewards[-1]:.3f}; the model is in {options.output}")


if __name__ == "__main__":
    main()
