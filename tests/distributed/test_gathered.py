"""Whole parameters: read, written and copied, between and after steps."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.test_parameters import Net, features
from tests.distributed.training import STAGES, Task, make_engine, start
from tests.parametrization import SHARED_MEMORY_AND_SLOW_GLOO
from zeroengine import ReleasedParameterError, ZeroEngineError, gathered


def trained_engine(stage: int, steps: int = 1, task: Task | None = None, **more: Any) -> zeroengine.Engine:
    task = task or Task()
    engine = make_engine(task, stage, **more)
    for step in range(steps):
        engine.backward(engine(*task.data(step, engine.rank)))
        engine.step()
    return engine


def same_on_all_ranks(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(other == found[0] for other in found)


def bits(values: Any) -> dict[str, list[float]]:
    return {name: value.detach().double().flatten().tolist() for name, value in values}


# -- reading ------------------------------------------------------------------------------------------


def one_unit_cannot_be_gathered() -> None:
    start()
    engine = trained_engine(3)
    pin, pinned = engine.gatherer.pin, []

    def pin_one(unit: Any) -> None:
        if pinned:
            raise MemoryError
        pin(unit)
        pinned.append(unit)

    with (
        mock.patch.object(engine.gatherer, "pin", pin_one),
        pytest.raises(MemoryError),
        gathered(engine.module),
    ):
        pass
    assert pinned and engine.memory().gathered == 0


def test_gathered_releases_everything_when_it_cannot_gather_all() -> None:
    run_ranks(2, one_unit_cannot_be_gathered)


def read_everywhere() -> None:
    start()
    for stage in STAGES:
        engine = trained_engine(stage)
        state = engine.full_state_dict()
        model = engine.module
        with gathered(model):
            assert bits(model.named_parameters()) == bits((n, state[n]) for n, _ in model.named_parameters())
            assert bits(model.state_dict().items()) == bits(state.items())
        with (
            gathered(model.blocks[1]),
            gathered(model.blocks[1].up.weight),
            gathered([model.norm.weight, model.norm.bias]),
        ):
            assert bits(model.blocks[1].named_parameters("blocks.1")) == bits(
                (n, state[n]) for n, _ in model.blocks[1].named_parameters("blocks.1")
            )
            assert torch.equal(model.norm.bias, state["norm.bias"])
        assert engine.memory().gathered == 0
        with gathered([]):
            pass


def test_gathered_gives_the_values_of_modules_parameters_and_lists() -> None:
    run_ranks(2, read_everywhere)


def fresh_after_a_step() -> None:
    """At stages 1 and 2 a step's values arrive when somebody looks, at stage 0 they are there."""
    start()
    with gathered((reference := trained_engine(0, 3)).module):
        expected = bits(reference.module.state_dict().items())
    for stage in (0, 1, 2):
        engine = trained_engine(stage, 3)
        looked = {name: value.clone() for name, value in engine.module.state_dict().items()}
        assert bits(looked.items()) == bits(engine.full_state_dict().items()) == expected
        engine = trained_engine(stage, 3)
        assert engine.module.tok.weight.sum().item() == looked["tok.weight"].sum().item()
        assert copy.deepcopy(engine.module).norm.weight.tolist() == looked["norm.weight"].tolist()
        parts = [p.detach().flatten() for p in engine.module.blocks[0].parameters()]
        assert (
            torch.cat(parts).tolist()
            == torch.cat(
                [looked[f"blocks.0.{n}"].flatten() for n, _ in engine.module.blocks[0].named_parameters()]
            ).tolist()
        )
        vector = nn.utils.parameters_to_vector(engine.module.parameters())
        assert vector.sum().item() == pytest.approx(sum(p.sum().item() for p in engine.module.parameters()), rel=1e-5)


def test_state_dict_and_parameters_are_fresh_right_after_a_step_at_stages_0_to_2() -> None:
    run_ranks(2, fresh_after_a_step)


