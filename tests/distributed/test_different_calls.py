"""Ranks that are in different calls are told which, on every rank, and an engine after it is as good as any."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start, take_steps
from zeroengine import DivergenceError, ZeroEngineError

PATIENCE = 0.5  # seconds: comm.timeout_seconds, which ranks wait where one of them is in no exchange of objects
SOON = 25.0  # seconds
Call = Callable[[zeroengine.Engine, str], Any]


def make(stage: int, transport: str) -> zeroengine.Engine:
    comm = {"transport": "auto" if transport == "two-level" else transport, "timeout_seconds": PATIENCE}
    return zeroengine.initialize(build(TinyLM), config=config(stage, comm=comm, ema={"decay": 0.9}))


def weight(engine: zeroengine.Engine) -> torch.nn.Parameter:
    return engine.module.blocks[0].up.weight  # type: ignore[no-any-return]


def offload(engine: zeroengine.Engine, folder: str) -> None:
    with engine.offloaded("optimizer", device="nvme", nvme_path=folder):
        pass


def gather(engine: zeroengine.Engine, folder: str) -> None:
    with zeroengine.gathered(engine.module):
        pass


def average(engine: zeroengine.Engine, folder: str) -> None:
    with engine.average_weights():
        pass


# By what a message calls them. The first ones exchange objects before anything else.
EXCHANGES: dict[str, Call] = {
    "save_checkpoint()": lambda engine, folder: engine.save_checkpoint(f"{folder}/new"),
    "load_checkpoint()": lambda engine, folder: engine.load_checkpoint(f"{folder}/checkpoints"),
    "resume()": lambda engine, folder: engine.resume(f"{folder}/checkpoints"),
    "save_weights()": lambda engine, folder: engine.save_weights(f"{folder}/other"),
    "load_weights()": lambda engine, folder: engine.load_weights(f"{folder}/weights"),
    "full_state_dict()": lambda engine, folder: engine.full_state_dict(),
    "stream_weights()": lambda engine, folder: list(engine.stream_weights()),
    "state_digests()": lambda engine, folder: engine.state_digests(),
    "full_gradient": lambda engine, folder: zeroengine.full_gradient(weight(engine)),
    "full_master": lambda engine, folder: zeroengine.full_master(weight(engine)),
    "full_optimizer_state": lambda engine, folder: zeroengine.full_optimizer_state(weight(engine), "exp_avg"),
    "set_full_master": lambda engine, folder: zeroengine.set_full_master(weight(engine), torch.ones(1)),
    "offloaded()": offload,
    "average_weights()": average,
    "round_masters()": lambda engine, folder: engine.round_masters(),
    "release()": lambda engine, folder: engine.release(),
    "close()": lambda engine, folder: engine.close(),
    "initialize()": lambda engine, folder: zeroengine.initialize(build(TinyLM), config=config(1)).close(),
}
# These meet the other ranks in the transport, at some stages.
COLLECTIVES: dict[str, Call] = {
    "step": lambda engine, folder: take_steps(engine, range(1)),
    "forward": lambda engine, folder: engine(*batch(0, engine.rank)),
    "gathered": gather,
}
CALLS = EXCHANGES | COLLECTIVES
# At stages 1 and 2 a call that reads states first waits for gathers of the last step.
MEET_AT_ONCE = {name: call for name, call in EXCHANGES.items() if name != "state_digests()"}
DIFFERENT = "the ranks make different calls: rank"
REFUSED = "save_checkpoint() (exchange to save a checkpoint) is refused, because the ranks of this engine have diverged"


class Outcome(NamedTuple):
    """How a rank's call ended, and how training after it."""

    error: str
    message: str
    seconds: float
    later: str
    later_seconds: float


