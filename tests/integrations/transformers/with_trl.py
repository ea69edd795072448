"""Trains with the trainers of TRL, under DDP and on the engine, and reports what was logged.

The argument is a folder, which all ranks share.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import zeroengine
from tests.integrations.environments import report
from tests.integrations.transformers.models import tiny_llama
from zeroengine.integrations.transformers import ZeroTrainerMixin

FOLDER = Path(sys.argv[1])
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}


class ZeroSFT(ZeroTrainerMixin, SFTTrainer):
    pass


class ZeroDPO(ZeroTrainerMixin, DPOTrainer):
    pass


class ZeroGRPO(ZeroTrainerMixin, GRPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that are numbers."""
    vocabulary = {"<pad>": 0, "<eos>": 1, **{str(number): number for number in range(2, 60)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def text(seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(4, 9, (), generator=generator))
    return " ".join(str(int(n)) for n in torch.randint(2, 60, (length,), generator=generator))


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def logged(trainer: Any, *keys: str) -> dict[str, list[float]]:
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm", *keys)}


def lora(model: Any) -> Any:
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def sft() -> dict[str, Any]:
    data = Dataset.from_dict({"text": [text(seed) for seed in range(24)]})
    arguments = SFTConfig(str(FOLDER / "sft"), **COMMON)
    rest: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer()}
    found = {"ddp": logged(SFTTrainer(tiny_llama(), arguments, **rest))}
    for stage in (0, 2, 3):
        found[f"stage {stage}"] = logged(ZeroSFT(tiny_llama(), arguments, zero_config=zero(stage), **rest))
    return found


def sft_of_an_adapter() -> dict[str, Any]:
    """Train an adapter, save it alone, load it with peft, and resume."""
    data = Dataset.from_dict({"text": [text(seed) for seed in range(24)]})
    changes = COMMON | {"save_strategy": "steps", "save_steps": 2}
    arguments = SFTConfig(str(FOLDER / "lora"), **changes)
    rest: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer()}
    found: dict[str, Any] = {"ddp": logged(SFTTrainer(lora(tiny_llama()), SFTConfig("unused", **COMMON), **rest))}
    trainer = ZeroSFT(lora(tiny_llama()), arguments, zero_config=zero(3), **rest)
    found["stage 3"] = logged(trainer)
    saved = load_file(FOLDER / "lora" / "checkpoint-4" / "adapter_model.safetensors")
    live = trainer.engine.full_state_dict(names="*lora_*")
    assert len(saved) == len(live) and all(".lora_" in name for name in saved)
    assert not (FOLDER / "lora" / "checkpoint-4" / "model.safetensors").exists()
    for name, value in saved.items():
        assert torch.equal(
            value, live[name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")]
        )
    resumed = ZeroSFT(lora(tiny_llama()), arguments, zero_config=zero(2), **rest)
    resumed.train(resume_from_checkpoint=str(FOLDER / "lora" / "checkpoint-2"))
    found["resumed at stage 2"] = logged_already(resumed)
    return found


def logged_already(trainer: Any) -> dict[str, list[float]]:
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in ("loss", "grad_norm")}


def dpo() -> dict[str, Any]:
    """Train a policy against a frozen reference of its own engine, and an adapter against its base."""
    columns = {
        name: [text(10 * seed + i) for seed in range(16)] for i, name in enumerate(["prompt", "chosen", "rejected"])
    }
    data = Dataset.from_dict(columns)
    arguments = DPOConfig(str(FOLDER / "dpo"), **COMMON)
    rest: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer()}
    found = {"ddp": logged(DPOTrainer(tiny_llama(), tiny_llama(), args=arguments, **rest), "rewards/margins")}
    for stage in (0, 3):
        reference = tiny_llama()
        trainer = ZeroDPO(tiny_llama(), reference, args=arguments, zero_config=zero(stage), **rest)
        found[f"stage {stage}"] = logged(trainer, "rewards/margins")
        other = zeroengine.engine_of(reference)
        assert other is not None and other is not trainer.engine
    found["ddp, adapter"] = logged(DPOTrainer(lora(tiny_llama()), args=arguments, **rest), "rewards/margins")
    adapter = ZeroDPO(lora(tiny_llama()), args=arguments, zero_config=zero(3), **rest)
    found["stage 3, adapter"] = logged(adapter, "rewards/margins")
    return found


def reward_of_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion.split()) % 5) for completion in completions]


def grpo() -> dict[str, Any]:
    """Generate on each rank for as long as it needs, and train on the completions."""
    data = Dataset.from_dict({"prompt": [text(seed) for seed in range(16)]})
    changes = COMMON | {"num_generations": 4, "max_completion_length": 8, "beta": 0.0, "max_steps": 2}
    arguments = GRPOConfig(str(FOLDER / "grpo"), **changes)
    rest: dict[str, Any] = {"reward_funcs": reward_of_length, "train_dataset": data, "processing_class": tokenizer()}
    found = {"ddp": logged(GRPOTrainer(tiny_llama(), args=arguments, **rest), "reward")}
    for stage in (0, 3):
        trainer = ZeroGRPO(tiny_llama(), args=arguments, zero_config=zero(stage), **rest)
        found[f"stage {stage}"] = logged(trainer, "reward")
    return found


def main() -> None:
    scenarios = {"sft": sft, "adapter": sft_of_an_adapter, "dpo": dpo, "grpo": grpo}
    chosen = sys.argv[2:] or scenarios
    report({name: scenarios[name]() for name in chosen})


if __name__ == "__main__":
    main()
