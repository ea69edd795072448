"""A rank that runs out of memory in a micro-step: all go on with less, and the step has the bits of one without."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.models import VOCAB, Block, batch
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, Trained, assert_same_bits, make_engine, start
from tests.emulated import wanted
from zeroengine.errors import DivergenceError, ZeroEngineError

LOWER = {"on_out_of_memory": "lower", "memory_check": "off"}
Accident = tuple[int, int, str]  # (micro-step, rank, "forward" or "backward")


class Dropping(nn.Module):
    """Draws random numbers, and counts its forwards. Each stage takes less memory than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.norm, self.head = nn.Embedding(VOCAB, 48), nn.LayerNorm(48), nn.Linear(48, VOCAB)
        self.blocks = nn.ModuleList(Block(48) for _ in range(10))
        self.dropout, self.num_forwards = nn.Dropout(0.2), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.seen += ids.sum()
        x = self.tok(ids)
        for block in self.blocks:
            x = self.dropout(block(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Memory:
    """Raises the error of a full memory in the middle of some forwards and backwards, once each."""

    def __init__(self, engine: Any, accidents: Sequence[Accident]) -> None:
        self.left, self.micro_step, self._rank = list(accidents), 0, engine.rank
        block = engine.module.blocks[1]
        block.register_forward_hook(lambda *_: self.check("forward"))
        block.register_full_backward_hook(lambda *_: self.check("backward"))

    def check(self, where: str) -> None:
        if (accident := (self.micro_step, self._rank, where)) in self.left:
            self.left.remove(accident)
            raise torch.OutOfMemoryError(f"no memory in {where}")


def train(
    accidents: Sequence[Accident], num_steps: int, more: dict[str, Any], stage: int, loop: Callable[..., None] | None
) -> tuple[Trained, int, int]:
    start()
    task = Task(factory=Dropping, steps=num_steps, micro_steps=more.get("gradient_accumulation_steps", 1))
    # Small buckets, beside which such a model's states count.
    zero = {"stage": stage, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
    more = more | {"zero_optimization": zero | more.get("zero_optimization", {})}
    engine = make_engine(task, stage, **more)
    torch.manual_seed(7 + engine.rank)
    memory = Memory(engine, accidents)
    losses, norms = [], []
    for number in range(task.steps * task.micro_steps):
        memory.micro_step = number
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss)
        if engine.step():
            norms.append(engine.grad_norm or 0.0)
        losses.append(loss.item())
    assert not [left for left in memory.left if left[1] == engine.rank]
    assert (engine.global_steps, engine.micro_steps) == (task.steps, task.steps * task.micro_steps)
    trained = Trained(losses, norms, engine.full_state_dict()), int(engine.config.zero_optimization.stage)
    engine.close()
    return *trained, engine.module.num_forwards


def check(
    num_ranks: int, accidents: Sequence[Accident], stages: Sequence[int], num_steps: int = 6, **more: Any
) -> list[int]:
    """Compare with a run without accidents. Return the number of forwards of each rank."""
    first, last = stages
    expected = run_ranks(num_ranks, train, [], num_steps, more, first, None)
    found = run_ranks(num_ranks, train, accidents, num_steps, more | LOWER, first, None)
    for (whole, _, _), (lowered, stage, _) in zip(expected, found, strict=True):
        assert_same_bits(whole, lowered)
        # On a GPU states may go to CPU memory in place of a stage that takes more buffers than it saves.
        assert stage == last or wanted() != "cpu"
    return [num_forwards for _, _, num_forwards in found]


def test_accidents_on_different_ranks_leave_the_bits_and_raise_the_stage() -> None:
    check(2, [(1, 0, "forward"), (3, 1, "backward"), (4, 1, "forward")], (0, 3))
    check(2, [(2, 1, "backward")], (1, 2))


def test_with_accumulation_the_whole_step_is_taken_again() -> None:
    # Gradients that are partitioned are added in another order, so these stages are those before and after that.
    forwards = check(2, [(4, 1, "backward")], (2, 3), 3, gradient_accumulation_steps=3)
    # Micro-steps 3 and 4 of the second step come twice.
    assert forwards == [9 + 2, 9 + 2]
    check(2, [(5, 0, "forward")], (0, 1), 3, gradient_accumulation_steps=3)


def test_at_stage_3_a_rank_gathers_what_the_others_gather(tmp_path: Path) -> None:
    """The first accident ends prefetches, and the second one moves the optimizer's states."""
    offload = {"device": "none", "nvme_path": str(tmp_path), "buffer_size": 1024}
    zero = {"zero_optimization": {"offload_optimizer": offload}}
    check(2, [(0, 1, "backward"), (1, 0, "forward")], (3, 3), 3, **zero)
    check(2, [(0, 0, "forward")], (3, 3), 2, gradient_accumulation_steps=3)
    for second in ("forward", "backward"):
        check(2, [(1, 0, "forward"), (1, 1, second)], (3, 3), 3, **zero)


def test_both_ranks_may_run_out_of_memory_at_once() -> None:
    check(2, [(2, 0, "forward"), (2, 1, "backward")], (0, 1))


def test_one_process_moves_its_states_to_a_disk(tmp_path: Path) -> None:
    def zero(device: str) -> dict[str, Any]:
        offload = {"device": device, "nvme_path": str(tmp_path), "buffer_size": 1024}
        return {"zero_optimization": {"offload_optimizer": offload}}

    check(1, [(1, 0, "forward")], (0, 0), **zero("none"))
    # All states are there already, and nothing is left.
    with pytest.raises(AssertionError, match=r"OutOfMemoryError.*no memory in backward"):
        run_ranks(1, train, [(1, 0, "backward")], 3, {**zero("nvme"), **LOWER}, 0, None)


@pytest.mark.slow  # four ranks
def test_smaller_degrees_give_way_to_those_of_all_ranks() -> None:
    degrees = {"optimizer": 4, "gradients": 2, "parameters": 2}
    check(4, [(1, 2, "forward"), (1, 3, "backward")], (3, 3), 3, zero_optimization={"degrees": degrees})


@pytest.mark.slow  # the same with many
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ten_accidents_at_random_steps(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    for seed in range(5):
        first, second = sorted(torch.randperm(12, generator=generator)[:2].tolist())
        ranks = torch.randint(num_ranks, (2,), generator=generator).tolist()
        where = [("forward", "backward")[(seed + number) % 2] for number in range(2)]
        accidents = [(first, ranks[0], where[0]), (second, ranks[1], where[1])]
        check(num_ranks, accidents[1:], (3, 3), 12)
        if seed % 2:
            check(num_ranks, accidents[1:], (0, 1), 4, gradient_accumulation_steps=3)
        else:
            check(num_ranks, accidents, (0, 2), 12)


def refuse(kind: str) -> str:
    start()
    engine = make_engine(Task(factory=Dropping), 1, **LOWER)
    memory = Memory(engine, [(0, 0, "backward")])
    ids, labels = batch(0, engine.rank)
    if kind == "another error":
        memory.left = []
        engine.module.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    kinds = (RuntimeError, ZeroEngineError, ZeroDivisionError)
    with pytest.raises(kinds) as caught:
        loss = engine(ids, labels)
        engine.backward(loss * 2 if kind == "outside" else loss + engine(ids, labels))
    text = f"{type(caught.value).__name__}: {caught.value} {' '.join(getattr(caught.value, '__notes__', []))}"
    if kind != "another error":
        # The run goes on where the loop catches the error.
        memory.left = []
        engine.zero_grad()
        engine.backward(engine(ids, labels))
        assert engine.step()
    engine.close()
    return text


def test_what_cannot_be_taken_again_says_what_to_write() -> None:
    for kind, text in (("outside", "the loss is no part of"), ("twice", "a micro-step has 2 forwards")):
        first, second = run_ranks(2, refuse, kind)
        assert first.startswith("OutOfMemoryError") and second.startswith("ZeroEngineError: rank 0 ran out of memory")
        for message in (first, second):
            assert text in message and "let the model return the loss" in message
    assert "ZeroDivisionError" in run_ranks(1, refuse, "another error")[0]


def in_other_loops(kind: str) -> str:
    """A loop in whose first step at stage 3 rank 1 runs out of memory, so that it follows what rank 0 launches."""
    start()
    engine = make_engine(Task(factory=Dropping), 3, **LOWER)
    Memory(engine, [(0, 1, "forward")])
    with pytest.raises((torch.OutOfMemoryError, ZeroEngineError)) as caught:
        loss = engine(*batch(0, engine.rank))
        if kind == "an evaluation between":
            with torch.no_grad():
                engine(*batch(1, engine.rank))
        loss.backward() if kind == "plain backwards" else engine.backward(loss)
        engine.step()
    return f"{type(caught.value).__name__}: {caught.value} {' '.join(getattr(caught.value, '__notes__', []))}"


def test_a_rank_that_follows_says_what_the_loop_is_to_do() -> None:
    for kind, text in (
        ("plain backwards", "this loop calls loss.backward(): call engine.backward(loss)"),
        ("an evaluation between", "a forward without gradients came between a forward and its backward"),
    ):
        _, message = run_ranks(2, in_other_loops, kind)
        assert message.startswith("OutOfMemoryError: no memory in forward") and text in message


def above_limit() -> tuple[str, int, list[float]]:
    start()
    limited = make_engine(Task(factory=Dropping), 1, memory_limit="1MB")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        limited(*batch(0, limited.rank))
    limited.close()
    engine = make_engine(Task(factory=Dropping), 1, memory_limit="64GB", **LOWER)
    losses = []
    for number in range(2):
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    stage = int(engine.config.zero_optimization.stage)
    engine.close()
    return str(caught.value), stage, losses


@pytest.mark.skipif(wanted() != "cpu", reason="the allocator of a GPU has a limit of its own")
def test_a_limit_of_the_memory_raises_the_error_of_a_full_one() -> None:
    for text, stage, losses in run_ranks(2, above_limit):
        assert "the process holds" in text and "above memory_limit" in text
        assert stage == 1 and len(losses) == 2


# -- loops of other kinds --------------------------------------------------------------------------

Loop = Callable[[Any, int], None]


def two_losses(engine: Any, number: int) -> None:
    loss = engine(*batch(number, engine.rank))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss * 0.5)


def plain(engine: Any, number: int) -> None:
    engine(*batch(number, engine.rank)).backward()


def dropped(engine: Any, number: int) -> None:
    engine.backward(engine(*batch(number, engine.rank)))
    if number == 0:
        engine.zero_grad()


def without_sync(engine: Any, number: int) -> None:
    with engine.no_sync() if number == 0 else contextlib.nullcontext():
        engine.backward(engine(*batch(number, engine.rank)))


def changed_inputs(engine: Any, number: int) -> None:
    ids, labels = engine.module.__dict__.setdefault("buffer", batch(0, engine.rank))
    ids.copy_(batch(number, engine.rank)[0])
    engine.backward(engine(ids, labels))


LOOPS: dict[str, tuple[Loop, str]] = {
    "two losses": (two_losses, "a backward has 0 forwards"),
    "plain backward": (plain, "this loop calls loss.backward()"),
    "zero_grad": (dropped, "or some were dropped"),
    "no_sync": (without_sync, "a micro-step is inside no_sync()"),
    "inputs": (changed_inputs, "inputs of the model were changed in place"),
}


def run_loop(kind: str) -> str:
    start()
    engine = make_engine(Task(factory=Dropping), 1, gradient_accumulation_steps=2, **LOWER)
    memory, loop = Memory(engine, [(1, rank, "forward") for rank in range(2)]), LOOPS[kind][0]
    loop(engine, 0)
    engine.step()
    memory.micro_step = 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop(engine, 1)
    engine.close()
    return " ".join(caught.value.__notes__)


@pytest.mark.parametrize("kind", LOOPS)
def test_a_step_that_is_not_known_whole_is_not_taken_again(kind: str) -> None:
    for message in run_ranks(2, run_loop, kind):
        assert LOOPS[kind][1] in message


class Held:
    """Is held by a graph."""


class Hold(torch.autograd.Function):
    """The identity, whose node holds an object."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: weakref.WeakSet[Held]) -> torch.Tensor:
        ctx.held = Held()
        alive.add(ctx.held)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Seen(Dropping):
    """Counts the graphs that are alive as a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []
        self.graphs: weakref.WeakSet[Held] = weakref.WeakSet()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.alive.append(len(self.graphs))
        loss = super().forward(ids, labels)
        return Hold.apply(loss, self.graphs)  # type: ignore[no-any-return]


def hold_graphs() -> list[int]:
    start()
    engine = make_engine(Task(factory=Seen), 0, **LOWER)
    memory = Memory(engine, [(1, 0, "backward")])
    for number in range(3):
        memory.micro_step = number
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss)
        engine.step()
        # The loop keeps the loss as long as the backward runs.
        del loss
    alive: list[int] = engine.module.alive
    engine.close()
    return alive


def test_the_memory_of_what_failed_is_free_as_the_step_is_taken_again() -> None:
    assert run_ranks(2, hold_graphs) == [[0, 0, 0, 0]] * 2


def plain_loop() -> tuple[str, float]:
    start()
    engine = make_engine(Task(factory=Dropping), 1, **LOWER)
    memory = Memory(engine, [(1, 0, "forward")])
    plain(engine, 0)
    engine.step()
    memory.micro_step = 1
    # The other rank waits for what this one does not do.
    began, kinds = time.monotonic(), (torch.OutOfMemoryError, DivergenceError)
    with pytest.raises(kinds) as caught:
        plain(engine, 1)
        engine.step()
    return " ".join(getattr(caught.value, "__notes__", [])), time.monotonic() - began


def test_a_loop_of_plain_backwards_raises_at_once() -> None:
    (message, seconds), _ = run_ranks(2, plain_loop)
    assert "this loop calls loss.backward(): call engine.backward(loss)" in message
    assert seconds < 10
