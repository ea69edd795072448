"""Train on long documents, each of which several ranks share: the help texts of Python's language reference.

The ranks of a sample have a part of its tokens each, the loss and the MLPs are computed in tiles, and checkpoints keep
their inputs in CPU memory where the model is on a GPU. Without ``--model`` this trains a small model of random weights,
so that it runs anywhere; ``--model`` takes the name of a model of the hub, or a folder.

    zero-launch --nproc 2 examples/long_sequences.py
    zero-launch --nproc 8 examples/long_sequences.py --model Qwen/Qwen3-0.6B --ranks-of-a-sample 8 --tokens 131072
"""

from __future__ import annotations

import argparse
import time

import torch
from python_topics import model_and_tokenizer, topics
from torch.utils.data import Dataset

import zeroengine


class Documents(Dataset[dict[str, torch.Tensor]]):
    """Pieces of one long text, of equally many tokens."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.pieces = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the hub or a folder; without it, a small random model")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="the ZeRO stage")
    parser.add_argument("--ranks-of-a-sample", type=int, default=2, help="sequence_parallel_size")
    parser.add_argument("--tokens", type=int, default=8192, help="the tokens of a sample")
    parser.add_argument("--steps", type=int, default=20, help="the number of updates")
    parser.add_argument("--bf16", action="store_true", help="train in bf16")
    options = parser.parse_args()

    model, tokenizer = model_and_tokenizer(options.model)
    model.gradient_checkpointing_enable()
    text = "\n\n".join(topics(length=1_000_000).values())
    tokens = torch.tensor(tokenizer(text)["input_ids"])  # type: ignore[operator]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": options.ranks_of_a_sample,
        "tiling": {"loss": True, "mlp": True},
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": options.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3 if options.model is None else 2e-5}},
    }
    if torch.cuda.is_available():
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    engine = zeroengine.initialize(model, config=config)
    loader = engine.dataloader(Documents(tokens, options.tokens))
    start, step = time.perf_counter(), 0
    while step < options.steps:
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            step += 1
            if engine.rank == 0 and (step == 1 or step % 10 == 0):
                rate = step * options.tokens * engine.num_sample_groups / (time.perf_counter() - start)
                print(f"step {step}: loss {loss.item():.4f}, {rate:,.0f} tokens/s", flush=True)
            if step == options.steps:
                break
    engine.close()


if __name__ == "__main__":
    main()
