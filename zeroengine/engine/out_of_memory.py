"""Take a micro-step again, with less memory, after a rank has run out of it: `"on_out_of_memory": "lower"`.

[Note: A rank that runs out of memory]
It still takes part in the collectives of the micro-step, with gradients that count as zeros, so that no rank waits.
Where units are gathered, it follows what the others launch (``comm/launch_board.py``). At the end of each backward the
ranks tell one another whether memory sufficed. If not, all of them drop the gradients of the step, change to the next
setting that takes less (``Engine.change``), and take the step's micro-steps again from the first one, with the random
numbers that they had. So the step has the bits of a run without the accident.

What is taken again is the forward of the model, so the loss that ``Engine.backward`` gets must be what the model has
returned, or a part of it. Where a step is not made of such micro-steps alone, the ranks know that it cannot be taken
again, and raise the error.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.checkpoint.content import random_states, set_random_states
from zeroengine.comm.group import own_store
from zeroengine.comm.launch_board import LaunchBoard
from zeroengine.config.fields import CHOSEN
from zeroengine.engine.assembly import EngineParts
from zeroengine.engine.memory import is_out_of_memory
from zeroengine.engine.micro_steps import RunMicroStep, drop_graph_of
from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.memory.state_memory import LEAST_SAVING
from zeroengine.utils.call_stack import run_as_own_call
from zeroengine.utils.host_memory import trim_heap
from zeroengine.utils.torch_internals import version_of

log = logging.getLogger("zeroengine")

PLAIN_LOOP = "this loop calls loss.backward(): call engine.backward(loss) in its place"


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
        # The micro-steps of the step in progress that have had their backward; the latest forward without one, and the
        # number of such forwards; and why the step cannot be taken again.
        self._done: list[RunMicroStep] = []
        self._latest: RunMicroStep | None = None
        self._num_begun = 0
        self._obstacle: str | None = None
        # Whether backwards were run by others than ``Engine.backward``, where the ranks compare.
        self._is_plain_loop = False
        # The forwards without gradients before the latest one of training.
        self._num_evaluated = 0
        # How many backwards of the step in progress ``Engine.backward`` has run.
        self._num_backwards = 0
        # The buffers that forwards have changed; None: none has run.
        self._changing: set[torch.Tensor] | None = None
        # What ranks launch; made where they gather. And how often the ranks have compared, by which they tell it.
        self._board: LaunchBoard | None = None
        self._num_compared = 0

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of training, again if memory does not suffice."""
        parts = self._parts()
        parts.passes.backward.end_if_over()
        self._num_begun += 1
        self._note_obstacle(f"a micro-step has {self._num_begun} forwards" if self._num_begun > 1 else None)
        model, device = parts.setup.model, parts.ranks.group.device
        versions = {buffer: version_of(buffer) for buffer in model.buffers()}
        micro_step = self._latest = RunMicroStep.begin(args, kwargs, model, device, self._changing)
        if self._num_begun == 1:
            self._num_evaluated = parts.ranks.group.divergence.num_forwards[0]
            self._watch_launches()
        output, memory, failure = self._attempt("forward", self._run_forward, *args, **kwargs)
        if failure is None:
            changed = {buffer for buffer, version in versions.items() if version_of(buffer) != version}
            if self._changing is None:
                # torch's batch norm changes its statistics without counting that.
                changed |= {buffer for buffer, values in micro_step.buffers if not torch.equal(buffer, values)}
            self._changing = changed | (self._changing or set())
        while failure is not None:
            self._complete_pass(failure, is_forward=True)
            self._go_on(memory, failure)
            self._watch_launches()
            with micro_step.again():
                output, memory, failure = self._attempt("forward", self._run_forward, *args, **kwargs)
        micro_step.note_output(output)
        return output

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """Run a backward, after which all ranks take the step again if memory did not suffice on one of them."""
        self._num_backwards += 1
        micro_step, device = self._latest, self._parts().ranks.group.device
        if micro_step is None or self._num_begun != 1:
            self._note_obstacle(f"a backward has {self._num_begun} forwards")
        else:
            micro_step.loss_path, micro_step.options = micro_step.find(loss), options
            if self._num_evaluated != self._parts().ranks.group.divergence.num_forwards[0]:
                self._note_obstacle("a forward without gradients came between a forward and its backward")
            is_outside = micro_step.loss_path is None
            self._note_obstacle("the loss is no part of what the model has returned" if is_outside else None)
        # What the loop has drawn since the forward stays drawn.
        random = random_states(device)
        _, memory, failure = self._attempt("backward", self._run_backward, loss, **options)
        if failure is not None:
            _drop_graphs(micro_step, loss)
            self._complete_pass(failure, is_forward=False)
        self._forget_forwards()
        is_again = False
        while self._go_on(memory, failure):
            is_again = True
            _drop_graphs(micro_step, loss)
            # Otherwise there is an obstacle.
            assert micro_step is not None
            memory, failure = self._take_again(micro_step)
        if is_again:
            set_random_states(random, device)
        if micro_step is not None:
            self._done.append(micro_step)

    def note_step(self) -> None:
        """Note that a micro-step or a step is about to end."""
        parts = self._parts()
        parts.passes.backward.end_if_over()
        if not self._num_backwards and parts.loop.accumulation.backwards:
            self._is_plain_loop = True
            self._end_launches(PLAIN_LOOP)

    def note_end_of_micro_step(self) -> None:
        """Note that ``Engine.step`` has ended a micro-step, but not the step."""
        if self._done:
            self._done[-1].has_ended = True

    def end_step(self) -> None:
        """Note that the step has ended."""
        self.forget_step()
        self._num_backwards = 0

    def forget_step(self) -> None:
        """Note that the step has lost its gradients."""
        self._done.clear()
        self._forget_forwards()
        self._obstacle = None

    def _forget_forwards(self) -> None:
        self._latest, self._num_begun = None, 0
        self._end_launches()

    def _note_obstacle(self, obstacle: str | None) -> None:
        """Note why the step in progress cannot be taken again, if it cannot."""
        accumulation = self._parts().loop.accumulation
        if accumulation.backwards != len(self._done):
            obstacle = "not every backward of the step was run by engine.backward(), or some were dropped"
        elif not accumulation.reduces_gradients:
            obstacle = "a micro-step is inside no_sync()"
        self._obstacle = self._obstacle or obstacle

    # -- the collectives of a micro-step ----------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """Whether a forward launches collectives."""
        parts = self._parts()
        return parts.ranks.group.world_size > 1 and any(unit.is_releasable for unit in parts.partition.units)

    def _watch_launches(self) -> None:
        """Let the others know what this rank launches in a micro-step that begins."""
        if not self._gathers:
            return
        parts = self._parts()
        if self._board is None:
            group, timeout_s = parts.ranks.group, parts.setup.config.comm.timeout_seconds
            store = own_store(f"launches/{group.divergence.engine}")
            self._board = LaunchBoard(store, group.rank, group.world_size, timeout_s)
        self._board.begin(self._num_compared)
        executor = parts.passes.backward.executor
        executor.launches, executor.tell_launch = [], self._board.tell

    def _end_launches(self, obstacle: str = "") -> None:
        """Let the others know that this rank launches nothing more by itself. ``obstacle``: see ``LaunchBoard.end``."""
        executor = self._parts().passes.backward.executor
        if self._board is not None and executor.launches is not None:
            executor.launches = executor.tell_launch = None
            self._board.end(obstacle)

    # -- after an accident ------------------------------------------------------------------------

    def _attempt(
        self, where: str, run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, RankMemory, RuntimeError | None]:
        """Run a forward or a backward. Return its result, what to tell the others, and an error of memory."""
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            memory = self._memory_after(error, where)
            if memory is None:
                self._forget_forwards()
                raise
            # The traceback holds what has been computed.
            return None, memory, _without_frames(error)
        except BaseException:
            self._forget_forwards()
            raise
        return result, RankMemory(None, self._obstacle), None

    def _memory_after(self, error: RuntimeError, where: str) -> RankMemory | None:
        """Return what to tell the others after an error; None: it is another one, or the ranks cannot go on."""
        if not is_out_of_memory(error):
            return None
        parts = self._parts()
        if self._is_plain_loop:
            error.add_note(f"on_out_of_memory: {PLAIN_LOOP}")
            return None
        steps = [*self._done, *([] if self._latest is None else [self._latest])]
        if not all(step.has_its_inputs for step in steps):
            self._note_obstacle("inputs of the model were changed in place")
        number = parts.loop.step_runner.next_number
        return RankMemory(f"in the {where} of step {number}: {str(error).splitlines()[0]}", self._obstacle)

    def _complete_pass(self, failure: RuntimeError, *, is_forward: bool) -> None:
        """Take part in the collectives of the micro-step that this rank has not run, and drop its gradients.

        Raises:
            RuntimeError: ``failure``: the others do something else, or memory does not suffice for that either.
        """
        parts = self._parts()
        # What the micro-step has computed so far makes room for what it gathers.
        gc.collect()
        trim_heap()
        if parts.ranks.group.device.type == "cuda":
            torch.cuda.empty_cache()
        executor = parts.passes.backward.executor
        launched, executor.launches, executor.tell_launch = executor.launches, None, None
        if launched is not None and self._board is not None:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    executor.repeat(self._board.follow(launched))
            except (RuntimeError, DivergenceError) as error:
                failure.add_note(f"on_out_of_memory: this rank could not do what the others did: {error}")
                raise failure from error
        else:
            if is_forward:
                parts.passes.backward.begin_without_loss()
            parts.passes.backward.complete_without_gradients()
        parts.passes.backward.finish()

    def _go_on(self, memory: RankMemory, failure: RuntimeError | None) -> bool:
        """Return whether memory did not suffice on some rank, after all have taken the micro-steps before again.

        The arguments are those of ``compare_memory``.
        """
        # A rank comes here from its forward, and others from their backwards.
        if not run_as_own_call(self.compare_memory, memory, failure):
            return False
        run_as_own_call(self.take_earlier_again)
        return True

    def compare_memory(self, memory: RankMemory, failure: RuntimeError | None) -> bool:
        """Return whether memory did not suffice on some rank, after all ranks have changed to what takes less.

        Args:
            memory: Whether it did on this rank.
            failure: The error of this rank.

        Raises:
            RuntimeError: ``failure``: nothing takes less memory, or the step cannot be taken again.
            ZeroEngineError: The same on the other ranks.
        """
        parts = self._parts()
        self._num_compared += 1
        # A rank that drops its gradients waits for its reduces, of which others do their part while they wait.
        parts.passes.reducer.launcher.wait()
        try:
            ranks = parts.ranks.group.all_gather_object(memory, "whether memory sufficed")
        except DivergenceError as error:
            if failure is None:
                raise
            failure.add_note(
                f'on_out_of_memory "lower": the other ranks did not come to engine.backward(loss): {error}'
            )
            raise failure from error
        rank, short = next(((rank, own.error) for rank, own in enumerate(ranks) if own.error is not None), (0, None))
        if short is None:
            return False
        obstacle = next((own.obstacle for own in ranks if own.obstacle is not None), None)
        parts.passes.backward.drop_gradients()
        reason = (
            f"the step cannot be taken again, because {obstacle}: let the model return the loss, and run one forward "
        )
        reason += "and one engine.backward() for each micro-step"
        if obstacle is None:
            parts.loop.accumulation.restart_step()
            reason = "nothing is left that takes less memory"
            for change, words in next_settings(parts):
                if parts.ranks.group.rank == 0:
                    text = "rank %d ran out of memory %s; going on with %s, and taking the step again"
                    log.warning(text, rank, short, words)
                try:
                    self._change(change)
                except ZeroEngineError as refused:
                    if self._parts().has_ended:
                        raise
                    reason = f"{reason}; {words} was refused: {refused}"
                    continue
                return True
        self.forget_step()
        if failure is not None:
            failure.add_note(f"on_out_of_memory: {reason}")
            raise failure
        raise ZeroEngineError(f"rank {rank} ran out of memory {short}; {reason}")

    def take_earlier_again(self) -> None:
        """Take the earlier micro-steps of the step again, whose gradients were dropped. All ranks come here."""
        number = 0
        while number < len(self._done):
            memory, failure = self._take_again(self._done[number])
            if self.compare_memory(memory, failure):
                number = 0
                continue
            if self._done[number].has_ended:
                self._end_micro_step()
            number += 1

    def _take_again(self, micro_step: RunMicroStep) -> tuple[RankMemory, RuntimeError | None]:
        """Run a forward and its backward once more. Return what to tell the others, and an error of memory."""
        self._watch_launches()
        with micro_step.again():
            output, memory, failure = self._attempt("forward", self._run_forward, *micro_step.args, **micro_step.kwargs)
        is_forward = failure is not None
        if not is_forward:
            # The graph goes with the loss, and the loss before the pass is completed.
            loss, output = micro_step.loss_of(output), None
            _, memory, failure = self._attempt("backward", self._run_backward, loss, **micro_step.options)
            del loss
        if failure is not None:
            self._complete_pass(failure, is_forward=is_forward)
        self._end_launches()
        return memory, failure


