"""Save and load the checkpoints and weights of one engine, with the checks before and the repairs after."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zeroengine.checkpoint.load_plan import LoadOptions
from zeroengine.engine.accumulation import MANUAL_MODE
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.rounds import Rounds
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.byte_size import format_byte_size

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts
    from zeroengine.checkpoint.manager import CheckpointManager
    from zeroengine.weights.live_loads import LoadResult, Weights

log = logging.getLogger("zeroengine")


class EngineCheckpoints:
    """Saves and loads checkpoints and weights. Every method that moves values is a collective.

    torch's part of checkpoints takes 50 MB and a second to import, so it is imported when it is first used.

    Args:
        parts: The parts of the engine.
        rounds: Makes replicas equal before a save.
    """

    def __init__(self, parts: EngineParts, rounds: Rounds) -> None:
        self._parts, self._rounds = parts, rounds
        self._manager: CheckpointManager | None = None
        self._stateful: dict[str, Stateful] = {}

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of the copy in CPU memory that a checkpoint is written from."""
        return 0 if self._manager is None else self._manager.copy_bytes

    def register_stateful(self, name: str, stateful: Stateful) -> None:
        """Make the state of ``stateful`` part of every checkpoint. See ``Engine.register_stateful``."""
        # A second object under one name would overwrite the first one's state in every checkpoint.
        if name in self._stateful:
            raise ZeroEngineError(f"register_stateful(): the name {name!r} is taken")
        if not all(callable(getattr(stateful, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ZeroEngineError(
                f"register_stateful() takes an object with state_dict() and load_state_dict(), found "
                f"{type(stateful).__name__}"
            )
        self._stateful[name] = stateful
        # A checkpoint may have been loaded before the object was registered. The manager kept the state for it.
        if self._manager is not None:
            self._manager.hand_over(name)

    def unused_name(self, prefix: str) -> str:
        """Return a name for ``register_stateful`` that begins with ``prefix`` and a number that is free."""
        # Loaders are numbered in the order of registration, so each finds its own state again in a resumed run.
        return f"{prefix}.{sum(name.startswith(f'{prefix}.') for name in self._stateful)}"

    def check_not_half_loaded(self, call: str) -> None:
        """Refuse ``call`` after a load that failed halfway.

        Raises:
            CheckpointError: The states are partly those of a checkpoint.
        """
        if self._manager is not None:
            self._manager.check_not_half_loaded(call)

    # -- checkpoints ------------------------------------------------------------------------------

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None,
        client_state: Any,
        frozen: bool,
        *,
        inside_step: bool = False,
    ) -> None:
        """Write a checkpoint. See ``Engine.save_checkpoint``.

        Args:
            directory: The folder of checkpoints.
            tag: The checkpoint's name.
            client_state: Anything else to save.
            frozen: Whether frozen parameters are saved.
            inside_step: Whether this may come between the micro-steps of a step. Their gradients are not saved.
        """
        with self._parts.timer.span("checkpoint"):
            self._save(directory, tag, client_state, frozen, inside_step)

    def _save(
        self, directory: str | os.PathLike[str], tag: str | None, client_state: Any, frozen: bool, inside_step: bool
    ) -> None:
        parts = self._parts
        # A plain loss.backward() may not have been ended yet, and its gradients would be missed below.
        parts.backward.end_if_over()
        # All checks run on every rank before anything moves. If one rank refuses, all raise and nothing has changed.
        with parts.group.collective_errors("to save a checkpoint"):
            parts.state_offloader.check_resident("save_checkpoint()")
            parts.placement.check_intact()
            parts.foreign_parameters.check()
            if parts.accumulation.has_gradients and not inside_step:
                raise ZeroEngineError(
                    "save_checkpoint() between the micro-steps of a step would lose their gradients: call it after a "
                    "step() that updated. Where the last step of an epoch has fewer micro-steps, write "
                    f"{MANUAL_MODE} in the configuration and end it with step()."
                )
        # An overflow may be unreported yet, and the counters that are saved must include the last step.
        parts.step_runner.await_and_report()
        # Masters take over the values that the user wrote into the model since the last step, so that these are saved.
        parts.master_weights.settle()
        self._rounds.make_replicas_equal()
        default_tag = f"step-{parts.step_runner.num_updates}"
        self._get_manager().save(directory, default_tag if tag is None else tag, client_state, frozen=frozen)

    def load(self, directory: str | os.PathLike[str], tag: str | None, options: LoadOptions) -> Any:
        """Load a checkpoint and return its client state. See ``Engine.load_checkpoint``."""
        parts = self._parts
        with parts.group.collective_errors("to load a checkpoint"):
            parts.state_offloader.check_resident("load_checkpoint()")
            parts.foreign_parameters.check()
        # The report reads the gradients of the last step, so it comes before a failed backward drops gradients.
        parts.step_runner.await_and_report()
        parts.backward.finish()
        parts.master_weights.settle()
        with parts.timer.span("checkpoint"):
            restored = self._get_manager().load(directory, tag, options)
        self._mark_loaded(restored.missing)
        self._rounds.restart(restored.missing, loads_state=bool(restored.counters))
        # Without counters only the weights were loaded, and the step in progress goes on.
        if restored.counters:
            # These gradients belong to the parameters of before the load.
            parts.backward.drop_gradients()
            self._set_counters(restored.counters)
        # A checkpoint has no errors of quantized gradients: they are those of other gradients, perhaps of other ranks.
        parts.reducer.reduces.forget_errors()
        if parts.config.zero_optimization.zeropp_loco_param is not None and parts.group.rank == 0:
            log.warning("zeropp_loco_param: the error feedback of quantized gradients restarts from zero after a load")
        step = parts.step_runner.num_updates + parts.step_runner.num_skipped
        subject, path = "weights are" if options.weights_only else "the run is", os.fspath(directory)
        parts.report_event("resume", step, f"{subject} loaded from {path}, at step {step}", path=path)
        return restored.client_state

    def wait(self) -> None:
        """Return when no checkpoint is being saved in the background. See ``Engine.wait_for_checkpoint``."""
        if self._manager is not None:
            with self._parts.timer.span("checkpoint"):
                # Nothing of this job is written from here on, so another one may save into the folder.
                self._manager.finish()

    def close(self) -> None:
        """Wait for the checkpoint that is being saved, and give back what saving holds."""
        # A process that never saved has no manager, and closing must not import torch's checkpoint code for it.
        if self._manager is not None:
            self._manager.close()

    # -- weights ----------------------------------------------------------------------------------

    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None,
        shard_size: str | int,
        names: str | Iterable[str] | None,
        trainable_only: bool,
    ) -> None:
        """Write safetensors. See ``Engine.save_weights``."""
        # This module imports safetensors and much of the checkpoint code, so it is imported at its first use.
        from zeroengine.weights.live_weights import save

        with self._parts.group.collective_errors("to save weights"):
            self._parts.foreign_parameters.check()
            # A load that failed halfway left some parameters of the checkpoint and some from before it.
            self.check_not_half_loaded("save_weights()")
        with self._parts.timer.span("checkpoint"):
            self._parts.master_weights.settle()
            self._rounds.end_round()
            save(self._stateful_parts(), directory, dtype, shard_size, names, trainable_only)

    def load_weights(self, weights: Weights, strict: bool) -> LoadResult:
        """Load parameters and buffers. See ``Engine.load_weights``."""
        from zeroengine.weights.live_loads import load

        parts = self._parts
        with parts.group.collective_errors("to load weights"):
            parts.state_offloader.check_resident("load_weights()")
            parts.foreign_parameters.check()
            # Leaving the `with` compares checksums and would take the loaded values for values that the user wrote.
            if parts.gatherer.gathers.num_pins:
                raise ZeroEngineError(
                    "load_weights() inside `with zeroengine.gathered(...)`: its end would write the old values back. "
                    "Leave the `with` first."
                )
        parts.backward.finish()
        parts.master_weights.settle()
        loaded = load(self._stateful_parts(), weights, strict)
        self._mark_loaded(loaded.missing_keys)
        self._rounds.restart(loaded.missing_keys, loads_state=False)
        return loaded

    # -- what both need ---------------------------------------------------------------------------

    def _mark_loaded(self, missing: Sequence[str]) -> None:
        """Record that every parameter has values, except those named in ``missing`` which had none before."""
        for unit in self._parts.units:
            # The forward goes on refusing these.
            unit.unset_params &= set(missing)

    def _counters(self) -> dict[str, int]:
        runner = self._parts.step_runner
        runner.await_result()
        return {
            "global_steps": runner.num_updates,
            "micro_steps": self._parts.accumulation.micro_steps,
            "skipped_steps": runner.num_skipped,
        }

    def _set_counters(self, saved: dict[str, int]) -> None:
        runner, config = self._parts.step_runner, self._parts.config
        # A foreign checkpoint may lack some counters. These keep the engine's own values.
        counters = self._counters() | saved
        runner.num_updates, runner.num_skipped = counters["global_steps"], counters["skipped_steps"]
        if config.manual_accumulation:
            micro_steps = counters["micro_steps"]
        else:
            # The checkpoint may have been saved with another number of micro-steps in a step.
            micro_steps = (runner.num_updates + runner.num_skipped) * int(config.gradient_accumulation_steps)
        self._parts.accumulation.micro_steps = micro_steps

    def _stateful_parts(self) -> CheckpointedParts:
        from zeroengine.checkpoint.checkpointed_parts import CheckpointedParts

        parts = self._parts
        return CheckpointedParts(
            parts.model,
            parts.units,
            parts.optimizer,
            lambda: parts.step_runner.schedule,
            parts.scaler,
            parts.config,
            parts.group,
            parts.replica_layout,
            parts.outer_step,
            self._counters,
            parts.master_weights.publish,
            self._stateful,
            parts.gatherer,
            bool(parts.placement.disks),
            parts.placement.evict,
        )

    def _report_saved(self, path: str, nbytes: int, seconds: float) -> None:
        text = f"{path} is saved: {format_byte_size(nbytes)} in {seconds:.1f} s"
        self._parts.report_event("checkpoint", 0, text, path=path, bytes=nbytes, seconds=seconds)

    def _get_manager(self) -> CheckpointManager:
        # The manager imports torch's checkpoint code and allocates memory, which a run without checkpoints never needs.
        if self._manager is None:
            from zeroengine.checkpoint.manager import CheckpointManager

            self._manager = CheckpointManager(self._stateful_parts(), self._report_saved)
        return self._manager
