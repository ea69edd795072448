"""The modules and data that the scripts of these tests train."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", ".*does not have many workers.*")
WIDTH, NUM_SAMPLES = 8, 28


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Regression(lightning.LightningModule):
    """A module with hyperparameters, a schedule and validation, that keeps its losses."""

    def __init__(self, lr: float = 0.02, interval: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.net = Net()
        self.losses: list[float] = []
        self.validation_losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(float(loss))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.validation_losses.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.hparams["interval"]}}


def loader(num_samples: int = NUM_SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=2)


def config(stage: int, **sections: Any) -> dict[str, Any]:
    # Without a threshold of 0 units this small would stay gathered at stage 3.
    return {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0}, **sections}


def trainer(strategy: Any, folder: Any = None, **options: Any) -> lightning.Trainer:
    settings = {"max_epochs": 2, "devices": 2, "enable_checkpointing": False, "logger": False} | options
    return lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
