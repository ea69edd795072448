"""Trains LoRA on a quantized base at stages 0 and 3, and reports losses, and the bytes of the base and of the adapter.

The arguments are "4 bits", "8 bits" or "torchao", and a folder.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import zeroengine
from tests.integrations.environments import report
from zeroengine.cli.checkpoint_commands import export
from zeroengine.plan.api import model_facts

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 4
OPTIMIZER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def quantization() -> Any:
    if KIND == "4 bits":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if KIND == "8 bits":
        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization(), device_map={"": "cpu"}, dtype=torch.float32
    )


def adapted(folder: Path, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = base(folder)
    model.requires_grad_(False)
    # Evaluations of bitsandbytes on the CPU may pack weights anew, and compute in bf16.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return get_peft_model(model, LoraConfig(r=128, target_modules="all-linear", task_type="CAUSAL_LM"))


def batches(step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 128, (4, 16), generator=generator).split(2)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"optimizer": {"type": "AdamW", "params": OPTIMIZER}, "zero_optimization": zero}


def train(engine: zeroengine.Engine) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, batches(step)[engine.rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    logging.disable(logging.WARNING)
    source = FOLDER / f"base-{os.environ['RANK']}"
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes)).save_pretrained(source)

    plain = adapted(source)
    adapter_bytes = sum(param.nbytes for param in plain.parameters() if param.requires_grad)
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], **OPTIMIZER)
    expected = []
    for step in range(STEPS):
        losses = [loss_of(plain, ids) for ids in batches(step)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {"expected": [losses[rank] for losses in expected], "adapter": adapter_bytes}

    for stage in (0, 3):
        # The base of rank 0 counts, and its adapter.
        engine = zeroengine.initialize(adapted(source, seed=rank), config=settings(stage))
        planned = model_facts(adapted(source)).plans(engine.config)
        assert [(plan.name, plan.numel, plan.dtype) for plan in planned] == [
            (unit.name, sum(slot.numel for slot in unit.layout.slots), unit.dtype) for unit in engine.units
        ]
        found[f"losses {stage}"] = train(engine)
        found[f"base {stage}"] = sum(unit.shard.nbytes for unit in engine.units if not unit.trainable)
        assert engine.memory().parameters == sum(unit.shard.nbytes for unit in engine.units)
        if stage == 0:
            engine.close()
    state = engine.full_state_dict(trainable_only=True, rank0_only=True)
    engine.save_checkpoint(FOLDER / "adapter", "adapter", frozen=False)
    engine.save_checkpoint(FOLDER / "whole", "whole")
    engine.eval()
    with torch.no_grad():
        evaluated = loss_of(engine, batches(9)[0]).item()
    if engine.rank == 0:
        engine.module.save_pretrained(FOLDER / "peft", state_dict=state)
        found["peft"] = (FOLDER / "peft" / "adapter_model.safetensors").stat().st_size
        found["checkpoint"] = files(FOLDER / "adapter")
        assert export([str(FOLDER / "whole"), str(FOLDER / "exported")]) == 0
        again = PeftModel.from_pretrained(base(source), FOLDER / "peft").eval()
        for module in again.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        with torch.no_grad():
            assert abs(loss_of(again, batches(9)[0]).item() - evaluated) < 1e-5
    engine.release()
    model = engine.module
    with torch.no_grad():
        merged = model.merge_and_unload()
        found["merged"], found["evaluated"] = loss_of(merged, batches(9)[0]).item(), evaluated
    report(found)


if __name__ == "__main__":
    main()
