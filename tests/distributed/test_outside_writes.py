"""What is written into the model after initialize() counts: the next update starts from it, and saves hold it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, adamw, make_engine, settings, start, take_steps
from zeroengine import DivergenceError
from zeroengine.engine.initialize import make_engine as make_engine_with

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
FP32: dict[str, Any] = {}


def untied() -> nn.Module:
    return TinyLM(tied=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def check_masters(engine: zeroengine.Engine) -> None:
    """Every low-precision parameter is its master, rounded, to the bit."""
    for states in engine.optimizer.shards:
        if states.unit.has_master:
            rounded = states.master.to(states.param.dtype)
            assert torch.equal(rounded.view(torch.int16), states.param.view(torch.int16)), states.unit.name


# -- ways to write ------------------------------------------------------------------------------------


def load_state_dict(model: Any) -> None:
    other = build(untied, seed=1)
    model.load_state_dict(other.state_dict())


def copy_in_place(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param * 1.5)


def clamp_data(model: Any) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.02, 0.02)


def replace_data(model: Any) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def initialise_anew(model: Any) -> None:
    torch.manual_seed(5)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)


def write_one_element(model: Any) -> None:
    model.blocks[1].up.weight.data[3, 5] = 2.0


WAYS: list[Callable[[Any], None]] = [
    load_state_dict,
    copy_in_place,
    clamp_data,
    replace_data,
    initialise_anew,
    write_one_element,
]


def written_between_steps(task: Task, more: dict[str, Any], stage: int, inside: bool, **options: Any) -> list[Any]:
    """Losses and the state in the end of a training that writes between its steps, inside ``gathered`` or not."""
    start()
    model = build(task.factory)
    engine = make_engine_with(model, task.optimizer(model), settings(task, stage, **more), **options)
    losses: list[float] = []
    for number, write in enumerate(WAYS):
        losses += take_steps(engine, range(2 * number, 2 * number + 2))
        if inside:
            with zeroengine.gathered(model), torch.no_grad():
                write(model)
        else:
            write(model)
    losses += take_steps(engine, range(2 * len(WAYS), 2 * len(WAYS) + 1))
    check_masters(engine)
    state = engine.full_state_dict()
    engine.close()
    return [losses, state]


def compare_with_gathered(task: Task, more: dict[str, Any], cases: list[tuple[int, dict[str, Any], Any]]) -> None:
    expected, expected_state = written_between_steps(task, more, 3, True)
    for stage, further, options in cases:
        losses, state = written_between_steps(task, more | further, stage, False, **options)
        assert losses == expected, (stage, further, options)
        for name, value in state.items():
            assert torch.equal(value, expected_state[name]), (stage, further, options, name)


def stay_whole(threshold: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage3_param_persistence_threshold": threshold}}


def optimizer_on(device: str, path: str) -> dict[str, Any]:
    offload = {"device": device, "nvme_path": path, "buffer_size": 4096, "buffer_count": 4}
    return {"zero_optimization": {"offload_optimizer": offload}, "aio": {"block_size": 4096}}


@pytest.mark.parametrize(
    ("task", "more", "on_device", "stages"),
    [
        pytest.param(Task(factory=untied), FP32, False, (0, 3), id="fp32"),
        pytest.param(Task(factory=untied), BF16, False, (1, 2), id="bf16", marks=pytest.mark.slow),
        pytest.param(Task(factory=untied), BF16, True, (0, 3), id="bf16, issued at once"),
        pytest.param(Task(factory=untied), FP16, False, (1, 2), id="fp16", marks=pytest.mark.slow),
        pytest.param(Task(factory=untied, optimizer=sgd), BF16, False, (2, 3), id="bf16, an optimizer on shards"),
        pytest.param(Task(factory=untied), BF16, False, (0, 3), id="bf16 at other stages", marks=pytest.mark.slow),
        pytest.param(Task(factory=untied), FP16, False, (0, 3), id="fp16 at other stages", marks=pytest.mark.slow),
    ],
)
def test_the_next_update_starts_from_outside_writes(
    task: Task, more: dict[str, Any], on_device: bool, stages: tuple[int, ...]
) -> None:
    """At stage 3 the parameters stay whole."""
    options = {"async_step": on_device}
    cases = [(stage, stay_whole(10**9) if stage == 3 else FP32, options) for stage in stages]
    run_ranks(2, compare_with_gathered, task, more, cases)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_updates_of_offloaded_masters_start_from_outside_writes(stage: int, tmp_path: Path) -> None:
    cases = [(stage, optimizer_on("nvme", str(tmp_path)), {})]
    run_ranks(2, compare_with_gathered, Task(factory=untied), BF16, cases)


# -- parameters without a gradient --------------------------------------------------------------------


class Branching(TinyLM):
    """Has a branch that it takes when told to."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.side = nn.Linear(24, 24)
        self.takes_side = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids, labels)
        return loss + self.side(self.tok(ids)).square().mean() if self.takes_side else loss


