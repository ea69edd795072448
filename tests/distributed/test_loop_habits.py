"""Training loops written for plain PyTorch, with `optimizer.step()` in them, train the same model or say why not."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_reads import BlockTwice
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    adamw,
    assert_close,
    assert_same_bits,
    make_engine,
    settings,
    start,
    train_plainly,
)
from tests.parametrization import in_turn
from zeroengine import ZeroEngineError
from zeroengine.engine.initialize import make_engine as make_engine_on
from zeroengine.optim.caller_optimizer import PartitionedStateDict

EVERY_STAGE = (0, 1, 2, 3)  # of which two each have the same bits with several micro-steps


class Counting(torch.optim.SGD):
    """Keeps a count of its steps in each group, which its rate depends on, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # from now on torch runs step hooks in the base class's step, too
    return Counting(model.parameters(), lr=0.1, momentum=0.9)


def optimizer_loop(
    stages: Sequence[int], task: Task, use_engine_optimizer: bool, on_device: bool | None = None
) -> list[Trained]:
    """The loop of plain PyTorch: as many backwards as micro-steps, then step() and zero_grad() of an optimizer."""
    start()
    trained = []
    for stage in stages:
        model = build(task.factory)
        optimizer = task.optimizer(model)
        engine = make_engine_on(model, optimizer, settings(task, stage), async_step=on_device)
        stepped = engine.optimizer if use_engine_optimizer else optimizer
        losses, norms = [], []
        for micro_step in range(task.steps * task.micro_steps):
            loss = engine(*task.data(micro_step, engine.rank))
            loss.backward()
            losses.append(loss.item())
            last = (micro_step + 1) % task.micro_steps == 0
            if micro_step >= task.micro_steps:  # before the first update the engine does not know the loop's habit
                assert engine.is_gradient_accumulation_boundary() is last
            if last:
                assert stepped.step() is None
                stepped.zero_grad()
                assert engine.grad_norm is not None
                norms.append(engine.grad_norm)
        assert (engine.global_steps, engine.micro_steps) == (task.steps, task.steps * task.micro_steps)
        trained.append(Trained(losses, norms, engine.full_state_dict()))
        engine.close()
    return trained


@in_turn(
    ("task", "use_engine_optimizer"),
    [
        pytest.param(Task(), id="AdamW"),
        pytest.param(Task(micro_steps=4, steps=3), id="AdamW, 4 micro-steps"),
        pytest.param(Task(optimizer=counting, micro_steps=4, steps=2), id="group counters, 4 micro-steps"),
        pytest.param(Task(optimizer=counting), id="group counters", marks=pytest.mark.slow),
    ],
    [pytest.param(False, id="passed in"), pytest.param(True, id="of the engine")],
)
def test_optimizer_step_in_the_loop_trains_as_plain_pytorch(task: Task, use_engine_optimizer: bool) -> None:
    ranks = run_ranks(2, optimizer_loop, EVERY_STAGE, task, use_engine_optimizer)
    for found in ranks:
        assert_same_bits(found[0], found[1], "stages 0 and 1")
        assert_same_bits(found[2], found[3], "stages 2 and 3")
    for stage in (0, 2):
        assert_close([found[stage] for found in ranks], train_plainly(task))


def forwards_first(stages: Sequence[int], task: Task) -> list[Trained]:
    """All forwards of a step, then all its backwards, then the step."""
    start()
    trained = []
    for stage in stages:
        model = build(task.factory)
        optimizer = task.optimizer(model)
        engine = make_engine_on(model, optimizer, settings(task, stage))
        losses: list[float] = []
        norms = []
        for first in range(0, task.steps * task.micro_steps, task.micro_steps):
            of_step = [engine(*task.data(first + i, engine.rank)) for i in range(task.micro_steps)]
            for loss in of_step:
                loss.backward()
            norms.append(engine.clip_grad_norm_(1e9).item())
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in of_step]
        trained.append(Trained(losses, norms, engine.full_state_dict()))
        engine.close()
    return trained


