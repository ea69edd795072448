"""What Lightning adds to an engine's checkpoint, and the paths that it is saved under."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeroengine.engine.engine import Engine
from zeroengine.errors import CheckpointError, ZeroEngineError

# The name of the checkpoint in the folder that Lightning chooses, one for each save.
TAG = "checkpoint"
STATE_KEY = "lightning"


def checked_folder(path: str | os.PathLike[str], call: str) -> Path:
    """Return the folder that a checkpoint is saved in.

    Raises:
        ZeroEngineError: It cannot be a folder of this machine.
    """
    if "://" in os.fspath(path):
        raise ZeroEngineError(
            f"{call}: {os.fspath(path)} is no folder of this machine. Every rank writes its part of a checkpoint: name "
            "a folder on a disk that all ranks share, and upload it afterwards."
        )
    if Path(path).expanduser().is_file():
        raise ZeroEngineError(
            f"{call}: {os.fspath(path)} is a file, and a checkpoint of zeroengine is a folder. Remove the file or "
            "choose another name."
        )
    return Path(path).expanduser()


def is_engine_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a folder, as zeroengine writes them, and not a file of plain Lightning.

    Raises:
        CheckpointError: There is nothing.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {os.fspath(path)}")
    return path.is_dir()


def client_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return Lightning's state for ``Engine.save_checkpoint``, in the encoding of Lightning's own files."""
    # Lightning's state may hold objects of the user, such as hyperparameters. A zeroengine checkpoint never holds
    # objects, so they are one tensor of bytes, which is decoded on the same conditions as a file of Lightning.
    stream = io.BytesIO()
    torch.save(dict(state), stream)
    return {STATE_KEY: torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)}


def lightning_state(client: Any, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    """Return the state that ``client_state`` encoded.

    Args:
        client: What ``Engine.load_checkpoint`` returned.
        path: The checkpoint, for the message.
        weights_only: As of ``torch.load``: None and True refuse objects of user classes.

    Raises:
        CheckpointError: The checkpoint was not saved under Lightning.
    """
    if not isinstance(client, dict) or STATE_KEY not in client:
        raise CheckpointError(
            f"{os.fspath(path)} has no state of Lightning: engine.save_checkpoint wrote it. Load it with "
            "zeroengine.engine_of(model).load_checkpoint(...), before the training or after fabric.setup()."
        )
    stream = io.BytesIO(client[STATE_KEY].numpy().tobytes())
    state: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=weights_only)
    return state


def save_engines(engines: Mapping[str, Engine], folder: Path, state: Mapping[str, Any]) -> None:
    """Save engines in one folder. A collective.

    Args:
        engines: The engines by name. A single one is saved in ``folder`` itself, several in subfolders of their names.
        folder: The folder.
        state: What Lightning saves beside them, with the first engine.
    """
    for number, (name, engine) in enumerate(engines.items()):
        where = folder if len(engines) == 1 else folder / name
        engine.save_checkpoint(where, TAG, client_state(state) if number == 0 else None)


def load_engines(
    engines: Mapping[str, Engine], folder: Path, *, weights_only: Mapping[str, bool], strict: bool
) -> list[Any]:
    """Load what ``save_engines`` saved, and return the client state of each engine. A collective.

    Args:
        engines: The engines by name.
        folder: The folder.
        weights_only: Whether an engine's optimizer, schedule and counters stay, by name.
        strict: Whether a checkpoint must have the names of the model.

    Raises:
        CheckpointError: The folder has no checkpoint in it, or loading it failed.
    """
    folders = {name: folder / name if (folder / name).is_dir() and name != TAG else folder for name in engines}
    for where in folders.values():
        if not (where / TAG).is_dir():
            raise CheckpointError(_no_checkpoint(where))
    client_states = []
    for name, engine in engines.items():
        where = folders[name]
        client_states.append(engine.load_checkpoint(where, TAG, weights_only=weights_only[name], strict=strict))
    return client_states


def _no_checkpoint(folder: Path) -> str:
    """Return the message that ``folder`` has no checkpoint in it, and what to pass."""
    inside = sorted(path.parent for path in folder.glob(f"*/{TAG}"))
    example = inside[-1] if inside else "checkpoints/epoch=0-step=500.ckpt"
    return (
        f"there is no checkpoint in the folder {folder}. Pass the path that Lightning saved it under, a folder with "
        f"{TAG}/ in it, such as {example}; or None to start anew."
    )
