"""A tiny model and data for the scripts of these tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

VOCAB = 61


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, with some labels ignored, so that micro-batches have different numbers of them."""

    def __init__(self, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (length, 12), generator=generator)
        self.num_ignored = torch.randint(0, 6, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: int(self.num_ignored[index])] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **changes,
    )
    return LlamaForCausalLM(config)


def training_arguments(**changes: Any) -> TrainingArguments:
    """Return arguments of a short run with accumulation, whose epochs end with a shorter step."""
    values: dict[str, Any] = {
        "output_dir": str(Path(tempfile.gettempdir(), "unused")),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(**values | changes)
