"""Checkpoints and weights of one engine: what must hold before they are saved or loaded, and what follows a load."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from zeroengine.disk.mapped_memory import populate
from zeroengine.engine.accumulation import MANUAL_MODE
from zeroengine.engine.assembly import EngineComponents
from zeroengine.engine.unset_parameters import mark_loaded
from zeroengine.errors import ZeroEngineError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from zeroengine.checkpoint.engine_parts import EngineParts
    from zeroengine.checkpoint.manager import CheckpointManager
    from zeroengine.weights.live_weights import LoadResult, Weights


class EngineCheckpoints:
    """Saves and loads checkpoints and weights. Every method that moves values is a collective.

    torch's part of checkpoints takes 50 MB and a second to import, so it is imported when it is first used.

    Args:
        parts: The parts of the engine.
    """

    def __init__(self, parts: EngineComponents) -> None:
        self._parts = parts
        self._manager: CheckpointManager | None = None
        self._stateful: dict[str, Stateful] = {}

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of the copy in CPU memory that a checkpoint is written from."""
        return 0 if self._manager is None else self._manager.copy_bytes

    def register_stateful(self, name: str, stateful: Stateful) -> None:
        """Make the state of ``stateful`` part of every checkpoint. See ``Engine.register_stateful``."""
        if name in self._stateful:
            raise ZeroEngineError(f"register_stateful(): the name {name!r} is taken")
        if not all(callable(getattr(stateful, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ZeroEngineError(
                f"register_stateful() takes an object with state_dict() and load_state_dict(), found "
                f"{type(stateful).__name__}"
            )
        self._stateful[name] = stateful
        if self._manager is not None:
            self._manager.hand_over(name)

    def unused_name(self, prefix: str) -> str:
        """Return a name for ``register_stateful`` that begins with ``prefix`` and a number that is free."""
        return f"{prefix}.{sum(name.startswith(f'{prefix}.') for name in self._stateful)}"

    def check_not_half_loaded(self, call: str) -> None:
        """Refuse ``call`` after a load that failed halfway.

        Raises:
            CheckpointError: The states are partly those of a checkpoint.
        """
        if self._manager is not None:
            self._manager.check_not_half_loaded(call)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str], tag: str | None, client_state: Any) -> None:
        """Write a checkpoint. See ``Engine.save_checkpoint``."""
        parts = self._parts
        parts.backward.end_if_over()
        with parts.group.collective_errors("to save a checkpoint"):
            parts.state_offloader.check_resident("save_checkpoint()")
            parts.placement.check_intact()
            parts.foreign_parameters.check()
            if parts.accumulation.has_gradients:
                raise ZeroEngineError(
                    "save_checkpoint() between the micro-steps of a step would lose their gradients: call it after a "
                    "step() that updated. Where the last step of an epoch has fewer micro-steps, write "
                    f"{MANUAL_MODE} in the configuration and end it with step()."
                )
        parts.step_runner.sync_and_report()
        self._settle_parameters()
        default_tag = f"step-{parts.step_runner.num_updates}"
        self._get_manager().save(directory, default_tag if tag is None else tag, client_state)

    def load(
        self, directory: str | os.PathLike[str], tag: str | None, *, weights_only: bool, strict: bool, fallback: bool
    ) -> Any:
        """Load a checkpoint and return its client state. See ``Engine.load_checkpoint``."""
        parts = self._parts
        with parts.group.collective_errors("to load a checkpoint"):
            parts.state_offloader.check_resident("load_checkpoint()")
            parts.foreign_parameters.check()
        parts.step_runner.sync_and_report()
        parts.backward.finish()
        self._settle_parameters()
        restored = self._get_manager().load(directory, tag, weights_only=weights_only, strict=strict, fallback=fallback)
        mark_loaded(parts.units, restored.missing)
        # Without counters the weights alone were loaded, and the step in progress goes on.
        if restored.counters:
            parts.step_runner.forget_clipping()
            parts.backward.drop_gradients()
            self._set_counters(restored.counters)
        return restored.client_state

    def wait(self) -> None:
        """Return when no checkpoint is being saved in the background. See ``Engine.wait_for_checkpoint``."""
        if self._manager is not None:
            self._manager.wait()

    def close(self) -> None:
        """Wait for the checkpoint that is being saved, and give back what saving holds."""
        if self._manager is not None:
            self._manager.close()

    # -- weights ----------------------------------------------------------------------------------

    def save_weights(
        self, directory: str | os.PathLike[str], dtype: str | torch.dtype | None, shard_size: str | int
    ) -> None:
        """Write safetensors. See ``Engine.save_weights``."""
        from zeroengine.weights.live_weights import save

        with self._parts.group.collective_errors("to save weights"):
            self._parts.foreign_parameters.check()
            self.check_not_half_loaded("save_weights()")
        self._settle_parameters()
        save(self._stateful_parts(), directory, dtype, shard_size)

    def load_weights(self, weights: Weights, strict: bool) -> LoadResult:
        """Load parameters and buffers. See ``Engine.load_weights``."""
        from zeroengine.weights.live_weights import load

        parts = self._parts
        with parts.group.collective_errors("to load weights"):
            parts.state_offloader.check_resident("load_weights()")
            parts.foreign_parameters.check()
            if parts.gatherer.num_user_gathered:
                raise ZeroEngineError(
                    "load_weights() inside `with zeroengine.gathered(...)`: its end would write the old values back. "
                    "Leave the `with` first."
                )
        parts.backward.finish()
        self._settle_parameters()
        loaded = load(self._stateful_parts(), weights, strict)
        mark_loaded(parts.units, loaded.missing_keys)
        return loaded

    # -- what both need ---------------------------------------------------------------------------

    def _settle_parameters(self) -> None:
        """Return when nothing reads or writes parameters and masters, and masters are what the model computes with.

        Call it on every rank, before they are saved or replaced.

        Raises:
            DivergenceError: On every rank, where the ranks wrote different values into the model.
        """
        parts = self._parts
        parts.gatherer.finish_gathers_and_release()
        parts.placement.finish_copies()
        parts.external_writes.compare()
        parts.optimizer.reload_masters()
        parts.placement.evict()

    def _publish_masters(self) -> None:
        """Let all ranks compute with master weights that were written by a load."""
        parts = self._parts
        parts.placement.finish_copies()
        for states in parts.optimizer.shards:
            if states.mixed:
                populate(states.master)
                populate(states.param, write=True)
                states.param.copy_(states.master)
            parts.gatherer.publish_update(states.unit)
            parts.placement.evict(states.param, states.master)
        parts.external_writes.remember()
        parts.gatherer.finish_gathers_and_release()
        parts.transport.fence()

    def _counters(self) -> dict[str, int]:
        runner = self._parts.step_runner
        runner.sync_step()
        return {
            "global_steps": runner.num_updates,
            "micro_steps": self._parts.accumulation.micro_steps,
            "skipped_steps": runner.num_skipped,
        }

    def _set_counters(self, saved: dict[str, int]) -> None:
        runner, config = self._parts.step_runner, self._parts.config
        counters = self._counters() | saved
        runner.num_updates, runner.num_skipped = counters["global_steps"], counters["skipped_steps"]
        if config.manual_accumulation:
            micro_steps = counters["micro_steps"]
        else:  # The checkpoint may have been saved with another number of micro-steps in a step.
            micro_steps = (runner.num_updates + runner.num_skipped) * int(config.gradient_accumulation_steps)
        self._parts.accumulation.micro_steps = micro_steps

    def _stateful_parts(self) -> EngineParts:
        from zeroengine.checkpoint.engine_parts import EngineParts

        parts = self._parts
        return EngineParts(
            parts.model,
            parts.units,
            parts.optimizer,
            parts.step_runner.schedule,
            parts.scaler,
            parts.config,
            parts.group,
            self._counters,
            self._publish_masters,
            self._stateful,
            bool(parts.placement.disks),
            parts.placement.evict,
        )

    def _get_manager(self) -> CheckpointManager:
        if self._manager is None:
            from zeroengine.checkpoint.manager import CheckpointManager

            self._manager = CheckpointManager(self._stateful_parts())
        return self._manager
