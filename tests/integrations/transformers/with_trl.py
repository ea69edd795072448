"""Trains with the trainers of TRL, under DDP and on the engine, and reports what was logged.

The argument is a folder, which all ranks share.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

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
    # Rewards are logged where there are new completions.
    return {key: [entry[key] for entry in steps if key in entry] for key in ("loss", "grad_norm", *keys)}


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
    saving = DPOConfig(str(FOLDER / "dpo-adapter"), **COMMON | {"save_strategy": "steps", "save_steps": 4})
    adapter = ZeroDPO(lora(tiny_llama()), args=saving, zero_config=zero(3), **rest)
    found["stage 3, adapter"] = logged(adapter, "rewards/margins")
    # The reference is a frozen copy of the adapter at the start, which a run that resumes with other values gets back.
    other_values = lora(tiny_llama())
    for name, param in other_values.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.ones_(param)
    resumed = ZeroDPO(other_values, args=saving, zero_config=zero(3), **rest)
    resumed.train(resume_from_checkpoint=str(FOLDER / "dpo-adapter" / "checkpoint-4"))
    reference, again = (t.engine.full_state_dict(names="*.ref.*") for t in (adapter, resumed))
    assert reference and all(torch.equal(again[name], value) for name, value in reference.items())
    return found


def reward_of_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion.split()) % 5) for completion in completions]


def online(trainer_type: Any, config_type: Any) -> dict[str, Any]:
    """Generate on each rank for as long as it needs, and train on the completions, with and without a reference."""
    data = Dataset.from_dict({"prompt": [text(seed) for seed in range(16)]})
    changes = COMMON | {"num_generations": 4, "max_completion_length": 8, "max_steps": 3, "num_iterations": 2}
    rest: dict[str, Any] = {"reward_funcs": reward_of_length, "train_dataset": data, "processing_class": tokenizer()}

    class ZeroOnline(ZeroTrainerMixin, trainer_type):
        pass

    found = {}
    for suffix, model, beta in (("", tiny_llama, 0.0), (", adapter", lambda: lora(tiny_llama()), 0.1)):
        arguments = config_type(str(FOLDER / "online"), beta=beta, **changes)
        found[f"ddp{suffix}"] = logged(trainer_type(model(), args=arguments, **rest), "reward")
        for stage in (0, 2, 3):
            trainer = ZeroOnline(model(), args=arguments, zero_config=zero(stage), **rest)
            found[f"stage {stage}{suffix}"] = logged(trainer, "reward")
    return found


def grpo() -> dict[str, Any]:
    return online(GRPOTrainer, GRPOConfig)


def rloo() -> dict[str, Any]:
    return online(RLOOTrainer, RLOOConfig)


class Receiver:
    """Takes the place of the client of a vLLM server, and of a vLLM in this process."""

    def __init__(self) -> None:
        self.syncs: list[dict[str, torch.Tensor]] = []
        self.overwritten: list[str] = []
        self._received: dict[str, torch.Tensor] = {}
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self

    def update_named_params(self, metadata: list[Any], named_params: Any) -> None:
        # vLLM packs tensors of up to 1 GB before it sends them.
        packed = [(name, value, value.clone()) for name, value in named_params]
        assert [(n, str(v.dtype).removeprefix("torch."), list(v.shape)) for n, v, _ in packed] == metadata
        self.overwritten += [name for name, value, copy in packed if not torch.equal(value, copy)]
        self.load_weights([(name, copy) for name, _, copy in packed])

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        assert not self._received.keys() & dict(named)
        self._received |= {name: value.clone() for name, value in named}

    def reset_prefix_cache(self) -> None:
        self.syncs.append(self._received)
        self._received = {}


class WithReceiver(VLLMGeneration):
    """TRL's own code, with a receiver for vLLM, and a completion of each prompt that never changes."""

    def _init_vllm(self) -> None:
        self.vllm_client = self.llm = Receiver()

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        completions = [[2 + (token * (i + 3)) % 50 for token in ids[: 2 + i % 4]] for i, ids in enumerate(prompts)]
        return prompts, completions, [[[0.0]] * len(ids) for ids in completions], None


def check_lost_receiver(trainer: Any) -> None:
    """Check that a receiver that fails ends the sync on all ranks, and that the next one gets all tensors."""
    generation, names = trainer.vllm_generation, trainer.vllm_generation.llm.syncs[-1:]
    if generation.mode == "colocate":
        return
    generation.vllm_client = SimpleNamespace(update_named_params=lambda metadata, named: [next(named), 1 / 0])
    text = (
        "division by zero" if trainer.is_world_process_zero() else "rank 0 failed to stream weights: its consumer ended"
    )
    try:
        generation.sync_weights()
    except (ZeroDivisionError, zeroengine.ZeroEngineError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")
    generation.vllm_client = Receiver()
    generation.sync_weights()
    assert [sync.keys() for sync in generation.vllm_client.syncs] == [sync.keys() for sync in names]


def vllm() -> dict[str, Any]:
    """Send the weights to vLLM before each step, at each of its modes, with and without an adapter."""
    grpo_trainer.VLLMGeneration = rloo_trainer.VLLMGeneration = WithReceiver
    data = Dataset.from_dict({"prompt": [text(seed) for seed in range(16)]})
    rest: dict[str, Any] = {"reward_funcs": reward_of_length, "train_dataset": data, "processing_class": tokenizer()}
    rest["eval_dataset"] = data
    changes = COMMON | {"num_generations": 4, "max_completion_length": 8, "max_steps": 3, "use_vllm": True}
    server = GRPOConfig(str(FOLDER / "vllm"), vllm_mode="server", vllm_importance_sampling_correction=False, **changes)
    colocate = RLOOConfig(str(FOLDER / "vllm"), vllm_mode="colocate", beta=0.0, **changes)

    def tied() -> Any:
        return tiny_llama(tie_word_embeddings=True)

    found = {}
    for where, trainer_type, arguments, model in (
        ("server", GRPOTrainer, server, tied),
        ("server with an adapter", GRPOTrainer, server, lambda: lora(tied())),
        ("colocate", RLOOTrainer, colocate, tied),
        ("colocate with an adapter", RLOOTrainer, colocate, lambda: lora(tied())),
    ):
        plain = trainer_type(model(), args=arguments, **rest)
        found[f"ddp, {where}"] = logged(plain, "reward")
        expected = plain.vllm_generation.llm.syncs
        for stage in (2, 3):

            class ZeroOnline(ZeroTrainerMixin, trainer_type):
                pass

            trainer = ZeroOnline(model(), args=arguments, zero_config=zero(stage), **rest)
            # An evaluation has another engine, whose tensors come in another order. DDP trains another way after one.
            trainer.evaluate()
            found[f"stage {stage}, {where}"] = logged(trainer, "reward")
            syncs = trainer.vllm_generation.llm.syncs
            assert not trainer.vllm_generation.llm.overwritten
            check_lost_receiver(trainer)
            for step, (sync, other) in enumerate(zip(syncs, expected, strict=True)):
                assert sync.keys() == other.keys(), sync.keys() ^ other.keys()
                torch.testing.assert_close(sync, other, rtol=0, atol=1e-5 if step else 0)
        assert len(expected) == (3 if plain.args.vllm_mode == "colocate" or plain.is_world_process_zero() else 0)
    return found


def main() -> None:
    scenarios = {"sft": sft, "adapter": sft_of_an_adapter, "dpo": dpo, "grpo": grpo, "rloo": rloo, "vllm": vllm}
    chosen = sys.argv[2:] or scenarios
    report({name: scenarios[name]() for name in chosen})


if __name__ == "__main__":
    main()
