"""What ranks with slices hold and send is what the formula says, and the log of collectives counts all of it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.emulated import cpu_alone
from tests.slices import test_experts as experts
from tests.slices.split_models import make_split_engine
from tests.slices.test_stages import WIDE, WideLM
from zeroengine.utils.formats import round_up

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

STEPS, RANKS, PAGE = 3, 4, 4096
LOGGED: Mapping[str, Any] = {"comms_logger": {"enabled": True}}
# The elements of a block of ``WideLM``: those that the plan splits, and the others.
SPLIT, WHOLE = 2 * 4 * WIDE * WIDE + 4 * WIDE, WIDE
Table = dict[tuple[str, str], tuple[int, int]]


def shards(nbytes: int, num_ranks: int) -> int:
    """Return the bytes of a buffer that is divided over ranks, of which each has whole pages if there are several."""
    return num_ranks * round_up(nbytes // num_ranks, PAGE) if num_ranks > 1 else nbytes


def read_tables(printed: str) -> dict[str, Table]:
    """Return the count and the mean bytes of each row of each table, by the title of the table."""
    tables: dict[str, Table] = {}
    for line in printed.splitlines():
        if line.startswith("collectives of "):
            table = tables.setdefault(line, {})
        elif match := re.match(r"  (all_\w+|reduce_scatter)  +(.+?)  +(\d+)  +([\d.]+) (B|KiB|MiB) ", line):
            operation, unit, count, size, unit_of_size = match.groups()
            table[operation, unit] = (
                int(count),
                round(float(size) * {"B": 1, "KiB": 1024, "MiB": 1 << 20}[unit_of_size]),
            )
    return tables


def train(size: int, stage: int) -> tuple[zeroengine.Memory, str]:
    """On one rank: the states after some steps, and the log of its collectives."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = make_split_engine(size, stage, WideLM, LOGGED)
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(1, WIDE)))
            engine.step()
        memory = engine.memory()
        engine.close()
    return memory, out.getvalue()


def train_each() -> dict[tuple[int, int], tuple[zeroengine.Memory, str]]:
    return {(size, stage): train(size, stage) for size, stage in ((1, 3), (2, 0), (2, 3), (4, 3))}


@pytest.fixture(scope="module")
def trained() -> list[dict[tuple[int, int], tuple[zeroengine.Memory, str]]]:
    return run_ranks(RANKS, train_each)


def test_states_are_those_of_the_formula_to_the_byte(trained: list[Any]) -> None:
    for found in trained:
        for (size, stage), (memory, _) in found.items():
            num_data_ranks = RANKS // size
            # What is split and what is whole are units of their own, of two blocks.
            numels = [SPLIT // size, WHOLE] if size > 1 else [SPLIT + WHOLE]
            expected = 2 * sum(shards(4 * numel, num_data_ranks) for numel in numels)
            expected //= num_data_ranks if stage == 3 else 1
            assert (memory.parameters, memory.gradients) == (expected, expected), (size, stage)
            assert memory.optimizer == 2 * expected, (size, stage)


def test_gathers_and_reduces_move_the_bytes_of_the_slices(trained: list[Any]) -> None:
    for size in (1, 2):
        ((title, table),) = read_tables(trained[0][size, 3][1]).items()
        assert title == f"collectives of rank 0 of {RANKS // size}:"
        for operation in ("all_gather", "reduce_scatter"):
            for index in range(2):
                count, nbytes = table[operation, f"blocks.{index}"]
                assert count >= STEPS and (operation == "all_gather" or count == STEPS)
                numel = SPLIT // 2 if size == 2 else SPLIT + WHOLE
                # The table has one digit behind the point.
                assert nbytes == pytest.approx(shards(4 * numel, RANKS // size), abs=64)
    # The ranks have one slice each, which nothing gathers.
    ((_, table),) = read_tables(trained[0][4, 3][1]).items()
    assert not any(operation in ("all_gather", "reduce_scatter") for operation, _ in table)


def train_experts() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = experts.make_engine(2, 3, **LOGGED)
        experts.take_steps(engine, range(STEPS))
        engine.close()
    return out.getvalue()


def test_collectives_of_experts_have_a_table_of_their_own() -> None:
    tables = read_tables(run_ranks(RANKS, train_experts)[0])
    dense, of_experts = tables["collectives of rank 0 of 4:"], tables["collectives of rank 0 of 2, of experts:"]
    # Four experts of two matrices, of which a rank has two.
    numel = 2 * 2 * 2 * experts.WIDTH * experts.WIDTH
    for index in range(2):
        for table, name, nbytes in (
            (of_experts, f"blocks.{index}", shards(4 * numel, 2)),
            (dense, f"blocks.{index} (float32, whole)", None),
        ):
            assert table["reduce_scatter", name][0] == STEPS
            count, found = table["all_gather", name]
            assert count >= STEPS and (nbytes is None or found == nbytes)
    assert ("all_gather", "rest") in dense and ("all_gather", "rest") not in of_experts
