"""States that are away for a while: what works meanwhile, what is refused, and that training goes on as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import wanted
from zeroengine import ReleasedParameterError, ZeroEngineError

STATES = ("parameters", "masters", "moments", "averages", "gradients")
ALL = frozenset(STATES)
# What is away at each stage, one after another.
INCLUDES: dict[int, tuple[Any, ...]] = {
    0: ("parameters", "all"),
    2: (["masters"], "moments", None),
    3: ("all", ("gradients",), "optimizer"),
}
GROUPS: dict[Any, frozenset[str]] = {
    "optimizer": frozenset(STATES[1:4]),
    "all": ALL,
    None: frozenset(STATES[1:]),
}
# Two micro-steps in a step; masters, moments of 8 bits with scales, and averages.
MORE: dict[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer_state_dtype": "int8",
    "ema": {"decay": 0.5},
    "gradient_accumulation_steps": 2,
    "comm": {"transport": "gloo"},
}


def place(folder: str) -> dict[str, Any]:
    """Where states go. A GPU, also an emulated one, has CPU memory beside its own."""
    return {"device": "nvme", "nvme_path": folder} if wanted() == "cpu" else {"device": "cpu"}


def names_of(include: Any) -> frozenset[str]:
    known = GROUPS.get(include) if include is None or isinstance(include, str) else frozenset(include)
    return known if known is not None else frozenset([include])


def micro_step(engine: zeroengine.Engine, number: int, losses: list[float]) -> None:
    loss = engine(*batch(number, engine.rank))
    engine.backward(loss)
    losses.append(loss.item())


def calls_of(engine: zeroengine.Engine, folder: str) -> dict[str, tuple[frozenset[str], Callable[[], Any]]]:
    """By its name: the states that a public call needs, and the call."""
    param = engine.module.blocks[0].norm.weight

    def gather() -> None:
        with zeroengine.gathered(engine.module):
            assert not param.isnan().any()

    def average() -> None:
        with engine.average_weights():
            pass

    value = torch.zeros(param.shape)
    params = frozenset(["parameters"])
    return {
        "the forward": (params, lambda: engine(*batch(0, 0))),
        "gathered()": (params, gather),
        "full_state_dict()": (params, engine.full_state_dict),
        "stream_weights()": (params, lambda: sum(1 for _ in engine.stream_weights())),
        "full_master()": (params | {"masters"}, lambda: zeroengine.full_master(param)),
        "set_full_master()": (
            params | {"masters", "averages"},
            lambda: zeroengine.set_full_master(param, value),
        ),
        "full_gradient()": (frozenset(["gradients"]), lambda: zeroengine.full_gradient(param)),
        "set_full_gradient()": (frozenset(["gradients"]), lambda: zeroengine.set_full_gradient(param, value)),
        "full_optimizer_state()": (
            frozenset(["moments"]),
            lambda: zeroengine.full_optimizer_state(param, "exp_avg"),
        ),
        "set_full_optimizer_state()": (
            frozenset(["moments"]),
            lambda: zeroengine.set_full_optimizer_state(param, "exp_avg", value),
        ),
        "save_weights()": (ALL, lambda: engine.save_weights(folder)),
        "save_checkpoint()": (ALL, lambda: engine.save_checkpoint(folder)),
        "load_checkpoint()": (ALL, lambda: engine.load_checkpoint(folder)),
        "load_weights()": (ALL, lambda: engine.load_weights(folder)),
        "average_weights()": (ALL, average),
        "engine.step()": (ALL, engine.step),
        "clip_grad_norm_()": (ALL, lambda: engine.clip_grad_norm_(1.0)),
        "round_masters()": (ALL, engine.round_masters),
        "release()": (ALL, engine.release),
        "offload_states()": (ALL, lambda: engine.offload_states("moments")),
    }


def check_calls(engine: zeroengine.Engine, away: frozenset[str], folder: str) -> None:
    """Each call that needs a state which is away says so, and the cheap ones of the others work."""
    for name, (needs, call) in calls_of(engine, folder).items():
        if name == "save_weights()" and not away & {"parameters", "masters", "averages"}:
            continue
        if away & needs:
            with pytest.raises(ZeroEngineError, match=r"reload_states\(\)") as caught:
                call()
            assert name.removeprefix("engine.") in str(caught.value), (name, str(caught.value))
        elif not name.startswith("set_"):
            call()


def train(stage: int, includes: Sequence[Any], folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = zeroengine.initialize(build(TinyLM), config=config(stage, **MORE))
    losses: list[float] = []
    param = engine.module.blocks[0].norm.weight

    def write() -> None:
        with zeroengine.gathered(param), torch.no_grad():
            param.mul_(1.5)
        if stage < 3:
            with torch.no_grad():
                param.add_(0.25)

    for number in range(2):
        micro_step(engine, 2 * number, losses)
        engine.step()
        # Between micro-steps the gradients have values.
        for include in includes if number == 1 else ():
            away = names_of(include)
            before = engine.memory()
            with pytest.raises(KeyError), engine.offloaded(include, **place(folder)):
                after = engine.memory()
                held = {
                    "parameters": after.parameters + after.gathered,
                    "masters": after.master,
                    "moments": after.optimizer,
                    "gradients": after.gradients + after.buckets,
                }
                assert after.states == before.states and sum(after.nvme.values()) + sum(after.cpu.values()) > 0
                assert all(not held[name] for name in away & held.keys() if name != "moments"), (include, held)
                assert "averages" not in away or not held["moments"]
                assert after.total < before.total
                raise KeyError
            after = engine.memory()
            assert (after.states, after.cpu, after.nvme) == (before.states, before.cpu, before.nvme)
        if includes and number == 1 and stage == 3:
            # On the CPU nothing moves, and the same calls are refused.
            for include in (*STATES, None):
                with engine.offloaded(include):
                    check_calls(engine, names_of(include), folder)
        if includes and number == 1:
            # A write that all ranks make while masters are away reaches them, and so does a backward.
            with engine.offloaded("optimizer", **place(folder)):
                write()
                # A stream may be read meanwhile, which looks for values that were written without ``gathered``.
                assert sum(1 for _ in engine.stream_weights())
                micro_step(engine, 2 * number + 1, losses)
        else:
            if number == 1:
                write()
            micro_step(engine, 2 * number + 1, losses)
        engine.step()
    values = engine.full_state_dict() | {"master": zeroengine.full_master(param)}
    engine.close()
    return losses, values


def compare(stages: Sequence[int], folder: str) -> None:
    start()
    for stage in stages:
        losses, values = train(stage, (), folder)
        found, found_values = train(stage, INCLUDES[stage], folder)
        assert found == losses
        assert all(torch.equal(found_values[name], value) for name, value in values.items())


def test_training_goes_on_with_the_same_bits_after_states_were_away(tmp_path: Path) -> None:
    run_ranks(2, compare, (0, 2, 3) if wanted() == "cpu" else (3,), str(tmp_path))


def use_wrongly(folder: str) -> None:
    start()
    for stage in (0, 3):
        engine = zeroengine.initialize(build(TinyLM), config=config(stage, comm={"transport": "gloo"}))
        weight = engine.module.blocks[0].norm.weight
        for include, message in (("moment", "include has 'moment'; write any of"), (5, "include has 5; write any of")):
            with pytest.raises(ZeroEngineError, match=message):
                engine.offload_states(include)  # type: ignore[arg-type]
        with zeroengine.gathered(weight), pytest.raises(ZeroEngineError, match="inside `with"):
            engine.offload_states("moments")
        loss = engine(*batch(0, engine.rank))
        # Parameters are their own masters here, so nothing moves. On the CPU no other memory does, either.
        for include in ("masters", "gradients"):
            with engine.offloaded(include):
                if include == "gradients":
                    with pytest.raises(ZeroEngineError, match="while the gradients are offloaded"):
                        loss.backward()
                    del loss
                    with pytest.raises(ZeroEngineError, match=r"states are offloaded already"), engine.offloaded():
                        raise AssertionError
        engine.backward(engine(*batch(0, engine.rank)))
        engine.step()
        with engine.offloaded("parameters", **place(folder)):
            # A module alone runs no forward of the model, and a parameter needs none.
            with pytest.raises(ReleasedParameterError, match=r"offloaded: call engine.reload_states\(\) before"):
                engine.module.blocks[0](torch.zeros(2, 3, 8))
        if stage == 0:
            alias = engine.module.blocks[0].norm.weight.detach()
            with pytest.raises(ZeroEngineError, match="share the memory of blocks"):
                engine.offload_states("all", **place(folder))
            del alias
            assert engine(*batch(0, engine.rank)).isfinite()
        engine.close()


def test_what_cannot_work_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, use_wrongly, str(tmp_path))
