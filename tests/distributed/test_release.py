"""The end of an engine: what is left is an ordinary model, and nothing else."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_device_step import Log
from tests.distributed.training import STAGES, start, take_steps
from tests.parametrization import in_turn
from zeroengine import ReleasedParameterError, ZeroEngineError, engine_of

BF16 = {"bf16": {"enabled": True}}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_state_dict_hooks")
    on_modules = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    on_params = sum(bool(getattr(param, "_post_accumulate_grad_hooks", None)) for param in model.parameters())
    return on_modules + on_params


def assert_ordinary(model: nn.Module) -> None:
    assert hooks_of(model) == 0
    for param in model.parameters():
        assert type(param) is nn.Parameter and param.dtype is torch.float32
        assert param.grad is None and not vars(param)
        assert param.untyped_storage().nbytes() == param.nbytes
    x, y = batch(0, 0)
    model(x, y).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.to(torch.float64).to(torch.float32).zero_grad()


def ended(how: str, more: dict[str, Any]) -> None:
    start()
    for stage in STAGES:
        model = build(TinyLM)
        before = [(name, param) for name, param in model.named_parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        settings = config(stage, optimizer=None, **more)
        engine = zeroengine.initialize(model, optimizer, settings, lr_scheduler=schedule)
        assert engine_of(model) is engine is engine_of(model.blocks[0]) is engine_of(nn.Sequential(model))
        take_steps(engine, range(2))
        masters = {name: zeroengine.full_master(param) for name, param in before}
        getattr(engine, how)()
        getattr(engine, how)()
        assert engine_of(model) is None
        assert [(name, id(param)) for name, param in model.named_parameters()] == [(n, id(p)) for n, p in before]
        for name, param in before:
            assert torch.equal(param, masters[name]), name
        assert_ordinary(model)
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 2, 0)
        for use in (engine.full_state_dict, engine.step, engine.memory, partial(engine, *batch(0, 0))):
            with pytest.raises(ZeroEngineError, match=rf"this engine has ended, by engine.{how}\(\)"):
                use()
        # The optimizer and the schedule are the caller's again.
        model(*batch(0, 0)).backward()
        optimizer.step()
        schedule.step()
        assert not torch.equal(before[0][1], masters[before[0][0]])


@in_turn(("how", "more"), ["release", "close"], [pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16")])
def test_an_ended_engine_leaves_an_ordinary_model_with_the_trained_values(how: str, more: dict[str, Any]) -> None:
    run_ranks(2, ended, how, more)


def trained_in_parts(stages: tuple[int, ...], more: dict[str, Any]) -> dict[str, torch.Tensor]:
    start()
    model = build(TinyLM)
    for stage in stages:
        engine = zeroengine.initialize(model, sgd, config(stage, optimizer=None, **more))
        take_steps(engine, range(2))
        engine.release()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("more", [pytest.param({}, id="fp32", marks=pytest.mark.slow), pytest.param(BF16, id="bf16")])
def test_a_released_model_goes_on_at_another_stage_with_the_same_bits(more: dict[str, Any]) -> None:
    (expected, _) = run_ranks(2, trained_in_parts, (0, 0, 0), more)
    for found in run_ranks(2, trained_in_parts, (3, 1, 2), more):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def leftovers(transport: str, folder: Path | None) -> list[tuple[int, ...]]:
    start()
    model = build(TinyLM)
    found, schedules = [], []
    for _ in range(10):
        monitor = {} if folder is None else {"folder": str(folder)}
        more = {"monitor": monitor, "scheduler": {"type": "WarmupLR", "params": {}}}
        engine = zeroengine.initialize(model, None, config(3, comm={"transport": transport}, **more))
        take_steps(engine, range(1))
        engine.release()
        schedules.append(engine.lr_scheduler)  # as a loop that goes on to plot its rates
        parts = weakref.ref(engine)
        del engine
        gc.collect()
        assert parts() is None
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        # Gloo's threads may still hold the bytes of the last exchange of objects.
        values = (item for item in gc.get_objects() if isinstance(item, torch.Tensor))
        tensors = sum(item.dtype is not torch.uint8 for item in values)
        found.append((threads, files, threading.active_count(), tensors))
    return found


@pytest.mark.parametrize("transport, monitored", [("shm", True), pytest.param("gloo", False, marks=pytest.mark.slow)])
def test_ten_engines_on_one_model_leak_no_thread_no_descriptor_and_no_tensor(
    tmp_path: Path, transport: str, monitored: bool
) -> None:
    for found in run_ranks(2, leftovers, transport, tmp_path if monitored else None):
        # The system may list a thread for a moment after it has ended, so single counts may be one too high.
        for early, late in zip(zip(*found[2:5], strict=True), zip(*found[-3:], strict=True), strict=True):
            assert min(late) <= max(early), found


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum()


def radam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(params)


def no_schedule(optimizer: torch.optim.Optimizer) -> Any:
    raise ZeroDivisionError


def failed_initialize(where: str, stage: int) -> None:
    start()
    model = build(Reference)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    schedule: Any = None
    more: dict[str, Any] = {"optimizer": None}
    make: Any = sgd
    if where == "schedule":
        schedule = no_schedule
    elif where == "optimizer":
        # Only the fused rules keep their states in bf16.
        more["optimizer_state_dtype"], make = "bf16", radam
    with pytest.raises((ZeroEngineError, ZeroDivisionError)):
        zeroengine.initialize(model, make, config(stage, **more), lr_scheduler=schedule)
    assert hooks_of(model) == 0
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert type(param) is nn.Parameter and not vars(param)
    model(torch.ones(2, 8)).backward()
    model.zero_grad()
    engine = zeroengine.initialize(model, None, config(stage))
    engine.backward(engine(torch.ones(2, 8)))
    assert engine.step()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("where", ["schedule", "optimizer"])
def test_a_failed_initialize_leaves_the_model_as_it_was(where: str, stage: int) -> None:
    run_ranks(2, failed_initialize, where, stage)


def closed_after_an_error() -> None:
    rank = start()
    engine = zeroengine.initialize(build(TinyLM), None, config(3))
    take_steps(engine, range(1))
    if rank == 1:
        return
    try:
        raise RuntimeError("the training failed")
    except RuntimeError:
        engine.close()
    with pytest.raises(ReleasedParameterError, match="the engine was closed after RuntimeError"):
        engine.module.head.weight.sum()
    assert engine.module.head.weight.shape


def test_closing_after_an_error_of_one_rank_waits_for_no_other() -> None:
    run_ranks(2, closed_after_an_error, timeout=40)


# -- models without trainable parameters, and optimizers over a part ----------------------------------


def evaluate_frozen(stage: int, optimizer: dict[str, Any] | None) -> tuple[float, float, int]:
    start()
    plain = build(TinyLM)
    expected = float(plain(*batch(0, 0)))
    model = build(TinyLM).requires_grad_(False)
    settings = config(stage, optimizer=optimizer)
    engine = zeroengine.initialize(model, None, settings)
    with torch.no_grad():
        loss = float(engine(*batch(0, 0)))
    with pytest.raises(ZeroEngineError, match="all parameters are frozen"):
        engine.backward(engine(*batch(0, 0)))
    parameters = engine.memory().parameters
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert engine.memory().optimizer == engine.memory().master == 0
    engine.release()
    assert not any(param.requires_grad for param in model.parameters())
    return loss, expected, parameters


@pytest.mark.parametrize("optimizer", [None, {"type": "AdamW", "params": {"lr": 1e-3}}], ids=["none", "adamw"])
def test_a_model_without_trainable_parameters_is_partitioned_and_needs_no_optimizer(
    optimizer: dict[str, Any] | None,
) -> None:
    whole, part = (run_ranks(2, evaluate_frozen, stage, optimizer)[0] for stage in (0, 3))
    assert whole[0] == whole[1] == part[0]
    assert part[2] < 0.6 * whole[2]


def train_the_head() -> tuple[list[str], bool]:
    rank = start()
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    log = Log()
    engine = zeroengine.initialize(model, torch.optim.AdamW(model.head.parameters(), lr=0.1), config(2, optimizer=None))
    notices = [line for line in log.messages if "count as frozen: blocks.0.norm.weight" in line]
    assert len(notices) == (rank == 0)
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["tok.weight"]
    take_steps(engine, range(2))
    norm, weights = engine.grad_norm, engine.full_state_dict()
    engine.release()
    assert all(param.requires_grad for param in model.parameters())
    # The norm is that of the parameters that the optimizer holds.
    plain = build(TinyLM)
    optimizer = torch.optim.AdamW(plain.head.parameters(), lr=0.1)
    for number in range(2):
        plain.zero_grad()
        torch.stack([plain(*batch(number, rank)) for rank in range(2)]).mean().backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.head.parameters(), 1.0)
        optimizer.step()
    assert norm == pytest.approx(plain_norm.item(), rel=1e-4)
    torch.testing.assert_close(weights["head.weight"], plain.head.weight.detach(), rtol=1e-4, atol=1e-4)
    return [name for name, param in model.named_parameters() if not torch.equal(param, before[name])], rank == 0


def test_parameters_that_the_optimizer_leaves_out_are_frozen_until_release() -> None:
    for changed, _ in run_ranks(2, train_the_head):
        assert changed == ["tok.weight"]


# -- ends in unusual places ---------------------------------------------------------------------------


def end_with_states_away(stage: int, folder: str) -> None:
    start()
    engine = zeroengine.initialize(build(TinyLM), None, config(stage, comm={"transport": "gloo"}, **BF16))
    take_steps(engine, range(2))
    masters = {name: zeroengine.full_master(param) for name, param in engine.module.named_parameters()}
    engine.offload_states(["parameters", "optimizer"], device="nvme", nvme_path=folder)
    with pytest.raises(ZeroEngineError, match=r"call engine\.reload_states\(\)"):
        engine.release()
    engine.close()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, masters[name])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_close_brings_back_states_that_are_away(stage: int, tmp_path: Path) -> None:
    run_ranks(2, end_with_states_away, stage, str(tmp_path))


def retry_after_an_error() -> None:
    start()
    try:
        raise torch.OutOfMemoryError("the first attempt")
    except torch.OutOfMemoryError:
        engine = zeroengine.initialize(build(TinyLM), None, config(3))
        take_steps(engine, range(1))
        engine.close()
    assert_ordinary(engine.module)


def test_a_retry_inside_an_except_keeps_its_model() -> None:
    run_ranks(2, retry_after_an_error)


def peak_rates(stage: int) -> list[float]:
    start()
    model = build(TinyLM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 1, "total_num_steps": 4}}
    settings = config(stage, optimizer=None, scheduler=schedule)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("zeroengine.engine.assembly.ForeignParameters", interrupt)
        zeroengine.initialize(model, optimizer, settings)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    peaks = []
    for _ in range(3):
        engine = zeroengine.initialize(model, optimizer, settings)
        rates = []
        for step in range(4):
            take_steps(engine, range(step, step + 1))
            rates.append(optimizer.param_groups[0]["lr"])
        peaks.append(max(rates))
        engine.release()
    return peaks


def test_a_schedule_starts_from_the_same_rate_in_each_engine_of_an_optimizer() -> None:
    for peaks in run_ranks(2, peak_rates, 2):
        assert peaks[0] == peaks[1] == peaks[2] > 1e-3


def interrupted() -> None:
    start()
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroengine.comm.group.Group.broadcast", interrupt)
        with pytest.raises(KeyboardInterrupt):
            zeroengine.initialize(model, None, config(3, **BF16))
    for name, param in model.named_parameters():
        assert param.dtype is torch.float32 and torch.equal(param, before[name])


def interrupt(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_initialize_leaves_the_parameters() -> None:
    run_ranks(2, interrupted)


def end_in_the_wrong_place() -> None:
    start()
    with (
        torch.inference_mode(),
        pytest.raises(ZeroEngineError, match=r"initialize\(\) inside torch.inference_mode\(\)"),
    ):
        zeroengine.initialize(build(TinyLM), None, config(3))
    engine = zeroengine.initialize(build(TinyLM), None, config(3))
    with zeroengine.gathered(engine.module):
        for end in (engine.release, engine.close):
            with pytest.raises(ZeroEngineError, match="leave the `with` first"):
                end()
    model, loss = engine.module, engine(*batch(0, 0))
    loss.register_hook(lambda _: engine.release())
    with pytest.raises(ZeroEngineError, match=r"release\(\) inside of a backward"):
        engine.backward(loss)
    engine.zero_grad()
    take_steps(engine, range(1))
    with torch.inference_mode():
        engine.release()
    assert not hasattr(engine.optimizer, "param_groups")
    assert_ordinary(model)


def test_an_engine_is_not_ended_in_the_midst_of_its_work() -> None:
    run_ranks(2, end_in_the_wrong_place)


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 1)).to(memory_format=torch.channels_last)
    model.register_parameter("transposed", nn.Parameter(torch.rand(8, 4).t()))
    model.register_parameter(
        "volumes", nn.Parameter(torch.rand(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d))
    )
    model.register_parameter("permuted", nn.Parameter(torch.rand(2, 3, 4).permute(1, 2, 0)))
    return model


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_release_keeps_the_memory_format_of_parameters(stage: int) -> None:
    model = convolutions()
    before = {name: (param.stride(), param.detach().clone()) for name, param in model.named_parameters()}
    settings = config(stage)
    settings["zero_optimization"]["param_persistence_threshold"] = 0
    zeroengine.initialize(model, None, settings).release()
    for name, param in model.named_parameters():
        strides, value = before[name]
        assert param.stride() == strides and torch.equal(param, value), name


def test_parameters_without_values_are_not_released_as_zeros() -> None:
    with zeroengine.meta_init(values=False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine = zeroengine.initialize(model, None, config(0))
    with pytest.raises(ZeroEngineError, match=r"have no values yet: 0\.weight.*engine.load_weights"):
        engine.release()
    engine.load_weights({"0.weight": torch.ones(4, 4)}, strict=False)
    engine.close()
    assert bool((model[0].weight == 1).all()) and bool(model[1].weight.isnan().all())
