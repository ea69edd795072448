"""What user code does to `param.grad` has the effect that it has in plain PyTorch, at every stage, or is an error."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import STAGES, Task, settings, start
from zeroengine import DivergenceError, ZeroEngineError

NAME = "blocks.1.up.weight"


class OwnWeightGradient(torch.autograd.Function):
    """Writes the gradient of its weight itself, as fused weight gradients do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        assert weight.is_own
        weight.grad = grad.flatten(0, 1).T @ x.flatten(0, 1) + (0 if weight.grad is None else weight.grad)
        return grad @ weight, None


class FusedLM(TinyLM):
    def __init__(self) -> None:
        super().__init__(tied=False, blocks=2)
        for block in self.blocks:
            block.up.weight.is_own = True

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = x + block.down(F.gelu(OwnWeightGradient.apply(block.norm(x), block.up.weight) + block.up.bias))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def zero_by_loop(loop: Loop, set_to_none: bool) -> None:
    for param in loop.model.blocks[1].parameters():
        if param.grad is not None:
            param.grad.zero_()


def zero_by_lists(loop: Loop, set_to_none: bool) -> None:
    params = loop.model.blocks[1].parameters()
    torch._foreach_zero_([param.grad.data for param in params if param.grad is not None])


def zero_by_engine(loop: Loop, set_to_none: bool) -> None:
    (loop.optimizer if loop.engine is None else loop.engine).zero_grad(set_to_none=set_to_none)


# The ways to throw gradients away, or to set them to zero, with the arguments of a ``Loop``.
WAYS_TO_DROP: dict[str, Callable[[Loop, bool], None]] = {
    "engine": zero_by_engine,
    "optimizer": lambda loop, set_to_none: loop.optimizer.zero_grad(set_to_none),
    "model": lambda loop, set_to_none: loop.model.zero_grad(set_to_none),
    "part": lambda loop, set_to_none: loop.model.blocks[1].zero_grad(set_to_none),
    "another optimizer": lambda loop, set_to_none: torch.optim.SGD(
        loop.model.blocks[1].parameters(), lr=1.0, foreach=True
    ).zero_grad(set_to_none),
    "loop": zero_by_loop,
    "lists": zero_by_lists,
}


