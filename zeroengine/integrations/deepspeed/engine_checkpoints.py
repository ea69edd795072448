"""Checkpoints and weights of a ``DeepSpeedEngine``: DeepSpeed's calls and folders, zeroengine's files."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch

from zeroengine.engine.engine import Engine
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.integrations.deepspeed.zero_to_fp32 import write_recovery_script
from zeroengine.utils.paths import checked_path

log = logging.getLogger("zeroengine")
LATEST = "latest"
# A file of every checkpoint that DeepSpeed wrote.
DEEPSPEED_FILES = "*_model_states.pt"


class TagMismatchError(CheckpointError, AssertionError):
    """Ranks name one checkpoint differently. DeepSpeed asserts this, and scripts catch its class of error."""


class EngineFiles:
    """Saves and loads what belongs to one engine. Every method is a collective.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def common_tag(self, tag: str, validation: str) -> str:
        """Return the tag of rank 0, because a checkpoint is one folder.

        Args:
            tag: This rank's tag.
            validation: What to do if the tags differ: "FAIL", "WARN" or "IGNORE".

        Raises:
            TagMismatchError: The tags differ, and ``validation`` is "FAIL".
        """
        tags = self._all_ranks("to name a checkpoint", tag)
        if len(set(tags)) > 1 and validation != "IGNORE":
            message = f"the ranks name a checkpoint differently: {', '.join(map(repr, tags[:4]))}. Pass one tag"
            if validation == "FAIL":
                raise TagMismatchError(message)
            log.warning("%s; that of rank 0 counts", message)
        return str(tags[0])

    def save(
        self,
        folder: str | os.PathLike[str],
        tag: str,
        client_state: dict[str, Any] | None,
        save_latest: bool,
        exclude_frozen: bool,
    ) -> bool:
        """Write a checkpoint. See ``DeepSpeedEngine.save_checkpoint``."""
        folder = checked_path(folder, "save_checkpoint(save_dir)", CheckpointError)
        latest = Path(folder) / LATEST
        named = latest.read_text() if not save_latest and latest.is_file() else None
        parts = self._engine._parts
        parts.backward.end_if_over()
        if parts.accumulation.has_gradients and parts.group.rank == 0:
            log.warning(
                "save_checkpoint() between the micro-steps of a step: their gradients are not saved, so a run that "
                "continues from this checkpoint repeats the step"
            )
        self._engine._checkpoints.save(folder, tag, client_state or {}, not exclude_frozen, inside_step=True)
        if parts.group.rank == 0:
            write_recovery_script(folder)
        if not save_latest or not self._engine.config.checkpoint.async_save:
            # A save in the background writes the file `latest` at its end. Without one the folder is free again, as it
            # is in DeepSpeed: a second Trainer of this process may save into it.
            self._engine.wait_for_checkpoint()
        if not save_latest:
            if self._engine.rank == 0:
                if named is None:
                    latest.unlink(missing_ok=True)
                else:
                    latest.write_text(named)
            self._all_ranks("to name the latest checkpoint")
        return True

    def load(
        self,
        folder: str | os.PathLike[str],
        tag: str | None,
        *,
        strict: bool,
        optimizer: bool,
        schedule: bool,
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint. See ``DeepSpeedEngine.load_checkpoint``."""
        self._engine.wait_for_checkpoint()
        folder = checked_path(folder, "load_checkpoint(load_dir)", CheckpointError)
        tag = self._all_ranks("to find a checkpoint", _tag_in(folder, tag))[0]
        if tag is None:
            log.warning("%s names no checkpoint to load, and nothing is loaded", Path(folder) / LATEST)
            return None, None
        path = Path(folder) / tag
        if any(path.glob(DEEPSPEED_FILES)):
            raise CheckpointError(
                f"{path} is a checkpoint that DeepSpeed wrote. Turn it into one that loads here, once: "
                f"zero-import {folder} NEW_FOLDER --tag {tag}"
            )
        running = self._engine.lr_scheduler
        own_state = None if schedule or running is None else copy.deepcopy(running.state_dict())
        client_state = self._engine.load_checkpoint(
            folder, tag, weights_only=module_only, optimizer=optimizer and not module_only, strict=strict
        )
        if own_state is not None:
            running.load_state_dict(own_state)
        return str(path), client_state if isinstance(client_state, dict) else {}

    def consolidated_state_dict(self, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """Return the whole state dict on rank 0, in the dtypes that the model computes in."""
        state = self._engine.full_state_dict(trainable_only=exclude_frozen, rank0_only=True)
        return state if self._engine.rank == 0 else None

    def save_16bit_model(self, folder: str | os.PathLike[str], name: str, exclude_frozen: bool) -> bool:
        """Write the whole state dict with ``torch.save``."""
        state = self.consolidated_state_dict(exclude_frozen)
        if state is not None:
            folder = checked_path(folder, "save_16bit_model(save_dir)", CheckpointError)
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(folder) / name)
        self._all_ranks("to save the model")
        return True

    def offload_states(self, include: Any, device: Any) -> None:
        """Free the device's memory of states. See ``Engine.offload_states``."""
        kinds = {
            "hp_params": "optimizer",
            "optim_states": "optimizer",
            "lp_params": "parameters",
            "lp_grads": "gradients",
            "contiguous_grad_buffer": "gradients",
        }
        names = None
        if include is not None:
            values = [str(getattr(kind, "value", kind)) for kind in include]
            unknown = sorted(set(values) - set(kinds))
            if unknown:
                raise ZeroEngineError(f"offload_states(): {unknown[0]!r} is no state; write some of {sorted(kinds)}")
            names = sorted({kinds[value] for value in values})
        self._engine.offload_states(names, device=str(getattr(device, "value", device)))  # type: ignore[arg-type]

    def _all_ranks(self, purpose: str, fact: Any = None) -> list[Any]:
        return self._engine._parts.group.all_gather_object(fact, purpose)


def _tag_in(folder: str | os.PathLike[str], tag: str | None) -> str | None:
    """Return ``tag``, or the one that the file ``latest`` names; None where there is no such file."""
    if tag is not None:
        return tag
    with contextlib.suppress(OSError):
        return (Path(folder) / LATEST).read_text().strip()
    return None