def write_unused(task: Task, on_device: bool) -> None:
    start()
    for stage in (0, 1, 2):
        model: Any = build(task.factory)
        engine = make_engine_with(model, task.optimizer(model), settings(task, stage, **BF16), async_step=on_device)
        take_steps(engine, range(1))
        model.side.weight.data.fill_(0.75)
        take_steps(engine, range(1, 3))
        assert (model.side.weight == 0.75).all()
        model.takes_side = True
        take_steps(engine, range(3, 4))
        assert (model.side.weight - 0.75).abs().max() < 0.1
        assert not (model.side.weight == 0.75).all()
        check_masters(engine)
        engine.close()


@pytest.mark.parametrize(
    ("task", "on_device"),
    [
        (Task(factory=Branching), False),
        (Task(factory=Branching), True),
        (Task(factory=Branching, optimizer=sgd), False),
    ],
    ids=["fused", "issued at once", "an optimizer on shards"],
)
def test_a_write_into_an_unused_parameter_stays_until_it_is_used(task: Task, on_device: bool) -> None:
    run_ranks(2, write_unused, task, on_device)


# -- looking and saving before the next step ----------------------------------------------------------


def save_after_writing(folder: str) -> None:
    start()
    for stage in (0, 2):
        engine = make_engine(Task(factory=untied), stage, **BF16)
        take_steps(engine, range(2))
        engine.module.blocks[0].down.weight.data.fill_(0.25)
        assert (zeroengine.full_master(engine.module.blocks[0].down.weight) == 0.25).all()
        initialise_anew(engine.module)
        engine.module.head.weight.data.mul_(2)
        written = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        engine.save_checkpoint(f"{folder}/{stage}")
        check_masters(engine)
        engine.save_weights(f"{folder}/weights/{stage}")
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, written[name])
        take_steps(engine, range(2, 3))

        # What is loaded in part leaves the rest as it was written.
        with torch.no_grad():
            engine.module.norm.weight.copy_(torch.full_like(engine.module.norm.weight, 3.0))
        engine.load_weights({"norm.bias": torch.ones(24)}, strict=False)
        assert (engine.module.norm.weight == 3).all() and (engine.module.norm.bias == 1).all()
        check_masters(engine)
        for load in (
            lambda engine=engine, stage=stage: engine.load_weights(f"{folder}/weights/{stage}"),
            lambda engine=engine, stage=stage: engine.load_checkpoint(f"{folder}/{stage}"),
        ):
            initialise_anew(engine.module)
            load()
            check_masters(engine)
            for name, param in engine.module.named_parameters():
                assert torch.equal(param, written[name]), (stage, name)
        engine.close()


def test_saves_hold_outside_writes_before_the_next_step(tmp_path: Path) -> None:
    run_ranks(2, save_after_writing, str(tmp_path))


def round_masters(folder: str) -> None:
    """Everything of the engine's own that writes masters or parameters leaves one the rounding of the other."""
    start()
    for stage in STAGES:
        engine = make_engine(Task(factory=untied), stage, **BF16)
        check_masters(engine)
        take_steps(engine, range(2))
        check_masters(engine)
        weight = engine.module.blocks[0].up.weight
        zeroengine.set_full_master(weight, torch.rand(weight.shape))
        check_masters(engine)
        with zeroengine.gathered(engine.module), torch.no_grad():
            weight.mul_(1.01)
        check_masters(engine)
        weight.register_hook(lambda grad: grad * float("nan"))
        take_steps(engine, range(2, 3))
        assert engine.skipped_steps == 1
        check_masters(engine)
        engine.save_checkpoint(f"{folder}/{stage}")
        engine.load_checkpoint(f"{folder}/{stage}")
        check_masters(engine)
        engine.close()