class Buffered(Net):
    """Buffers of every kind, some of them not in the state dict; a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())
        self.register_buffer("rotation", torch.polar(torch.ones(3), torch.rand(3)))
        self.register_buffer("expanded", torch.rand(3).expand(2, 3))
        self.register_buffer("transposed", torch.rand(2, 3).t())
        self.register_buffer("low", torch.rand(3).bfloat16())
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("hidden", torch.rand(2), persistent=False)
        self.twin = self.blocks[1]
        self.batch_norm = nn.BatchNorm1d(24)
        self.stem = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(self.batch_norm(x))


def full_state_dicts() -> dict[int, dict[str, torch.Tensor]]:
    rank = start()
    found = {}
    for stage in STAGES:
        torch.manual_seed(rank)  # buffers differ before `initialize`, and rank 0's hold after
        model = Buffered()
        engine = zeroengine.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
        )
        names = list(build(Buffered).state_dict())
        state = engine.full_state_dict()
        assert list(state) == names, "the names of state_dict, in its order"
        assert same_on_all_ranks(bits((n, v) for n, v in state.items() if not v.is_complex()))
        assert same_on_all_ranks(bits([("hidden", model.hidden)])) and same_on_all_ranks(
            state["rotation"].angle().tolist()
        )
        with gathered(model):
            expected = model.state_dict()
            assert all(torch.equal(state[n], v) and state[n].dtype == v.dtype for n, v in expected.items())
        assert state["blocks.1.up.weight"].data_ptr() == state["twin.up.weight"].data_ptr()
        build(Buffered).load_state_dict(state, assign=True)
        other = engine.full_state_dict(rank0_only=True)
        assert bits((n, v) for n, v in other.items() if not v.is_complex()) == (
            bits((n, v) for n, v in state.items() if not v.is_complex()) if rank == 0 else {}
        )
        state["head.weight"].zero_()
        assert engine.full_state_dict()["head.weight"].any(), "a copy"
        found[stage] = engine.full_state_dict()
    return found


def test_the_full_state_dict_is_the_plain_one_with_tied_names_and_buffers() -> None:
    torch.manual_seed(0)
    plain = Buffered().state_dict()
    for found in run_ranks(2, full_state_dicts):
        for stage in STAGES:
            assert list(found[stage]) == list(plain)
            for name, value in plain.items():
                assert torch.equal(found[stage][name], value), (stage, name)


def generate() -> None:
    """Ranks run different numbers of forwards, of the whole model and of parts, on every transport."""
    rank = start()
    for transport in ("shm", "gloo"):
        for stage in STAGES:
            engine = trained_engine(stage, 2, comm={"transport": transport, "timeout_seconds": 20})
            alone = trained_engine(stage, 2)
            with torch.no_grad():
                with gathered(engine.module):
                    for _ in range(3 * rank):
                        engine(*batch(9, rank))
                with gathered(engine.module.blocks[0]):
                    for _ in range(1 - rank):
                        engine.module.blocks[0](torch.ones(1, 24))
            losses = []
            for each in (engine, alone):
                for step in range(2, 4):
                    loss = each(*batch(step, rank))
                    each.backward(loss)
                    each.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]


def test_inside_gathered_ranks_may_run_different_numbers_of_forwards() -> None:
    run_ranks(2, generate)


# -- writing ------------------------------------------------------------------------------------------


def write_and_train(transport: str) -> None:
    rank = start()
    for stage in STAGES:
        engine = trained_engine(stage, 2, comm={"transport": transport})
        model = engine.module
        before = engine.full_state_dict()
        with gathered(model.norm):
            with torch.no_grad():
                model.norm.weight.fill_(5.0 + rank)  # ranks disagree: the lowest that wrote wins
                if rank == 1:
                    model.norm.bias[3] = 2.0  # rank 1 alone wrote this parameter
        with gathered(model), torch.no_grad():
            if rank == 1:
                model.blocks[2].up.bias.copy_(torch.arange(72.0))  # written by rank 1 alone
        with gathered([model.blocks[1].up.weight]):
            model.blocks[1].up.weight.data = torch.full((72, 24), 0.25)  # another tensor altogether
            model.blocks[1].up.bias.data.zero_()
        expected = before | {
            "norm.weight": torch.full((24,), 5.0),
            "norm.bias": before["norm.bias"].index_fill(0, torch.tensor([3], device="cpu"), 2.0),
            "blocks.2.up.bias": torch.arange(72.0),
            "blocks.1.up.weight": torch.full((72, 24), 0.25),
            "blocks.1.up.bias": torch.zeros(72),
        }
        after = engine.full_state_dict()
        assert bits(after.items()) == bits(expected.items())

        # Training goes on from what was written, as in a plain model of those values.
        plain = build(TinyLM)
        plain.load_state_dict(expected)
        for step in range(2, 4):
            mean = torch.stack([plain(*batch(step, r)) for r in range(2)]).mean()
            loss = engine(*batch(step, rank))
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert total.item() / 2 == pytest.approx(mean.item(), rel=1e-5)
            engine.backward(loss)
            engine.step()
            plain.load_state_dict(engine.full_state_dict())
        assert engine.full_state_dict()["norm.weight"][0] != 5.0


@SHARED_MEMORY_AND_SLOW_GLOO
def test_writes_inside_gathered_hold_on_all_ranks_and_are_trained_on(transport: str) -> None:
    run_ranks(2, write_and_train, transport)


def write_in_bf16() -> None:
    """A write to one parameter leaves the masters of the others as they are, beyond bf16's precision."""
    start()
    for stage in STAGES:
        written, untouched = (trained_engine(stage, 3, bf16={"enabled": True}) for _ in range(2))
        for _ in range(2):
            with gathered(written.module), torch.no_grad():
                written.module.blocks[0].up.bias.fill_(0.5)
        assert set(written.full_state_dict()["blocks.0.up.bias"].tolist()) == {0.5}
        masters = [
            {
                shard.unit.layout.slots[span.param_index].name: shard.master[span.shard_slice]
                for shard in engine.optimizer.shards
                for span in shard.spans()
            }
            for engine in (written, untouched)
        ]
        for name, master in masters[0].items():
            assert torch.equal(master, masters[1][name]) is (name != "blocks.0.up.bias"), (stage, name)
            if name == "blocks.0.up.bias":
                assert set(master.tolist()) == {0.5}


