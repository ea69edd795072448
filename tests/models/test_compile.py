"""torch.compile of blocks and of whole models: the numbers of eager, and no compiling from the third step on."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed import test_evaluation, test_inputs, test_parameters
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import features, trainable_only
from tests.distributed.training import Task, Trained, adamw, assert_same_bits, settings, start

STEPS = 4
Backend = Callable[[Any, Any], Any]


class Counting:
    """A backend that counts the graphs it is given.

    Args:
        autograd: whether it also takes the backward's, as AOTAutograd makes them.
    """

    def __init__(self, autograd: bool) -> None:
        self.autograd, self.compiled = autograd, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.compiled += 1
        return aot_eager(graph, inputs) if self.autograd else graph.forward


# -- ways to compile ----------------------------------------------------------------------------------


def blocks_in_place(model: nn.Module, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(model: nn.Module, backend: Any) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)
    return model


def whole_in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def whole_wrapped(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def nothing(model: nn.Module, backend: Any) -> nn.Module:
    return model


Way = Callable[[nn.Module, Any], nn.Module]
WAYS: dict[str, tuple[Way, Way]] = {  # before `initialize`, and after it
    "blocks in place": (blocks_in_place, nothing),
    "blocks wrapped": (blocks_wrapped, nothing),
    "whole in place": (whole_in_place, nothing),
    "whole wrapped": (whole_wrapped, nothing),
    "blocks after initialize": (nothing, blocks_in_place),
    "the training step": (nothing, nothing),
}


def train(way: str, backend: Any, task: Task, stage: int, more: dict[str, Any]) -> tuple[Trained, list[int]]:
    """Training with evaluations in between, and how many graphs were compiled after each step."""
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    before, after = WAYS.get(way, (nothing, nothing))
    model = build(task.factory)
    optimizer = task.optimizer(model)
    engine = zeroengine.initialize(before(model, backend), optimizer, settings(task, stage, **more))
    after(engine.module, backend)

    def one(*data: Any) -> torch.Tensor:
        loss = engine(*data)
        engine.backward(loss)
        engine.step()
        return loss

    one = torch.compile(one, backend=backend) if way == "the training step" else one
    losses, norms, counts = [], [], []
    for step in range(STEPS):
        losses.append(one(*task.data(step, engine.rank)).item())
        norms.append(engine.grad_norm)
        engine.eval()
        with torch.no_grad():
            losses.append(engine(*task.data(99, engine.rank)).item())
        engine.train()
        counts.append(getattr(backend, "compiled", 0))
    engine.gatherer.quiesce()
    assert engine.memory().gathered == 0
    state = {name.replace("_orig_mod.", ""): value for name, value in engine.full_state_dict().items()}
    engine.close()
    return Trained(losses, norms, state), counts


def check(way: str, stages: tuple[int, ...], task: Task, autograd: bool, more: dict[str, Any]) -> list[list[int]]:
    """On one rank: at each stage the bits of eager. How many graphs were compiled after each step."""
    start()
    expected, _ = train("", None, task, 0, more)
    found = []
    for stage in stages:
        trained, counts = train(way, Counting(autograd), task, stage, more)
        assert_same_bits(expected, trained, (way, stage))
        assert counts[0] > 0 and counts[-1] == counts[2], (way, stage, counts)
        found.append(counts)
    return found


Case = tuple[str, str, tuple[int, ...], int]  # transport, way, stages, blocks
# The other ways differ from these in when or how the blocks are replaced; AOTAutograd makes the graphs of the backward
# over Gloo.
NORMAL_CASES: list[Case] = [("shm", "blocks in place", (3,), 10), ("gloo", "whole in place", (1,), 3)]
SLOW_CASES: list[Case] = [("shm", "whole wrapped", (3,), 3), ("shm", "the training step", (3,), 3)]
SLOW_CASES += [case for way in WAYS for case in (("shm", way, (0, 3), 10), ("gloo", way, (1,), 10))]


def together(cases: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: some cases for one start of ranks, which import the compiler; each other, slow."""
    alone = [pytest.param([case], id=str(case), marks=pytest.mark.slow) for case in others if case not in cases]
    return [pytest.param(cases, id="some"), *alone]


def check_cases(cases: Sequence[Case]) -> None:
    """Ten blocks are more than torch.compile would compile one frame for."""
    for transport, way, stages, blocks in cases:
        task = Task(factory=functools.partial(TinyLM, blocks=blocks))
        for counts in check(way, stages, task, transport == "gloo", {"comm": {"transport": transport}}):
            assert max(counts) <= 10, f"blocks share their graphs: {way} over {transport}"


@pytest.mark.parametrize("cases", together(NORMAL_CASES, SLOW_CASES))
def test_compiled_models_train_as_eager_ones(cases: Sequence[Case]) -> None:
    run_ranks(2, check_cases, cases)


