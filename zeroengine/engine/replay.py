"""Keep what repeats the last steps of a run, and take a step again: `replay` and zero-replay.

[Note: A step that is taken again]
zero-replay starts the script of a run anew, on as many ranks, with a variable that names the step. `initialize` then
loads the last checkpoint before that step, and the script trains on from there as a resumed run does. Its own calls
that save or load do nothing. Generators get their states of the checkpoint before the first forward, since the script
may still draw its data before it. In steps whose inputs the run has kept, forwards get these and the generators of that
time. The process ends after the step. zero-replay compares the digests of both runs.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroengine.checkpoint.content import random_states, set_random_states, storable
from zeroengine.checkpoint.failures import failure_reason
from zeroengine.engine.assembly import EngineParts
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.monitor.observer import Observer
from zeroengine.runtime.input_digest import can_read_values
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.utils.compiler_disable import hidden_from_activation_checkpoint
from zeroengine.utils.tensors import map_tensors
from zeroengine.utils.torch_internals import current_graph_task_id

log = logging.getLogger("zeroengine")

REPLAY_VARIABLE = "ZEROENGINE_REPLAY"
# Those of all engines of this process.
_replays: weakref.WeakSet[StepReplay] = weakref.WeakSet()


@dataclass(frozen=True)
class ReplayTarget:
    """The step that a process takes again.

    Attributes:
        step: Its number.
        run_folder: The run folder of the run that took it first.
        checkpoint: The checkpoint that it goes on from; None: the run begins anew.
    """

    step: int
    run_folder: str
    checkpoint: str | None

    @staticmethod
    def of_process() -> ReplayTarget | None:
        """Return the target of this process, if it has one: the fields as JSON in `REPLAY_VARIABLE`."""
        text = os.environ.get(REPLAY_VARIABLE)
        return None if text is None else ReplayTarget(**json.loads(text))


def file_of_step(run_folder: str | os.PathLike[str], rank: int, step: int) -> Path:
    """Return the file with what a rank was given in a step."""
    return Path(run_folder) / "replay" / f"rank-{rank}" / f"step-{step}.pt"


class StepRecorder(Observer):
    """Keeps the inputs of the model and the states of the generators of the last steps of this rank. A collective.

    Raises:
        ZeroEngineError: On every rank: there is no run folder.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._keep = parts, parts.setup.config.replay.keep or 0
        self._forwards: list[Any] = []
        self._failed = False
        group, monitor = parts.ranks.group, parts.reports.monitor
        folder = None if monitor is None or monitor.folder is None else monitor.folder.absolute()
        folder = group.all_gather_object(folder, "to keep steps")[0]
        if folder is None:
            raise ZeroEngineError(
                'replay.keep needs a run folder to keep steps in: write "monitor": {"folder": "runs/a"}, or start the '
                "run by zero-launch --run-folder runs/a"
            )
        self._folder: Path = folder

    def forward_began(self, args: Any, kwargs: Any) -> None:
        """Keep the inputs."""
        device = self._parts.ranks.group.device
        if self._failed or not can_read_values(device):
            return
        try:
            with hidden_from_activation_checkpoint():
                # Of a view torch would save all the memory that it is part of, such as a whole corpus.
                inputs = map_tensors(torch.clone, [list(args), dict(kwargs)])
                inputs = storable("the inputs of the model", inputs)
                self._forwards.append({"inputs": inputs, "random": random_states(device)})
        except CheckpointError as error:
            self._fail(str(error))

    def gradients_dropped(self) -> None:
        """Forget what the step in progress was given."""
        self._forwards = []

    def step_ended(self, number: int) -> None:
        """Write what the step was given, and remove what is no longer kept."""
        forwards, self._forwards = self._forwards, []
        if self._failed:
            return
        path = file_of_step(self._folder, self._parts.ranks.group.rank, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(forwards, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
            for old in path.parent.glob("step-*.pt"):
                # A run that went back to an earlier step has files of later ones, which are of another course.
                if not number - self._keep < int(old.stem.removeprefix("step-")) <= number:
                    old.unlink(missing_ok=True)
        # torch has errors of its own for a full disk, and an error of this rank alone would let the others wait.
        except (OSError, RuntimeError) as error:
            self._fail(f"{path} cannot be written: {failure_reason(error)}")

    def _fail(self, reason: str) -> None:
        self._failed = True
        log.warning("no further steps are kept for zero-replay: %s", reason)


class StepReplay(Observer):
    """Takes a step again. See the note above.

    Args:
        parts: The parts of the engine.
        target: The step.

    Raises:
        ZeroEngineError: Another engine of this process takes the step. Nothing says whose step it is.

    Attributes:
        target: As given.
        client_state: That of the checkpoint that was loaded.
    """

    def __init__(self, parts: EngineParts, target: ReplayTarget) -> None:
        if list(_replays):
            raise ZeroEngineError("zero-replay: this script has several engines. Compare two whole runs by zero-diff.")
        _replays.add(self)
        self._parts, self.target, self.client_state = parts, target, None
        device = parts.ranks.group.device
        self._script_random = random_states(device)
        self._random: dict[str, Any] | None = None
        # What the forwards of a step were given that have not run yet, and the number of the step.
        self._kept: Iterator[Any] = iter(())
        self._kept_step = -1
        # Before every other hook, so that the engine sees the inputs that the model gets.
        hook = UncopiedHook(self._replace_inputs)
        handle = parts.setup.model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        parts.setup.undo.callback(handle.remove)

    def note_loaded(self, client_state: Any) -> None:
        """Note that the checkpoint has been loaded."""
        device = self._parts.ranks.group.device
        self.client_state, self._random = client_state, random_states(device)
        # The script may draw its data next, which it drew from its own seed in the run, too.
        set_random_states(self._script_random, device)

    @property
    def has_loaded(self) -> bool:
        """Whether this goes on from a checkpoint."""
        return self.target.checkpoint is not None

    def skips(self, call: str, *, weights_only: bool = False) -> bool:
        """Return whether a call of the script that saves or loads does nothing.

        Args:
            call: The call.
            weights_only: Whether it loads weights alone, with which a run begins that goes on from no checkpoint.
        """
        if weights_only and not self.has_loaded:
            return False
        if self._parts.ranks.group.rank == 0:
            log.warning("%s does nothing: this process takes step %d of a run again", call, self.target.step)
        return True

    def gradients_dropped(self) -> None:
        """Begin with the first forward that the run has kept of the step."""
        self._kept_step = -1

    def step_ended(self, number: int) -> None:
        """End the process after the step that was asked for.

        Raises:
            SystemExit: This was the step.
        """
        if number >= self.target.step:
            raise SystemExit(0)

    def _replace_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        group, runner = self._parts.ranks.group, self._parts.loop.step_runner
        is_training = module.training and torch.is_grad_enabled() and current_graph_task_id() < 0
        if module is not self._parts.setup.model or not is_training:
            return None
        if self._random is not None:
            set_random_states(self._random, group.device)
            self._random = None
        if runner.next_number != self._kept_step:
            self._kept_step = runner.next_number
            path = file_of_step(self.target.run_folder, group.rank, self._kept_step)
            self._kept = iter(torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else ())
        if (kept := next(self._kept, None)) is None:
            return None
        set_random_states(kept["random"], group.device)
        kept_args, kept_kwargs = kept["inputs"]
        return tuple(kept_args), kept_kwargs