def next_settings(parts: EngineParts) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the changes to settings that take less memory of the device, the next one first, and their words.

    Prefetches end first, then all ranks share each state, then stages rise, then states leave the device.
    """
    memory, requested = parts.setup.state_memory, parts.setup.requested
    current, zero = memory.current(), requested.zero_optimization
    if zero.prefetch_bucket_size and any(unit.is_releasable for unit in parts.partition.units):
        smaller = zero.model_copy(update={"prefetch_bucket_size": 0})
        yield {"zero_optimization": smaller.model_dump(mode="json")}, '"stage3_prefetch_bucket_size": 0'
    if zero.degrees is not None:
        over_all = zero.model_copy(update={"degrees": None})
        yield {"zero_optimization": over_all.model_dump(mode="json")}, '"degrees": null'
        return
    limit = memory.requirement(current).states.device_total * (1 - LEAST_SAVING)
    choices = [
        choice
        for choice in memory.choices(CHOSEN, CHOSEN, CHOSEN, any_disk=False)
        if choice.stage >= current.stage and memory.requirement(choice).states.device_total < limit
    ]
    for choice in sorted(choices, key=lambda own: (own.cost[:2], own.num_changes(current), own.stage)):
        section = choice.applied(requested).zero_optimization.model_dump(mode="json")
        yield {"zero_optimization": section}, choice.written(requested)


def _drop_graphs(micro_step: RunMicroStep | None, loss: torch.Tensor) -> None:
    """Free what the graph of a micro-step has saved, which the loop keeps as long as it has the loss."""
    if micro_step is not None:
        micro_step.drop_graph()
    drop_graph_of(loss)


def _without_frames(error: RuntimeError) -> RuntimeError:
    """Return an error that holds nothing which its frames have computed."""
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)
