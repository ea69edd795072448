"""Take a micro-step again, with less memory, after a rank has run out of it: `"on_out_of_memory": "lower"`.

[Note: A rank that runs out of memory]
It still takes part in the collectives of the micro-step, with gradients that count as zeros, so that no rank waits.
Where units are gathered, these collectives are known from the steps before, if two of them had the same. At the end of
each backward the ranks tell one another whether memory sufficed. If not, all of them drop the gradients of the step,
change to the next setting that takes less (``Engine.change``), and take the step's micro-steps again from the first
one, with the random numbers that they had. So the step has the bits of a run without the accident.

What is taken again is the forward of the model, so the loss that ``Engine.backward`` gets must be what the model has
returned, or a part of it.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroengine.checkpoint.content import random_states, set_random_states
from zeroengine.config.fields import CHOSEN
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.memory import is_out_of_memory
from zeroengine.errors import ZeroEngineError
from zeroengine.memory.state_memory import LEAST_SAVING
from zeroengine.schedule.actions import Gather, Reduce
from zeroengine.utils.call_stack import run_as_own_call
from zeroengine.utils.host_memory import trim_heap
from zeroengine.utils.torch_internals import version_of

log = logging.getLogger("zeroengine")

# Where a loss is in what the model has returned: keys, indices and names of attributes.
Path = tuple[Any, ...]


@dataclass
class RunMicroStep:
    """One forward of the model, and the backward of its loss.

    Attributes:
        args: The positional inputs of the model.
        kwargs: Its other inputs.
        random: The states of the generators before.
        buffers: The buffers of the model that forwards change, and their values before.
        output: What the model has returned, until the backward.
        path: Where the loss is in it; None: it is not there.
        options: The arguments of ``Engine.backward`` beside the loss.
        has_ended: Whether ``Engine.step`` has ended it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    output: Any = None
    path: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    has_ended: bool = False


@dataclass(frozen=True)
class RankMemory:
    """What a rank tells the others at the end of a backward.

    Attributes:
        error: The first line of its out-of-memory error, and where it was; None: memory sufficed.
        obstacle: Why its micro-steps cannot be taken again; None: they can.
    """

    error: str | None = None
    obstacle: str | None = None


