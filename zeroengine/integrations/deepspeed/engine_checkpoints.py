"""What ``DeepSpeedEngine`` saves and loads."""

from __future__ import annotations

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.directory import LATEST
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.integrations.deepspeed.engine_properties import EngineProperties
from zeroengine.integrations.deepspeed.zero_to_fp32 import write_recovery_script
from zeroengine.utils.files import checked_path

log = logging.getLogger("zeroengine")
# A file of every checkpoint that DeepSpeed wrote.
DEEPSPEED_FILES = "*_model_states.pt"

# The kinds of states that ``offload_states`` moves, by DeepSpeed's names.
KINDS_OF_STATES = {
    "hp_params": ("masters",),
    "optim_states": ("moments", "averages"),
    "lp_params": ("parameters",),
    **dict.fromkeys(("contiguous_grad_buffer", "lp_grads"), ("gradients",)),
}


class TagMismatchError(CheckpointError, AssertionError):
    """Ranks name one checkpoint differently. DeepSpeed asserts this, and scripts catch its class of error."""


class EngineCheckpointMethods(EngineProperties):
    """The part of ``DeepSpeedEngine`` that saves, loads and offloads: DeepSpeed's folders, zeroengine's files."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the checkpoint ``save_dir/tag``, in zeroengine's format. Call it on every rank.

        Args:
            save_dir: The folder of checkpoints.
            tag: The name of the checkpoint. None: ``global_step<global_steps>``. If the ranks pass different ones,
                rank 0's counts, or AssertionError is raised: see "tag_validation" in the section "checkpoint".
            client_state: More to save: tensors, numbers, strings, and containers of these. Rank 0's is saved.
            save_latest: Whether the file ``latest`` names this checkpoint.
            exclude_frozen_parameters: Whether frozen parameters are left out.

        Returns:
            True.
        """
        if not save_dir:
            raise ZeroEngineError(f"save_checkpoint() needs the folder of checkpoints, found save_dir={save_dir!r}")
        tag = self._common_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        folder = checked_path(save_dir, "save_checkpoint(save_dir)", CheckpointError)
        latest, is_rank_0 = Path(folder) / LATEST, self.engine.rank == 0
        named = latest.read_text() if not save_latest and latest.is_file() else None
        if self.engine.backwards_in_step and is_rank_0:
            log.warning(
                "save_checkpoint() between the micro-steps of a step: their gradients are not saved, so a run that "
                "continues from this checkpoint repeats the step"
            )
        frozen = not exclude_frozen_parameters
        self.engine.save_checkpoint(folder, tag, client_state or {}, frozen=frozen, inside_step=True)
        if is_rank_0:
            write_recovery_script(folder)
        if not save_latest or not self.engine.config.checkpoint.async_save:
            # A save in the background writes the file `latest` at its end. Without one the folder is free again, as it
            # is in DeepSpeed: a second Trainer of this process may save into it.
            self.engine.wait_for_checkpoint()
        if not save_latest:
            if is_rank_0:
                if named is None:
                    latest.unlink(missing_ok=True)
                else:
                    latest.write_text(named)
            self.engine.group.all_gather_object(None, "to name the latest checkpoint")
        return True

    def _common_tag(self, tag: str) -> str:
        """Return the tag of rank 0, because a checkpoint is one folder.

        Raises:
            TagMismatchError: The tags differ, and the key "tag_validation" is "FAIL".
        """
        tags, validation = self.engine.group.all_gather_object(tag, "to name a checkpoint"), self._config.tag_validation
        if len(set(tags)) > 1 and validation != "IGNORE":
            message = f"the ranks name a checkpoint differently: {', '.join(map(repr, tags[:4]))}. Pass one tag"
            if validation == "FAIL":
                raise TagMismatchError(message)
            log.warning("%s; that of rank 0 counts", message)
        return tags[0]

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that was saved at any stage and world size. Call it on every rank.

        Returns:
            The path of the checkpoint and the ``client_state``; None twice, with a warning, where there is none.
        """
        if custom_load_fn is not None:
            raise ZeroEngineError(
                "load_checkpoint(custom_load_fn=...): write engine.engine.load_weights(state_dict) with a state dict "
                "that you made"
            )
        self.engine.wait_for_checkpoint()
        folder = checked_path(load_dir, "load_checkpoint(load_dir)", CheckpointError)
        own_tag = None if tag is None else str(tag)
        if own_tag is None:
            with contextlib.suppress(OSError):
                own_tag = (Path(folder) / LATEST).read_text().strip()
        tag = self.engine.group.all_gather_object(own_tag, "to find a checkpoint")[0]
        if tag is None:
            log.warning("%s names no checkpoint to load, and nothing is loaded", Path(folder) / LATEST)
            return None, None
        path = Path(folder) / tag
        if any(path.glob(DEEPSPEED_FILES)):
            raise CheckpointError(
                f"{path} is a checkpoint that DeepSpeed wrote. Turn it into one that loads here, once: "
                f"zero-import {folder} NEW_FOLDER --tag {tag}"
            )
        running = self.engine.lr_scheduler
        own_state = None if load_lr_scheduler_states or running is None else copy.deepcopy(running.state_dict())
        client_state = self.engine.load_checkpoint(
            folder,
            tag,
            weights_only=load_module_only,
            optimizer=load_optimizer_states and not load_module_only,
            strict=load_module_strict,
        )
        if own_state is not None:
            running.load_state_dict(own_state)
        return str(path), client_state if isinstance(client_state, dict) else {}

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole state dict with ``torch.save``, in the dtype that the model computes in.

        Returns:
            True.
        """
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            folder = Path(checked_path(save_dir, "save_16bit_model(save_dir)", CheckpointError))
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / save_filename)
        self.engine.group.all_gather_object(None, "to save the model")
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole state dict on rank 0, and None on the others. A collective."""
        state = self.engine.full_state_dict(trainable_only=exclude_frozen_parameters, rank0_only=True)
        return state if self.engine.rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, *ranks: int) -> str:
        """Return the directory that holds the optimizer's state: that of the checkpoint."""
        return str(Path(checkpoints_path) / tag)

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Free the device's memory until ``reload_states``. See ``Engine.offload_states``."""
        names = None
        if include is not None:
            values = {str(getattr(kind, "value", kind)) for kind in include}
            unknown = sorted(values - KINDS_OF_STATES.keys())
            if unknown:
                known = sorted(KINDS_OF_STATES)
                raise ZeroEngineError(f"offload_states(): {unknown[0]!r} is no state; write some of {known}")
            names = sorted({name for value in values for name in KINDS_OF_STATES[value]})
        self.engine.offload_states(names, device=str(getattr(device, "value", device)))  # type: ignore[arg-type]

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back the states that ``offload_states`` moved."""
        self.engine.reload_states()
