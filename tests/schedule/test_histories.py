"""Whatever the data of each rank decides, ranks launch the same collectives in the same order.

All ranks run the same script. For each model and script, every sequence of choices that one rank can make is played;
each must lead to the same collectives. So ranks with any combination of them agree: with 64 sequences, three ranks have
262,144 combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.simulation import Block, Choice, Rank, Wrong, call
from zeroengine.schedule import cursor, reduce_order, residency, visits
from zeroengine.schedule.backwards import Backwards
from zeroengine.schedule.events import GradientsBegan
from zeroengine.schedule.forwards import Forwards
from zeroengine.schedule.lists import ListWalk
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import UnitFacts

EXPERTS = (call(2), call(3), call(4))
MODELS: dict[str, tuple[Block, ...]] = {
    "chain": tuple(call(unit) for unit in range(5)),
    "tied": (call(0), call(1), call(2), call(0)),
    "tied embedding": (Block("lookup", (0,)), call(1), Block("lookup", (2,)), call(2), call(0)),
    "embedding of a part of a unit": (call(0, 1), Block("lookup", (1,)), Block("head", (2,)), Block("head", (0,))),
    "embeddings in checkpoints": (
        Block("checkpoint", inner=(Block("lookup", (0,)), call(1))),
        Block("checkpoint", inner=(Block("lookup", (2,)), call(0))),
        call(2),
    ),
    "embeddings in reentrant checkpoints": (
        Block("reentrant", inner=(Block("lookup", (0,)), call(0), Block("lookup", (0,)))),
        Block("reentrant", inner=(Block("lookup", (1,)), call(2))),
    ),
    "embedding of an expert's unit": (
        Block("lookup", (2,)),
        Block("list", (1,), (Block("lookup", (2,)), call(3))),
        call(0),
    ),
    "one module for two units": (call(0, 1), call(2), call(1)),
    "heads": (call(0), call(1), Block("head", (2,)), Block("head", (3,)), Block("head", (4,))),
    "experts": (call(0), Block("list", (1,), EXPERTS)),
    "experts without a router": (call(0), Block("list", (), EXPERTS), call(1)),
    "two layers of experts": (Block("list", (0,), EXPERTS[:1]), call(1), Block("list", (4,), EXPERTS[1:2])),
    "checkpoints": tuple(Block("checkpoint", inner=(call(unit),)) for unit in range(5)),
    "reentrant checkpoints": tuple(Block("reentrant", inner=(call(unit),)) for unit in range(5)),
    "experts in a checkpoint": (call(0), Block("checkpoint", inner=(Block("list", (1,), EXPERTS),))),
    "experts in a reentrant checkpoint": (call(0), Block("reentrant", inner=(Block("list", (1,), EXPERTS),))),
    "parameters used elsewhere": (call(0), Block("use", (2,)), call(1), call(2), Block("use", (1,))),
    "a checkpoint that ends in an operation": (
        Block("checkpoint", inner=(call(0), Block("operation"))),
        *(Block("head", (unit,)) for unit in (1, 2, 3)),
    ),
    "experts and a head": (Block("list", (1,), EXPERTS), call(0), Block("head", (0,))),
}
# An operation of a script, and whether it takes a choice.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "two steps": ("forward", "backward", "step", "forward", "backward", "step"),
    "plain backwards": ("forward", "plain backward", "step", "forward", "plain backward", "step"),
    "accumulation": ("forward", "backward", "forward", "backward", "step"),
    "no_sync": ("forward", "backward in no_sync", "forward", "backward", "step"),
    "an evaluation between": ("forward", "evaluation", "backward", "step"),
    "a forward that is not used": ("forward", "forward", "backward", "step"),
    "a backward that raises": ("forward", "backward that raises", "forward", "backward", "step"),
    "a forward that raises": ("forward that raises", "forward", "backward", "step"),
    "three steps": ("forward", "backward", "step") * 3,
    "two losses": ("forward", "two backwards", "step") * 2,
    "gathered": ("forward", "backward", "step", "gathered", "forward", "backward", "step"),
    "a gather that fails": ("forward whose gather fails", "forward", "backward", "step"),
    "a transform": ("forward in a transform", "backward", "step") * 2,
    "two threads": ("forward in two threads", "backward", "step") * 2,
    "autograd.grad in a forward": ("forward with autograd.grad", "backward", "step") * 2,
    "second derivatives": ("forward", "second derivatives", "step", "forward", "backward", "step"),
}
# Nothing shows their order, so ranks have to do the same: only what one rank can check is checked.
ALIKE = ("a transform", "two threads", "autograd.grad in a forward", "second derivatives")
# What torch refuses in a reentrant checkpoint.
NOT_REENTRANT = ("a transform", "autograd.grad in a forward", "second derivatives")
FORWARDS = (
    "forward",
    "forward that raises",
    "forward whose gather fails",
    "forward in a transform",
    "forward in two threads",
    "forward with autograd.grad",
    "evaluation",
)
LIMITS = {"alone": PrefetchLimits(0, 0), "ahead": PrefetchLimits(2, 4)}
FACTS = {
    "sharded": [UnitFacts(f"unit {unit}", 1) for unit in range(5)],
    "a frozen unit, and one that is kept": [
        UnitFacts(f"unit {unit}", 1, is_releasable=unit != 1, is_trained=unit != 0) for unit in range(5)
    ],
    "whole gradients": [UnitFacts(f"unit {unit}", 1, is_sharded=False) for unit in range(5)],
}


def lists_of(blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if block.kind == "list":
            yield block
        yield from lists_of(block.inner if block.kind != "list" else ())


def choices_of(blocks: Sequence[Block]) -> list[Choice]:
    """All that a rank may do in one forward: items in order, at least none, and heads, at least one."""
    calls = [
        [
            items
            for size in range(len(found.inner) + 1)
            for items in itertools.combinations(range(len(found.inner)), size)
        ]
        for found in lists_of(blocks)
    ]
    num_heads = sum(block.kind == "head" for block in blocks)
    heads = [used for used in itertools.product((True, False), repeat=num_heads) if any(used) or not num_heads]
    return [Choice(called, used) for called in itertools.product(*calls) for used in heads]


def kinds_of(blocks: Sequence[Block]) -> set[str]:
    return {kind for block in blocks for kind in (block.kind, *kinds_of(block.inner))}


def units_of(blocks: Sequence[Block]) -> set[int]:
    return {unit for block in blocks for unit in (*block.units, *units_of(block.inner))}


def facts_of(blocks: Sequence[Block], facts: Sequence[UnitFacts]) -> list[UnitFacts]:
    """Facts of the units of a model, of which those of items are released after each visit."""
    items = {unit for found in lists_of(blocks) for item in found.inner for unit in item.units}
    used = units_of(blocks)
    return [
        its._replace(is_item=unit in items, is_trained=its.is_trained and unit in used)
        for unit, its in enumerate(facts)
    ]


def play(rank: Rank, script: Sequence[str], choices: Sequence[Choice], facts: Sequence[UnitFacts]) -> list[str]:
    """Play a script, check what one rank can check, and return the collectives."""
    following = iter(choices)
    trained = sorted(unit for unit, its in enumerate(facts) if its.is_trained)
    reduces_of_step: list[int] = []
    for place, operation in enumerate(script):
        is_last = "step" in script[place + 1 : place + 2]
        reduces = operation != "backward in no_sync"
        rank.reduces, rank.is_last = reduces, is_last
        rank.reduced.clear()
        if operation in FORWARDS:
            rank.raises_at = 0 if operation == "forward that raises" else -1
            rank.fails_at = 0 if operation == "forward whose gather fails" else -1
            rank.forward(
                next(following),
                has_grad=operation != "evaluation",
                is_tracked=operation != "forward in a transform",
                in_threads=operation == "forward in two threads",
                probes=operation == "forward with autograd.grad",
            )
        elif operation == "step":
            rank.step()
            reduces_of_step += rank.reduced
            unsharded = [unit for unit in reduces_of_step if not facts[unit].is_sharded]
            assert len(unsharded) == len(set(unsharded)) and {*reduces_of_step} == {*trained}
            reduces_of_step.clear()
        elif operation == "gathered":
            rank.gathered()
        else:
            raises = operation == "backward that raises"
            if operation == "two backwards":
                rank.two_backwards()
                # The first time, nothing tells that a second call follows.
                is_first = "two backwards" not in script[:place]
                assert rank.num_late == (rank.num_gradients if is_first else 0)
            elif operation == "second derivatives":
                rank.differentiate_twice()
            else:
                rank.backward(by_engine=operation != "plain backward", raises=raises)
            if not raises:
                expected = [unit for unit in trained if (reduces and (facts[unit].is_sharded or is_last))]
                if sorted(rank.reduced) != expected:
                    raise Wrong(f"a backward reduced {rank.reduced}, and should have reduced {expected}")
                reduces_of_step += rank.reduced
    return rank.collectives


def check(model: str, script: str, facts: str, limits: str, bucket_numel: int = 0, most: int = 40) -> int:
    """Play all that a rank may do, up to ``most`` histories, and return how many there were."""
    blocks = MODELS[model]
    if script in NOT_REENTRANT and "reentrant" in kinds_of(blocks):
        return 0
    its = facts_of(blocks, FACTS[facts])
    num_forwards = sum(operation in FORWARDS for operation in SCRIPTS[script])
    most = min(most, 10) if script in ALIKE else most
    histories = itertools.islice(itertools.product(choices_of(blocks), repeat=num_forwards), most)
    first: list[list[str]] | None = None
    count = 0
    for choices in histories:
        count += 1
        rank = Rank(blocks, its, LIMITS[limits], bucket_numel)
        collectives = play(rank, SCRIPTS[script], choices, its)
        # Gathers and reduces have communicators of their own.
        found = [[which for which in collectives if which.startswith(kind)] for kind in ("gather", "reduce")]
        if first is None or script in ALIKE:
            first = found
        elif found != first:
            raise Wrong(f"{model}, {script}, {facts}, {limits}: {choices} leads to {found}, and not to {first}")
    return count


CASES = [
    (model, script, facts, limits, bucket)
    for model, script in itertools.product(MODELS, SCRIPTS)
    for facts, limits, bucket in (
        ("sharded", "alone", 0),
        ("sharded", "ahead", 2),
        ("a frozen unit, and one that is kept", "ahead", 0),
        ("whole gradients", "alone", 0),
    )
]


@pytest.mark.parametrize("model", MODELS)
def test_ranks_agree_whatever_their_data_decides(model: str) -> None:
    assert sum(check(*case) for case in CASES if case[0] == model) >= (len(SCRIPTS) - len(NOT_REENTRANT)) * 4


_begin = reduce_order.ReduceOrder.begin


def begin_as_by_engine(its: reduce_order.ReduceOrder, event: GradientsBegan) -> None:
    _begin(its, event._replace(by_engine=True))


def never(*_: Any, **__: Any) -> Any:
    return iter(())


# One rule each, left out.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "nothing is passed over": (cursor.Cursor, "passed_over", never),
    "skipped items are not gathered": (ListWalk, "skip", never),
    "units are not completed with zeros": (reduce_order.ReduceOrder, "complete_with_zeros", lambda *_: False),
    "a unit is released though a forward needs it": (residency.Residency, "begin_use", lambda *_: None),
    "a unit is not gathered again": (residency.Residency, "release", lambda *_: None),
    "a visit that is passed over is never over": (Backwards, "_leave", lambda *_: None),
    "units that are to be used are completed": (cursor.Cursor, "is_over", lambda *_: True),
    "a call's visit is not logged": (Forwards, "_log_visit", lambda *_: None),
    "an end is not reduced": (reduce_order.ReduceOrder, "_end_units", lambda *_, **__: None),
    "what was launched is forgotten": (reduce_order.ReduceOrder, "end_step", lambda *_: None),
    "uses without a hook are not ended": (residency.Residency, "release_all_unhooked", lambda *_: None),
    "a pin that ends is not counted": (residency.Residency, "unpin", lambda self, unit: self.release(unit)),
    "a failure is not noted": (residency.Residency, "restore", lambda *_: None),
    "uses in a transform are not noted": (Forwards, "_mark_untracked", lambda *_: None),
    "a backward that raised goes on": (Backwards, "abandon", lambda *_: None),
    "threads have one order": (visits.VisitLog, "add", lambda log, ended, _: log.visits.extend(ended)),
    "calls are not counted": (reduce_order.ReduceOrder, "begin", begin_as_by_engine),
    "units are used before they are gathered": (residency.Residency, "gather", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_that_is_left_out_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, IndexError)):
        # Most are found by the first few histories of one of the scripts.
        for most, model, script in itertools.product((2, 20), MODELS, SCRIPTS):
            for facts in ("sharded", "whole gradients"):
                check(model, script, facts, "ahead", most=most)


@st.composite
def larger(draw: st.DrawFn) -> tuple[tuple[Block, ...], list[UnitFacts], list[list[Choice]], list[str]]:
    """A model of up to 12 units, what three ranks choose in each of some forwards, and a script."""
    numbers = iter(range(12))

    def units(most: int) -> tuple[int, ...]:
        return tuple(unit for unit, _ in zip(numbers, range(draw(st.integers(1, most))), strict=False))

    def block(depth: int) -> Block:
        kind = draw(
            st.sampled_from(["call", "head", "list", "checkpoint", "reentrant"] if depth == 0 else ["call", "list"])
        )
        if kind == "list":
            router = units(1) if draw(st.booleans()) else ()
            return Block("list", router, tuple(call(*units(2)) for _ in range(draw(st.integers(1, 3)))))
        if kind in ("checkpoint", "reentrant"):
            return Block(kind, inner=tuple(block(1) for _ in range(draw(st.integers(1, 2)))))  # type: ignore[arg-type]
        return Block(kind, units(2))  # type: ignore[arg-type]

    blocks = tuple(block(0) for _ in range(draw(st.integers(1, 4))))
    # An error within a backward may come before what a rank does late, such as a head that its loss leaves out.
    scripts = sorted(SCRIPTS.keys() - {"a backward that raises", *ALIKE})
    facts = facts_of(
        blocks,
        [
            UnitFacts(
                f"unit {unit}",
                draw(st.integers(1, 9)),
                is_releasable=draw(st.integers(0, 4)) > 0,
                is_trained=draw(st.integers(0, 4)) > 0,
            )
            for unit in range(12)
        ],
    )
    script = list(itertools.chain(*(SCRIPTS[draw(st.sampled_from(scripts))] for _ in range(2))))
    num_forwards = sum(operation in FORWARDS for operation in script)
    possible = choices_of(blocks)
    ranks = [[draw(st.sampled_from(possible)) for _ in range(num_forwards)] for _ in range(3)]
    return blocks, facts, ranks, script


@settings(max_examples=150)
@given(larger(), st.integers(0, 20), st.integers(0, 30), st.integers(0, 9))
def test_larger_models_agree_too(
    drawn: tuple[tuple[Block, ...], list[UnitFacts], list[list[Choice]], list[str]],
    ahead: int,
    live: int,
    bucket_numel: int,
) -> None:
    blocks, facts, ranks, script = drawn
    found = []
    for choices in ranks:
        rank = Rank(blocks, facts, PrefetchLimits(ahead, live), bucket_numel)
        collectives = play(rank, script, choices, facts)
        found.append([[which for which in collectives if which.startswith(kind)] for kind in ("gather", "reduce")])
    assert found[0] == found[1] == found[2]
