"""TRL's losses, computed by its trainers, and peft's adapters: DDP's losses, the same bits at stages 0 and 3.

TRL and peft are no dependencies of the tests: `pip install trl peft datasets` runs these.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroengine
from tests.distributed.models import config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.models.test_transformers import quietly

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

STEPS, BATCH = 5, 2
WORDS = ["the", "a", "cat", "dog", "sees", "hears", "one", "other", "and", "then", "sleeps", "runs"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def sentence(number: int, length: int) -> str:
    generator = torch.Generator().manual_seed(number)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=generator))


def llama(kind: str = "llama", seed: int = 0) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    more: dict[str, Any] = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    more |= {"vocab_size": len(SPECIAL + WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(seed)
    if kind == "mixtral":
        more |= {"num_local_experts": 4, "output_router_logits": True}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more, tie_word_embeddings=kind == "tied"))


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def usual(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
    }


def sft(folder: Path, kind: str = "llama", adapters: bool = False, **more: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": sentence(i, 3), "completion": " " + sentence(99 + i, 3 + i % 4)} for i in range(40)]
    return SFTTrainer(
        model=llama(kind),
        args=SFTConfig(**usual(folder), **{"gradient_checkpointing": False, "max_length": 32, **more}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )


def dpo(folder: Path, kind: str = "llama", adapters: bool = False, **more: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": sentence(i, 3), "chosen": " " + sentence(99 + i, 4), "rejected": " " + sentence(299 + i, 2 + i % 4)}
        for i in range(40)
    ]
    return DPOTrainer(
        model=llama(kind),
        ref_model=None if adapters else llama(kind, seed=1),
        args=DPOConfig(**usual(folder), **{"gradient_checkpointing": False, "max_length": 32, **more}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
NON_REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
TRAINERS: dict[str, Callable[[Path], Any]] = {
    "SFT": sft,
    "SFT of tied weights": functools.partial(sft, kind="tied"),
    "SFT, weighted by probability": functools.partial(sft, loss_type="dft"),
    "SFT with label smoothing": functools.partial(sft, label_smoothing_factor=0.1),
    "SFT of experts": functools.partial(sft, kind="mixtral"),
    "SFT, packed": functools.partial(sft, packing=True),
    "SFT, reentrant checkpoints": functools.partial(sft, **REENTRANT),
    "SFT, non-reentrant checkpoints": functools.partial(sft, **NON_REENTRANT),
    "SFT of adapters": functools.partial(sft, adapters=True),
    "SFT of adapters, reentrant checkpoints": functools.partial(sft, adapters=True, **REENTRANT),
    "DPO": dpo,
    "DPO of tied weights": functools.partial(dpo, kind="tied"),
    "DPO, several losses": functools.partial(dpo, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "DPO, reentrant checkpoints": functools.partial(dpo, **REENTRANT),
    "DPO, non-reentrant checkpoints": functools.partial(dpo, **NON_REENTRANT),
    "DPO of adapters": functools.partial(dpo, adapters=True),
}


def train(name: str, how: int | str, folder: Path) -> list[float]:
    """The losses of this rank, by the engine at a stage or by DDP, in a loop over the trainer's loss."""
    trainer = TRAINERS[name](folder)
    model = trainer.model.train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-5)
    engine = None
    if how == "ddp":
        called: Any = DistributedDataParallel(model)
    else:
        called = engine = zeroengine.initialize(model, optimizer, config(int(how), optimizer=None))
    losses = []
    for step in range(STEPS):
        first = 2 * BATCH * step + BATCH * dist.get_rank()
        size = len(trainer.train_dataset)
        inputs = trainer.data_collator([trainer.train_dataset[i % size] for i in range(first, first + BATCH)])
        loss = trainer.compute_loss(called, inputs)
        losses.append(loss.item())
        if engine is not None:
            engine.backward(loss)
            assert engine.step()
            continue
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return losses


def train_every_way(names: list[str], folder: Path) -> dict[str, dict[int | str, list[float]]]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    start()
    return {name: {how: train(name, how, folder) for how in ("ddp", 0, 3)} for name in names}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_losses_are_those_of_ddp(kind: str, tmp_path: Path) -> None:
    names = [name for name in TRAINERS if name.startswith(kind)]
    ranks = run_ranks(2, quietly, train_every_way, names, tmp_path, timeout=600)
    for name in names:
        for found in (rank[name] for rank in ranks):
            assert found[0] == found[3], name
            assert found[0] == pytest.approx(found["ddp"], rel=2e-5), name
        assert ranks[0][name][0] != ranks[1][name][0], name


# -- peft alone -------------------------------------------------------------------------------------------


def adapted(kind: str) -> nn.Module:
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

    where = ["q_proj", "v_proj", "down_proj"]
    settings: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: LoraConfig(r=4, target_modules=where, lora_dropout=0.0),
        "LoRA beside a trained head": lambda: LoraConfig(r=4, target_modules=where, modules_to_save=["lm_head"]),
        "LoRA of embeddings": lambda: LoraConfig(r=4, target_modules=[*where, "embed_tokens"]),
        "DoRA": lambda: LoraConfig(r=4, target_modules=where, use_dora=True),  # reads the weights of frozen layers
        "IA3": lambda: IA3Config(target_modules=where, feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
        "prompts": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    torch.manual_seed(1)
    return get_peft_model(llama(), settings[kind]())


def train_adapter(kind: str, how: int | str) -> list[float]:
    rank, model = start(), adapted(kind).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    ddp = how == "ddp"
    called: Any = (
        DistributedDataParallel(model)
        if ddp
        else zeroengine.initialize(model, optimizer, config(int(how), optimizer=None))
    )
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(3, len(SPECIAL + WORDS), (BATCH, 7), generator=generator)
        loss = called(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        losses.append(loss.item())
        if ddp:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            called.backward(loss)
            assert called.step()
    if not ddp:
        called.close()
    return losses


def train_adapters(kinds: list[str]) -> dict[str, dict[int | str, list[float]]]:
    return {kind: {how: train_adapter(kind, how) for how in ("ddp", 0, 3)} for kind in kinds}


def test_adapters_have_the_losses_of_ddp() -> None:
    kinds = ["LoRA", "LoRA beside a trained head", "LoRA of embeddings", "DoRA", "IA3", "prompts"]
    for ranks in run_ranks(2, quietly, train_adapters, kinds, timeout=400):
        for kind, found in ranks.items():
            assert found[0] == found[3], kind
            assert found[0] == pytest.approx(found["ddp"], rel=2e-5), kind
