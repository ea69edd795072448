"""On two ranks: what a Trainer offers beside a plain fit, under Lightning's DDP and under zeroengine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

import zeroengine
from tests.integrations.environments import report
from tests.integrations.lightning.lightning_models import Net, Regression, config, loader, trainer
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.lightning import ZeroStrategy


class Adversarial(Regression):
    """Two networks, each with its optimizer, and steps by hand. One batch in three has no step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(6)
        self.other = Net()
        self.unused = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        loss = self.other(self.net(x) * x).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        second.zero_grad()
        other = nn.functional.mse_loss(self.other(x), y)
        if batch_idx % 3:
            self.manual_backward(other)
            second.step()
            second.zero_grad()
        self.losses += [float(loss), float(other)]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (self.net, self.other)]


class ByHand(Regression):
    """One optimizer and steps by hand, with accumulation over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        ends = batch_idx % 2 == 1 or batch_idx == 6
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(super().training_step(batch, batch_idx))
        if ends:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


class Deferred(Regression):
    """Built without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            with zeroengine.meta_init():
                self.net = Net()


class FromConfiguration(Regression):
    def configure_optimizers(self) -> None:
        return None


def losses(strategy: Any, module: Regression, *callbacks: Any, **options: Any) -> list[float]:
    run = trainer(strategy, callbacks=list(callbacks), **{"max_epochs": 3} | options)
    run.fit(module, loader(), loader(4))
    return module.losses + module.validation_losses


def error(strategy: Any, module: Regression, *callbacks: Any, **options: Any) -> str:
    try:
        losses(strategy() if callable(strategy) else strategy, module, *callbacks, **options)
    except ZeroEngineError as raised:
        return str(raised)
    return "no error"


def errors() -> dict[str, str]:
    bf16 = {"bf16": {"enabled": True}}
    clip, values = {"gradient_clip_val": 1.0}, {"gradient_clip_algorithm": "value"}
    return {
        "precision": error(lambda: ZeroStrategy(config(2, **bf16)), Regression(), precision="16-true"),
        "no precision": error(lambda: ZeroStrategy(config(2)), Regression(), precision="bf16-mixed"),
        "double": error(lambda: ZeroStrategy(config(2)), Regression(), precision="64-true"),
        "stage": error(lambda: ZeroStrategy(config(2), stage=3), Regression()),
        "steps": error(ZeroStrategy(config(2, gradient_accumulation_steps=4)), Regression()),
        "clip": error(ZeroStrategy(config(2, gradient_clipping=0.5)), Regression(), **clip),
        "values": error(ZeroStrategy(config(2)), Regression(), **clip, **values),
        "average": error(ZeroStrategy(config(3)), Regression(), EMAWeightAveraging()),
        "no optimizer": error(ZeroStrategy(config(3)), FromConfiguration()),
        "argument": error(lambda: ZeroStrategy(config(3), find_unused_parameters=True), Regression()),
    }


def averages(folder: Path) -> dict[str, Any]:
    """Resume an average in the middle, and return the losses after it, of both runs."""
    callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    whole, resumed = Regression(), Regression()
    losses(ZeroStrategy(config(2)), whole, EMAWeightAveraging(decay=0.9), callback, enable_checkpointing=True)
    run = trainer(ZeroStrategy(config(1)), callbacks=[EMAWeightAveraging(decay=0.9)], max_epochs=3)
    run.fit(resumed, loader(), loader(4), ckpt_path=folder / "epoch=0.ckpt")
    return {"whole": whole.validation_losses[-2:], "resumed": resumed.validation_losses[-2:]}


def plain_file(folder: Path) -> dict[str, Any]:
    """Test a file that Lightning wrote under DDP, and try to resume from it, and from the folder that it is in."""
    module = Regression()
    run = trainer("ddp", max_epochs=1)
    run.fit(module, loader(), loader(4))
    run.save_checkpoint(folder / "ddp.ckpt")
    tested = [
        trainer(strategy).test(Regression(lr=9.0), loader(4), ckpt_path=folder / "ddp.ckpt", verbose=False)
        for strategy in ("ddp", ZeroStrategy(config(3)))
    ]
    errors = []
    for path in (folder / "ddp.ckpt", folder):
        try:
            trainer(ZeroStrategy(config(3))).fit(Regression(), loader(), ckpt_path=path)
        except ZeroEngineError as raised:
            errors.append(str(raised))
    return {"tested": [rows[0]["test_loss"] for rows in tested], "errors": errors}


def main(folder: Path) -> None:
    results: dict[str, Any] = {}
    # DDP needs its search for unused parameters for several optimizers.
    references = {"ddp": ByHand, "ddp_find_unused_parameters_true": Adversarial}
    for reference, make in references.items():
        results[make.__name__] = [losses(strategy, make()) for strategy in (reference, ZeroStrategy(config(3)))]
    results["deferred"] = [losses("ddp", Regression()), losses("zeroengine_stage_3", Deferred())]
    for name, make in {"ema": EMAWeightAveraging, "swa": lambda: StochasticWeightAveraging(0.01, 1)}.items():
        results[name] = [losses(strategy, Regression(), make()) for strategy in ("ddp", ZeroStrategy(config(2)))]
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}}}
    results["optimizer"] = [
        losses("ddp", Regression(interval="epoch"), max_epochs=1),
        losses(ZeroStrategy(config(3, **adamw)), FromConfiguration(), max_epochs=1),
    ]
    bf16 = {"bf16": {"enabled": True}}
    results["bf16"] = [
        losses(ZeroStrategy(config(3, **bf16)), Regression(), precision="bf16-mixed"),
        losses("zeroengine_stage_3", Regression(), precision="bf16-mixed"),
    ]
    results["average resumed"] = averages(folder / "average")
    results["file"] = plain_file(folder)
    results["errors"] = errors()
    report(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