def test_a_bf16_write_reaches_the_master_of_the_written_parameter_alone() -> None:
    run_ranks(2, write_in_bf16)


def wrong_writes() -> list[str]:
    rank = start()
    messages = []
    for stage in STAGES:
        engine = trained_engine(stage)
        before = engine.full_state_dict()
        with pytest.raises(ZeroEngineError) as error, gathered(engine.module):
            engine.module.norm.weight.data = torch.zeros(25)
        messages.append(str(error.value))
        with pytest.raises(KeyError), gathered(engine.module):
            raise KeyError  # the caller's own error, on every rank
        loss = engine(*batch(1, rank))
        engine.backward(loss)
        with pytest.raises(ZeroEngineError) as error, gathered(engine.module):
            engine.step()
        messages.append(str(error.value))
        assert bits(engine.full_state_dict().items()) == bits(before.items())
        assert engine.step(), "nothing was lost"
    ended = trained_engine(3)
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            ended.close()  # after an error, which leaves the parameters partitioned
    with pytest.raises(ZeroEngineError) as error, gathered(ended.module):
        pass
    messages.append(str(error.value))
    with (
        pytest.raises(ZeroEngineError) as error,
        gathered([*engine.module.norm.parameters(), nn.Parameter(torch.ones(1))]),
    ):
        pass
    messages.append(str(error.value))
    return messages


def test_wrong_uses_of_gathered_are_errors_on_every_rank() -> None:
    for messages in run_ranks(2, wrong_writes):
        *by_stage, ended, mixed = messages
        for shape, step in zip(by_stage[::2], by_stage[1::2], strict=True):
            assert "norm.weight (from (24,) to (25,))" in shape and "Change the model before initialize()" in shape
            assert step.startswith("engine.step() inside `with zeroengine.gathered(...)`")
        assert "or their engine is gone" in ended
        assert "to different engines" in mixed


# -- released parameters ------------------------------------------------------------------------------


