"""What the examples of transformers and TRL share: real text that every Python has, and a small model."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)


def topics(length: int) -> dict[str, str]:
    """Return the help texts of Python's language reference by topic, each cut to ``length`` characters."""
    texts = pydoc_data.topics.topics
    return {name: texts[name].strip()[:length] for name in sorted(texts)}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def model_and_tokenizer(name: str | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return a model of the hub or of a folder by its name; without one, a small model of random weights."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(name), tokenizer
    set_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer
