"""Methods that an optimizer's class adds to torch's do on shards what they do in plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, start
from zeroengine import ZeroEngineError
from zeroengine.engine.initialize import make_engine


class Averaging(torch.optim.Optimizer):
    """SGD that keeps an average of the weights, and swaps the two as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "averaged": False})
        self.num_swaps = self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not self.param_groups[0]["averaged"]
        for p in self._with_state():
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 0.25)
        self.num_steps += 1

    def _with_state(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None or self.state[p])

    @torch.no_grad()
    def swap(self, times: int = 1) -> Averaging:
        for _ in range(times):
            for p in self._with_state():
                average = self.state[p]["average"]
                p.data, self.state[p]["average"] = average.clone(), p.detach().clone()
        self.num_swaps += times
        for group in self.param_groups:
            group["averaged"] = self.is_averaged
        return self

    @property
    def is_averaged(self) -> bool:
        return bool(self.num_swaps % 2)

    @property
    def total(self) -> float:
        return sum(float(self.state[p]["average"].sum()) for p in self._with_state())

    @torch.no_grad()
    def normalize(self) -> None:
        for p in self._with_state():
            p.div_(p.norm())

    def state_of(self, param: nn.Parameter) -> Any:
        return self.state[param]

    def fail(self) -> None:
        for p in self._with_state():
            p.detach().zero_()
        raise KeyError("its own")


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): parameters are at one point in training, and at another in evaluation."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "is_training": False, "num_steps": 0})

    def train(self) -> None:
        self._move(True, 0.1)

    def eval(self) -> None:
        self._move(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def _move(self, is_training: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["is_training"] != is_training else ():
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["is_training"]:
                raise RuntimeError("call train() first")
            group["num_steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["num_steps"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["num_steps"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])


class Decaying(torch.optim.AdamW):
    """An AdamW, which runs on the fused kernel, with methods of its own."""

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def forget(self, factor: float) -> int:
        for p, state in self.state.items():
            state["exp_avg"] = state["exp_avg"] * factor
            state["exp_avg_sq"].mul_(factor)
            state["step"] += 1
            p.mul_(factor)
        return len(self.param_groups)


def averaged(model: nn.Module, optimizer: Any, step: Callable[[int], None]) -> None:
    step(0)
    step(1)
    assert optimizer.swap() is optimizer
    assert optimizer.is_averaged and optimizer.num_swaps == 1 and optimizer.num_steps == 2
    optimizer.swap(times=3)
    step(2)
    optimizer.swap()


def decayed(model: nn.Module, optimizer: Any, step: Callable[[int], None]) -> None:
    assert optimizer.forget(0.5) == 1
    step(0)
    optimizer.forget(0.5)
    step(1)
    optimizer.set_lr(0.05)
    step(2)
    optimizer.forget(0.25)


def free_of_schedules(model: nn.Module, optimizer: Any, step: Callable[[int], None]) -> None:
    with pytest.raises(RuntimeError, match="call train"):
        step(3)
    # The gradients of a step that raised are not those of the next one.
    optimizer.zero_grad()
    optimizer.train()
    step(0)
    step(1)
    optimizer.eval()
    optimizer.train()
    step(2)
    optimizer.eval()


CASES: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., None]]] = {
    "averaging": (Averaging, averaged),
    "decaying": (Decaying, decayed),
    "schedule-free": (ScheduleFree, free_of_schedules),
}


