"""``deepspeed.utils.zero_to_fp32``: the fp32 weights of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.weights.export import export


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint of zeroengine, on the CPU.

    Args:
        checkpoint_dir: The folder of checkpoints.
        tag: The name of the checkpoint. None: the newest.
        exclude_frozen_parameters: Not used: what was saved is returned.
        lazy_mode: Not used.
    """
    folder = CheckpointFolder(checkpoint_dir)
    with TemporaryDirectory(dir=checkpoint_dir) as temporary:
        export(folder.path, temporary, tag=tag, dtype="fp32")
        state: dict[str, torch.Tensor] = {}
        for file in sorted(Path(temporary).glob("*.safetensors")):
            state |= load_file(file)
    return state


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint as one file, ``pytorch_model.bin`` or ``model.safetensors``."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        save_file(state, Path(output_dir) / "model.safetensors")
    else:
        torch.save(state, Path(output_dir) / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Put the fp32 weights of a checkpoint into an ordinary model, and return it on the CPU."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model