def ramp(param: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.linspace(-scale, scale, param.numel()).view(param.shape)


class Loop:
    """One case's training. By the engine or, without one, by plain PyTorch on what all ranks see.

    Args:
        is_plain: whether the engine's backwards are `loss.backward()`.
        ranks: how many there are.
        more: further keys of the configuration.
    """

    def __init__(
        self, case: str, stage: int | None, is_plain: bool = False, ranks: int = 2, more: dict[str, Any] | None = None
    ) -> None:
        self.is_plain, self.ranks = is_plain, ranks
        self.case, self.micro_steps = case, 1 if case in ("without a backward", "post-accumulate hook") else 2
        self.model: Any = build(FusedLM)
        self.params = dict(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.engine: zeroengine.Engine | None = None
        if stage is not None:
            if case == "before initialize":
                self.model(*batch(9, 0)).backward()
            task = Task(clip=0.0, micro_steps=self.micro_steps)
            self.engine = zeroengine.initialize(self.model, self.optimizer, settings(task, stage, **(more or {})))
        if case == "post-accumulate hook":
            self.params[NAME].register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    def backward(self, number: int) -> None:
        if self.engine is not None:
            loss = self.engine(*batch(number, self.engine.rank))
            loss.backward() if self.is_plain else self.engine.backward(loss)
        else:
            losses = [self.model(*batch(number, rank)) for rank in range(self.ranks)]
            (torch.stack(losses).mean() / self.micro_steps).backward()

    def end_micro_step(self) -> None:
        if self.engine is not None:
            self.engine.step()

    def drop_as_case_says(self, moment: str) -> None:
        if not self.case.endswith(moment):
            return
        way, set_to_none = self.case.removesuffix(moment), True
        if way.endswith(" to zero"):
            way, set_to_none = way.removesuffix(" to zero"), False
        if way.endswith(" in gathered"):
            with contextlib.nullcontext() if self.engine is None else zeroengine.gathered(self.model):
                WAYS_TO_DROP[way.removesuffix(" in gathered")](self, set_to_none)
        else:
            WAYS_TO_DROP[way](self, set_to_none)

    def run(self) -> dict[str, torch.Tensor]:
        weight = self.params[NAME]
        for step in range(2):
            if self.case == "assigned before the first backward":
                weight.grad = ramp(weight, 0.02)
            for micro_step in range(self.micro_steps):
                if self.case == "without a backward":
                    for param in self.params.values():
                        param.grad = ramp(param, 0.01 * (1 + step))
                else:
                    self.backward(2 * step + micro_step)
                if micro_step + 1 < self.micro_steps:
                    if self.case == "assigned between backwards":
                        weight.grad = ramp(weight, 0.03)
                    if step:
                        self.drop_as_case_says(", before a micro-step ends")
                    self.end_micro_step()
                    if step:
                        self.drop_as_case_says(", between micro-steps")
            if step:
                self.drop_as_case_says(", before the step")
            if self.case == "assigned before the step":
                weight.grad = ramp(weight, 0.04)
            if self.case == "transposed, assigned before the step":
                weight.grad = ramp(torch.empty(weight.shape[::-1]), 0.04).t()
            if self.case == "cleared before the step, after uses of the values":
                with contextlib.nullcontext() if self.engine is None else zeroengine.gathered(weight):
                    weight.norm()
                    copy.deepcopy(weight)
                if self.engine is not None:
                    zeroengine.full_gradient(weight)
            if self.case.startswith("cleared before the step"):
                weight.grad = None
            if self.engine is not None:
                self.engine.step()
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
        if self.engine is None:
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        state = self.engine.full_state_dict()
        self.engine.close()
        return state


CASES = [
    "before initialize",
    "assigned before the first backward",
    "assigned between backwards",
    "assigned before the step",
    "transposed, assigned before the step",
    "cleared before the step",
    "cleared before the step, after uses of the values",
    "without a backward",
    "post-accumulate hook",
]


def check_cases(cases: list[str], stages: tuple[int, ...], ranks: int = 2, more: dict[str, Any] | None = None) -> None:
    start()
    for number, case in enumerate(cases):
        expected = Loop(case, None, ranks=ranks).run()
        for stage in stages:
            state = Loop(case, stage, is_plain=bool((number + stage) % 3), ranks=ranks, more=more).run()
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, c=(case, stage, name): f"{c}: {m}"
                )


def test_gradients_of_the_user_count_as_in_plain_pytorch() -> None:
    run_ranks(2, check_cases, CASES, STAGES)


# Between micro-steps some gradients were reduced at stages 2 and 3, and before the step all of them.
DROPS = [
    "model, between micro-steps",
    "part to zero, before a micro-step ends",
    "loop in gathered, before the step",
    "lists, between micro-steps",
    "another optimizer, before the step",
    "engine to zero, before the step",
]
ALL_DROPS = [
    f"{way}{how}{when}"
    for way in WAYS_TO_DROP
    for how in ("", " to zero", " in gathered")
    for when in (", before a micro-step ends", ", between micro-steps", ", before the step")
    # The engine refuses its own call there.
    if how != " in gathered" or (way != "engine" and when == ", before the step")
]


def test_every_way_to_drop_a_gradient_drops_it_as_in_plain_pytorch() -> None:
    run_ranks(2, check_cases, DROPS, STAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stages", "more"),
    [
        (3, (0, 1), {}),
        (3, (2, 3), {}),
        (2, (0, 3), {"comm": {"transport": "gloo"}}),
        (2, (2,), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        (1, (3,), {}),
    ],
)
def test_all_ways_to_drop_a_gradient_at_all_stages(ranks: int, stages: tuple[int, ...], more: dict[str, Any]) -> None:
    run_ranks(ranks, check_cases, ALL_DROPS, stages, ranks, more)


def drop_by(call: Callable[[zeroengine.Engine, torch.optim.Optimizer], None], stage: int) -> None:
    start()
    model = build(TinyLM)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = zeroengine.initialize(model, optimizer, settings(Task(clip=0.0), stage))
    before = engine.full_state_dict()
    for after_backward in (False, True):
        if after_backward:
            engine.backward(engine(*batch(0, engine.rank)))
        for param in model.parameters():
            param.grad = torch.ones_like(param.detach()) if stage < 3 else torch.ones(param.shape)
        call(engine, optimizer)
        assert all(param.grad is None for param in model.parameters())
        if after_backward:
            # A micro-step whose gradients were dropped counts.
            assert engine.step()
        else:
            with pytest.raises(ZeroEngineError, match="without backward"):
                engine.step()
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def by_engine(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    engine.zero_grad()


def by_engines_optimizer(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    engine.optimizer.zero_grad()


def by_own_optimizer(engine: zeroengine.Engine, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize(("call", "stage"), [(by_engine, 3), (by_engines_optimizer, 1), (by_own_optimizer, 0)])
def test_every_zero_grad_drops_what_was_assigned(
    call: Callable[[zeroengine.Engine, torch.optim.Optimizer], None], stage: int
) -> None:
    run_ranks(2, drop_by, call, stage)


# -- errors and warnings ------------------------------------------------------------------------------


def assign_differently(stage: int, clears: bool) -> None:
    start()
    model = build(TinyLM)
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), settings(Task(), stage))
    engine.backward(engine(*batch(0, engine.rank)))
    weight = dict(model.named_parameters())[NAME]
    if clears and engine.rank == 1:
        weight.grad = None
    elif not clears:
        weight.grad = torch.full(weight.shape, float(engine.rank))
    engine.step()


@pytest.mark.parametrize(("stage", "clears"), [(0, False), (3, False), (2, True)])
def test_ranks_that_assign_different_gradients_raise_by_name(stage: int, clears: bool) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, assign_differently, stage, clears)
    for kind, text, _ in failed.value.failures.values():
        assert kind == DivergenceError.__name__
        assert f"{NAME}.grad" in text and "set_full_gradient" in text


def notices_at_initialize() -> list[str]:
    start()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    model = build(TinyLM)
    model(*batch(9, 0)).backward()
    zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), settings(Task(), 1))
    assert all(param.grad is None for param in model.parameters())
    return texts