def test_parameters_are_their_rounded_masters_whoever_wrote_either(tmp_path: Path) -> None:
    run_ranks(2, round_masters, str(tmp_path))


# -- ranks that write different values ----------------------------------------------------------------


def write_differently(more: dict[str, Any]) -> list[str]:
    rank = start()
    messages = []

    def by_a_number(weight: torch.Tensor) -> None:
        weight.fill_(float(rank))

    def on_rank_1(weight: torch.Tensor) -> None:
        if rank == 1:
            weight.mul_(2)

    for stage in (0, 1, 2):
        for write in (by_a_number, on_rank_1):
            for use in ("step", "save_checkpoint"):
                engine = make_engine(Task(factory=untied), stage, **more)
                take_steps(engine, range(1))
                with torch.no_grad():
                    write(engine.module.blocks[1].up.weight)
                    engine.module.norm.weight.fill_(2)  # on every rank
                with pytest.raises(DivergenceError) as caught:
                    if use == "step":
                        take_steps(engine, range(1, 2))
                    else:
                        engine.save_checkpoint("nowhere")
                messages.append(str(caught.value))
                load_state_dict(engine.module)  # now they agree
                take_steps(engine, range(2, 4))
                engine.close()
    return messages


@pytest.mark.parametrize("more", [pytest.param(FP32, id="fp32", marks=pytest.mark.slow), pytest.param(BF16, id="bf16")])
def test_ranks_that_wrote_different_values_are_an_error_on_all_of_them(more: dict[str, Any]) -> None:
    for messages in run_ranks(2, write_differently, more):
        for message in messages:
            assert "different values of blocks.1.up.weight, which were written since the last step" in message
            assert "norm" not in message and "zeroengine.gathered" in message


def write_differently_before_a_block_of_gathered() -> str:
    rank = start()
    engine = make_engine(Task(factory=untied), 1)
    model: Any = engine.module
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(float(rank))
        with zeroengine.gathered(model.norm):
            model.norm.bias.fill_(0.5)
    with pytest.raises(DivergenceError) as caught:
        take_steps(engine, range(1))
    return str(caught.value)


def test_values_written_inside_gathered_do_not_hide_those_that_ranks_wrote_differently_before() -> None:
    for message in run_ranks(2, write_differently_before_a_block_of_gathered):
        assert "different values of blocks.1.up.weight" in message and "norm" not in message


def write_differently_ahead_of_the_verdict() -> list[str]:
    rank = start()
    messages = []
    for stage in (0, 1, 2):
        model: Any = untied()
        engine = make_engine_with(model, adamw(model), settings(Task(), stage, **BF16), async_step=True)
        take_steps(engine, range(1))
        with torch.no_grad():
            model.norm.bias.fill_(float(rank))
        loss = engine(*batch(1, rank))
        engine.backward(loss)
        verdict = engine.step()
        with pytest.raises(DivergenceError) as caught:
            if rank == 0:
                bool(verdict)
            else:
                engine.backward(engine(*batch(2, rank)))
        messages.append(str(caught.value))
    return messages


def test_ranks_whose_step_is_known_late_raise_when_they_learn_of_it() -> None:
    for messages in run_ranks(2, write_differently_ahead_of_the_verdict):
        for message in messages:
            assert "different values of norm.bias" in message


def write_alike_in_different_ways() -> None:
    rank = start()
    for stage in (0, 1, 2):
        engine = make_engine(Task(factory=untied), stage, **BF16)
        model: Any = engine.module
        take_steps(engine, range(1))
        assert not engine._parts.passes.outside_writes._written()  # the engine's own updates do not count
        weight = model.blocks[1].up.weight
        if rank == 0:
            with torch.no_grad():
                weight.normal_()
        value = weight.detach().clone()
        dist.broadcast(value, 0)
        if rank == 1:
            weight.data.copy_(value)  # no version counter sees it
        take_steps(engine, range(1, 2))
        with zeroengine.gathered(model), torch.no_grad():
            if rank == 1:
                weight.fill_(0.5)
        assert not engine._parts.passes.outside_writes._written()
        take_steps(engine, range(2, 3))
        assert (weight - 0.5).abs().max() < 0.1
        engine.close()


def test_ranks_that_come_to_the_same_values_in_different_ways_agree() -> None:
    run_ranks(2, write_alike_in_different_ways)
