"""Trains the byte-level language model of `train_lm.py` with Lightning: by a Trainer, or by a Fabric loop.

    python examples/lightning_lm.py --strategy zeroengine_stage_3 --ranks 2
    python examples/lightning_lm.py --fabric --strategy zeroengine_stage_2 --ranks 2 --checkpoint runs/fabric

`--strategy ddp` trains under Lightning's own DDP, with the same losses. With `--checkpoint FOLDER` the run is saved
there at its end, and a later run with more epochs continues, at any stage. `torchrun` and `zero-launch` start the
script, too: `zero-launch --set zero_optimization.stage=3 examples/lightning_lm.py --strategy zeroengine`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset
from train_lm import GPT, read_text, sample

import zeroengine
import zeroengine.integrations.lightning  # registers the strategies

LEARNING_RATE = 2e-3


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a text at random places, the same ones for the same seed."""

    def __init__(self, text: torch.Tensor, context: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text, self.context = text, context
        self.starts = torch.randint(len(text) - context, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, targets = sample(self.text, self.starts[index : index + 1], self.context)
        return ids[0], targets[0]


class LanguageModel(lightning.LightningModule):
    """The GPT with its optimizer and schedule. It is built without memory, which large models need at stage 3."""

    def __init__(self, layers: int, width: int, heads: int, context: int, steps: int, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            torch.manual_seed(self.hparams["seed"])
            with zeroengine.meta_init():
                self.gpt = GPT(*(self.hparams[name] for name in ("layers", "width", "heads", "context")))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.gpt(*batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held_out", self.gpt(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(options: argparse.Namespace, train: DataLoader[Any], held_out: DataLoader[Any]) -> None:
    """Train with a Trainer."""
    module = LanguageModel(
        options.layers, options.width, options.heads, options.context, options.schedule_steps, options.seed
    )
    if options.strategy == "ddp":
        # DDP takes no model without memory.
        torch.manual_seed(options.seed)
        module.gpt = GPT(options.layers, options.width, options.heads, options.context)
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=options.ranks,
        strategy=options.strategy,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, held_out, ckpt_path=options.checkpoint if resumes(options) else None)
    if trainer.is_global_zero:
        print(f"held-out loss {float(trainer.callback_metrics['held_out']):.6f} after {trainer.global_step} steps")
    if options.checkpoint is not None:
        trainer.save_checkpoint(options.checkpoint)


def loop(options: argparse.Namespace, train: DataLoader[Any], held_out: DataLoader[Any]) -> None:
    """Train with a Fabric loop."""
    fabric = lightning.Fabric(accelerator=options.accelerator, devices=options.ranks, strategy=options.strategy)
    fabric.launch()
    torch.manual_seed(options.seed)
    with fabric.init_module():
        model = GPT(options.layers, options.width, options.heads, options.context)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.schedule_steps)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    if resumes(options):
        fabric.load(options.checkpoint, state)
    train, held_out = fabric.setup_dataloaders(train, held_out)
    for _ in range(state["epoch"], options.epochs):
        for batch in train:
            fabric.backward(model(*batch))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    state["epoch"] = options.epochs
    with torch.no_grad():
        losses = torch.stack([model(*batch) for batch in held_out])
    loss = fabric.all_reduce(losses.mean())
    fabric.print(f"held-out loss {float(loss):.6f} after {options.epochs * options.steps} steps")
    if options.checkpoint is not None:
        fabric.save(options.checkpoint, state)


def resumes(options: argparse.Namespace) -> bool:
    """Return whether there is a checkpoint to go on from."""
    return options.checkpoint is not None and options.checkpoint.exists()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a language model on bytes of text with Lightning.")
    add = parser.add_argument
    add("--fabric", action="store_true", help="a Fabric loop rather than a Trainer")
    add("--strategy", default="zeroengine_stage_3", help="the name of a strategy (default: %(default)s)")
    add("--accelerator", default="auto", help="cpu, gpu or auto (default: %(default)s)")
    add("--ranks", type=int, default=2, help="ranks on this machine (default: %(default)s)")
    add("--text", metavar="FILE", type=Path, help="the text to learn (default: Python's standard library)")
    add("--epochs", type=int, default=1, help="times to go through the samples (default: %(default)s)")
    add("--steps", type=int, default=200, help="steps of an epoch (default: %(default)s)")
    add("--schedule-steps", type=int, default=1000, help="steps of the whole schedule (default: %(default)s)")
    add("--batch", type=int, default=8, help="samples of a rank and step (default: %(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (default: %(default)s)")
    add("--width", type=int, default=192, help="features of a token (default: %(default)s)")
    add("--heads", type=int, default=4, help="attention heads (default: %(default)s)")
    add("--context", type=int, default=128, help="bytes that the model sees at once (default: %(default)s)")
    add("--checkpoint", metavar="FOLDER", type=Path, help="save into it at the end, and go on from it")
    add("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Train and evaluate."""
    options = parse()
    text, held_out_text = read_text(options.text, options.context)
    samples = options.batch * options.ranks
    windows = Windows(text, options.context, samples * options.steps, options.seed)
    held_out = Windows(held_out_text, options.context, samples * 4, options.seed)
    train = loop if options.fabric else fit
    train(options, DataLoader(windows, options.batch), DataLoader(held_out, options.batch))


if __name__ == "__main__":
    main()
