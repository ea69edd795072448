"""Fine-tune an adapter as a YAML file says that names a DeepSpeed configuration, in the way of Axolotl.

The file has ``base_model``, ``adapter: lora``, ``sample_packing``, ``deepspeed`` and the sizes of a run. The adapter is
trained by the Trainer of transformers with PEFT, and saved alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from tests.integrations.environments import report

settings: dict[str, Any] = yaml.safe_load(Path(sys.argv[1]).read_text())
if settings.get("deepspeed"):
    # Axolotl tells accelerate by variables, before anything asks for its state.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = settings["deepspeed"]


class PackedSamples(Dataset[dict[str, torch.Tensor]]):
    """Samples of several lengths, several in each row. The positions begin anew with each sample."""

    def __init__(self, rows: int, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = []
        for _ in range(rows):
            lengths: list[int] = []
            while sum(lengths) < length:
                lengths.append(min(int(torch.randint(3, 9, (1,), generator=generator)), length - sum(lengths)))
            tokens = torch.randint(3, 61, (length,), generator=generator)
            positions = torch.cat([torch.arange(size) for size in lengths])
            labels = tokens.clone()
            # No sample is predicted from the one before it.
            labels[positions == 0] = -100
            self.rows.append({"input_ids": tokens, "labels": labels, "position_ids": positions})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def trainer(name: str) -> Trainer:
    """Return the trainer of the file."""
    arguments = TrainingArguments(
        output_dir=f"{settings['output_dir']}/{name}",
        deepspeed=settings.get("deepspeed"),
        per_device_train_batch_size=settings["micro_batch_size"],
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        max_steps=settings["max_steps"],
        learning_rate=float(settings["learning_rate"]),
        lr_scheduler_type=settings["lr_scheduler"],
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_steps=settings["save_steps"],
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(settings["seed"])
    model = AutoModelForCausalLM.from_pretrained(settings["base_model"], attn_implementation="eager")
    lora = LoraConfig(
        r=settings["lora_r"],
        lora_alpha=settings["lora_alpha"],
        lora_dropout=settings["lora_dropout"],
        target_modules=settings["lora_target_modules"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    model.enable_input_require_grads()
    return Trainer(model=model, args=arguments, train_dataset=PackedSamples(64, settings["sequence_len"]))


def losses(state: Any) -> list[float]:
    return [entry["loss"] for entry in state.log_history if "loss" in entry]


whole = trainer("whole")
whole.train()
whole.save_model(f"{settings['output_dir']}/adapter")
resumed = trainer("resumed")
resumed.train(resume_from_checkpoint=f"{settings['output_dir']}/whole/checkpoint-{settings['save_steps']}")
torch.distributed.barrier()
adapter = load_file(f"{settings['output_dir']}/adapter/adapter_model.safetensors")
report(
    {
        "losses": losses(whole.state),
        "resumed": losses(resumed.state),
        "names": sorted(adapter),
        "saved": sum(value.double().abs().sum().item() for value in adapter.values()),
        "engine": type(whole.model_wrapped).__module__,
    }
)