@pytest.mark.parametrize("factory", [pytest.param(TinyLM, marks=pytest.mark.slow), BlockTwice])
def test_forwards_that_all_come_before_the_backwards_are_micro_steps(factory: Callable[[], nn.Module]) -> None:
    task = Task(factory=factory, micro_steps=3, steps=3)
    ranks = run_ranks(2, forwards_first, STAGES, task)
    for number in range(len(STAGES)):
        assert_close([found[number] for found in ranks], train_plainly(task))


def other_forwards(stage: int, backward_by_engine: bool) -> list[int]:
    """The micro-steps that update, where each has two forwards and one loss, and one step has one forward too few."""
    start()
    task = Task(factory=BlockTwice, micro_steps=4)
    model = build(task.factory)
    optimizer = task.optimizer(model)
    engine = make_engine_on(model, optimizer, settings(task, stage))
    updates = []
    for micro_step in range(12):
        first, second = (engine(*task.data(2 * micro_step + i, engine.rank)) for i in range(2))
        loss = (first - second).square() + first
        engine.backward(loss) if backward_by_engine else loss.backward()
        if engine.is_gradient_accumulation_boundary():
            optimizer.step()
            updates.append(micro_step)
        elif micro_step > 4:
            with pytest.raises(ZeroEngineError, match=f"after {micro_step % 4 + 1} of 4 backwards"):
                optimizer.step()
    engine.close()
    return updates