class MicroStepRetaker:
    """Runs the forwards and backwards of an engine, and takes them again where a rank has run out of memory.

    Args:
        parts: Returns the present parts of the engine.
        forward: Runs the model's forward.
        backward: Runs a backward: ``Engine.backward`` without this.
        end_micro_step: Ends a micro-step within a step.
        change: Changes the configuration: ``Engine.change``.
    """

    def __init__(
        self,
        parts: Callable[[], EngineParts],
        forward: Callable[..., Any],
        backward: Callable[..., None],
        end_micro_step: Callable[[], object],
        change: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._parts, self._run_forward, self._run_backward = parts, forward, backward
        self._end_micro_step, self._change = end_micro_step, change
        # The micro-steps of the step in progress that have had their backward, and the forwards since then.
        self._done: list[RunMicroStep] = []
        self._begun: list[RunMicroStep] = []
        # The buffers that forwards have changed; None: none has run. And the versions of all before this forward.
        self._changing: set[torch.Tensor] | None = None
        self._versions: dict[torch.Tensor, int] = {}
        # What each micro-step of the step before launched, and whether the step before that launched the same.
        self._launches: dict[int, tuple[list[Gather | Reduce], bool]] = {}

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of training, again if memory does not suffice."""
        micro_step = RunMicroStep(args, kwargs, random_states(self._parts().ranks.group.device), self._copy_buffers())
        self._begun.append(micro_step)
        while True:
            if len(self._begun) == 1:
                self._parts().passes.backward.executor.launches = []
            try:
                micro_step.output = self._run_forward(*args, **kwargs)
                self._note_buffers()
                return micro_step.output
            except RuntimeError as error:
                memory = self._memory_after(error, "forward")
                if memory is None:
                    self._begun.clear()
                    raise
                # The traceback holds what the forward has computed.
                failure = _without_frames(error)
            self._complete_pass(is_forward=True)
            self._go_on(memory, failure)
            self._restore(micro_step)

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """Run a backward, after which all ranks take the step again if memory did not suffice on one of them."""
        micro_step = self._begun[-1] if self._begun else None
        obstacle = None
        if len(self._begun) == 1 and micro_step is not None:
            micro_step.path, micro_step.options = path_to(loss, micro_step.output), options
            micro_step.output = None
            if micro_step.path is None:
                obstacle = "the loss was computed outside of the model"
        else:
            obstacle = f"the micro-step has {len(self._begun)} forwards"
        memory, failure = RankMemory(None, obstacle), None
        try:
            self._run_backward(loss, **options)
        except RuntimeError as error:
            after = self._memory_after(error, "backward", obstacle)
            if after is None:
                raise
            memory, failure = after, _without_frames(error)
        del loss
        if failure is not None:
            self._complete_pass(is_forward=False)
        self._note_launches()
        self._begun.clear()
        while self._go_on(memory, failure):
            assert micro_step is not None
            memory, failure = self._take_again(micro_step)
        if micro_step is not None:
            self._done.append(micro_step)

    def note_end_of_micro_step(self) -> None:
        """Note that ``Engine.step`` has ended a micro-step, but not the step."""
        if self._done:
            self._done[-1].has_ended = True

    def forget_step(self) -> None:
        """Note that the step has ended, or has lost its gradients."""
        self._done.clear()
        self._begun.clear()

    # -- what a forward begins with ---------------------------------------------------------------

    def _copy_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        buffers = list(self._parts().setup.model.buffers())
        self._versions = {buffer: version_of(buffer) for buffer in buffers}
        # At first, which ones a forward changes is not known.
        return [(buffer, buffer.clone()) for buffer in buffers if self._changing is None or buffer in self._changing]

    def _note_buffers(self) -> None:
        changed = {buffer for buffer, version in self._versions.items() if version_of(buffer) != version}
        self._changing = changed | (self._changing or set())

    def _restore(self, micro_step: RunMicroStep) -> None:
        """Let a forward begin as that of ``micro_step`` began."""
        set_random_states(micro_step.random, self._parts().ranks.group.device)
        with torch.no_grad():
            for buffer, values in micro_step.buffers:
                buffer.copy_(values)

    # -- after an accident ------------------------------------------------------------------------

    def _memory_after(self, error: RuntimeError, where: str, obstacle: str | None = None) -> RankMemory | None:
        """Return what to tell the others after an error; None: it is another one, or the ranks cannot go on."""
        if not is_out_of_memory(error):
            return None
        parts = self._parts()
        if self._gathers and self._launches_left() is None:
            error.add_note(
                'on_out_of_memory "lower": at stage 3 over several ranks this rank has to know what the others gather '
                "next, which takes two steps before with the same collectives."
            )
            return None
        number = parts.loop.step_runner.next_number
        return RankMemory(f"in the {where} of step {number}: {str(error).splitlines()[0]}", obstacle)

    def _complete_pass(self, *, is_forward: bool) -> None:
        """Take part in the collectives of the micro-step that this rank has not run, and drop its gradients."""
        parts = self._parts()
        # What the micro-step has computed so far makes room for what it gathers.
        gc.collect()
        trim_heap()
        if parts.ranks.group.device.type == "cuda":
            torch.cuda.empty_cache()
        launches = self._launches_left() if self._gathers else None
        if launches is not None:
            parts.passes.backward.executor.launches = None
            with torch.inference_mode(False), torch.no_grad():
                parts.passes.backward.executor.repeat(launches)
        else:
            if is_forward:
                parts.passes.backward.begin_without_loss()
            parts.passes.backward.complete_without_gradients()
        parts.passes.backward.finish()

    @property
    def _gathers(self) -> bool:
        """Whether a forward launches collectives."""
        parts = self._parts()
        return parts.ranks.group.world_size > 1 and any(unit.is_releasable for unit in parts.partition.units)

    def _launches_left(self) -> list[Gather | Reduce] | None:
        """Return the collectives of the micro-step that this rank has not launched; None: they are not known."""
        launched = self._parts().passes.backward.executor.launches
        expected, is_stable = self._launches.get(len(self._done), ([], False))
        if launched is None or not is_stable or expected[: len(launched)] != launched:
            return None
        return expected[len(launched) :]

    def _note_launches(self) -> None:
        """Note what the micro-step has launched."""
        launched = self._parts().passes.backward.executor.launches
        if launched is not None:
            before, _ = self._launches.get(len(self._done), ([], False))
            self._launches[len(self._done)] = launched, before == launched

    def _go_on(self, memory: RankMemory, failure: RuntimeError | None) -> bool:
        """Return whether memory did not suffice on some rank, after all have taken the micro-steps before again.

        The arguments are those of ``_lower_if_short``.
        """
        # A rank comes here from its forward, and others from their backwards.
        if not run_as_own_call(self._lower_if_short, memory, failure):
            return False
        run_as_own_call(self._take_earlier_again)
        return True

    def _lower_if_short(self, memory: RankMemory, failure: RuntimeError | None) -> bool:
        """Return whether memory did not suffice on some rank, after all ranks have changed to what takes less.

        Args:
            memory: Whether it did on this rank.
            failure: The error of this rank.

        Raises:
            RuntimeError: ``failure``: nothing takes less memory, or the step cannot be taken again.
            ZeroEngineError: The same on the other ranks.
        """
        parts = self._parts()
        # A rank that drops its gradients waits for its reduces, of which others do their part while they wait.
        parts.passes.reducer.launcher.wait()
        ranks = parts.ranks.group.all_gather_object(memory, "whether memory sufficed")
        rank, error = next(((rank, own.error) for rank, own in enumerate(ranks) if own.error is not None), (0, None))
        if error is None:
            return False
        obstacle = next((own.obstacle for own in ranks if own.obstacle is not None), None)
        parts.passes.backward.drop_gradients()
        parts.loop.accumulation.restart_step()
        lowered = None if obstacle is not None else next_setting(parts)
        if lowered is None:
            reason = "nothing is left that takes less memory"
            if obstacle is not None:
                reason = (
                    f"the step cannot be taken again, because {obstacle}: let the model return the loss, and run one "
                    "forward for each backward"
                )
            self.forget_step()
            if failure is not None:
                failure.add_note(f"on_out_of_memory: {reason}")
                raise failure
            raise ZeroEngineError(f"rank {rank} ran out of memory {error}; {reason}")
        change, words = lowered
        if parts.ranks.group.rank == 0:
            log.warning("rank %d ran out of memory %s; going on with %s, and taking the step again", rank, error, words)
        self._change(change)
        self._launches.clear()
        return True

    def _take_earlier_again(self) -> None:
        """Take the earlier micro-steps of the step again, whose gradients were dropped. All ranks come here."""
        number = 0
        while number < len(self._done):
            memory, failure = self._take_again(self._done[number])
            if self._lower_if_short(memory, failure):
                number = 0
                continue
            if self._done[number].has_ended:
                self._end_micro_step()
            number += 1

    def _take_again(self, micro_step: RunMicroStep) -> tuple[RankMemory, RuntimeError | None]:
        """Run a forward and its backward once more. Return what to tell the others, and an error of memory."""
        where = "forward"
        self._parts().passes.backward.executor.launches = []
        self._restore(micro_step)
        try:
            output = self._run_forward(*micro_step.args, **micro_step.kwargs)
            where = "backward"
            assert micro_step.path is not None
            self._run_backward(follow(micro_step.path, output), **micro_step.options)
        except RuntimeError as error:
            memory = self._memory_after(error, where)
            if memory is None:
                raise
            failure = _without_frames(error)
        else:
            return RankMemory(), None
        self._complete_pass(is_forward=where == "forward")
        return memory, failure


def next_setting(parts: EngineParts) -> tuple[dict[str, Any], str] | None:
    """Return the change to the next setting that takes less memory of the device, and its words; None: there is none.

    Prefetches end first, then stages rise, then states leave the device.
    """
    memory, requested = parts.setup.state_memory, parts.setup.requested
    current, zero = memory.current(), requested.zero_optimization
    if zero.prefetch_bucket_size and any(unit.is_releasable for unit in parts.partition.units):
        smaller = zero.model_copy(update={"prefetch_bucket_size": 0})
        return {"zero_optimization": smaller.model_dump(mode="json")}, '"stage3_prefetch_bucket_size": 0'
    if zero.degrees is not None:
        return None
    limit = memory.requirement(current).states.device_total * (1 - LEAST_SAVING)
    choices = [
        choice
        for choice in memory.choices(CHOSEN, CHOSEN, CHOSEN, any_disk=False)
        if choice.stage >= current.stage and memory.requirement(choice).states.device_total < limit
    ]
    if not choices:
        return None
    best = min(choices, key=lambda choice: (choice.cost[:2], choice.num_changes(current), choice.stage))
    section = best.applied(requested).zero_optimization.model_dump(mode="json")
    return {"zero_optimization": section}, best.written(requested)


def path_to(loss: torch.Tensor, output: Any) -> Path | None:
    """Return where a loss is in what a model has returned; None: it is not there."""
    if output is loss:
        return ()
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (list, tuple)):
        items = list(enumerate(output))
    elif dataclasses.is_dataclass(output):
        items = [(own.name, getattr(output, own.name)) for own in dataclasses.fields(output)]
    for key, value in items:
        if (path := path_to(loss, value)) is not None:
            return (key, *path)
    return None


def follow(path: Path, output: Any) -> torch.Tensor:
    """Return what is at a path of ``path_to``."""
    for key in path:
        output = output[key] if isinstance(output, (Mapping, list, tuple)) else getattr(output, key)
    return output  # type: ignore[no-any-return]


def _without_frames(error: RuntimeError) -> RuntimeError:
    """Return an error that holds nothing which its frames have computed."""
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)
