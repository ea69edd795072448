"""Random models train at every stage as by plain PyTorch: see `random_models`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.distributed.random_models.checking import check, describe
from tests.distributed.random_models.features import FEATURES, draw_features, random_recipe
from tests.distributed.random_models.recipe import BlockSpec, Op, Recipe
from tests.distributed.random_models.training import train_plainly

# Together these have every feature: `test_recipes_are_sound` counts.
SHORT = (162, 164, 167, 173, 174, 177, 182, 185, 192, 194, 196, 368)


def assert_right(seeds: Iterable[int]) -> None:
    wrong = check([random_recipe(seed) for seed in seeds])
    assert not wrong, describe(wrong)


@pytest.mark.parametrize("seeds", [SHORT[::3], pytest.param(SHORT, marks=pytest.mark.slow)], ids=["some", "all"])
def test_random_models_train_as_plain_pytorch_and_the_same_at_every_stage(seeds: tuple[int, ...]) -> None:
    assert_right(seeds)


FAILED_ONCE = {
    "a selective checkpoint of a block whose input is a Function's output": Recipe(
        seed=1,
        blocks=(BlockSpec(), BlockSpec(output="tuple")),
        ops=(Op("block", 0, "reentrant"), Op("block", 1, "selective")),
    ),
    "a parameter in the hands of a saved-tensor hook, of a layer called past its block": Recipe(
        seed=1,
        blocks=(BlockSpec("direct"), BlockSpec("convolution")),
        ops=(Op("block", 0), Op("block", 1, "saved by hooks of body")),
    ),
    "an evaluation in inference mode that ends a plain backward": Recipe(
        seed=1,
        ops=(Op("block", 0), Op("block", 1, skip=(0,))),
        mode="two forwards, first first",
        backward="plain",
        evaluate="inference",
        evaluate_when="before backward",
    ),
    "clipping after micro-steps in no_sync, before optimizer.step()": Recipe(
        seed=1, loop="optimizer", steps=2, micro_steps=3, no_sync=True, clip=0.3
    ),
    "a plain backward that raises after the backward of a reentrant checkpoint within it, and is repeated": Recipe(
        seed=1, ops=(Op("block", 0), Op("block", 1, "reentrant")), backward="plain", fault="backward", fault_at=0
    ),
    "a view of a weight that one rank keeps": Recipe(seed=1, blocks=(BlockSpec("kept views"), BlockSpec())),
    "blocks that are called in another order than that of their list, in two forwards before a backward": (
        random_recipe(210)
    ),
    "two forwards before their backwards, the first one's first": random_recipe(198),
    "several gradients of a parameter, whose unit waits for units with unused parameters": random_recipe(298),
    "several plain backwards of one forward, with unused parameters": random_recipe(378),
    "several plain backwards through a reentrant checkpoint that calls its block twice": random_recipe(480),
    "a graph that is retained while another forward's loss is run backward": Recipe(
        seed=1, mode="loss of another forward between", output="tuple"
    ),
    "the same with plain backwards": Recipe(
        seed=1, mode="loss of another forward between", output="tuple", backward="plain"
    ),
}


@pytest.mark.parametrize(
    "recipes",
    [dict(list(FAILED_ONCE.items())[::6]), pytest.param(FAILED_ONCE, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_recipes_that_failed_once(recipes: dict[str, Recipe]) -> None:
    wrong = check(list(recipes.values()))
    names = [name for name, recipe in recipes.items() if recipe in wrong]
    assert not wrong, f"{names}\n{describe(wrong)}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_500_random_models(first: int) -> None:
    assert_right(range(first, first + 50))


def test_recipes_are_sound() -> None:
    """What they are compared with trains: finite losses and gradients, on other data at each rank; and none is lost."""
    drawn: Counter[str] = Counter()
    for seed in SHORT:
        drawn.update(set(draw_features(seed)))
        assert random_recipe(seed) == random_recipe(seed)
    assert drawn.keys() == set(FEATURES)
    for seed in SHORT[::3]:
        first, second = train_plainly(random_recipe(seed)).values()
        assert all(map(math.isfinite, first.values + first.norms)) and all(first.norms)
        assert first.values != second.values and first.norms == second.norms
