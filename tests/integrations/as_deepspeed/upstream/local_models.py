"""Write tiny random models where the hub's client looks for those that upstream's tests name.

``python local_models.py FOLDER`` fills ``FOLDER/hub``, the cache of an environment with ``HF_HOME=FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    MobileViTConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

REVISION = "0" * 40
VOCABULARY = 1024


def gpt2(folder: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=2)).save_pretrained(
        folder
    )
    tokenizer().save_pretrained(folder)


def gptj(folder: Path) -> None:
    torch.manual_seed(0)
    config = GPTJConfig(vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=2, rotary_dim=4)
    GPTJForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def mobilevit(folder: Path) -> None:
    MobileViTConfig(hidden_sizes=[16, 20, 24], neck_hidden_sizes=[4, 4, 8, 8, 16, 16, 32]).save_pretrained(folder)


def qwen2_moe(folder: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
    sizes |= {"shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2MoeConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, **sizes)
    Qwen2MoeForCausalLM(config).save_pretrained(folder)


def t5(folder: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((chr(code), -1.0) for code in range(32, 127))]
    T5Tokenizer(vocab=[*pieces, ("▁", -1.0)], extra_ids=0).save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes."""
    vocabulary = {symbol: index for index, symbol in enumerate(["<|endoftext|>", *pre_tokenizers.ByteLevel.alphabet()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
    )
    special = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special, eos_token=special, unk_token=special)


MODELS: dict[str, Callable[[Path], None]] = {
    "apple/mobilevit-xx-small": mobilevit,
    "gpt2": gpt2,
    "hf-internal-testing/tiny-random-gpt2": gpt2,
    "hf-internal-testing/tiny-random-gptj": gptj,
    "patrickvonplaten/t5-tiny-random": t5,
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": qwen2_moe,
    "sshleifer/tiny-gpt2": gpt2,
}


def main(home: Path) -> None:
    for name, write in MODELS.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        write(repository / "snapshots" / REVISION)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
