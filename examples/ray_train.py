"""Train on the workers of a Ray cluster, and go on from the newest checkpoint when a worker is lost.

    pip install zeroengine "ray[train]"
    python examples/ray_train.py --workers 2 --config configs/zero3.json --folder runs/a

Ray starts one process per worker and its process group. `zeroengine.initialize` partitions the model over them. If a
worker dies, Ray starts all of them again, and the loop goes on where the last checkpoint was saved, with the losses
that an uninterrupted run has. `--folder` must be on a disk that all nodes see.

A script that knows nothing of Ray runs there as well, by `zero-launch --launcher ray`: see docs/launch/ray.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import zeroengine

# A token is a byte.
VOCABULARY, CONTEXT, WIDTH, LAYERS = 256, 32, 64, 2


class ByteModel(nn.Module):
    """A decoder-only transformer over bytes, whose forward returns the mean loss in nats per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # (batch, CONTEXT + 1), bytes
        inputs, targets = text[:, :-1].long(), text[:, 1:].long()
        x = self.token(inputs) + self.position(torch.arange(CONTEXT, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def read_dataset() -> TensorDataset:
    """Return windows of bytes of a file that every Python has."""
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    length = CONTEXT + 1
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length]
    return TensorDataset(windows.view(-1, length))


def train(settings: dict[str, Any]) -> None:
    """Train in one worker. Ray calls this in each of them, and again in new ones after a failure."""
    torch.manual_seed(0)
    engine = zeroengine.initialize(ByteModel(), config=settings["config"])
    loader = engine.dataloader(read_dataset())
    folder = Path(settings["folder"])
    if (folder / "latest").is_file():
        engine.load_checkpoint(folder)
    print(f"rank {engine.rank} is process {os.getpid()}, from step {engine.global_steps}", flush=True)
    while engine.global_steps < settings["steps"]:
        for batch in loader:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            if engine.rank == 0:
                with (folder / "losses.jsonl").open("a") as file:
                    print(json.dumps({"step": engine.global_steps, "loss": loss.item()}), file=file, flush=True)
            if engine.global_steps % settings["save_every"] == 0 or engine.global_steps == settings["steps"]:
                # All ranks write into the folder. Ray is told the numbers alone, since it would copy a checkpoint.
                engine.save_checkpoint(folder)
                ray.train.report({"step": engine.global_steps, "loss": loss.item()})
            if engine.global_steps == settings["steps"]:
                break
    engine.close()


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description="Train a small language model on the workers of a Ray cluster.")
    add = parser.add_argument
    add("--workers", type=int, default=2, help="workers in the whole cluster (default: %(default)s)")
    add("--config", required=True, type=Path, help="the configuration, a file")
    add("--folder", required=True, type=Path, help="a folder that all nodes see, for checkpoints and losses.jsonl")
    add("--steps", type=int, default=200, help="steps to take (default: %(default)s)")
    add("--save-every", type=int, default=50, help="steps between checkpoints (default: %(default)s)")
    add("--max-failures", type=int, default=3, help="restarts after lost workers (default: %(default)s)")
    add("--gpu", action="store_true", help="give each worker a GPU")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # Workers run in folders of their own, so the file is read here.
    config = zeroengine.config.load(options.config).to_dict()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "config": config,
            "folder": str(options.folder.resolve()),
            "steps": options.steps,
            "save_every": options.save_every,
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            storage_path=str(options.folder.resolve() / "ray"),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    trainer.fit()
    print((options.folder / "losses.jsonl").read_text().splitlines()[-1])


if __name__ == "__main__":
    main()
