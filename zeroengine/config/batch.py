"""Resolve the batch sizes: train_batch_size = micro-batch size x gradient_accumulation_steps x ranks (or groups)."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from zeroengine.errors import ConfigError
from zeroengine.utils.formats import counted

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# The value of STEPS with which the training loop ends each step itself.
MANUAL = "manual"
# Larger products are a typing error, and they would not fit the counters of other libraries.
MAX_BATCH = 2**31 - 1
# zero-launch sets this to the number of ranks that an elastic run has when all of its nodes take part.
FULL_VARIABLE = "ZEROENGINE_FULL_WORLD_SIZE"

log = logging.getLogger("zeroengine")


def resolve(
    train: int | None,
    micro: int | None,
    steps: int | str | None,
    *,
    world_size: int,
    group_size: int = 1,
    ranks_per_model: int = 1,
    source: str,
) -> dict[str, Any]:
    """Return the three sizes by key, with the missing ones filled in.

    If the given sizes do not decide, accumulation is 1, and then the micro-batch size is 1. With manual accumulation
    there is no train batch size. In an elastic run the given sizes are those of the full world size; with fewer ranks
    the train batch size stays, and each rank accumulates more micro-steps.

    Args:
        train: The train batch size, or None if it is missing.
        micro: The micro-batch size, or None if it is missing.
        steps: The number of micro-steps, "manual", or None if it is missing.
        world_size: The number of ranks, of which those that hold one model together are one.
        group_size: The number of ranks that share each sample.
        ranks_per_model: The number of those.
        source: The name of the configuration, for messages.

    Raises:
        ConfigError: The sizes or numbers contradict one another. The message says which to change, and to what.
    """
    if world_size % group_size:
        fitting = " or ".join(map(str, sorted({*_divisors(world_size)})))
        raise ConfigError(
            f"{source}: sequence_parallel_size is {group_size}, and must divide the {_ranks(world_size, 1)}; "
            f"write {fitting}"
        )
    # In manual accumulation each step may have another number of micro-steps, so no train batch size follows.
    if isinstance(steps, str):
        if train is not None:
            raise ConfigError(f"{source}: {manual_with_train(train)}.")
        return {TRAIN: None, MICRO: micro or 1, STEPS: steps}
    full = int(os.environ.get(FULL_VARIABLE) or world_size * ranks_per_model) // ranks_per_model // group_size
    world_size //= group_size
    if train and micro and steps and train == micro * steps * world_size:
        # The sizes fit this world size, so they have been resolved for it already, and an elastic run must not adapt
        # them again.
        full = world_size
    # The train batch size follows from the other two, whose defaults are 1.
    if train is None:
        micro, steps = micro or 1, steps or 1
        train = micro * steps * full
    # Without a number of micro-steps, the whole share of a rank is one micro-batch.
    elif micro is None:
        steps = steps or 1
        micro = _divide(train, STEPS, steps, full, group_size, source)
    elif steps is None:
        steps = _divide(train, MICRO, micro, full, group_size, source)
    elif train != micro * steps * full:
        product = micro * steps * full
        raise ConfigError(
            f"{source}: {TRAIN} is {train}, but {MICRO} ({micro}) x {STEPS} ({steps}) x "
            f"{_ranks(full, group_size)} = {product}. Change {TRAIN} to {product}, or remove one of the three."
        )
    if full != world_size:
        # Fewer ranks take over the work of those that are gone, so the loss curve stays comparable.
        micro, steps = _adapt(train, micro, steps, world_size, full, group_size, source)
    if train > MAX_BATCH:
        raise ConfigError(f"{source}: {TRAIN} would be {train}, more than the {MAX_BATCH} that can be. Lower {MICRO}.")
    return {TRAIN: train, MICRO: micro, STEPS: steps}


def manual_with_train(train: int) -> str:
    """Return the message for a train batch size beside manual accumulation."""
    return (
        f'{TRAIN} is {train}, but {STEPS} is "{MANUAL}": each step has as many micro-steps as the training loop gives '
        f"it. Remove {TRAIN} and write {MICRO}, or write a number for {STEPS}"
    )


def _adapt(
    train: int, micro: int, steps: int, world_size: int, full: int, group_size: int, source: str
) -> tuple[int, int]:
    """Return micro-batch size and accumulation on another number of ranks, with a micro-batch no larger than before."""
    if train % world_size:
        raise ConfigError(
            f"{source}: {TRAIN} is {train}, which {_ranks(world_size, group_size)} cannot share equally, and so "
            f"many are left of {full}. Change {TRAIN} to a multiple of every number of ranks that --nnodes allows."
        )
    share = train // world_size
    # A micro-batch above the configured size might not fit into memory, so accumulation grows instead.
    fitting = max(size for size in _divisors(share) if size <= micro)
    changes = [(STEPS, steps, share // fitting), (MICRO, micro, fitting)]
    # All ranks compute the same sizes, and one line in the log is enough.
    if os.environ.get("RANK", "0") == "0":
        description = " and ".join(f"{name} is {new} instead of {old}" for name, old, new in changes if old != new)
        log.warning(
            "%s of %s: %s, so that %s stays %d.", world_size, _ranks(full, group_size), description, TRAIN, train
        )
    return fitting, share // fitting


def _divide(train: int, name: str, value: int, world_size: int, group_size: int, source: str) -> int:
    """Return the missing factor of `train`, where the factor `name` is `value`."""
    divisor = value * world_size
    if train % divisor == 0:
        return train // divisor
    # The message offers the nearest sizes that work.
    nearest = [multiple for multiple in (train // divisor * divisor, -(-train // divisor) * divisor) if multiple]
    # Where the ranks do not divide the train batch, no other value of the key fits.
    share = f", or {name} to a divisor of {train // world_size}" if train % world_size == 0 else ""
    raise ConfigError(
        f"{source}: {TRAIN} ({train}) is not a multiple of {name} ({value}) x {_ranks(world_size, group_size)} = "
        f"{divisor}. Change {TRAIN} to {' or '.join(map(str, nearest))}{share}."
    )


def _divisors(number: int) -> list[int]:
    # Divisors come in pairs, so it is enough to search up to the square root.
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in small)]


def _ranks(world_size: int, group_size: int) -> str:
    if group_size > 1:
        return f"{counted(world_size, 'group')} of {group_size} ranks"
    return counted(world_size, "rank")