def test_gradients_from_before_initialize_are_dropped_with_a_notice() -> None:
    on_rank_0, on_rank_1 = run_ranks(2, notices_at_initialize)
    assert sum("from before initialize()" in text for text in on_rank_0) == 1 and not on_rank_1


def assign_after_clipping() -> None:
    start()
    model = build(TinyLM)
    engine = zeroengine.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), settings(Task(clip=0.0), 3))
    engine.backward(engine(*batch(0, engine.rank)))
    engine.clip_grad_norm_(1.0)
    with pytest.raises(ZeroEngineError, match=r"set_full_gradient\(\) after engine.clip_grad_norm_"):
        zeroengine.set_full_gradient(model.get_parameter(NAME), torch.zeros(72, 24))
    model.get_parameter(NAME).grad = torch.zeros(72, 24)
    with pytest.raises(ZeroEngineError, match="the limit would also apply"):
        engine.step()


def test_a_gradient_that_is_assigned_after_clipping_is_an_error() -> None:
    run_ranks(2, assign_after_clipping)


def assign_to_frozen() -> None:
    start()
    model = build(TinyLM)
    model.requires_grad_(False)
    model.get_parameter(NAME).requires_grad_(True)
    engine = zeroengine.initialize(model, torch.optim.SGD([model.get_parameter(NAME)], lr=1.0), settings(Task(), 3))
    engine.backward(engine(*batch(0, engine.rank)))
    model.get_parameter("norm.weight").grad = torch.ones(24)
    with pytest.raises(ZeroEngineError, match=r"norm\.weight was frozen at initialize"):
        engine.step()
    engine.zero_grad()
    engine.backward(engine(*batch(0, engine.rank)))
    assert engine.step()


def test_a_gradient_of_a_frozen_parameter_is_an_error() -> None:
    run_ranks(2, assign_to_frozen)
