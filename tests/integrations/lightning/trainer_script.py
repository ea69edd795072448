"""On two ranks: train under Lightning's DDP and under zeroengine, and report the losses of each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import zeroengine
from tests.integrations.environments import report
from tests.integrations.lightning.lightning_models import Regression, config, loader, trainer
from zeroengine.integrations.lightning import ZeroStrategy

FIT = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 3, "num_sanity_val_steps": 1}


def fit(strategy: Any, folder: Path | None = None, ckpt_path: Any = None, **options: Any) -> dict[str, Any]:
    module = Regression(interval=options.pop("interval", "step"))
    run = trainer(strategy, folder, **FIT | options)
    # Seven batches a rank, so that the last window of an epoch has one.
    run.fit(module, loader(), loader(4), ckpt_path=ckpt_path)
    return {"losses": module.losses, "validation": module.validation_losses, "steps": run.global_step}


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=True)


def resume(folder: Path, stages: list[int]) -> dict[str, Any]:
    """Save at stage 2, and go on from the last step of the first epoch at other stages."""
    full = fit(
        ZeroStrategy(config(2)), folder, callbacks=[checkpoints(folder)], enable_checkpointing=True, max_epochs=3
    )
    resumed = {
        f"stage {stage}": fit(ZeroStrategy(config(stage)), ckpt_path=folder / "step=4.ckpt", max_epochs=3)
        for stage in stages
    }
    return {"full": full, **resumed}


def after_fit(folder: Path) -> dict[str, Any]:
    """What users do after fit: test the best, predict, save by hand, and use the module."""
    module = Regression()
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1)
    run = trainer(ZeroStrategy(config(3)), folder, callbacks=[callback], enable_checkpointing=True)
    run.fit(module, loader(), loader(4))
    run.save_checkpoint(folder / "by_hand")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    whole = zeroengine.engine_of(module).full_state_dict()
    tested = run.test(module, loader(4), ckpt_path=folder / "by_hand", verbose=False)[0]["test_loss"]
    predicted = torch.cat(run.predict(module, loader(4)))
    zeroengine.engine_of(module).release()
    plain = Regression.load_from_checkpoint(folder / "weights.ckpt", map_location="cpu")
    return {
        "best": callback.best_model_path,
        "folders": sorted(path.name for path in folder.iterdir()),
        "tested": tested,
        "weights agree": all(torch.equal(whole[name], value) for name, value in plain.state_dict().items()),
        "released agrees": all(torch.equal(whole[name], value) for name, value in module.state_dict().items()),
        "predictions agree": torch.equal(predicted, torch.cat(run.predict(plain, loader(4)))),
    }


def main(folder: Path, stages: list[int]) -> None:
    results: dict[str, Any] = {"ddp": fit("ddp")}
    for stage in stages:
        results[f"stage {stage}"] = fit(ZeroStrategy(config(stage)))
    results["resume"] = resume(folder / "resume", [stage for stage in stages if stage])
    if 3 in stages:
        results["ddp by epoch"] = fit("ddp", interval="epoch")
        results["stage 3 by epoch"] = fit("zeroengine_stage_3", interval="epoch")
        results["after fit"] = after_fit(folder / "after")
    report(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(stage) for stage in sys.argv[2:]])
