"""Runs some seeds, or one of them at one stage: `python -m tests.distributed.random_models --seed 17 --stage 3`."""

from __future__ import annotations

import argparse
import dataclasses

from tests.distributed.random_models.checking import STAGES, check, describe, reduce
from tests.distributed.random_models.features import random_recipe
from tests.distributed.random_models.training import train_plainly


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.random_models", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--stage", type=int, action="append", choices=STAGES, help="all by default")
    parser.add_argument("--transport", choices=("shm", "gloo"), help="instead of the recipe's")
    parser.add_argument("--reduce", action="store_true", help="look for a smallest recipe that still fails")
    parser.add_argument("--plain", action="store_true", help="train by plain PyTorch alone")
    given = parser.parse_args()
    stages = tuple(given.stage or STAGES)
    recipes = [random_recipe(seed) for seed in range(given.seed, given.seed + given.count)]
    if given.transport:
        recipes = [dataclasses.replace(recipe, transport=given.transport) for recipe in recipes]
    if given.plain:
        for recipe in recipes:
            print(recipe.seed, train_plainly(recipe)[0])
        return
    failed = 0
    for begin in range(0, len(recipes), 20):
        wrong = check(recipes[begin : begin + 20], stages)
        failed += len(wrong)
        if given.reduce:
            wrong = dict(reduce(recipe, stages) for recipe in wrong)
        print(describe(wrong, stages), end="", flush=True)
    print(f"{failed} of {len(recipes)} seeds failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
