"""A script of transformers that knows nothing of zeroengine: Trainer(deepspeed=...) trains, saves, resumes, evaluates.

Stage 0 stands for a run without DeepSpeed, under DistributedDataParallel.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer

from tests.integrations.environments import report
from tests.integrations.transformers.models import Tokens, tiny_llama, training_arguments

folder, stage = sys.argv[1], int(sys.argv[2])
# Each rank has a copy, so that none waits for another before there is a process group.
PRETRAINED = f"{folder}/pretrained-{os.environ['RANK']}"
tiny_llama().save_pretrained(PRETRAINED)
SETTINGS: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": stage},
}


def trainer(name: str) -> Trainer:
    """Return a trainer whose arguments fill the values `auto`."""
    values: dict[str, Any] = {
        "output_dir": f"{folder}/{name}",
        "save_strategy": "steps",
        "save_steps": 2,
        "weight_decay": 0.0,
    }
    values |= {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_steps": 4}
    values["deepspeed"] = SETTINGS if stage else None
    args = training_arguments(**values)
    # At stage 3 transformers reads the weights into a model that is partitioned as it is built.
    return Trainer(
        model=LlamaForCausalLM.from_pretrained(PRETRAINED),
        args=args,
        train_dataset=Tokens(32),
        eval_dataset=Tokens(8),
    )


def losses(state: Any) -> list[float]:
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


whole = trainer("whole")
whole.train()
evaluated = whole.evaluate()["eval_loss"]
whole.save_model(f"{folder}/weights")
resumed = trainer("resumed")
resumed.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-2")
torch.distributed.barrier()
weights = load_file(f"{folder}/weights/model.safetensors")
report(
    {
        "whole": losses(whole.state),
        "resumed": losses(resumed.state),
        "evaluated": evaluated,
        "resumed_evaluated": resumed.evaluate()["eval_loss"],
        "saved": sum(value.double().abs().sum().item() for value in weights.values()),
        "engine": type(whole.model_wrapped).__module__,
    }
)
