"""Trains a language model on the standard library's source files, with accelerate's loop on the engine.

    zero-launch --nproc 2 examples/accelerate_lm.py --stage 3
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_lm.py --stage 3

accelerate shards the loader, accumulates, clips and steps the schedule; the configuration says how the model is
partitioned. Run it again with the same `--folder`, at another stage or number of ranks, and with more
`--epochs`, and it goes on.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from train_lm import GPT, HELD_OUT, library_files

from zeroengine.integrations.accelerate import ZeroAccelerator


def read_samples(context: int, limit: int) -> tuple[TensorDataset, TensorDataset]:
    """Return samples of `context` bytes to train on, and held-out ones.

    Args:
        context: The number of bytes of a sample. Its targets are the bytes one further.
        limit: The largest number of samples to train on.
    """
    texts = [b"", b""]
    for index, file in enumerate(library_files()):
        if len(texts[0]) <= limit * context or not texts[1]:
            texts[index % HELD_OUT == HELD_OUT - 1] += file.read_bytes()
    datasets = []
    for text, count in zip(texts, (limit, max(8, limit // 8)), strict=True):
        count = min(count, (len(text) - 1) // context)
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        datasets.append(
            TensorDataset(
                values[: count * context].view(-1, context), values[1 : count * context + 1].view(-1, context)
            )
        )
    return datasets[0], datasets[1]


def evaluate(accelerator: ZeroAccelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean held-out loss in nats per byte."""
    losses = []
    model.eval()
    with torch.no_grad():
        for ids, targets in loader:
            loss = model(ids, targets)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(ids))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    """Train, evaluate before and after, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO")
    parser.add_argument("--folder", type=Path, help="where checkpoints and weights are saved")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()

    accelerator = ZeroAccelerator(
        zero_config={"zero_optimization": {"stage": options.stage}},
        gradient_accumulation_steps=options.accumulation,
        # The order depends on the seed and the epoch alone, so that a resumed run sees the same samples.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(0)
    train_set, held_out_set = read_samples(options.context, options.samples)
    model = GPT(options.layers, options.width, heads=4, context=options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    loader = DataLoader(train_set, batch_size=options.batch, shuffle=True, drop_last=True)
    # accelerate steps the schedule once for the batch of each rank.
    num_steps = options.epochs * math.ceil(len(loader) / options.accumulation)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    held_out = accelerator.prepare(DataLoader(held_out_set, batch_size=options.batch))

    first_epoch, state = 0, options.folder / "state" if options.folder is not None else None
    if state is not None and (state / "zeroengine").is_dir():
        accelerator.load_state(str(state))
        # One checkpoint is saved at the end of each epoch.
        first_epoch = int((state / "epoch").read_text()) + 1
        accelerator.print(f"continues with epoch {first_epoch}")
    accelerator.print(f"held-out loss before {evaluate(accelerator, model, held_out):.4f} nats")
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        total = torch.zeros((), device=accelerator.device)
        for ids, targets in loader:
            with accelerator.accumulate(model):
                loss = model(ids, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total, reduction="mean").item() / len(loader)
        accelerator.print(f"epoch {epoch}  loss {mean:.4f}  learning rate {scheduler.get_last_lr()[0]:.2e}")
        if state is not None:
            accelerator.save_state(str(state))
            if accelerator.is_main_process:
                (state / "epoch").write_text(str(epoch))
    accelerator.print(f"held-out loss after {evaluate(accelerator, model, held_out):.4f} nats")
    if options.folder is not None:
        # On every rank, each of which writes its part.
        accelerator.save_model(model, options.folder / "weights")
    accelerator.end_training()


if __name__ == "__main__":
    main()
