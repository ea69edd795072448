"""Compares what ranks saw at each stage with what plain PyTorch saw, over many seeds, and reduces what fails."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.distributed.random_models.micro_steps import SEVERAL_BACKWARDS, Trace
from tests.distributed.random_models.recipe import Op, Recipe
from tests.distributed.random_models.training import train_by_engine, train_plainly
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import start

STAGES = (0, 1, 2, 3)


def differences(recipe: Recipe, plain: dict[int, Trace], stages: dict[int, list[Trace]]) -> list[str]:
    """What is wrong with what the ranks saw at each stage."""
    wrong = []
    tolerance = 1e-9 if recipe.dtype == "float64" else 2e-4
    for stage, traces in stages.items():
        for rank, trace in enumerate(traces):
            expected = plain[rank]
            for what, seen, wanted in (
                ("value", trace.values, expected.values),
                ("norm", trace.norms, expected.norms),
            ):
                if not _close(seen, wanted, tolerance):
                    wrong.append(f"stage {stage}, rank {rank}: {what}s {_row(seen)}, plain PyTorch's {_row(wanted)}")
            for name, value in trace.state.items():
                if not torch.allclose(value, expected.state[name], rtol=tolerance, atol=tolerance):
                    error = (value - expected.state[name]).abs().max().item()
                    wrong.append(f"stage {stage}, rank {rank}: parameter {name} differs by {error:.2g}")
                    break
    for first, other in _equal_stages(recipe):
        if first in stages and other in stages and not wrong:
            for rank, (one, two) in enumerate(zip(stages[first], stages[other], strict=True)):
                if not _same_bits(one, two):
                    wrong.append(f"rank {rank}: stages {first} and {other} differ in bits: {_first_bits(one, two)}")
    return wrong


def _close(seen: list[float], wanted: list[float], tolerance: float) -> bool:
    return len(seen) == len(wanted) and all(
        math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a, b in zip(seen, wanted, strict=True)
    )


def _row(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values[:12]) + (", ..." if len(values) > 12 else "") + "]"


def _equal_stages(recipe: Recipe) -> list[tuple[int, int]]:
    """Stages with the same bits: all, unless gradients are added up over micro-steps or backwards."""
    if recipe.micro_steps > 1 or recipe.mode in SEVERAL_BACKWARDS:
        return [(0, 1), (2, 3)]
    return [(0, 1), (0, 2), (0, 3)]


def _same_bits(one: Trace, two: Trace) -> bool:
    same = one.values == two.values and one.norms == two.norms and one.state.keys() == two.state.keys()
    return same and all(torch.equal(value, two.state[name]) for name, value in one.state.items())


def _first_bits(one: Trace, two: Trace) -> str:
    for what, a, b in (("value", one.values, two.values), ("norm", one.norms, two.norms)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return f"{what} {index}, {x!r} and {y!r}"
    return next(name for name, value in one.state.items() if not torch.equal(value, two.state[name]))


# -- many seeds ----------------------------------------------------------------------------------------------------


def _train_some(recipes: list[Recipe], stages: Sequence[int], folder: Path) -> None:
    """On one rank: leaves each trace in a file, so that those before a crash are not lost."""
    rank = start()
    logging.getLogger("zeroengine").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # torch's, of checkpoints and hooks that a recipe combines
    for index, recipe in enumerate(recipes):
        for stage in stages:
            path = folder / f"{index}.{stage}.{rank}"
            try:
                found: Any = train_by_engine(recipe, stage, str(folder))
            except BaseException as error:
                found = "".join(traceback.format_exception(error, limit=-5))
            unfinished = folder / f"{path.name}.unfinished"
            unfinished.write_bytes(pickle.dumps(found))
            unfinished.rename(path)
            if isinstance(found, str):
                return  # the engine may be in any state, and the other rank waits for it


def check(recipes: Sequence[Recipe], stages: Sequence[int] = STAGES, seconds: float = 60) -> dict[Recipe, list[str]]:
    """What is wrong with each recipe at these stages, for those with which something is.

    Args:
        seconds: that one recipe may take, as long as it takes to notice a hang.
    """
    wrong: dict[Recipe, list[str]] = {}
    for ranks in sorted({recipe.ranks for recipe in recipes}):
        remaining = [recipe for recipe in recipes if recipe.ranks == ranks]
        while remaining:
            problems = _check_some(remaining, stages, seconds)
            wrong |= {recipe: problem for recipe, problem in zip(remaining, problems, strict=False) if problem}
            remaining = remaining[len(problems) :]
    return wrong


def _check_some(recipes: list[Recipe], stages: Sequence[int], seconds: float) -> list[list[str]]:
    """What is wrong with each recipe, up to the first one that ends its processes."""
    problems, ended, ending = [], False, ""
    with tempfile.TemporaryDirectory() as name:
        folder, timeout = Path(name), seconds + 4 * len(recipes)
        try:
            run_ranks(recipes[0].ranks, _train_some, recipes, stages, folder, timeout=timeout)
        except RankFailed as failed:
            ending = ", ".join(f"rank {rank}: {text}" for rank, (_, text, _) in failed.failures.items())
        while len(problems) < len(recipes) and not ended:
            found, ended = _judge(recipes[len(problems)], len(problems), stages, folder, ending)
            problems.append(found)
    return problems


def _judge(recipe: Recipe, index: int, stages: Sequence[int], folder: Path, ending: str) -> tuple[list[str], bool]:
    """What is wrong with one recipe, and whether that ended the run."""
    found: dict[int, list[Trace]] = {}
    for stage in stages:
        paths = [folder / f"{index}.{stage}.{rank}" for rank in range(recipe.ranks)]
        answers = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors or None in answers:
            return [f"stage {stage}: {error}" for error in dict.fromkeys(errors or [f"no answer ({ending})"])], True
        found[stage] = answers
    return differences(recipe, train_plainly(recipe), found), False


def describe(wrong: dict[Recipe, list[str]], stages: Sequence[int] = STAGES) -> str:
    lines = []
    for recipe, problems in wrong.items():
        again = " ".join(f"--stage {stage}" for stage in stages) if tuple(stages) != STAGES else ""
        lines += [
            f"seed {recipe.seed}: python -m tests.distributed.random_models --seed {recipe.seed} {again}".rstrip()
        ]
        lines += [str(recipe), *problems, ""]
    return "\n".join(lines)


# -- reducing ------------------------------------------------------------------------------------------------------


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that differ from this one by one part that is gone or ordinary."""
    for f in dataclasses.fields(recipe):
        if f.name not in ("seed", "blocks", "ops", "fault_at") and getattr(recipe, f.name) != f.default:
            yield dataclasses.replace(recipe, **{f.name: f.default})
    for index, op in enumerate(recipe.ops):
        ops = recipe.ops[:index] + recipe.ops[index + 1 :]
        if not (recipe.fault and index == recipe.fault_at):
            yield dataclasses.replace(recipe, ops=ops, fault_at=recipe.fault_at - (index < recipe.fault_at))
        if op.kind == "block" and op.how != "plain":
            yield dataclasses.replace(
                recipe, ops=(*recipe.ops[:index], Op("block", op.block), *recipe.ops[index + 1 :])
            )
    for index, spec in enumerate(recipe.blocks):
        for f in dataclasses.fields(spec):
            if getattr(spec, f.name) != f.default:
                ordinary = dataclasses.replace(spec, **{f.name: f.default})
                yield dataclasses.replace(
                    recipe, blocks=(*recipe.blocks[:index], ordinary, *recipe.blocks[index + 1 :])
                )
        if len(recipe.blocks) > 1 and index == len(recipe.blocks) - 1 and index not in recipe.tied:
            if all(op.kind != "block" or op.block != index for op in recipe.ops):
                yield dataclasses.replace(recipe, blocks=recipe.blocks[:-1])
    if recipe.steps > 1:
        yield dataclasses.replace(recipe, steps=recipe.steps - 1)
    if recipe.micro_steps > 2:
        yield dataclasses.replace(recipe, micro_steps=2)


def reduce(recipe: Recipe, stages: Sequence[int]) -> tuple[Recipe, list[str]]:
    """A smallest recipe that still fails, and how."""
    problems = check([recipe], stages).get(recipe, [])
    again = bool(problems)
    while again:
        again = False
        for candidate in smaller(recipe):
            with contextlib.suppress(Exception):
                train_plainly(candidate)
                found = check([candidate], stages, seconds=30).get(candidate)
                if found:
                    recipe, problems, again = candidate, found, True
                    break
    return recipe, problems
