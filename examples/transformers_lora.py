"""Fine-tune a causal language model with LoRA on the help texts of Python's language reference.

The base is frozen and partitioned, and only the adapter is trained and saved. Without ``--model`` this trains a small
model of random weights, so that it runs anywhere; ``--model`` takes the name of a model of the hub, or a folder.

    torchrun --nproc-per-node 2 examples/transformers_lora.py --stage 3
    torchrun --nproc-per-node 8 examples/transformers_lora.py --model Qwen/Qwen3-0.6B --bf16
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from python_topics import model_and_tokenizer, topics
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, TrainingArguments

from zeroengine.integrations.transformers import ZeroTrainer


class Texts(Dataset[dict[str, list[int]]]):
    """Tokenized texts."""

    def __init__(self, texts: list[str], tokenizer: object) -> None:
        self.samples = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.samples[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder; without it, a small random model")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
    parser.add_argument("--steps", type=int, default=100, help="the number of updates")
    parser.add_argument("--bf16", action="store_true", help="train in bf16")
    parser.add_argument("--output", default="lora-out", help="a folder for checkpoints and the adapter")
    options = parser.parse_args()

    model, tokenizer = model_and_tokenizer(options.model)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    texts = list(topics(length=300).values())
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3 if options.model is None else 2e-4,
        bf16=options.bf16,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ZeroTrainer(
        model,
        arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=Texts(texts[8:], tokenizer),
        eval_dataset=Texts(texts[:8], tokenizer),
        zero_config={"zero_optimization": {"stage": options.stage}},
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(trainer.engine.memory())
        print(f"held-out loss before {before:.4f}, after {after:.4f}; the adapter is in {options.output}")


if __name__ == "__main__":
    main()
