"""On two ranks: run one Fabric loop under Lightning's DDP and under zeroengine, and report the losses of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

import zeroengine
from tests.integrations.environments import report
from tests.integrations.lightning.lightning_models import Net, config, loader
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.lightning import ZeroFabricStrategy

LR = 0.02


def made(strategy: Any, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


def set_up(fabric: Fabric, apart: bool = False, init: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(3)
    if init:
        with fabric.init_module():
            model = Net()
    else:
        model = Net()
    if apart:
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR))
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR))


def train(
    fabric: Fabric, model: Any, optimizer: Any, epochs: int = 2, window: int = 2, plain: bool = False
) -> list[Any]:
    """Train with windows of two micro-steps, of which the last one of an epoch has one. Return losses and norms."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    batches = fabric.setup_dataloaders(loader())
    rows: list[Any] = []
    for _ in range(epochs):
        for i, (x, y) in enumerate(batches):
            is_last = (i + 1) % window == 0 or i + 1 == len(batches)
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.mse_loss(model(x), y) / window
                loss.backward() if plain else fabric.backward(loss)
            rows.append(float(loss))
            if is_last:
                rows.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return rows


def adversarial(strategy: Any) -> list[float]:
    """Two models, each with its optimizer, of which one's loss runs through the other."""
    fabric, rows = made(strategy), []
    first, first_optimizer = set_up(fabric)
    second, second_optimizer = set_up(fabric, apart=True)
    for x, y in fabric.setup_dataloaders(loader()):
        loss = second(first(x) * x).mean()
        fabric.backward(loss)
        first_optimizer.step()
        first_optimizer.zero_grad()
        second_optimizer.zero_grad()
        other = nn.functional.mse_loss(second(x), y)
        fabric.backward(other)
        second_optimizer.step()
        second_optimizer.zero_grad()
        rows += [float(loss), float(other)]
    return rows


def uneven(strategy: Any) -> list[float]:
    """Three backwards in a step, of which only the first is said not to be the last."""
    fabric, rows = made(strategy), []
    model, optimizer = set_up(fabric)
    for i, (x, y) in enumerate(fabric.setup_dataloaders(loader())):
        with fabric.no_backward_sync(model, enabled=i % 3 == 0):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
        rows.append(float(loss))
        if i % 3 == 2:
            optimizer.step(lambda loss=loss: loss)
            optimizer.zero_grad()
    return rows


def resume(folder: Path) -> dict[str, Any]:
    """Save after an epoch at stage 2; go on there, and at stage 3 with another loop."""
    fabric = made(ZeroFabricStrategy(config(2)))
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, 1)
    fabric.save(folder, {"model": model, "optimizer": optimizer, "epoch": 1, "notes": {"text": "one"}})
    rows = {"full": train(fabric, model, optimizer, 1)}
    for stage in (2, 3):
        fabric = made(ZeroFabricStrategy(config(stage)))
        model, optimizer = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        remaining = fabric.load(folder, state)
        assert state["epoch"] == 1 and remaining == {"notes": {"text": "one"}}, (state, remaining)
        rows[f"stage {stage}"] = train(fabric, model, optimizer, 1)
    return rows


def evaluate(folder: Path) -> bool:
    """Load a checkpoint into a model without an optimizer, and a file of torch into another one."""
    fabric = made(ZeroFabricStrategy(config(3)))
    torch.manual_seed(4)
    model = fabric.setup_module(Net())
    fabric.load(folder, {"model": model})
    x = torch.ones(2, 8)
    with torch.no_grad():
        output = model(x)
    state_dict = zeroengine.engine_of(model).full_state_dict()
    if fabric.global_rank == 0:
        torch.save(state_dict, folder / "plain.pt")
    fabric.barrier()
    raw = fabric.setup_module(Net())
    fabric.load_raw(folder / "plain.pt", raw)
    with torch.no_grad():
        return torch.equal(output, raw(x))


def error(call: Any) -> str:
    try:
        call()
    except ZeroEngineError as raised:
        return str(raised)
    return "no error"


def errors(folder: Path) -> dict[str, str]:
    fabric = made(ZeroFabricStrategy(config(2)))
    net = Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.blocks, net.head)]
    several = error(lambda: fabric.setup(net, *optimizers))
    counting = made(ZeroFabricStrategy(config(2, gradient_accumulation_steps=4)))
    scheduled = made(ZeroFabricStrategy(config(2, scheduler={"type": "WarmupLR", "params": {}})))
    model, optimizer = set_up(fabric)
    state = {"model": model}
    return {
        "two optimizers": several,
        "steps": error(lambda: set_up(counting)),
        "schedule": error(lambda: set_up(scheduled)),
        "values": error(lambda: fabric.clip_gradients(model, optimizer, clip_val=1.0)),
        "norm": error(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)),
        "optimizer": error(lambda: fabric.setup_optimizers(optimizers[0])),
        "folder without a model": error(lambda: fabric.load(folder)),
        "file": error(lambda: fabric.save(folder / "plain.pt", state)),
        "remote": error(lambda: fabric.save("s3://bucket/checkpoint", state)),
        "filter": error(lambda: fabric.save(folder / "part", state, {"model": lambda name, value: True})),
    }


def main(folder: Path) -> None:
    results: dict[str, Any] = {"ddp": train(f := made("ddp"), *set_up(f))}
    for stage in (0, 2, 3):
        results[f"stage {stage}"] = train(f := made(ZeroFabricStrategy(config(stage))), *set_up(f))
    results["by name"] = train(f := made("zeroengine_stage_3"), *set_up(f, init=True))
    results["apart"] = train(f := made(ZeroFabricStrategy(config(3))), *set_up(f, apart=True), plain=True)
    results["adversarial"] = {"ddp": adversarial("ddp"), "stage 3": adversarial(ZeroFabricStrategy(config(3)))}
    results["uneven"] = {"ddp": uneven("ddp")}
    for stage in (1, 2, 3):
        results["uneven"][f"stage {stage}"] = uneven(ZeroFabricStrategy(config(stage)))
    results["resume"] = resume(folder / "saved")
    results["evaluated"] = evaluate(folder / "saved")
    results["errors"] = errors(folder / "saved")
    report(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
