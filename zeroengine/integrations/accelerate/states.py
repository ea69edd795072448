"""What `save_state` writes, and `load_state` reads.

Each engine writes a checkpoint, `zeroengine/` for the first model of `prepare` and `zeroengine_1/` for the second. The
other files are accelerate's: schedules, samplers, random numbers, and registered objects. `Accelerator.save_state`
itself would gather every model, and pickle optimizers, whose state is partitioned.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

from zeroengine.engine.initialize import engine_of
from zeroengine.engine.replay import ReplayTarget
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.integrations.accelerate.wrappers import ZeroAcceleratedOptimizer

# The tag of an engine's checkpoint in its folder.
TAG = "state"


def save(
    accelerator: Accelerator,
    output_dir: str | None,
    safe_serialization: bool,
    options: dict[str, Any],
) -> str:
    """Save the states. See `ZeroAccelerator.save_state`."""
    settings = accelerator.project_configuration
    # A replay would replace or remove what the run has saved.
    if ReplayTarget.of_process() is not None:
        return output_dir or ""
    if settings.automatic_checkpoint_naming:
        folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if folder.exists():
            raise ZeroEngineError(
                f"save_state(): {folder} is there already. Set accelerator.project_configuration.iteration to the "
                "number of the next checkpoint."
            )
        # No rank makes the folder before all have looked.
        accelerator.wait_for_everyone()
    elif output_dir is None:
        raise ZeroEngineError(
            "save_state() needs a folder: write accelerator.save_state(folder), or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    else:
        folder = Path(output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    weights: list[Any] = []
    for index, model in enumerate(accelerator._models):
        engine = engine_of(model)
        if engine is None:
            weights.append(accelerator.get_state_dict(model, unwrap=False))
        else:
            # Ranks that join later have no file of their own with the step.
            engine.save_checkpoint(_engine_folder(folder, index), TAG, {"step": accelerator.step}, **options)
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, weights, str(folder))
    save_accelerator_state(
        str(folder),
        weights,
        _other_optimizers(accelerator),
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.step,
        save_on_each_node=settings.save_on_each_node,
        safe_serialization=safe_serialization,
    )
    for index, custom in enumerate(accelerator._custom_objects):
        save_custom_state(custom, str(folder), index, save_on_each_node=settings.save_on_each_node)
    # A later load on any rank finds the files of all ranks.
    accelerator.wait_for_everyone()
    if settings.automatic_checkpoint_naming and settings.total_limit is not None and accelerator.is_main_process:
        # Older checkpoints go last, so that a failure leaves one.
        for old in _numbered(folder.parent)[: -settings.total_limit]:
            shutil.rmtree(old)
    settings.iteration += 1
    return str(folder)


def restore(
    accelerator: Accelerator,
    input_dir: str | None,
    load_kwargs: dict[str, Any] | None,
    options: dict[str, Any],
) -> None:
    """Load the states. See `ZeroAccelerator.load_state`."""
    folder = _folder_to_load(accelerator, input_dir)
    map_location = options.pop("map_location", "cpu")
    others, step = [], None
    for index, model in enumerate(accelerator._models):
        engine = engine_of(model)
        if engine is None:
            others.append(model)
            continue
        checkpoint = _engine_folder(folder, index)
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"{folder} has no {checkpoint.name}: it was not saved by ZeroAccelerator.save_state with as many "
                "models. Of a checkpoint of accelerate itself, the weights can be loaded: "
                f"zeroengine.engine_of(model).load_weights({str(folder / 'model.safetensors')!r})."
            )
        client_state = engine.load_checkpoint(checkpoint, TAG, **options) or {}
        step = client_state.get("step", step)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(others, str(folder))
    states = load_accelerator_state(
        str(folder),
        others,
        _other_optimizers(accelerator),
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        map_location=map_location,
        load_kwargs=load_kwargs,
    )
    accelerator.step = step if step is not None else states.get("step", accelerator.step)
    saved = sum(re.fullmatch(r"custom_checkpoint_\d+\.pkl", name) is not None for name in os.listdir(folder))
    if saved != len(accelerator._custom_objects):
        raise CheckpointError(
            f"{folder} has {saved} registered objects, and register_for_checkpointing was given "
            f"{len(accelerator._custom_objects)} here. Register the same objects, in the same order."
        )
    for index, custom in enumerate(accelerator._custom_objects):
        load_custom_state(custom, str(folder), index)


def _engine_folder(folder: Path, index: int) -> Path:
    return folder / (f"zeroengine_{index}" if index else "zeroengine")


def _other_optimizers(accelerator: Accelerator) -> list[Any]:
    """Return the optimizers without an engine. Others are in the checkpoints of their engines."""
    return [known for known in accelerator._optimizers if not isinstance(known, ZeroAcceleratedOptimizer)]


def _folder_to_load(accelerator: Accelerator, input_dir: str | None) -> Path:
    if input_dir is not None:
        folder = Path(input_dir).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"load_state({str(input_dir)!r}): there is no such folder")
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ZeroEngineError("load_state() needs a folder: write accelerator.load_state(folder).")
    parent = Path(accelerator.project_dir, "checkpoints")
    folders = _numbered(parent)
    if not folders:
        raise CheckpointError(f"load_state(): {parent} has no checkpoint")
    return folders[-1]


def _numbered(parent: Path) -> list[Path]:
    """Return the folders that `automatic_checkpoint_naming` makes, from the oldest to the newest."""
    folders = [path for path in parent.glob("checkpoint_*") if path.name.rpartition("_")[2].isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]))
