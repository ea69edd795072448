"""Scores the lines of a text file: their perplexity under a causal language model that may be larger than memory.

    python examples/score_text.py book.txt --model weights/Llama-3-8B --nvme /local_nvme --keep 0.2
    zero-launch --nproc 2 examples/score_text.py book.txt --model weights/Llama-3-8B
    python examples/score_text.py README.md

`--model` is a folder with `config.json`, a tokenizer and safetensors, as `hf download` makes it. Without it a small
Llama of random weights scores bytes. With `--nvme` the weights are read from a disk for each batch, ahead of their use,
so larger batches take less time for each line; `--keep` is the fraction that stays in memory. `--in-place` reads them
out of the model's own files, if these are on that disk: nothing is copied at the start. Several ranks partition the
weights and share the lines.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import zeroengine

NO_TARGET = -100


def build(folder: Path | None, zero: dict[str, Any]) -> zeroengine.Engine:
    """Return the engine of a model that only runs forwards. Its weights go from the files into the shards."""
    if folder is None:
        torch.manual_seed(0)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=256, max_position_embeddings=2048, dtype="float32", **shape)
    else:
        config = AutoConfig.from_pretrained(folder)
    with zeroengine.meta_init(values=folder is None):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    engine = zeroengine.initialize(model.requires_grad_(False).eval(), {"zero_optimization": zero})
    if folder is not None:
        engine.load_weights(folder)
    return engine


def tokenizer_of(folder: Path | None) -> Callable[[str], list[int]]:
    """Return a function that makes numbers of text: bytes without a folder."""
    if folder is None:
        return lambda text: list(text.encode())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text)["input_ids"])


def losses(engine: zeroengine.Engine, lines: list[list[int]]) -> list[tuple[float, int]]:
    """Return the sum of the losses of each line's tokens, and how many of them are predicted: all but the first."""
    length = max(2, *map(len, lines))
    ids = torch.zeros(len(lines), length, dtype=torch.long)
    targets = torch.full((len(lines), length), NO_TARGET)
    for row, tokens in enumerate(lines):
        ids[row, : len(tokens)] = targets[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    ids, targets = ids.to(engine.device), targets.to(engine.device)
    # Padding is on the right, where no earlier token attends to it.
    logits = engine(input_ids=ids, use_cache=False).logits[:, :-1]
    found = []
    for row, target in zip(logits, targets[:, 1:], strict=True):
        loss = F.cross_entropy(row.float(), target, ignore_index=NO_TARGET, reduction="sum")
        found.append((float(loss), int((target != NO_TARGET).sum())))
    return found


def perplexity(loss: float, count: int) -> float:
    return math.exp(min(loss / count, 700.0)) if count else math.nan


def main() -> None:
    """Score the lines, and print the perplexity of each and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file; empty lines are left out")
    parser.add_argument("--model", type=Path, help="a folder with a model of transformers")
    parser.add_argument("--nvme", type=Path, help="a folder on a local disk that the weights are read from")
    parser.add_argument("--keep", type=float, default=0.0, help="with --nvme, the fraction that stays in memory")
    parser.add_argument(
        "--in-place", action="store_true", help="with --nvme, read the weights where the model's files are"
    )
    parser.add_argument("--batch", type=int, default=32, help="lines in a forward, on each rank")
    parser.add_argument("--tokens", type=int, default=512, help="longer lines are cut off")
    options = parser.parse_args()

    zero: dict[str, Any] = {"stage": 3}
    if options.nvme is not None:
        place = {"device": "nvme", "nvme_path": str(options.nvme), "ratio": 1 - options.keep}
        zero["offload_param"] = place | {"in_place": options.in_place}
    engine = build(options.model, zero)
    tokenize, rank, ranks = tokenizer_of(options.model), engine.rank, engine.world_size
    lines = [line for line in options.text.read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise SystemExit(f"{options.text} has no lines to score")
    tokens = [tokenize(line)[: options.tokens] for line in lines]
    # Lines of equal length share a batch, so that little is padded.
    order = sorted(range(len(lines)), key=lambda index: -len(tokens[index]))
    # All ranks run equally many forwards, because each gathers the weights. A rank without a line scores the last one.
    batches = [order[start : start + options.batch * ranks] for start in range(0, len(order), options.batch * ranks)]
    scores: dict[int, tuple[float, int]] = {}
    # A bar where there is a terminal.
    shown = track(batches, "scoring", console=Console(stderr=True), disable=rank != 0 or not sys.stderr.isatty())
    with torch.inference_mode():
        for batch in shown:
            own = batch[rank::ranks] or batch[-1:]
            scores |= dict(zip(own, losses(engine, [tokens[index] for index in own]), strict=True))
    parts: list[Any] = [None] * ranks
    if ranks > 1:
        dist.all_gather_object(parts, scores)
        scores = {index: score for part in parts for index, score in part.items()}
    if rank == 0:
        for index, line in enumerate(lines):
            print(f"{perplexity(*scores[index]):12.3f}  {line}")
        total, count = map(sum, zip(*scores.values(), strict=True))
        print(f"{perplexity(total, count):12.3f}  all {len(lines):,} lines, {count:,} predicted tokens")
    # engine.close() would leave an ordinary model, and read all weights into memory for that.


if __name__ == "__main__":
    main()
