"""Print the predicted bytes of a micro-step, and by how much a process grows in a real one, for models of Hugging Face.

Usage: peak_memory.py FAMILY PRECISION CHECKPOINTING ..., where glibc must return freed memory (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from zeroengine.config import load
from zeroengine.plan.trace.activations import loss_of, trace_micro_step
from zeroengine.plan.trace.model_facts import from_huggingface
from zeroengine.utils.host_memory import trim_heap

SAMPLES, SEQUENCE = 2, 128
WIDTHS = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 4096}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 4096},
    "LlamaForCausalLM": {"model_type": "llama", **WIDTHS, "num_key_value_heads": 2, "intermediate_size": 704},
    "MixtralForCausalLM": {
        **{"model_type": "mixtral", **WIDTHS, "num_key_value_heads": 2, "intermediate_size": 352},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "ViTForImageClassification": {"model_type": "vit", **WIDTHS, "intermediate_size": 1024, "image_size": 160},
    "T5ForConditionalGeneration": {
        **{"model_type": "t5", "d_model": 256, "d_ff": 512, "d_kv": 64, "num_layers": 2, "num_heads": 4},
        **{"vocab_size": 4096, "decoder_start_token_id": 0, "pad_token_id": 0},
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True}},
}


def status(name: str) -> int:
    """Return a line of the process's status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def growth(family: str, precision: str, checkpointing: bool) -> dict[str, int]:
    """Return the predicted and the real peak."""
    import transformers

    content = {"architectures": [family], **FAMILIES[family]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        facts = from_huggingface(folder, SEQUENCE)
    config = load(PRECISIONS[precision]).resolve(world_size=1)
    predicted = trace_micro_step(facts, config, SAMPLES, checkpointing)
    assert facts.make_batch is not None
    _, kwargs = facts.make_batch(SAMPLES)
    settings = transformers.AutoConfig.for_model(**content)
    settings.use_cache = False
    model = getattr(transformers, family)(settings)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if precision == "bf16":
        model.bfloat16()
    model.train()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))

    def micro_step() -> None:
        batch = {name: torch.ones(t.shape, dtype=t.dtype) for name, t in kwargs.items()}
        if precision == "bf16":
            batch = {name: t.bfloat16() if t.is_floating_point() else t for name, t in batch.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = loss_of(model(**batch))
        loss.backward()

    micro_step()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    micro_step()
    return {"predicted": predicted.peak_bytes, "real": status("VmHWM") - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    triples = zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True)
    print(json.dumps([growth(family, precision, ck == "1") for family, precision, ck in triples]))
