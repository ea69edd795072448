"""Save or load a run in a folder; with 2 ranks also train in fp16, with compiled and with split models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

import zeroengine
from tests.integrations.environments import report
from tests.integrations.lightning.lightning_models import Net, Regression, config, loader, trainer
from zeroengine.integrations.lightning import ZeroFabricStrategy, ZeroStrategy


def save(folder: Path) -> dict[str, Any]:
    module = Regression()
    run = trainer(ZeroStrategy(config(2)), max_epochs=1, devices=1, num_sanity_val_steps=0)
    run.fit(module, loader(), loader(4))
    run.save_checkpoint(folder / "saved")
    losses = {"losses": module.losses}
    return {"validation": float(run.callback_metrics["val_loss"]), "steps": run.global_step, **losses}


def load(folder: Path) -> dict[str, Any]:
    run = trainer(ZeroStrategy(config(3)))
    validation = run.validate(Regression(), loader(4), ckpt_path=folder / "saved", verbose=False)[0]["val_loss"]
    run = trainer(ZeroStrategy(config(3)), max_epochs=2)
    run.fit(Regression(), loader(), ckpt_path=folder / "saved")
    return {"validation": validation, "steps": run.global_step}


def trained(fabric_strategy: Any, compiles: bool) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fabric_strategy)
    fabric.launch()
    torch.manual_seed(3)
    net: Any = torch.compile(Net(), backend="eager") if compiles else Net()
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.02))
    losses = []
    for x, y in fabric.setup_dataloaders(loader()):
        loss = nn.functional.mse_loss(net(x).float(), y)
        fabric.backward(loss)
        fabric.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def fit(strategy: Any, compiles: bool = False) -> list[float]:
    module = Regression()
    if compiles:
        module.net.compile(backend="eager")
    trainer(strategy, max_epochs=1, gradient_clip_val=1.0).fit(module, loader())
    return module.losses


def fit_split() -> list[float]:
    module = Regression()
    zeroengine.parallelize(module.net, {"blocks.*.linear": "colwise_gathered"}, size=2)
    strategy = ZeroStrategy(config(2, tensor_parallel={"autotp_size": 2}))
    trainer(strategy, max_epochs=1, num_sanity_val_steps=0).fit(module, loader())
    return module.losses


def main(folder: Path, ranks: int) -> None:
    if ranks == 1:
        report(save(folder))
        return
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    report(
        {
            **load(folder),
            "trainer": [fit(ZeroStrategy(config(3, **sections))) for sections in ({}, fp16)],
            "fabric": [trained(ZeroFabricStrategy(config(3, **sections)), False) for sections in ({}, fp16)],
            "compiled trainer": fit(ZeroStrategy(config(3)), compiles=True),
            "compiled fabric": trained(ZeroFabricStrategy(config(3)), compiles=True),
            "split": fit_split(),
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