def plainly(case: str) -> dict[str, torch.Tensor]:
    cls, use = CASES[case]
    model = build(TinyLM)
    optimizer = cls(model.parameters(), lr=0.02)

    def step(number: int) -> None:
        torch.stack([model(*batch(number, rank)) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    use(model, optimizer, step)
    return {name: value.clone() for name, value in model.state_dict().items()}


def on_ranks(stages: tuple[int, ...], both_ways: bool) -> dict[Any, dict[str, torch.Tensor]]:
    """By the optimizer that was passed in, and by the engine's: both ways at each stage, or in turn."""
    start()
    results = {}
    for case, (cls, use) in CASES.items():
        for number, stage in enumerate(stages):
            ways = (False, True) if both_ways else (number % 2 == 1,)
            for via_engine in ways if cls is not ScheduleFree else (False,):
                model = build(TinyLM)
                optimizer: Any = cls(model.parameters(), lr=0.02)
                settings = config(stage, optimizer=None, gradient_clipping=0)
                engine = make_engine(model, optimizer, settings, async_step=via_engine)

                def step(number: int, engine: zeroengine.Engine = engine) -> None:
                    engine.backward(engine(*batch(number, engine.rank)))
                    engine.step()

                use(model, engine.optimizer if via_engine and case == "decaying" else optimizer, step)
                results[case, stage, via_engine] = engine.full_state_dict()
                engine.close()
                assert type(optimizer) is cls, "and it is an ordinary optimizer again"
    return results


@pytest.mark.parametrize("both_ways", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_own_methods_do_what_they_do_in_plain_pytorch(both_ways: bool) -> None:
    plain = {case: plainly(case) for case in CASES}
    for results in run_ranks(2, on_ranks, STAGES, both_ways):
        for (case, *how), state in results.items():
            for name, value in state.items():
                torch.testing.assert_close(value, plain[case][name], rtol=1e-4, atol=1e-5, msg=f"{case} {how} {name}")


def in_bf16() -> list[tuple[float, float]]:
    """For each stage: how far a swap moves the weights, and what remains after it is taken back."""
    start()
    moved = []
    for stage in STAGES:
        model = build(TinyLM)
        optimizer = Averaging(model.parameters())
        engine = zeroengine.initialize(model, optimizer, config(stage, optimizer=None, bf16={"enabled": True}))
        for number in range(2):
            engine.backward(engine(*batch(number, engine.rank)))
            engine.step()
        states = [engine.full_state_dict()]
        for _ in range(2):
            optimizer.swap()
            states.append(engine.full_state_dict())
        differences = [
            max(float((state[name] - states[0][name]).abs().max()) for name in state) for state in states[1:]
        ]
        moved.append((differences[0], differences[1]))
        engine.close()
    return moved


def test_a_method_moves_masters_and_low_precision_parameters_of_all_ranks() -> None:
    first, second = run_ranks(2, in_bf16)
    assert first == second
    assert all(there > 0 and back == 0 for there, back in first), first


def refusals(stage: int) -> None:
    start()
    model = build(TinyLM)
    optimizer = Averaging(model.parameters())
    engine = zeroengine.initialize(model, optimizer, config(stage, optimizer=None))
    engine.backward(engine(*batch(0, engine.rank)))
    engine.step()
    with pytest.raises(ZeroEngineError, match="full_optimizer_state"):
        optimizer.state_of(model.tok.weight)
    for act in (optimizer.normalize, lambda: optimizer.total):
        if stage:
            with pytest.raises(ZeroEngineError, match="depends on other elements"):
                act()
        else:
            act()
    with zeroengine.gathered(model), pytest.raises(ZeroEngineError, match="leave the `with` first"):
        optimizer.swap()
    with pytest.raises(KeyError, match="its own"):
        optimizer.fail()
    assert not any(value.any() for name, value in engine.full_state_dict().items() if "norm" in name)
    for save in (copy.copy, lambda value: torch.save(value, io.BytesIO())):
        for value in (optimizer, engine.optimizer):
            with pytest.raises(ZeroEngineError, match="cannot be saved or copied"):
                save(value)
    engine.optimizer.num_swaps = 4
    assert optimizer.num_swaps == engine.optimizer.num_swaps == 4
    assert not hasattr(engine.optimizer, "unknown")
    engine.close()
    assert optimizer.swap().num_swaps == 5
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("stage", (0, 2))
def test_what_cannot_run_on_shards_is_refused_by_name(stage: int) -> None:
    run_ranks(2, refusals, stage)


def test_an_optimizer_whose_empty_state_was_looked_at_has_taken_no_step() -> None:
    model = build(TinyLM)
    optimizer = Averaging(model.parameters())
    assert not optimizer.state[model.tok.weight]
    zeroengine.initialize(model, optimizer, config(1, optimizer=None)).close()