MODELS = {
    "parameters used directly": Task(factory=test_parameters.Direct, data=features),
    "adapters": Task(factory=test_parameters.adapted, data=features, optimizer=trainable_only),
    "containers": Task(factory=test_inputs.Contained, data=features),
    "batch norm": Task(factory=test_evaluation.Normalised, data=features),
    "checkpoints": Task(factory=test_evaluation.Checkpointed, data=features),
    "reentrant checkpoints": Task(factory=test_evaluation.Reentrant, data=features),
    "skipped blocks": Task(factory=test_parameters.Skipping, data=test_parameters.skipping_on_all_ranks),
}
IN_BLOCKS = ("containers", "reentrant checkpoints")
# Eager models of the other kinds are tested beside their definitions, and their compiled blocks are those of any model.
SHORT = ("checkpoints",)


def check_models(names: Sequence[str]) -> None:
    for name in names:
        way = "blocks in place" if name in IN_BLOCKS else "whole in place"
        check(way, (3,), MODELS[name], False, {"comm": {"transport": "gloo"}})


@pytest.mark.slow  # the first test has one of them
@pytest.mark.parametrize("names", together(SHORT, MODELS))
def test_compiled_models_of_all_kinds_train_as_eager_ones(names: Sequence[str]) -> None:
    run_ranks(2, check_models, names)


LOW = {
    "fp32 norms": {"bf16": {"enabled": True}, "keep_fp32_modules": ["*norm*"]},
    "bf16": {"bf16": {"enabled": True}},
    "small units": {"units": ["blocks.*.up", "tok"]},
    "autocast": {"torch_autocast": {"enabled": True}},
}


def check_low(cases: Sequence[tuple[str, int]]) -> None:
    for name, stage in cases:
        check("whole wrapped", (stage,), Task(), False, LOW[name])


@pytest.mark.parametrize("cases", together([("fp32 norms", 3)], itertools.product(LOW, (3, 1))))
def test_compiled_models_in_low_precision_and_other_units_train_as_eager_ones(cases: Sequence[tuple[str, int]]) -> None:
    run_ranks(2, check_low, cases)


def refuse() -> list[str]:
    start()
    messages = []
    for stage in (0, 3):
        model = build()
        optimizer = adamw(model)
        whole = torch.compile(model, backend="eager", fullgraph=True)
        engine = zeroengine.initialize(whole, optimizer, settings(Task(), stage))
        try:
            engine.backward(engine(*batch(0, engine.rank)))
            messages.append(f"updated: {bool(engine.step())}")
        except Exception as error:
            messages.append(str(error))
    return messages


def test_one_graph_of_a_partitioned_model_is_refused_with_the_remedy() -> None:
    for whole, partitioned in run_ranks(2, refuse):
        assert whole == "updated: True"
        assert "`for block in model.blocks: block.compile(fullgraph=True)`" in partitioned


def with_inductor(stages: tuple[int, ...]) -> list[tuple[Trained, Trained]]:
    start()
    task = Task(factory=functools.partial(TinyLM, blocks=2))
    return [(train("", None, task, s, {})[0], train("blocks in place", "inductor", task, s, {})[0]) for s in stages]


@pytest.mark.slow
def test_inductor_kernels_train_as_eager_within_rounding() -> None:
    for found in run_ranks(2, with_inductor, (0, 3), timeout=300):
        for eager, compiled in found:
            assert_same_bits(found[0][1], compiled)
            assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
            for name, value in compiled.state.items():
                torch.testing.assert_close(value, eager.state[name], rtol=1e-4, atol=1e-5)


def with_checkpoints(folder: str) -> None:
    """Compiling changes no name, in patterns and in checkpoints."""
    start()
    more = {"units": ["blocks.*", "tok"], "bf16": {"enabled": True}, "keep_fp32_modules": ["norm", "*.norm"]}
    task, losses = Task(), []
    ways: list[tuple[int, Way]] = [(3, whole_wrapped), (1, nothing), (3, blocks_wrapped)]
    for stage, way in ways:
        torch._dynamo.reset()
        model = build()
        optimizer = task.optimizer(model)
        engine = zeroengine.initialize(way(model, "eager"), optimizer, settings(task, stage, **more))
        if losses:
            engine.load_checkpoint(folder)
        for step in range(2) if not losses else range(2, 4):
            loss = engine(*batch(step, engine.rank))
            engine.backward(loss)
            engine.step()
        if not losses:
            engine.save_checkpoint(folder)
        losses.append(loss.item())
    assert losses[1] == losses[2] != losses[0]


def test_checkpoints_of_compiled_models_are_those_of_others(tmp_path: Path) -> None:
    run_ranks(2, with_checkpoints, str(tmp_path))


LEAN = """
import sys, torch, zeroengine
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
engine = zeroengine.initialize(model, config={"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})
engine.backward(engine(torch.ones(2, 3)).sum())
assert engine.step()
engine.close()
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""


def test_training_without_torch_compile_does_not_load_the_compiler() -> None:
    """It takes 70 MB and a second on every rank. Sympy, which parts of it load, takes half of that."""
    subprocess.run([sys.executable, "-c", LEAN], check=True, timeout=60)
