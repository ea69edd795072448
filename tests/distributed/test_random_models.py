"""Random models train at every stage as by plain PyTorch: see `random_models`."""

from __future__ import annotations

import math

import pytest

from .random_models.checking import check, describe
from .random_models.features import FEATURES, draw_features, random_recipe
from .random_models.training import train_plainly

SHORT = range(160, 200)


def assert_right(seeds: range) -> None:
    wrong = check([random_recipe(seed) for seed in seeds])
    assert not wrong, describe(wrong)


def test_random_models_train_as_plain_pytorch_and_the_same_at_every_stage() -> None:
    assert_right(SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_500_random_models(first: int) -> None:
    assert_right(range(first, first + 50))


def test_recipes_are_sound() -> None:
    """What they are compared with trains: finite losses and gradients, on other data at each rank; and none is lost."""
    drawn: set[str] = set()
    for seed in SHORT:
        drawn |= set(draw_features(seed))
        assert random_recipe(seed) == random_recipe(seed)
    assert drawn == set(FEATURES)
    for seed in SHORT[::4]:
        first, second = train_plainly(random_recipe(seed)).values()
        assert all(map(math.isfinite, first.values + first.norms)) and all(first.norms)
        assert first.values != second.values and first.norms == second.norms
