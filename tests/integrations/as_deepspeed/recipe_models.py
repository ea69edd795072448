"""Write a tiny random Llama and a tokenizer of digits into a folder: ``recipe_models.py FOLDER``."""

from __future__ import annotations

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.integrations.transformers.models import tiny_llama

folder = sys.argv[1]
tiny_llama().save_pretrained(folder)
symbols = ["<pad>", "</s>", "<unk>", *"0123456789+="]
backend = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
).save_pretrained(folder)