def touch_released() -> dict[str, str]:
    start()
    engine = trained_engine(3)
    weight = engine.module.blocks[1].up.weight
    assert weight.shape == (72, 24) and weight.dtype is torch.float32 and weight.numel() == 72 * 24
    assert "released by zeroengine: shape=(72, 24)" in repr(weight)
    assert weight.requires_grad and weight.is_leaf and isinstance(weight, nn.Parameter)
    assert weight.device == engine.device
    uses = {
        "arithmetic": lambda: weight + 1,
        "a reduction": lambda: weight.sum(),
        "a function": lambda: torch.nn.functional.linear(torch.ones(24), weight),
        "a list": lambda: torch.cat([torch.ones(1, 24), weight]),
        "out": lambda: torch.add(torch.ones(72, 24), 1, out=weight),
        "a comparison": lambda: weight == weight,
        "an index": lambda: weight[0],
        "an assignment": lambda: weight.__setitem__(0, 1.0),
        "in place": lambda: weight.zero_(),
        "data": lambda: weight.data,
        "detach": lambda: weight.detach(),
        "tolist": lambda: weight.tolist(),
        "numpy": lambda: weight.detach().numpy(),
        "a copy": lambda: copy.deepcopy(weight),
        "the model's copy": lambda: copy.deepcopy(engine.module),
        "the model's state_dict": lambda: engine.module.state_dict(),
        "a cast": lambda: engine.module.to(torch.float64),
        "a method of the model": lambda: nn.utils.parameters_to_vector(engine.module.parameters()),
        "iteration": lambda: list(weight),
        "bool": lambda: bool(engine.module.norm.weight[0]),
        "pointer": lambda: weight.data_ptr(),
        "setting data": lambda: setattr(weight, "data", torch.zeros(72, 24)),
        "loading": lambda: engine.module.load_state_dict(TinyLM().state_dict()),
    }
    messages = {}
    for what, use in uses.items():
        try:
            use()
            messages[what] = "no error"
        except ReleasedParameterError as error:
            messages[what] = str(error)
        except Exception as error:
            messages[what] = f"{type(error).__name__}: {error}"
    loss = engine(*batch(1, engine.rank))
    engine.backward(loss)
    assert engine.step()
    return messages


def test_a_use_of_a_released_parameter_names_it_and_the_remedy() -> None:
    for messages in run_ranks(2, touch_released):
        for what, message in messages.items():
            assert "partitioned and released" in message, (what, message)
            assert "with zeroengine.gathered(" in message, (what, message)
        assert "blocks.1.up.weight (72, 24)" in messages["arithmetic"]
        assert "norm.weight (24,)" in messages["bool"]


# -- copies -------------------------------------------------------------------------------------------


def copies() -> None:
    """A deep copy, such as for an average of weights, is an ordinary model, and trains under an engine of its own."""
    rank = start()
    for stage in STAGES:
        engine = trained_engine(stage)
        with gathered(engine.module):
            twin = copy.deepcopy(engine.module)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        plain = build(TinyLM)
        plain.load_state_dict(engine.full_state_dict())
        loss = engine(*batch(1, rank))
        assert twin(*batch(1, rank)).item() == plain(*batch(1, rank)).item() == loss.item()
        twin(*batch(1, rank)).backward()
        assert all(p.grad is not None for p in twin.parameters())
        engine.backward(loss)
        engine.step()
        assert bits(twin.named_parameters()) == bits(plain.named_parameters())
        twin.zero_grad()
        second = zeroengine.initialize(
            twin,
            torch.optim.SGD(twin.parameters(), lr=0.1),
            {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
        )
        second.backward(second(*batch(1, rank)))
        assert second.step()


def test_a_deep_copy_of_the_model_is_an_ordinary_model() -> None:
    run_ranks(2, copies)


def two_engines() -> None:
    """Side by side, their calls interleaved, each as if alone."""
    start()

    def losses(engines: list[tuple[zeroengine.Engine, Task]]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in engines]
        for step in range(3):
            pending = [engine(*task.data(step, engine.rank)) for engine, task in engines]
            for (engine, _), loss in zip(engines, pending, strict=True):
                engine.backward(loss)
            for each, (engine, _), loss in zip(found, engines, pending, strict=True):
                assert engine.step()
                each.append(loss.item())
        return found

    tasks = [(3, Task()), (1, Task(factory=Net, data=features)), (2, Task())]
    together = losses([(make_engine(task, stage), task) for stage, task in tasks])
    alone = [losses([(make_engine(task, stage), task)])[0] for stage, task in tasks]
    assert together == alone


def test_engines_live_side_by_side_in_one_process() -> None:
    run_ranks(2, two_engines)
