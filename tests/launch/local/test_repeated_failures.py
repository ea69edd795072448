"""Which failures are equal, so that another start would repeat them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.launch.conftest import Launch, Script
from zeroengine.launch.local.rank import RankFailure, RunOutcome
from zeroengine.launch.local.repeated_failures import CHANGING_WORD, count_equal_failures


def failure(text: str = "ValueError: loss is nan", step: int | None = 6, rank: int = 0, code: int = 1) -> RankFailure:
    return RankFailure(rank, 1.0, code, text, step=step, resumed_step=4)


def counts(*rounds: RunOutcome | RankFailure) -> list[int]:
    outcome, numbers = RunOutcome(), []
    for ended in rounds:
        ended = ended if isinstance(ended, RunOutcome) else RunOutcome((ended,))
        outcome = count_equal_failures(outcome, ended)
        numbers.append(outcome.num_equal)
    return numbers


NAN = failure()
KILLED = RankFailure(1, 1.0, 137)


def test_the_third_equal_failure_ends_the_run_whichever_rank_is_first() -> None:
    assert counts(NAN, failure(rank=1), NAN) == [1, 2, 3]
    first = count_equal_failures(RunOutcome(), RunOutcome((NAN,)))
    second = count_equal_failures(first, RunOutcome((failure(rank=1),)))
    third = count_equal_failures(second, RunOutcome((NAN, failure("RuntimeError: peer", rank=1))))
    assert [outcome.is_final for outcome in (first, second, third)] == [False, False, True]
    assert first.notices == () and second.notices[0].startswith(
        "2 times in a row the ranks failed with the same error after step 6, this time from step 4: ValueError: loss "
        "is nan. The run ends at 3, as a start would repeat it: look at step 6 (zero-replay RUN --step 6)"
    )
    # The exit code is that of the failure.
    assert (third.code, dataclasses.replace(third, notices=(), num_equal=0).failures) == (1, third.failures)


@pytest.mark.parametrize(
    "between",
    [
        failure(step=7),
        failure(step=5),
        failure("ValueError: loss is inf"),
        failure("TypeError: loss is nan"),
        failure(code=2),
        failure(step=None),
        KILLED,
        RankFailure(0, 1.0, 139),
        RankFailure(0, 1.0, 5),
        RunOutcome((NAN, KILLED)),
        RunOutcome((NAN,), node_losses=("b was lost",)),
        RunOutcome(),
    ],
    ids=[
        "a later step", "an earlier step", "another text", "another type", "another code", "no engine and late",
        "SIGKILL", "SIGSEGV", "os._exit", "another rank was killed", "a node was lost", "a node is back",
    ],
)  # fmt: skip
def test_an_end_that_is_not_equal_begins_the_count_again(between: RunOutcome | RankFailure) -> None:
    numbers = counts(NAN, NAN, between, NAN, NAN)
    assert numbers[2] in (0, 1) and numbers[3:] == [1, 2]


def test_machines_that_fail_again_and_again_are_never_equal() -> None:
    for outcome in (RunOutcome((KILLED,)), RunOutcome(node_losses=("b was lost",)), RunOutcome((failure(step=None),))):
        assert counts(*[outcome] * 5) == [0] * 5


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("loss is 3.25e+04 on rank 0", "loss is -7.1 on rank 13"),
        ("at 0x7f3416685a90, process 28634", "at 0x7fba6b53e760, process 9"),
        ("2026-01-01T10:00:00 [10.0.0.1:29500] refused", "2027-12-31T23:59:59 [10.0.0.27:4] refused"),
        ("No such file: '/tmp/tmpk3jx_q/data'", "No such file: '/scratch/tmp/tmpabcdefgh/data'"),
        ("run 3f2a-77 failed", "run deadbeef0-1 failed"),
    ],
)
def test_words_that_change_between_rounds_are_not_compared(text: str, other: str) -> None:
    assert counts(failure(text), failure(other)) == [1, 2]


def test_long_texts_are_compared_at_once() -> None:
    # A search in quadratic time would take minutes.
    for text in ("a" * 10**5, "/" * 10**5, "a/" * 10**5, "-" * 10**5, "a " * 10**5):
        assert CHANGING_WORD.sub("#", text) == text


def test_a_failure_at_the_start_is_before_the_first_step(launch: Launch, script: Script) -> None:
    result = launch("--max-restarts", "4", "--nproc", "1", script("import nosuchmodule"))
    notice = "times in a row the ranks failed with the same error before the first step: ModuleNotFoundError: No module"
    lines = [line for line in result.err.splitlines() if line.startswith("zero-launch: ")]
    assert result.code == 1 and lines[-1].startswith(f"zero-launch: 3 {notice}") and "mend the error" in lines[-1]
    assert [line for line in lines if "restart" in line] == [f"zero-launch: restart {n} of 4" for n in (1, 2)]
    assert sum(f": 2 {notice}" in line for line in lines) == 1


# The ranks fail in step 4 of a round, after a checkpoint of step 2.
TRAIN = """
import torch, zeroengine
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3}}
engine = zeroengine.initialize(torch.nn.Linear(4, 4), config=config)
engine.resume("ckpt")
while True:
    loss = engine(torch.ones(1, 4)).sum()
    if engine.global_steps == 3: raise ValueError(f"loss of rank {rank} is {id(loss)}")
    engine.backward(loss)
    engine.step()
    if engine.global_steps == 2: engine.save_checkpoint("ckpt")
"""
NOTICE = "3 times in a row the ranks failed with the same error after step 3, this time from step 2: ValueError"


@pytest.mark.slow  # the start above and the arithmetic have the same path
def test_a_step_that_always_fails_ends_the_run(launch: Launch, script: Script) -> None:
    result = launch("--max-restarts", "5", "--run-folder", "run", script(TRAIN))
    assert result.code == 1 and NOTICE in result.err.splitlines()[-1], result.err
    assert result.err.count("zero-launch: restart") == 2
