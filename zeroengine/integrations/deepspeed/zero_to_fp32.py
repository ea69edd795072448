"""``deepspeed.utils.zero_to_fp32``: the fp32 weights of a checkpoint, as functions and as a command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from zeroengine.checkpoint.directory import CheckpointFolder
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import checked_path
from zeroengine.weights.export import export

# DeepSpeed puts a program of this name beside its checkpoints, and its users know it.
RECOVERY_SCRIPT = "zero_to_fp32.py"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint of zeroengine, on the CPU. Names of a tied parameter share one tensor.

    Args:
        checkpoint_dir: The folder of checkpoints.
        tag: The name of the checkpoint. None: the newest.
        exclude_frozen_parameters: Not used: what was saved is returned.
        lazy_mode: Not used.
    """
    checkpoint_dir = checked_path(checkpoint_dir, "the folder of checkpoints", CheckpointError)
    folder = CheckpointFolder(checkpoint_dir)
    with TemporaryDirectory(dir=checkpoint_dir) as temporary:
        export(folder.path, temporary, tag=tag, dtype="fp32")
        state: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for file in sorted(Path(temporary).glob("*.safetensors")):
            state |= load_file(file)
            with safe_open(file, framework="pt") as opened:
                tied = json.loads((opened.metadata() or {}).get("tied", "{}"))
            aliases.update(tied)
    return state | {alias: state[name] for alias, name in aliases.items()}


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
    output_dir = checked_path(output_dir, "the folder for the weights", CheckpointError)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        # The format stores every tensor once, and loaders tie parameters themselves.
        once = {id(value): name for name, value in reversed(state.items())}
        save_file({name: state[name] for name in once.values()}, Path(output_dir) / "model.safetensors")
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


def write_recovery_script(folder: str | os.PathLike[str]) -> None:
    """Write the program ``zero_to_fp32.py`` into a folder of checkpoints. It needs zeroengine to be installed."""
    path = Path(folder) / RECOVERY_SCRIPT
    # A checkpoint that is written in the background may not have made the folder yet.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!{sys.executable}\n"
        '"""Write the fp32 weights of a checkpoint in this folder: zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER"""\n'
        "from zeroengine.integrations.deepspeed.zero_to_fp32 import main\n\n"
        'if __name__ == "__main__":\n'
        "    main()\n"
    )
    path.chmod(path.stat().st_mode | 0o111)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the fp32 weights of a checkpoint, as the program ``zero_to_fp32.py`` of DeepSpeed's checkpoints does."""
    parser = argparse.ArgumentParser(prog=RECOVERY_SCRIPT, description=main.__doc__)
    parser.add_argument("checkpoint_dir", help="the folder of checkpoints")
    parser.add_argument("output_dir", help="the folder for pytorch_model.bin, or model.safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint (default: the newest)")
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors")
    # DeepSpeed's other options, which change nothing here: the weights are one file, and hold what was saved.
    parser.add_argument("--max_shard_size", default="5GB", help=argparse.SUPPRESS)
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        options.checkpoint_dir,
        options.output_dir,
        safe_serialization=options.safe_serialization,
        tag=options.tag,
    )
