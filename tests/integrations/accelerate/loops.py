"""The training script of the tests, as a user of accelerate writes it, on the engine or under accelerate's own DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS = 12, 3


class Small(nn.Module):
    """Blocks of which each is a unit, a tied head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight
        # Losses of about 3 keep a rounding error well below 1e-6.
        nn.init.normal_(self.embed.weight, std=0.1)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def data() -> TensorDataset:
    # 7 batches of 2 ranks: two steps of 3 micro-steps, and one of a single micro-step.
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(17, (28, 6), generator=generator)
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
    return {"zero_optimization": zero, **more}


def loading() -> DataLoaderConfiguration:
    """Return what makes the order of samples depend on the seed and the epoch alone, so that it can be resumed."""
    return DataLoaderConfiguration(use_seedable_sampler=True)


def forget() -> None:
    """Let the next Accelerator begin anew, as in a script of its own."""
    AcceleratorState._reset_state()
    GradientState._reset_state()


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    set_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    loader = DataLoader(data(), batch_size=2, shuffle=True)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    ids, targets = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def train(
    accelerator: Accelerator,
    objects: tuple[Any, Any, Any, Any],
    epochs: range,
    at_end: Callable[[int], None] = lambda epoch: None,
) -> list[float]:
    """Return the losses of each micro-step, and the norms and learning rates of each step."""
    model, optimizer, loader, scheduler = objects
    values = []
    for epoch in epochs:
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    values.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            values += [loss.item(), scheduler.get_last_lr()[0]]
        at_end(epoch)
    return values


def message(call: Callable[[], Any]) -> str:
    """Return the error of a call, of one line."""
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
