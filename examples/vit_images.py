"""Trains a ViT of transformers to tell shapes apart, on images that it draws itself.

    zero-launch --nproc 2 examples/vit_images.py --stage 2

There are four classes: disks, rings, squares and crosses, of random size, place and color, on a noisy background.
Held-out images come from other seeds.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

import zeroengine

CLASSES = ("disk", "ring", "square", "cross")


class Shapes(Dataset[tuple[torch.Tensor, int]]):
    """Images of shapes, which follow from their numbers.

    Args:
        first: The number of the first image.
        count: How many there are.
        size: The height and width in pixels.
    """

    def __init__(self, first: int, count: int, size: int) -> None:
        self.first, self.count, self.size = first, count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, (3, size, size), and its class."""
        generator = torch.Generator().manual_seed(self.first + index)
        label = (self.first + index) % len(CLASSES)
        radius = self.size * (0.2 + 0.15 * torch.rand((), generator=generator))
        center = radius + (self.size - 2 * radius) * torch.rand(2, generator=generator)
        pixels = torch.arange(self.size, dtype=torch.float32)
        y, x = (pixels - center[0])[:, None].abs(), (pixels - center[1])[None].abs()
        distance, farther, nearer = (y.square() + x.square()).sqrt(), torch.maximum(y, x), torch.minimum(y, x)
        masks = (
            distance < radius,
            (distance < radius) & (distance > 0.6 * radius),
            farther < 0.85 * radius,
            (farther < radius) & (nearer < 0.3 * radius),
        )
        color = torch.rand(3, generator=generator)[:, None, None] + 0.5
        noise = 0.3 * torch.randn(3, self.size, self.size, generator=generator)
        return masks[label] * color + noise, label


def make_model(options: argparse.Namespace) -> ViTForImageClassification:
    """Return a ViT with random weights."""
    config = ViTConfig(
        image_size=options.size,
        patch_size=4,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_labels=len(CLASSES),
    )
    torch.manual_seed(0)
    return ViTForImageClassification(config)


@torch.no_grad()
def accuracy(engine: zeroengine.Engine, dataset: Shapes, batch: int) -> float:
    """Return the share of held-out images that are told right. Each rank takes every world_size-th batch."""
    right = torch.zeros((), device=engine.device)
    engine.eval()
    # Each rank runs as many forwards, because every forward gathers parameters on all ranks.
    for start in range(0, len(dataset), batch * engine.world_size):
        numbers = range(start + engine.rank * batch, start + (engine.rank + 1) * batch)
        images, labels = zip(*(dataset[number] for number in numbers), strict=True)
        predicted = engine(pixel_values=torch.stack(images)).logits.argmax(-1)
        right += (predicted == torch.tensor(labels, device=engine.device)).sum()
    engine.train()
    dist.all_reduce(right)
    return right.item() / len(dataset)


def main() -> None:
    """Train, and print the accuracy on held-out images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="of ZeRO")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=256, help="a multiple of the batch size of all ranks")
    parser.add_argument("--batch", type=int, default=16, help="images of a rank")
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    options = parser.parse_args()

    config = {
        "zero_optimization": {"stage": options.stage},
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.05}},
    }
    engine = zeroengine.initialize(make_model(options), config=config)
    if options.held_out % (options.batch * engine.world_size):
        raise SystemExit(f"--held-out: write a multiple of {options.batch * engine.world_size}")
    held_out = Shapes(10**6, options.held_out, options.size)
    loader = engine.dataloader(Shapes(0, options.images, options.size))
    for epoch in range(1, options.epochs + 1):
        total, steps = torch.zeros((), device=engine.device), 0
        for images, labels in loader:
            loss = cross_entropy(engine(pixel_values=images).logits, labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.detach()
            steps += 1
        share = accuracy(engine, held_out, options.batch)
        if engine.rank == 0:
            print(
                f"epoch {epoch}/{options.epochs}  loss {total.item() / steps:.3f}  held-out accuracy {share:.1%}",
                flush=True,
            )
    engine.close()


if __name__ == "__main__":
    main()
