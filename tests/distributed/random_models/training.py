"""Trains the model of a recipe, by plain PyTorch or by the engine, in one loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

from tests.distributed.random_models.bodies import PLAIN_BODIES
from tests.distributed.random_models.micro_steps import MicroStep, Trace
from tests.distributed.random_models.model import RandomModel
from tests.distributed.random_models.recipe import Recipe
from tests.distributed.random_models.trainers import ByEngine, Plain, Trainer
from tests.distributed.training import start


class PlannedFault(RuntimeError):
    """What a recipe raises inside of a forward or a backward."""


def planned_fault(recipe: Recipe) -> BaseException:
    return KeyboardInterrupt("planned") if recipe.fault_error == "KeyboardInterrupt" else PlannedFault("planned")


@contextlib.contextmanager
def armed(recipe: Recipe, model: RandomModel) -> Iterator[BaseException]:
    """The model raises the recipe's fault, once or more."""
    fault, handle = planned_fault(recipe), None
    block = model.blocks[recipe.ops[recipe.fault_at].block]

    def hook(*_: Any) -> None:
        raise fault

    if recipe.fault == "backward":
        model.fault = fault
    elif recipe.fault == "hook":
        handle = block.register_forward_pre_hook(hook, prepend=True)
    elif recipe.fault == "hook after":
        handle = block.register_forward_hook(hook)
    else:
        block.fault, block.fault_in_recompute = fault, recipe.fault == "recompute"
    try:
        yield fault
    finally:
        model.fault = block.fault = None
        if handle is not None:
            handle.remove()


def add_hooks(recipe: Recipe, model: RandomModel) -> None:
    """Hooks of the user's."""

    def scale(grads: Any) -> Any:
        return tuple(grad if grad is None else grad * 0.9 for grad in grads)

    for block in model.blocks:
        if block.spec.body not in PLAIN_BODIES or block.spec.output != "tensor":
            continue
        if recipe.hooks == "parameter":
            for param in block.parameters():
                if param.requires_grad:
                    param.register_hook(lambda grad: grad * 0.5)
        elif recipe.hooks == "backward":
            block.register_full_backward_hook(lambda module, inputs, outputs: scale(inputs))
        elif recipe.hooks == "forward":
            block.register_forward_hook(lambda module, args, output: output * 1.1)
        elif recipe.hooks == "forward before":
            block.register_forward_pre_hook(lambda module, args: scale(args))


def train(recipe: Recipe, trainer: Trainer, ranks: Sequence[int]) -> dict[int, Trace]:
    """What each of `ranks` sees, which this process plays in turn."""
    traces = {rank: Trace() for rank in ranks}
    model = trainer.module
    trainable = {param for param in model.parameters() if param.requires_grad}
    for step in range(recipe.steps):
        if 0 <= recipe.toggled < len(model.blocks) and step in (1, 2):
            for param in model.blocks[recipe.toggled].parameters():
                if param in trainable:
                    param.requires_grad_(step == 2)
        if recipe.zero_grad:
            trainer.zero_grad()
        for micro_step in range(recipe.micro_steps):
            last = micro_step == recipe.micro_steps - 1
            for rank in ranks:
                one = MicroStep(recipe, trainer, traces[rank], step, step * recipe.micro_steps + micro_step, rank)
                with trainer.no_sync() if recipe.no_sync and not last else contextlib.nullcontext():
                    trainer.begin_micro_step(last)
                    if recipe.fault and (step, micro_step) == (recipe.fault_step, 0):
                        _interrupt(one)
                        trainer.begin_micro_step(last)
                    one.run()
            trainer.end_micro_step()
        norm = trainer.step()
        for rank in ranks:
            traces[rank].norms.append(norm)
            if recipe.evaluate_when == "after step":
                MicroStep(recipe, trainer, traces[rank], step, step * recipe.micro_steps, rank).evaluate()
    return traces


def _interrupt(step: MicroStep) -> None:
    values = len(step.trace.values)
    with step.trainer.interrupted(), armed(step.recipe, step.trainer.module) as fault:
        try:
            step.run()
        except type(fault) as error:
            assert str(error) == "planned", error
        else:
            raise AssertionError("the planned fault did not happen")
    del step.trace.values[values:]
    step.trainer.module.train()


def train_plainly(recipe: Recipe) -> dict[int, Trace]:
    """What each rank is to see."""
    plain = Plain(recipe)
    add_hooks(recipe, plain.module)
    traces = train(recipe, plain, range(recipe.ranks))
    for trace in traces.values():
        trace.state = {name: value.detach().clone() for name, value in plain.module.state_dict().items()}
    return traces


def train_by_engine(recipe: Recipe, stage: int, folder: str) -> Trace:
    """On one rank. What fails leaves its engine open: its process is to end.

    Graphs that are dropped in cycles are alive for other times on each rank.
    """
    rank = start()
    gc.freeze()
    gc.set_threshold(*((50, 1, 1) if rank == 0 else (0,)))
    by_engine = ByEngine(recipe, stage, folder)
    add_hooks(recipe, by_engine.module)
    trace = train(recipe, by_engine, [rank])[rank]
    trace.state = by_engine.engine.full_state_dict()
    by_engine.engine.close()
    return trace
