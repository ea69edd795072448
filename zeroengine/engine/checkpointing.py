"""Save and load the checkpoints and weights of one engine, with the checks before and the repairs after."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zeroengine.checkpoint.content import CheckpointContent, collect_content
from zeroengine.checkpoint.dcp_metadata import OpenFile, open_local
from zeroengine.checkpoint.directory import check_tag
from zeroengine.checkpoint.engine_state import EngineState, EngineTensors
from zeroengine.checkpoint.load_plan import LoadOptions
from zeroengine.checkpoint.newest import NewestStates, SnapshotStore, newest_on_disk
from zeroengine.checkpoint.unused_states import UnusedStates, listed_by_kind
from zeroengine.comm.group import check_same
from zeroengine.engine.accumulation import MANUAL_MODE
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.average_weights import check_keeps_averages
from zeroengine.engine.digests import StateDigests
from zeroengine.engine.public_call import WEIGHTS, Inside, PublicCall
from zeroengine.engine.replay import StepReplay
from zeroengine.engine.replica_rounds import ReplicaRounds
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.monitor.observer import Observer
from zeroengine.runtime.mixed_precision import exact_tensors
from zeroengine.utils.files import checked_path
from zeroengine.utils.formats import format_byte_size

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from zeroengine.checkpoint.manifest import Manifest
    from zeroengine.checkpoint.restore import RestoreResult
    from zeroengine.checkpoint.writer import CheckpointWriter
    from zeroengine.weights.live_loads import LoadResult, Weights

log = logging.getLogger("zeroengine")

SAVE_CHECKPOINT = PublicCall(
    "save_checkpoint()",
    "to save a checkpoint",
    WEIGHTS,
    needs_store=True,
    needs_own_parameters=True,
    ends_backward=True,
)
LOAD_CHECKPOINT = PublicCall("load_checkpoint()", "to load a checkpoint", WEIGHTS, needs_own_parameters=True)
SAVE_WEIGHTS = PublicCall(
    "save_weights()", "to save weights", WEIGHTS, ("parameters", "masters", "averages"), needs_own_parameters=True
)
LOAD_WEIGHTS = PublicCall("load_weights()", "to load weights", WEIGHTS | Inside.GATHERED, needs_own_parameters=True)


class EngineCheckpoints(Observer):
    """Saves and loads checkpoints and weights, and saves after a step when that is due.

    Every method that moves values is a collective.

    torch's part of checkpoints takes 50 MB and a second to import, so it is imported when it is first used.

    Args:
        parts: The parts of the engine.
        rounds: Makes replicas equal before a save.
        digests: Takes the digests of what is saved.
        replay: Takes a step of another run again; None in an ordinary run.

    Attributes:
        rounds, digests, replay: See above.
        tensors: The engine's tensors by name.
    """

    def __init__(
        self, parts: EngineParts, rounds: ReplicaRounds, digests: StateDigests, replay: StepReplay | None
    ) -> None:
        self._parts, self.rounds, self.digests, self.replay = parts, rounds, digests, replay
        module, units, gatherer = parts.setup.model, parts.partition.units, parts.passes.gatherer
        group, replicas, states = parts.ranks.group, parts.ranks.replica_layout, parts.states
        exact = exact_tensors(module, parts.setup.config)
        optimizer, outer_step = states.optimizer, states.outer_step
        self.tensors = EngineTensors(
            module, units, optimizer, outer_step, gatherer, group, replicas, exact, parts.ranks.slice_number
        )
        self._stateful: dict[str, Stateful] = {}
        # The states that were loaded for objects that are not registered yet, and whether the number of ranks is the
        # same as at the save.
        self._unclaimed_states: dict[str, tuple[Any, bool]] = {}
        # What this run does not use of the checkpoint that was loaded, and the names that a save has warned of.
        self._unused = UnusedStates("", {}, [])
        self._reported: set[str] = set()
        self._is_half_loaded = False
        # A process that never saves has none, for it imports torch's part and owns a group of processes.
        self._writer: CheckpointWriter | None = None

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of CPU memory that checkpoints alone are written from: copies, and states that are held."""
        writers = [writer for writer in (self._writer, self._parts.loop.snapshots) if writer is not None]
        return sum(entry.nbytes for entry in self._unused.held.values()) + sum(writer.copy_bytes for writer in writers)

    def check_not_half_loaded(self, call: str) -> None:
        """Refuse ``call`` after a load that failed halfway.

        Raises:
            CheckpointError: Some states are those of a checkpoint, and no load has succeeded since.
        """
        if self._is_half_loaded:
            raise CheckpointError(
                f"{call} after a load that failed half way: some states are the checkpoint's. Load a checkpoint that "
                "is whole first."
            )

    # -- registered objects -----------------------------------------------------------------------

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
        # A checkpoint may have been loaded before the object was registered.
        self._hand_over(name)

    def objects(self) -> dict[str, Any]:
        """Return the registered objects, and what the last load left, for ``restore_objects``."""
        return {
            "stateful": dict(self._stateful),
            "unclaimed": self._unclaimed_states,
            "unused": self._unused,
            "reported": self._reported,
        }

    def restore_objects(self, objects: dict[str, Any], observers: dict[str, dict[str, Any]]) -> None:
        """Go on with the objects of an engine whose partitioning has changed.

        Args:
            objects: What ``objects`` returned before the change, without observers.
            observers: The states of the observers, by name.
        """
        for name, state in observers.items():
            if name in self._stateful:
                self._stateful[name].load_state_dict(state)
        self._stateful |= objects["stateful"]
        self._unclaimed_states, self._unused = objects["unclaimed"], objects["unused"]
        self._reported = objects["reported"]

    def unused_name(self, prefix: str) -> str:
        """Return a name for ``register_stateful`` that begins with ``prefix`` and a number that is free."""
        # Loaders are numbered in the order of registration, so each finds its own state again in a resumed run.
        return f"{prefix}.{sum(name.startswith(f'{prefix}.') for name in self._stateful)}"

    def _hand_over(self, name: str) -> None:
        """Give a registered object the state that was loaded for it, if there is one."""
        if name not in self._unclaimed_states:
            return
        # The state is given once. A second registration of the name is refused.
        state, same_world = self._unclaimed_states.pop(name)
        stateful = self._stateful[name]
        # A loader's position on one rank means nothing on another number of ranks, unless the object says otherwise.
        if same_world or getattr(stateful, "world_independent", False):
            stateful.load_state_dict(state)
        elif self._parts.ranks.group.rank == 0:
            log.warning(
                "the state of %r was saved on another number of ranks, and each has its own: it is left as it is", name
            )

    # -- checkpoints ------------------------------------------------------------------------------

    def save(
        self, directory: str | os.PathLike[str], tag: str | None, client_state: Any, frozen: bool, inside_step: bool
    ) -> None:
        """Write a checkpoint. See ``Engine.save_checkpoint``."""
        if self.replay is not None and self.replay.skips("save_checkpoint()"):
            return
        parts, call = self._parts, "save_checkpoint()"
        with parts.reports.timer.span("checkpoint"):
            self._prepare_save(inside_step)
            if self._writer is None:
                from zeroengine.checkpoint.writer import CheckpointWriter

                self._writer = CheckpointWriter(
                    parts.ranks.group, parts.setup.config.checkpoint, parts.partition.placement, self._report_saved
                )
            # Only one save is under way at a time: both would use the same copy and the same process group.
            self._writer.wait()
            tag = f"step-{parts.loop.step_runner.num_updates}" if tag is None else tag
            # The dict is filled inside, because the checks may raise, and the exchange happens at the end of the block.
            arguments: dict[str, object] = {"frozen": frozen}
            with parts.ranks.group.collective_errors("to save a checkpoint", arguments) as all_arguments:
                path = checked_path(directory, "save_checkpoint(directory)", CheckpointError)
                arguments |= {"directory": os.path.abspath(path), "tag": check_tag(tag)}
                self.check_not_half_loaded(call)
                content = self._collect(client_state, frozen=frozen)
            # Ranks that name different folders would write parts of two checkpoints, and neither would be whole.
            check_same(call, all_arguments)
            if parts.setup.config.digests.every is not None:
                content.about["digests"] = {"units": self.digests.names, **self.digests.now()}
            self._writer.write(content, path, tag)

    def step_ended(self, number: int) -> None:
        """Save if a signal has come, and end the process; take a snapshot if it is due. A collective.

        Ranks agree on whether the signal has come, so all save after the same step. See ``checkpoint/on_signal.py``.
        """
        loop = self._parts.loop
        if loop.save_on_signal is not None and loop.save_on_signal.is_due():
            self.save(loop.save_on_signal.directory, None, None, frozen=True, inside_step=False)
            # The process ends next, and a save beside training would be cut off.
            self.wait()
            loop.save_on_signal.exit(loop.step_runner.num_updates)
        # After that checkpoint a snapshot would be in vain.
        if loop.snapshots is not None and loop.snapshots.end_step(number):
            self.take_snapshot(loop.snapshots)

    def take_snapshot(self, snapshots: SnapshotStore) -> None:
        """Keep the states in the memory of hosts, at the end of a step. A failure is a warning."""
        try:
            with self._parts.reports.timer.span("checkpoint"):
                self._prepare_save(inside_step=True)
                with self._parts.ranks.group.collective_errors("to take a snapshot"):
                    content = self._collect(None, frozen=True)
                snapshots.take(content)
        # The state of a registered object may raise anything on one rank, and training goes on on all.
        except Exception as error:
            if not self._parts.ranks.group.is_error_of_all_ranks(error):
                raise
            if self._parts.ranks.group.rank == 0:
                log.warning("no snapshot: %s", error)

    def _collect(self, client_state: Any, *, frozen: bool) -> CheckpointContent:
        """Return what a checkpoint holds, and warn once of what it lacks of the checkpoint that was loaded."""
        content, unused = collect_content(self._state(), client_state, frozen=frozen), self._unused
        content.entries.update(unused.held if frozen else {})
        lost = {*unused.lost, *self._unclaimed_states, *(() if frozen else unused.held)} - self._reported
        if lost and self._parts.ranks.group.rank == 0:
            log.warning("this save does not hold states of %s: %s", unused.source, listed_by_kind(lost))
        self._reported |= lost
        return content

    def _prepare_save(self, inside_step: bool) -> None:
        parts = self._parts
        # A plain loss.backward() that is not ended yet would be missed below.
        with SAVE_CHECKPOINT.on_all_ranks(parts):
            if parts.loop.accumulation.has_gradients and not inside_step:
                raise ZeroEngineError(
                    "save_checkpoint() between the micro-steps of a step would lose their gradients: call it after a "
                    "step() that updated. Where the last step of an epoch has fewer micro-steps, write "
                    f"{MANUAL_MODE} in the configuration and end it with step()."
                )
        # An overflow may be unreported yet, and the counters that are saved must include the last step.
        parts.loop.step_runner.await_and_report()
        # Masters take over the values that the user wrote into the model since the last step, so that these are saved.
        parts.states.master_weights.settle()
        self.rounds.make_replicas_equal()

    def resume(self, directory: str | os.PathLike[str] | None) -> bool:
        """Load the newest snapshot or checkpoint, and return whether there is one. See ``Engine.resume``."""
        if self.replay is not None and self.replay.skips("resume()"):
            return self.replay.has_loaded
        newest = self._find_newest(directory)
        if newest.has_any:
            # Where the newest checkpoint is damaged, a snapshot loses fewer steps than the checkpoint before it.
            has_snapshot = newest.search is not None and newest.search.found is not None
            options = LoadOptions(fallback=not has_snapshot, weights_only=False, optimizer=True, strict=True)
            try:
                client_state = self._load(directory, None, options, newest)
            except CheckpointError as error:
                if newest.snapshot is not None or not has_snapshot:
                    raise
                client_state = self._load(directory, None, options, replace(newest, manifest=None, problem=str(error)))
            if client_state is not None and self._parts.ranks.group.rank == 0:
                log.warning("resume() does not return the client_state: load_checkpoint(directory) does")
        return newest.has_any

    def _find_newest(self, directory: str | os.PathLike[str] | None) -> NewestStates:
        """Return the newest snapshot and the newest checkpoint. A collective."""
        group = self._parts.ranks.group
        on_disk: list[tuple[bool, Manifest | None, str]] = []
        with group.collective_errors("to resume", on_disk) as all_on_disk:
            path = None if directory is None else checked_path(directory, "resume(directory)", CheckpointError)
            # Ranks may see the folder in different states. What rank 0 sees counts.
            if group.rank == 0 and path is not None:
                on_disk.append(newest_on_disk(Path(path)))
        snapshots = self._parts.loop.snapshots
        search = None if snapshots is None else snapshots.find()
        if search is not None and search.damage and group.rank == 0:
            log.warning("snapshots in memory: %s", "; ".join(search.damage))
        return NewestStates(path, *(*all_on_disk[0], (False, None, ""))[0], search)

    def load(self, directory: str | os.PathLike[str], tag: str | None, options: LoadOptions) -> Any:
        """Load a checkpoint and return its client state. See ``Engine.load_checkpoint``."""
        if self.replay is not None and self.replay.skips("load_checkpoint()", weights_only=options.weights_only):
            return self.replay.client_state
        return self._load(directory, tag, options)

    def _load(
        self,
        directory: str | os.PathLike[str] | None,
        tag: str | None,
        options: LoadOptions,
        newest: NewestStates | None = None,
    ) -> Any:
        """Load a checkpoint or a snapshot and return its client state.

        Args:
            directory: The folder of checkpoints. None: there is none.
            tag: The name of a checkpoint. None: the newest, or a newer snapshot of an earlier round.
            options: What to take from it.
            newest: What is known of the newest. None: nothing yet.
        """
        parts, snapshots, is_whole = self._parts, self._parts.loop.snapshots, not options.weights_only
        arguments: dict[str, object] = {"directory": directory, "tag": tag, **vars(options)}
        with LOAD_CHECKPOINT.on_all_ranks(parts, arguments) as all_arguments:
            if newest is None or directory is not None:
                directory = checked_path(directory, "load_checkpoint(directory)", CheckpointError)
                arguments["directory"] = os.path.abspath(directory)
            if tag is not None and not (isinstance(tag, str) and tag and "\0" not in tag):
                raise CheckpointError(f"load_checkpoint(tag): a tag is a folder's name; found {tag!r}")
        check_same("load_checkpoint()", all_arguments)
        # The report reads the gradients of the last step, so it comes before a failed backward drops gradients.
        parts.loop.step_runner.await_and_report()
        parts.passes.backward.finish()
        parts.states.master_weights.settle()
        with parts.reports.timer.span("checkpoint"):
            # A snapshot of an earlier round is meant as well, and one that this round has taken is not.
            if snapshots is not None and snapshots.unused and tag is None and newest is None and is_whole:
                newest = self._find_newest(directory)
            restored = self._restore(Path(directory or ""), tag, options, newest)
        if snapshots is not None and is_whole:
            snapshots.unused = None
        self._mark_loaded(restored.missing)
        self.rounds.restart(restored.missing, loads_state=bool(restored.counters))
        # Without counters only the weights were loaded, and the step in progress goes on.
        if restored.counters:
            if parts.loop.accumulation.has_gradients and parts.ranks.group.rank == 0:
                text = "a load drops the gradients of %d micro-steps: begin the step again, or load after a step()"
                log.warning(text, parts.loop.accumulation.micro_steps_in_step)
            # These gradients belong to the parameters of before the load.
            parts.passes.backward.drop_gradients()
            parts.loop.accumulation.restart_step()
            self._set_counters(restored.counters)
        # A checkpoint has no errors of quantized gradients: they are those of other gradients, perhaps of other ranks.
        parts.passes.reducer.launcher.forget_errors()
        if parts.setup.config.zero_optimization.zeropp_loco_param is not None and parts.ranks.group.rank == 0:
            log.warning("zeropp_loco_param: the error feedback of quantized gradients restarts from zero after a load")
        step = parts.loop.step_runner.num_updates + parts.loop.step_runner.num_skipped
        subject = "weights are" if options.weights_only else "the run is"
        # The tag of a checkpoint counts updates alone.
        facts: dict[str, Any] = {"path": os.fspath(directory or ""), "updates": parts.loop.step_runner.num_updates}
        text = f"{subject} loaded from {facts['path']}, at step {step}"
        if newest is not None and newest.search is not None:
            text, facts = newest.describe(step), facts | newest.facts(step)
            if parts.ranks.group.rank == 0:
                log.warning("%s", text)
        parts.reports.event("resume", step, text, **facts)
        return restored.client_state

    def _restore(
        self, folder: Path, tag: str | None, options: LoadOptions, newest: NewestStates | None
    ) -> RestoreResult:
        """Put a checkpoint or a snapshot into the engine, and return the rest of it.

        Raises:
            CheckpointError: On every rank; nothing is changed.
            HalfLoadedError: On every rank; some states are the checkpoint's.
        """
        from zeroengine.checkpoint.restore import HalfLoadedError, loading_errors, restore
        from zeroengine.checkpoint.search import CheckpointSearch

        group = self._parts.ranks.group
        # A save beside training may be replacing the very checkpoint that is asked for.
        if self._writer is not None:
            self._writer.wait()
        open_file: OpenFile = open_local
        source: AbstractContextManager[tuple[Path, Manifest | None]]
        source = CheckpointSearch(group, folder, tag, fallback=options.fallback).open()
        if newest is not None and (snapshot := newest.snapshot) is not None:
            source, open_file = nullcontext((snapshot.path, snapshot.manifest)), snapshot.open_file
        try:
            with source as (checkpoint, manifest):
                if manifest is not None and manifest.tag != checkpoint.name and group.rank == 0:
                    log.warning(
                        "%s holds the checkpoint that was saved as %s, of step %d: its folder was renamed or copied",
                        checkpoint,
                        manifest.tag,
                        manifest.step,
                    )
                restored = restore(self._state(), checkpoint, manifest, options, open_file)
            # The optimizer's states of a half loaded checkpoint are not replaced by weights alone.
            self._is_half_loaded = self._is_half_loaded and options.weights_only
            if restored.unused is not None:
                self._unused, self._reported, lost = restored.unused, set(), restored.unused.lost
                self._unclaimed_states = {key: (state, restored.same_world) for key, state in restored.stateful.items()}
                if lost and group.rank == 0:
                    text = "%s has states that this run does not use and its checkpoints will not hold: %s"
                    log.warning(text, checkpoint, listed_by_kind(lost))
            try:
                with loading_errors(group):
                    for name in self._stateful:
                        self._hand_over(name)
            # Objects of the user raise here, after the tensors were replaced. The engine is half loaded then.
            except CheckpointError as error:
                raise HalfLoadedError(
                    f"{error}. A registered object did not take its state, and the engine's has been loaded: load "
                    "again, or another checkpoint, before training goes on."
                ) from error
        except HalfLoadedError:
            # From here on the engine's states belong to no checkpoint, and saving them or training on is refused.
            self._is_half_loaded = True
            raise
        return restored

    def begin_replay(self) -> None:
        """Load the checkpoint that a replay goes on from, if zero-replay has started this process. A collective."""
        if self.replay is not None and self.replay.target.checkpoint is not None:
            options = LoadOptions(fallback=False, weights_only=False, optimizer=True, strict=True)
            directory, tag = os.path.split(self.replay.target.checkpoint)
            self.replay.note_loaded(self._load(directory, tag, options))

    def wait(self) -> None:
        """Return when no checkpoint is being saved in the background. See ``Engine.wait_for_checkpoint``."""
        if self._writer is not None:
            with self._parts.reports.timer.span("checkpoint"):
                # Nothing of this job is written from here on, so another one may save into the folder.
                self._writer.finish()

    def close(self) -> None:
        """Wait for the checkpoint that is being saved, and give back what saving holds."""
        if self._writer is not None:
            self._writer.close()

    # -- weights ----------------------------------------------------------------------------------

    def save_weights(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None,
        shard_size: str | int,
        names: str | Iterable[str] | None,
        merge: str | None,
        *,
        trainable_only: bool,
        ema: bool,
    ) -> None:
        """Write safetensors. See ``Engine.save_weights``."""
        if self.replay is not None and self.replay.skips("save_weights()"):
            return
        # This module imports safetensors and much of the checkpoint code, so it is imported at its first use.
        from zeroengine.weights.live_weights import save

        with SAVE_WEIGHTS.on_all_ranks(self._parts):
            if ema:
                check_keeps_averages(self._parts, "save_weights(ema=True)")
            # A load that failed halfway left some parameters of the checkpoint and some from before it.
            self.check_not_half_loaded("save_weights()")
        with self._parts.reports.timer.span("checkpoint"):
            self._parts.states.master_weights.settle()
            self.rounds.end_round()
            save(self.tensors, directory, dtype, shard_size, names, merge, trainable_only=trainable_only, ema=ema)

    def load_weights(self, weights: Weights, strict: bool) -> LoadResult:
        """Load parameters and buffers. See ``Engine.load_weights``."""
        from zeroengine.weights.live_loads import LoadResult, load

        if self.replay is not None and self.replay.skips("load_weights()", weights_only=True):
            return LoadResult([], [])
        parts = self._parts
        # The end of gathered() would take the loaded values for values that the user wrote.
        with LOAD_WEIGHTS.on_all_ranks(parts):
            pass
        parts.passes.backward.finish()
        parts.states.master_weights.settle()
        loaded = load(self.tensors, parts.states.master_weights, weights, strict)
        self._mark_loaded(loaded.missing_keys)
        self.rounds.restart(loaded.missing_keys, loads_state=False)
        return loaded

    # -- what both need ---------------------------------------------------------------------------

    def _mark_loaded(self, missing: Sequence[str]) -> None:
        """Record that every parameter has values, except those named in ``missing`` which had none before."""
        for unit in self._parts.partition.units:
            # The forward goes on refusing these.
            unit.originals.unset &= set(missing)

    def _counters(self) -> dict[str, int]:
        runner = self._parts.loop.step_runner
        runner.await_result()
        return {
            "global_steps": runner.num_updates,
            "micro_steps": self._parts.loop.accumulation.micro_steps,
            "skipped_steps": runner.num_skipped,
        }

    def _set_counters(self, saved: dict[str, int]) -> None:
        runner, config = self._parts.loop.step_runner, self._parts.setup.config
        # A foreign checkpoint may lack some counters. These keep the engine's own values.
        counters = self._counters() | saved
        runner.num_updates, runner.num_skipped = counters["global_steps"], counters["skipped_steps"]
        # The last steps are those of before the load.
        runner.issued_step = runner.grad_norm = None
        runner.num_skipped_in_a_row = 0
        if config.manual_accumulation:
            micro_steps = counters["micro_steps"]
        else:
            # The checkpoint may have been saved with another number of micro-steps in a step.
            micro_steps = (runner.num_updates + runner.num_skipped) * int(config.gradient_accumulation_steps)
        self._parts.loop.accumulation.micro_steps = micro_steps

    def _state(self) -> EngineState:
        parts = self._parts
        return EngineState(
            self.tensors,
            parts.setup.config,
            parts.passes.scaler,
            parts.states.lr_schedule.current,
            self._counters(),
            self._stateful,
            parts.partition.placement,
            parts.states.master_weights,
        )

    def _report_saved(self, path: str, nbytes: int, seconds: float) -> None:
        text = f"{path} is saved: {format_byte_size(nbytes)} in {seconds:.1f} s"
        self._parts.reports.event("checkpoint", 0, text, path=path, bytes=nbytes, seconds=seconds)
