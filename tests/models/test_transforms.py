"""torch.func over a partitioned model: right, or refused, and training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import STAGES, Task, check_every_stage, make_engine, start, take_steps
from tests.emulated import need_transport
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO
from zeroengine import ReleasedParameterError, gathered

EVERY_STAGE = (0, 1, 2, 3)


def own(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def with_other_tensors(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    other = {name: torch.full(param.shape, 0.01, requires_grad=True) for name, param in own(model).items()}
    loss = functional_call(model, other, (x,))
    loss.backward()
    return flat([loss, *(value.grad for value in other.values())])


def of_each_sample(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gradients = vmap(grad(lambda params, x: functional_call(model, params, (x[None],))), in_dims=(None, 0))
    return flat(gradients(own(model), x).values())


def ensemble(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    several = {name: torch.stack([torch.full(p.shape, 0.01), torch.ones(p.shape)]) for name, p in own(model).items()}
    return vmap(lambda params: functional_call(model, params, (x,)))(several)


def pulled_back(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss, pull = vjp(lambda params: functional_call(model, params, (x,)), own(model))
    return flat([loss, *pull(torch.ones(()))[0].values()])


# What works whether parameters are gathered or not: modules are called, and bring them.
CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "functional_call": lambda model, x: functional_call(model, own(model), (x,)),
    "functional_call with other tensors": with_other_tensors,
    "grad by parameters": lambda model, x: flat(grad(lambda p: functional_call(model, p, (x,)))(own(model)).values()),
    "grad by the input": lambda model, x: grad(model)(x),
    "gradients of each sample": of_each_sample,
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of a part": lambda model, x: vmap(model.blocks[1])(x),
    "vmap of an ensemble": ensemble,
    "jvp": lambda model, x: torch.stack(jvp(model, (x,), (torch.ones_like(x),))),
    "vjp": pulled_back,
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(model)(x[:1]),
    "torch.autograd.functional": torch.autograd.functional.jacobian,
}


# Of each kind of transform the one that takes the most together.
SOME_CALLS = (
    "functional_call with other tensors",
    "grad by parameters",
    "gradients of each sample",
    "vmap of a part",
    "jvp",
    "hessian",
    "torch.autograd.functional",
)


def transform(transport: str, inside: bool, names: Sequence[str]) -> list[str]:
    rank = start()
    (x,) = features(77, rank)
    wrong = []
    for stage in STAGES:
        more = {"comm": {"transport": transport, "timeout_seconds": 20}}
        quiet = make_engine(Task(factory=Net, data=features), stage, **more)
        take_steps(quiet, range(2), features)
        plain = build(Net)
        plain.load_state_dict(quiet.full_state_dict())
        expected = take_steps(quiet, range(2, 4), features)
        for name in names:
            call = CALLS[name]
            engine = make_engine(Task(factory=Net, data=features), stage, **more)
            take_steps(engine, range(2), features)
            with gathered(engine.module) if inside else contextlib.nullcontext():
                found = call(engine.module, x)
            if not torch.equal(found, call(plain, x)):
                wrong.append(f"{name} at stage {stage}: {found} is not {call(plain, x)}")
            if take_steps(engine, range(2, 4), features) != expected:
                wrong.append(f"{name} at stage {stage}: training is another after it")
            assert quiet.global_steps == engine.global_steps == 4
            assert engine.memory().gathered == 0, (name, stage)
            engine.close()
    return wrong


@SHARED_MEMORY_AND_SLOW_GLOO
@pytest.mark.parametrize(
    ("inside", "names"),
    [
        pytest.param(True, SOME_CALLS, id="gathered, some"),
        pytest.param(True, tuple(CALLS), id="gathered", marks=pytest.mark.slow),
        pytest.param(False, tuple(CALLS), id="not gathered", marks=pytest.mark.slow),
    ],
)
def test_transforms_of_modules_are_those_of_plain_pytorch(transport: str, inside: bool, names: Sequence[str]) -> None:
    for wrong in run_ranks(2, transform, transport, inside, names):
        assert not wrong, "\n".join(wrong)


# Parameters themselves, without their modules.
VALUES: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "detached": lambda model: grad(lambda p: p["stem.weight"].square().sum())(
        {name: param.detach() for name, param in own(model).items()}
    )["stem.weight"],
    "stacked": lambda model: vmap(lambda p: p["stem.weight"].sum())(stack_module_state([model, model])[0]),
    "weights as such": lambda model: grad(lambda weight: weight.square().sum())(model.stem.weight),
    "rows of a weight": lambda model: vmap(torch.sum)(model.stem.weight),
}


def transform_values(transport: str) -> dict[str, list[str]]:
    start()
    found: dict[str, list[str]] = {name: [] for name in VALUES}
    for stage in EVERY_STAGE:
        for name, call in VALUES.items():
            engine = make_engine(Task(factory=Net, data=features), stage, comm={"transport": transport})
            take_steps(engine, range(2), features)
            try:
                value = call(engine.module)
            except ReleasedParameterError as error:
                assert "with zeroengine.gathered(" in str(error)
                found[name].append("refused")
                value = None
            with gathered(engine.module):
                expected = call(engine.module)
            if value is not None:
                verdict = "right" if torch.equal(value, expected) else "nan" if value.isnan().all() else "wrong"
                found[name].append(verdict)
    return found


@SHARED_MEMORY_AND_SLOW_GLOO
def test_transforms_of_parameters_are_right_or_refused_or_nan(transport: str) -> None:
    """A transform takes a parameter past every hook of Python: what is away must not be taken for values."""
    need_transport(transport)
    for found in run_ranks(2, transform_values, transport):
        assert found["detached"] == found["stacked"] == ["right"] * 3 + ["refused"]
        for name in ("weights as such", "rows of a weight"):
            away = "nan" if transport == "gloo" else "right"  # there a step's gathers are still under way
            assert found[name] == ["right", away, away, "nan"], name


# -- transforms in training ---------------------------------------------------------------------------


class Forces(nn.Module):
    """Its output is a derivative, taken by torch.func, of its submodule's."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return grad(self.energy)(x).square().mean() * 1e3


class Vectorised(Net):
    """Runs some of its blocks sample by sample, one of them from outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = vmap(self.blocks[0])(self.stem(x))
        return vmap(lambda x: self.loss(self.blocks[2](self.blocks[1](x))))(x).mean()


class Called(Net):
    """Calls a block with what it makes of the block's parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        damped = {name: 0.5 * param for name, param in self.blocks[1].named_parameters()}
        return self.loss(self.blocks[2](functional_call(self.blocks[1], damped, (self.stem(x),))))


@SHARED_MEMORY_AND_SLOW_GLOO
@pytest.mark.parametrize("factory", [Forces, Vectorised, Called])
def test_models_that_transform_themselves_train(factory: Callable[[], nn.Module], transport: str) -> None:
    check_every_stage(Task(factory=factory, data=features), comm={"transport": transport})
