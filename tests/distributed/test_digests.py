"""Digests are those of the states alone, and find a bit that differs between copies."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import take_steps
from zeroengine.errors import DivergenceError
from zeroengine.optim.state_digests import differences, whole_digests
from zeroengine.partition.degrees import Degrees

RANKS = 4


def make(settings: dict[str, Any], group: Any = None, stage: int = 0, every: int = 1) -> zeroengine.Engine:
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "digests": {"every": every}}
    return zeroengine.initialize(build(), config=config(stage, **(given | settings)), process_group=group)


def sharded(optimizer: int, gradients: int, parameters: int) -> dict[str, Any]:
    degrees = {"optimizer": optimizer, "gradients": gradients, "parameters": parameters}
    return {"zero_optimization": {"stage": 3 if parameters > 1 else 2, "degrees": degrees}}


def placed(place: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_optimizer": place, "offload_param": place}}


def digests_at_the_end(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    digests = {}
    for name, settings in runs.items():
        engine = make(settings)
        take_steps(engine, range(2))
        taken = engine._checkpoints.digests.taken
        assert taken is not None and taken[0] == 2
        digests[name] = taken[1]
        # Between steps they are the same.
        for kind, by_unit in engine.state_digests().items():
            assert "".join(by_unit.values()) == taken[1][kind]
        engine.close()
    return digests


def equal_runs(places: dict[str, dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    runs = {f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)}
    runs |= {name: placed(place) for name, place in places.items()}
    runs |= {f"degrees {d}": sharded(*d) for d in ((2, 2, 2), (4, 2, 2), (4, 2, 1))}
    return run_ranks(RANKS, digests_at_the_end, {name: settings | run for name, run in runs.items()})


def check_equal(digests: dict[str, Any]) -> None:
    first, *others = digests.items()
    assert all(set(digits) != {"0"} for digits in first[1].values())
    for name, values in others:
        assert values == first[1], name


def test_digests_do_not_depend_on_stage_degrees_or_place(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    for digests in equal_runs({"cpu": {"device": "cpu"}, "nvme": disk}):
        check_equal(digests)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Muon", "torch.optim.Adafactor"])
def test_digests_do_not_depend_on_the_owners_of_matrices(optimizer: str) -> None:
    for digests in equal_runs({}, optimizer={"type": optimizer}):
        check_equal(digests)


def load_on_fewer_ranks(folder: Path) -> list[Any]:
    engine = make({"zero_optimization": {"stage": 3}, "optimizer_state_dtype": "int8"})
    take_steps(engine, range(2))
    engine.save_checkpoint(folder)
    saved = engine.state_digests()
    engine.close()
    loaded = []
    for size, stage in ((1, 0), (2, 1), (3, 3), (4, 2)):
        group = dist.new_group(list(range(size)))
        if dist.get_rank() < size:
            engine = make({"zero_optimization": {"stage": stage}, "optimizer_state_dtype": "int8"}, group)
            engine.load_checkpoint(folder)
            loaded.append(engine.state_digests())
            engine.close()
    return [saved, *loaded]


def test_a_checkpoint_has_the_same_digests_on_any_number_of_ranks(tmp_path: Path) -> None:
    all_digests = [digests for ranks in run_ranks(RANKS, load_on_fewer_ranks, tmp_path) for digests in ranks]
    assert len(all_digests) == 4 + 4 + 3 + 2 + 1 and all(digests == all_digests[0] for digests in all_digests)
    manifest = json.loads((tmp_path / "step-2/zeroengine.json").read_text())["digests"]
    names = manifest.pop("units")
    for kind, digits in manifest.items():
        assert [digits[16 * i :][:16] for i in range(len(names))] == [all_digests[0][kind][name] for name in names]


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    tensor.view(torch.int32)[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)


def flip_between_steps(settings: dict[str, Any], group_size: int, num_flips: int) -> int:
    """Flip bits of states that have copies, one at a time, and count those that were found and named."""
    engine = make(settings)
    take_steps(engine, range(1))
    choice, num_found = random.Random(0), 0
    shards = engine._parts.states.optimizer.shards
    for _ in range(num_flips):
        rank, kind = choice.randrange(RANKS), choice.choice(("parameters", "moments"))
        spans = [
            (shard, span) for shard in shards for span in shard.unit.layout.spans(rank, shard.unit.degrees.optimizer)
        ]
        shard, span = choice.choice(spans)
        moments = engine._parts.states.optimizer.state_of(shard).tensors(shard)
        place, bit, moment = choice.random(), choice.randrange(32), choice.randrange(2)
        tensor = (shard.master if kind == "parameters" else moments[moment])[span.shard_slice]
        number = int(place * span.numel)
        if engine.rank == rank:
            flip(tensor, number, bit)
        try:
            engine.state_digests()
        except DivergenceError as error:
            named = f"the {kind} of unit {shard.unit.name} on" in str(error) and f"rank {rank} (" in str(error)
            # Of two copies none is known to be the right one.
            alone = f"on rank {rank} (" in str(error) if group_size > 2 else True
            num_found += named and alone
        if engine.rank == rank:
            flip(tensor, number, bit)
    engine.state_digests()
    engine.close()
    return num_found


@pytest.mark.parametrize("num_flips", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("settings", "copies"), [({}, 4), (sharded(2, 2, 2), 2)], ids=["stage 0", "MiCS"])
def test_every_flipped_bit_of_a_copy_is_named_by_rank_and_unit(
    settings: dict[str, Any], copies: int, num_flips: int
) -> None:
    for num_found in run_ranks(RANKS, flip_between_steps, settings, copies, num_flips):
        assert num_found == num_flips


def flip_within_a_step(stage: int, flipped: str) -> tuple[str, int]:
    engine = make({"zero_optimization": {"stage": stage}}, every=2)
    take_steps(engine, range(1))
    shard, digest = engine._parts.states.optimizer.shards[1], engine._checkpoints.digests.gradients_reduced

    def digest_after_flip() -> None:
        if engine.rank == 2:
            flip(engine.units[1].full_buffer.tensor if flipped == "weights" else shard.gradient, 3, 7)
        digest()

    engine._checkpoints.digests.gradients_reduced = digest_after_flip  # type: ignore[method-assign]
    with pytest.raises(DivergenceError) as error:
        take_steps(engine, range(1, 2))
    # The step has been taken, so the script may save, or look at its states.
    steps = engine.global_steps
    engine.close()
    return str(error.value), steps


@pytest.mark.parametrize(("stage", "flipped"), [(0, "gradients"), (1, "weights")])
def test_a_bit_flipped_within_a_step_ends_the_run_on_all_ranks(stage: int, flipped: str) -> None:
    for text, steps in run_ranks(RANKS, flip_within_a_step, stage, flipped):
        assert "step 2: ranks that hold copies of one state have different values" in text and steps == 2
        assert f"the {flipped} of unit blocks.0 on rank 2 (" in text and "rank 1" not in text


def warn_of_a_flip(folder: Path) -> list[Any]:
    settings = {"digests": {"every": 1, "on_difference": "warn"}, "monitor": {"folder": str(folder)}}
    engine = make(settings)
    take_steps(engine, range(1))
    if engine.rank == 0:
        flip(engine._parts.states.optimizer.shards[0].master, 3, 7)
    take_steps(engine, range(1, 2))
    engine.close()
    return []


def test_a_run_may_go_on_and_its_records_have_digests_and_the_warning(tmp_path: Path) -> None:
    run_ranks(2, warn_of_a_flip, tmp_path)
    header, *lines = [json.loads(line) for line in (tmp_path / "digests.jsonl").read_text().splitlines()]
    assert header["format"] == 1 and header["world_size"] == 2 and [line["step"] for line in lines] == [1, 2]
    assert all(len(line[kind]) == 16 * len(header["units"]) for line in lines for kind in ("gradients", "moments"))
    # Each rank has other data, and no rank the data of another step.
    inputs = [line["inputs"][16 * rank :][:16] for line in lines for rank in range(2)]
    assert len(set(inputs)) == 4 and "0" * 16 not in inputs
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert len(warnings) == 1 and "the parameters of unit rest on rank 0 (" in warnings[0] and "rank 1 (" in warnings[0]


# -- the numbers of all ranks ---------------------------------------------------------------------

NESTED = [(1, 1, 1), (2, 2, 2), (4, 2, 1), (4, 4, 2), (8, 4, 2), (8, 8, 8)]


@st.composite
def copies(draw: st.DrawFn) -> Any:
    """The numbers of 8 ranks for some states whose copies are equal."""
    states = draw(st.lists(st.sampled_from(NESTED), min_size=1, max_size=4))
    degrees = [(Degrees(*numbers), numbers[draw(st.integers(0, 2))]) for numbers in states]
    values = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 2**64, (8, len(states)), np.uint64)
    numbers = np.array(
        [[values[of.index(rank, degree), i] for i, (of, degree) in enumerate(degrees)] for rank in range(8)]
    )
    shards = np.array([[of.index(rank, degree) for of, degree in degrees] for rank in range(8)])
    return numbers, shards, degrees


@given(copies(), st.integers(0, 7), st.integers(0, 3), st.integers(1, 2**64 - 1))
def test_one_number_that_differs_is_found_with_its_rank(given: Any, rank: int, state: int, change: int) -> None:
    numbers, shards, degrees = given
    assert not differences(numbers, shards)
    state %= len(degrees)
    numbers[rank, state] ^= np.uint64(change)
    of, degree = degrees[state]
    holders = [other for other in range(8) if of.index(other, degree) == of.index(rank, degree)]
    found = differences(numbers, shards)
    if len(holders) == 1:
        assert not found
    else:
        (difference,) = found
        assert difference.state == state and rank in difference.ranks
        assert difference.ranks == ((rank,) if len(holders) > 2 else tuple(holders))


@given(copies())
def test_the_shards_of_the_first_ranks_add_up_to_the_whole(given: Any) -> None:
    numbers, shards, degrees = given
    whole = whole_digests(numbers, shards)
    for i, (_, degree) in enumerate(degrees):
        assert int(whole[i]) == sum(int(number) for number in numbers[:degree, i]) % 2**64