def try_calls(stage: int, transport: str, pairs: Iterable[tuple[str, str]], folder: str) -> list[Outcome]:
    """How each rank's call of a pair ends where rank 0 makes the first and the other ranks the second."""
    rank = start()
    logging.getLogger("zeroengine").setLevel(logging.CRITICAL)
    if transport == "two-level":
        imagine_hosts(2)
    store = dist.distributed_c10d._get_default_store()
    found, expected, engine = [], None, None
    for number, pair in enumerate(pairs):
        if engine is None:
            engine = make(stage, transport)
            losses = take_steps(engine, range(1))
            expected = expected or losses
            assert losses == expected
        if number == 0:
            engine.save_checkpoint(f"{folder}/checkpoints")
            engine.save_weights(f"{folder}/weights")
        error, message, later, began = "", "", "", time.monotonic()
        divergence = engine.group.divergence
        try:
            CALLS[pair[min(rank, 1)]](engine, folder)
            # close() logs that other ranks have diverged, and ends the engine.
            if engine._parts.has_ended:
                raise DivergenceError(divergence.message)
            # Whoever has met no other rank so far does it here.
            take_steps(engine, range(1, 2))
        except Exception as raised:
            error, message = type(raised).__name__, str(raised)
        seconds, began = time.monotonic() - began, time.monotonic()
        # An exchange of objects is an error on every rank, which may go on together. After others the engine is closed.
        has_diverged = bool(divergence.message)
        if has_diverged and not engine._parts.has_ended:
            with pytest.raises(ZeroEngineError) as refused:
                engine.save_checkpoint(folder)
            later = str(refused.value)
            engine.close()
        later_seconds = time.monotonic() - began
        found.append(Outcome(error, message, seconds, later, later_seconds))
        # Every rank has had its error before the next engine begins.
        store.set(f"{number}/{rank}", str(has_diverged))
        if {store.get(f"{number}/{other}") for other in range(dist.get_world_size())} != {b"False"}:
            # Another rank may have diverged that this one has not met since.
            with contextlib.suppress(DivergenceError):
                engine.close()
            engine.close()
            engine = None
    return found


def problems_of(pairs: list[tuple[str, str]], by_rank: list[list[Outcome]]) -> list[str]:
    """What is wrong with the outcomes."""
    found = []
    for pair, *outcomes in zip(pairs, *by_rank, strict=True):
        for rank, outcome in enumerate(outcomes):
            where = f"{pair}, rank {rank}: {outcome}"
            # Of two calls that meet in the transport, the one of a rank may be a part of the other's.
            if outcome.error != "DivergenceError" and (outcome.error or not set(pair) <= COLLECTIVES.keys()):
                found.append(f"another error: {where}")
            elif max(outcome.seconds, outcome.later_seconds) > SOON:
                found.append(f"late: {where}")
            elif outcome.message.startswith(DIFFERENT) and not all(
                call.strip("()") in outcome.message for call in pair
            ):
                found.append(f"no name: {where}")
            elif outcome.later and not (outcome.later.startswith(REFUSED) and outcome.message in outcome.later):
                found.append(f"no advice: {where}")
            elif not outcome.message.startswith(DIFFERENT) and set(pair) <= MEET_AT_ONCE.keys():
                found.append(f"no exchange of objects: {where}")
    return found


@pytest.mark.parametrize(
    ("stage", "transport", "num_ranks"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(0, "shm", 2), (3, "shm", 3), (1, "gloo", 2), (3, "gloo", 2), (2, "two-level", 4)]
    ],
)
def test_any_two_calls_that_differ_are_an_error_by_name_on_every_rank(
    stage: int, transport: str, num_ranks: int, tmp_path: Path
) -> None:
    pairs = list(itertools.combinations(CALLS, 2))
    by_rank = run_ranks(num_ranks, try_calls, stage, transport, pairs, str(tmp_path), timeout=900.0)
    assert problems_of(pairs, by_rank) == []


def test_ranks_in_different_calls_are_told_which_and_what_comes_later_says_to_close(tmp_path: Path) -> None:
    pairs = [
        ("save_checkpoint()", "load_checkpoint()"),
        # One rank hears of the other's error, and both go on with the next engine.
        ("step", "full_state_dict()"),
        ("full_master", "save_weights()"),
        ("load_checkpoint()", "initialize()"),
    ]
    by_rank = run_ranks(2, try_calls, 3, "shm", pairs, str(tmp_path))
    assert problems_of(pairs, by_rank) == []


def call_of_different_engines() -> tuple[str, dict[str, dict[str, str]]]:
    rank = start()
    engines = [make(1, "shm") for _ in range(2)]
    with pytest.raises(DivergenceError) as raised:
        engines[rank].state_digests()
    return str(raised.value), engines[0].state_digests()


@pytest.mark.slow
def test_ranks_in_one_call_of_different_engines_are_told() -> None:
    (first, digests), (second, others) = run_ranks(2, call_of_different_engines)
    assert first == second and "in state_digests() (exchange of names of written parameters) of engine " in first
    assert digests == others