@pytest.mark.parametrize("backward_by_engine", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_forwards_with_one_loss_are_one_micro_step(backward_by_engine: bool) -> None:
    """Also under reentrant checkpoints, each of which runs a backward of its own."""
    assert run_ranks(2, other_forwards, 2, backward_by_engine) == [[3, 7, 11]] * 2


def test_optimizer_step_takes_a_step_that_waits_for_nothing() -> None:
    task = Task(micro_steps=2)
    for issued, waited in zip(
        run_ranks(2, optimizer_loop, STAGES, task, False, True),
        run_ranks(2, optimizer_loop, STAGES, task, False),
        strict=True,
    ):
        for number, stage in enumerate(STAGES):
            assert_same_bits(issued[number], waited[number], stage)


# -- objects that wrap the optimizer ------------------------------------------------------------------


class AcceleratedOptimizer(torch.optim.Optimizer):
    """What accelerate's wrapper does with an optimizer, for where accelerate is not installed."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self._original, self._called = optimizer.step, 0
        state = optimizer.state_dict()
        optimizer.load_state_dict(type(state)({key: value for key, value in state.items()}))

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        assert "set_to_none" in inspect.signature(self.optimizer.zero_grad).parameters
        self.optimizer.zero_grad(set_to_none=True)

    def _patched(self, *args: Any, **kwargs: Any) -> Any:
        self._called += 1
        return self._original(*args, **kwargs)

    def step(self, closure: Any = None) -> None:
        if self.scaler is None:
            return self.optimizer.step(closure)
        self.optimizer.step = self._patched  # type: ignore[method-assign]
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = self._original  # type: ignore[method-assign]


class Stepper:
    """Something with a step()."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    LambdaLR(optimizer, lambda step: 1.0)  # puts a wrapper around step
    return optimizer


def scaled(optimizer: torch.optim.Optimizer) -> Any:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Stepper(lambda: scaler.step(optimizer))


def taken(optimizer: torch.optim.Optimizer) -> Any:
    return Stepper(optimizer.step)


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    return AcceleratedOptimizer(optimizer)


def accelerated_with_scaler(optimizer: torch.optim.Optimizer) -> Any:
    return AcceleratedOptimizer(optimizer, torch.amp.GradScaler("cpu", enabled=False))


def really_accelerated(optimizer: torch.optim.Optimizer) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


def sharing(optimizer: torch.optim.Optimizer) -> Any:
    """Return another object of the class, with the attributes of the optimizer, as Lightning's wrapper is one."""
    wrapper = object.__new__(type(optimizer))
    vars(wrapper).update(vars(optimizer))
    return wrapper


WRAPPERS = [scheduled, scaled, taken, accelerated, accelerated_with_scaler, sharing]


def wrapped_loops(wrappers: list[Callable[[torch.optim.Optimizer], Any]]) -> dict[str, list[float]]:
    """The losses by the wrapper, and by what it is put around."""
    start()
    task = Task(steps=3)
    found = {}
    for wrapper in wrappers:
        for when in ("before", "after", "engine.optimizer", "given to initialize"):
            model = build(task.factory)
            optimizer = passed = task.optimizer(model)
            if when in ("before", "given to initialize"):
                stepped = wrapper(optimizer)
                if when == "given to initialize" and isinstance(stepped, torch.optim.Optimizer):
                    passed = stepped
            engine = zeroengine.initialize(model, passed, settings(task, 2))
            if when in ("after", "engine.optimizer"):
                stepped = wrapper(optimizer if when == "after" else engine.optimizer)
            losses = []
            for step in range(task.steps):
                loss = engine(*batch(step, engine.rank))
                loss.backward()
                for group in optimizer.param_groups:  # the engine still reads the groups of this object
                    group["lr"] = 1e-3 * (step + 1)
                stepped.step()
                losses.append(loss.item())
            found[f"{wrapper.__name__}, {when}"] = losses
            engine.close()
    return found


def check_wrapped(wrappers: list[Callable[[torch.optim.Optimizer], Any]]) -> None:
    for found in run_ranks(2, wrapped_loops, wrappers):
        expected = found[next(iter(found))]
        assert len(set(expected)) == len(expected)
        assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize(
    "wrappers",
    [[scheduled, accelerated_with_scaler, sharing], pytest.param(WRAPPERS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_step_ends_whatever_wraps_the_optimizer_before_or_after_initialize(
    wrappers: list[Callable[[torch.optim.Optimizer], Any]],
) -> None:
    check_wrapped(wrappers)


def test_the_step_ends_where_accelerate_wraps_the_optimizer() -> None:
    pytest.importorskip("accelerate")
    check_wrapped([scheduled, really_accelerated])


def gradscaler_messages() -> list[str]:
    start()
    messages = []
    for stage in (0, 3):
        for wrap in (None, "before", "after"):
            model = build()
            optimizer = adamw(model)
            scaler = torch.amp.GradScaler("cpu")
            early = AcceleratedOptimizer(optimizer, scaler) if wrap == "before" else None
            engine = zeroengine.initialize(model, optimizer, settings(Task(), stage))
            late = AcceleratedOptimizer(engine.optimizer, scaler) if wrap == "after" else None
            scaler.scale(engine(*batch(0, engine.rank))).backward()
            with pytest.raises(ZeroEngineError) as error:
                (early or late or Stepper(lambda o=optimizer, s=scaler: s.step(o))).step()
            messages.append(str(error.value))
            engine.zero_grad()
            # Where the scaler sees no gradients it leaves its scale on the optimizer.
            with pytest.raises(ZeroEngineError):
                scaler.step(optimizer)
            engine(*batch(0, engine.rank)).backward()
            optimizer.step()
            assert engine.global_steps == 1, "nothing of the scaler is left on the optimizer"
    return messages


def test_a_gradscaler_that_scales_is_refused_by_name() -> None:
    messages = run_ranks(1, gradscaler_messages)[0]
    assert len(messages) == 6 and len(set(messages)) == 1
    assert messages[0].startswith("GradScaler.step(optimizer): the scaler cannot see the gradients")
    assert '"fp16": {"enabled": true}' in messages[0] and "enabled=False" in messages[0]


# -- calls that do not fit together -------------------------------------------------------------------


def backward(engine: zeroengine.Engine, number: int = 0) -> None:
    engine(*batch(number, engine.rank)).backward()


def engine_after_optimizer(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(engine.config.micro_steps_in_mean):
        backward(engine)
    optimizer.step()
    engine.step()


def optimizer_after_engine(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(engine.config.micro_steps_in_mean):
        backward(engine)
        engine.step()
    optimizer.step()


def optimizer_within_engine(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    backward(engine)
    engine.step()
    backward(engine)
    optimizer.step()


def too_early(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    backward(engine)
    optimizer.step()


def without_backward(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


def with_closure(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(lambda: engine(*batch(0, 0)))


def in_a_hook(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    loss = engine(*batch(0, engine.rank))
    loss.register_hook(lambda grad: optimizer.step())
    loss.backward()


MISUSES: list[tuple[Callable[..., None], Any, str]] = [
    (engine_after_optimizer, 1, "engine.step() after optimizer.step(), with no backward in between"),
    (engine_after_optimizer, 3, "engine.step() after optimizer.step(), with no backward in between"),
    (engine_after_optimizer, "manual", "engine.step() after optimizer.step(), with no backward in between"),
    (optimizer_after_engine, 1, "optimizer.step() after engine.step(), with no backward in between"),
    (optimizer_after_engine, 3, "optimizer.step() after engine.step(), with no backward in between"),
    (optimizer_within_engine, 3, "optimizer.step() in a step of which engine.step() has ended 1 micro-step"),
    (too_early, 3, "optimizer.step() after 1 of 3 backwards: gradient_accumulation_steps is 3"),
    (without_backward, 1, "optimizer.step() without backward()"),
    (with_closure, 1, "optimizer.step() was given a closure"),
    (in_a_hook, 1, "optimizer.step() inside of a backward"),
]


def misuse(optimizers: Sequence[Sequence[bool]]) -> list[str]:
    """What is said of each misuse, by the engine's optimizer or the one that was passed in."""
    start()
    messages = []
    for number, (act, micro_steps, _) in enumerate(MISUSES):
        stage = (0, 3)[number % 2]
        for use_engine_optimizer in optimizers[number // 2 % 2]:
            model = build()
            optimizer = adamw(model)
            more = {"gradient_accumulation_steps": micro_steps}
            engine = zeroengine.initialize(model, optimizer, settings(Task(), stage, **more))
            with pytest.raises(ZeroEngineError) as error:
                act(engine, engine.optimizer if use_engine_optimizer else optimizer)
            messages.append(str(error.value))
            if act is too_early:
                assert "call engine.step() after each backward" in messages[-1]
                assert '"gradient_accumulation_steps": "manual"' in messages[-1]
                for _ in range(2):
                    backward(engine)
                optimizer.step()
                assert engine.global_steps == 1, "the error has changed nothing"
            engine.close()
    return messages


@pytest.mark.parametrize(
    "optimizers",
    [((False,), (True,)), pytest.param(((False, True), (False, True)), marks=pytest.mark.slow)],
    ids=["one in turn", "both"],
)
def test_calls_of_two_habits_in_one_step_are_refused_with_what_to_write(optimizers: Sequence[Sequence[bool]]) -> None:
    expected = [message for _, _, message in MISUSES for _ in optimizers[0]]
    for messages in run_ranks(2, misuse, optimizers):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def lifetimes() -> None:
    start()
    model = build()
    optimizer = adamw(model)
    engine = zeroengine.initialize(model, optimizer, settings(Task(), 2))
    alive = weakref.ref(engine)
    backward(engine)
    optimizer.step()
    del engine
    gc.collect()
    assert alive() is None, "the optimizer that was passed in does not keep the engine"
    with pytest.raises(ZeroEngineError, match="is gone"):
        optimizer.step()
    with pytest.raises(ZeroEngineError, match="Lookahead updates through another optimizer, its attribute optimizer"):
        zeroengine.initialize(other := build(), Lookahead(adamw(other)), settings(Task(), 2))
    gc.disable()
    try:
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None, "nothing refers to the optimizer in a cycle"
    finally:
        gc.enable()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer


def test_the_optimizer_that_was_passed_in_keeps_no_engine_alive() -> None:
    run_ranks(1, lifetimes)


def state_dicts() -> None:
    start()
    model = build()
    optimizer = adamw(model)
    engine = zeroengine.initialize(model, optimizer, settings(Task(), 2))
    backward(engine)
    engine.step()
    for it in (optimizer, engine.optimizer):
        groups = it.param_groups
        state = it.state_dict()
        assert isinstance(state, PartitionedStateDict) and state["param_groups"][0]["lr"] == 3e-3
        for save in (pickle.dumps, copy.deepcopy):
            with pytest.raises(ZeroEngineError, match=r"cannot be saved or copied\. Use engine.save_checkpoint"):
                save(state)
        # torch sets learning rates to 0 before it asks for the state.
        with pytest.raises(ZeroEngineError, match=r"get_optimizer_state_dict\(\).*engine.save_checkpoint"):
            get_optimizer_state_dict(model, it)
        assert groups[0]["lr"] == 3e-3 and all(param.grad is None for param in model.parameters())
        state["param_groups"][0]["lr"] = 7.0
        it.load_state_dict(state)
        assert it.param_groups is groups is engine.optimizer.param_groups and groups[0]["lr"] == 7.0
        groups[0]["lr"] = 3e-3
        with pytest.raises(ZeroEngineError, match=r"cannot be loaded from one dict. Use engine.load_checkpoint\(\)"):
            it.load_state_dict({"state": {0: {"step": 1}}, "param_groups": state["param_groups"]})


def test_a_state_dict_of_an_optimizer_is_neither_saved_nor_loaded_in_silence() -> None:
    run_ranks(1, state_dicts)


# -- schedules ----------------------------------------------------------------------------------------


def decaying(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def schedules() -> None:
    start()
    model = build()
    optimizer = adamw(model)
    schedule = decaying(optimizer)
    plain = set(vars(schedule))
    engine = zeroengine.initialize(model, optimizer, settings(Task(), 2), lr_scheduler=schedule)
    for step in range(2):
        backward(engine)
        optimizer.step()
        with pytest.raises(
            ZeroEngineError, match=r"LambdaLR.step\(\): the engine steps this schedule after each update"
        ):
            schedule.step()
        assert schedule.get_last_lr() == [3e-3 * 0.5 ** (step + 1)]
    assert type(schedule).__name__ == "LambdaLR" and isinstance(schedule, LambdaLR)
    assert set(vars(schedule)) == plain, "state_dict() saves attributes"
    assert type(copy.deepcopy(schedule)) is LambdaLR, "a copy, such as one to plot, is its own"
    other = decaying(engine.optimizer)
    engine.lr_scheduler = other
    schedule.step()
    with pytest.raises(ZeroEngineError, match="would step it once more"):
        other.step()
    engine.close()
    other.step()
    optimizer = adamw(model := build())
    last = decaying(optimizer)
    dropped = zeroengine.initialize(model, optimizer, settings(Task(), 2), lr_scheduler=last)
    with pytest.raises(ZeroEngineError, match="would step it once more"):
        last.step()
    del dropped
    gc.collect()
    last.step()


def test_a_schedule_that_the_engine_steps_is_not_stepped_a_second_time() -> None:
    run_ranks(1, schedules)


# -- a step that is forgotten -------------------------------------------------------------------------


def warnings_of(run: Callable[[], None]) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zeroengine")
    logger.addHandler(handler)
    try:
        run()
    finally:
        logger.removeHandler(handler)
    return records


def forgetting() -> tuple[list[str], list[str]]:
    start()

    def forgotten() -> None:
        engine = make_engine(Task(micro_steps=2), 1)
        for step in range(25):
            backward(engine, step)

    def legal() -> None:
        engine = make_engine(Task(), 1)
        for step in range(12):  # as a discriminator that sees real and generated samples
            backward(engine, step)
            backward(engine, step + 1)
            engine.step()
        loss = engine(*batch(0, engine.rank))
        for _ in range(12):  # as losses over one graph
            loss.backward(retain_graph=True)
        engine.step()
        with engine.no_sync():  # as under DDP
            for step in range(12):
                backward(engine, step)
        backward(engine)
        engine.step()
        engine.module.requires_grad_(False)  # as a critic of another model
        for step in range(12):
            embedded = engine.module.tok(batch(step, 0)[0]).requires_grad_()
            handle = engine.module.tok.register_forward_hook(lambda module, args, output, x=embedded: x)
            backward(engine, step)
            handle.remove()
        manual = make_engine(Task(), 1, gradient_accumulation_steps="manual")
        for step in range(12):
            backward(manual, step)
        manual.step()

    return warnings_of(forgotten), warnings_of(legal)


def test_a_forgotten_step_is_one_warning() -> None:
    (warned, legal), (warned_on_1, legal_on_1) = run_ranks(2, forgetting)
    assert legal == legal_on_1 == warned_on_1 == []
    assert len(warned) == 1 and warned[0].startswith("11 forwards and backwards without a step()")
    assert "gradient_accumulation_steps (2)" in warned[0] and '"manual"' in warned[0]


def hooked() -> tuple[list[str], int]:
    start()
    calls: list[Any] = []

    def run() -> None:
        model = build()
        optimizer = counting(model)
        optimizer.register_step_post_hook(lambda *args: calls.append(args))
        engine = zeroengine.initialize(model, optimizer, settings(Task(), 1))
        for _ in range(2):
            backward(engine)
            optimizer.step()
        for _ in range(2):
            backward(engine)
            engine.step()

    return warnings_of(run), len(calls)


def test_step_hooks_of_the_optimizer_run_once_where_its_step_is_called_and_else_are_named() -> None:
    warned, calls = run_ranks(1, hooked)[0]
    assert calls == 2
    assert len(warned) == 1 and "has step hooks, which engine.step() does not call" in warned[0]


class AllInCheckpoints(nn.Module):
    """A model whose trainable parameters are all used inside of reentrant checkpoints, as those of adapters may be."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1).requires_grad_(False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fault: Exception | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, self.tok(x).requires_grad_(), use_reentrant=True)
        hidden.register_hook(self.fail)
        return self.head(checkpoint(self.second, hidden, use_reentrant=True)).square().mean()  # type: ignore[no-any-return]

    def fail(self, gradient: torch.Tensor) -> None:
        if self.fault is not None:
            raise self.fault


def nested_alone(stage: int) -> list[float]:
    """Norms of a first step: of one backward, of one that is repeated after it raised, and of two at once."""
    start()
    norms = []
    for kind in ("one", "repeated", "two"):
        model = build(AllInCheckpoints)
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        micro_steps = 2 if kind == "two" else 1
        engine = zeroengine.initialize(
            model, optimizer, settings(Task(), stage, gradient_accumulation_steps=micro_steps, optimizer=None)
        )
        if kind == "repeated":
            model.fault = RuntimeError("planned")
            with pytest.raises(RuntimeError, match="planned"):
                engine(torch.ones(2, 4)).backward()
            model.fault = None
        for loss in [engine(torch.ones(2, 4)) for _ in range(micro_steps)]:
            loss.backward()
        optimizer.step()
        assert engine.grad_norm is not None
        norms.append(engine.grad_norm)
        engine.close()
    return norms


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_backwards_are_told_apart_although_all_gradients_come_in_nested_ones(stage: int) -> None:
    for one, repeated, two in run_ranks(2, nested_alone, stage):
        assert one > 0 and repeated == one and two == pytest.approx(one, rel=1e-6)
