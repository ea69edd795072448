"""Scripts of DeepSpeed on two ranks: the losses of DDP, and checkpoints, boundaries, values and errors."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroengine
import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks
from tests.integrations.environments import ROOT, run_program
from zeroengine.errors import ZeroEngineError
from zeroengine.integrations.deepspeed import parameters

WIDTH, STEPS, WINDOW = 8, 4, 2
PLAIN = {"type": "SGD", "params": {"lr": 0.1}}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": WINDOW,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def losses_of_ddp(make: Callable[[nn.Sequential], torch.optim.Optimizer] | None = None) -> list[float]:
    module = build()
    optimizer = make(module) if make else torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    model = DistributedDataParallel(module)
    losses = []
    for step in range(STEPS):
        for micro_step in range(WINDOW):
            inputs, targets = batch(step * WINDOW + micro_step)
            with contextlib.nullcontext() if micro_step == WINDOW - 1 else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets)
                (loss / WINDOW).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_muon(model: nn.Sequential) -> torch.optim.Optimizer:
    """In groups whose order is not that of the two rules."""
    muon_optimizer = importlib.import_module("zeroengine.integrations.deepspeed.runtime.zero.muon.muon_optimizer")
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    first = {"params": vectors, "use_muon": False, "lr": 1e-2, "weight_decay": 0.1}
    second = {"params": matrices, "use_muon": True, "weight_decay": 0.1, "ns_dtype": "fp32"}
    optimizer: torch.optim.Optimizer = muon_optimizer.MuonWithAuxAdam([first, second])
    return optimizer


def run_steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first * WINDOW, last * WINDOW):
        inputs, targets = batch(number)
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_and_resume(stage: int, folder: str) -> dict[str, Any]:
    deepspeed.init_distributed()
    expected = losses_of_ddp()
    with deepspeed.zero.Init(enabled=stage == 3):
        model = build()
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(stage)
    )
    assert (loader, schedule) == (None, None)
    losses = run_steps(engine, 0, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    losses += run_steps(engine, 2, STEPS)
    facts = (engine.global_steps, engine.micro_steps, engine.global_samples, engine.train_batch_size())
    state = engine._zero3_consolidated_16bit_state_dict()
    engine.save_16bit_model(folder)
    assert engine.get_global_grad_norm() > 0 and optimizer.param_groups[0]["lr"] == engine.get_lr()[0]
    steps = [float(state["step"]) for state in optimizer.state.values()]
    engine.destroy()
    # Another model continues with the losses that the first one had, bit for bit.
    engine, optimizer, *_ = deepspeed.initialize(model=build(), config=settings(stage))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert not any(float(state["step"]) for state in optimizer.state.values())
    path, client_state = engine.load_checkpoint(folder)
    resumed = run_steps(engine, 2, STEPS)
    # This holds of parameters of which another rank has all elements too.
    assert [float(state["step"]) for state in optimizer.state.values()] == steps
    engine.destroy()
    if state is not None:
        written = torch.load(Path(folder) / "pytorch_model.bin")
        assert all(torch.equal(written[name], state[name]) for name in state)
        fp32 = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "other")
        assert {name: value.shape for name, value in fp32.items()} == {
            n: v.shape for n, v in build().state_dict().items()
        }
    return {
        "expected": expected,
        "losses": losses,
        "resumed": resumed,
        "facts": facts,
        "path": path,
        "client_state": client_state,
        "has_state": state is not None,
    }


def habits(stage: int, folder: str) -> None:
    """What scripts of DeepSpeed do, beside what DeepSpeed 0.19.8 does with it."""
    deepspeed.init_distributed()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        training_data=[(torch.full((WIDTH,), float(i)), torch.tensor(i)) for i in range(21)],
        config=settings(
            stage, scheduler={"type": "WarmupLR", "params": {}}, gradient_accumulation_steps=1, gradient_clipping=0.0
        ),
    )
    assert engine.lr_scheduler is schedule and engine.optimizer_name() == "SGD"
    assert [len(numbers) for _, numbers in loader] == [4, 4, 3] and len(loader) == 3
    assert [len(numbers) for numbers in engine.deepspeed_io(range(21), batch_size=8)] == [8, 3]
    rates = []
    for inputs, _ in loader:
        rates += engine.get_lr()
        engine.backward(engine(inputs).square().mean() * 1e-6)
        engine.step()
    norm = engine.get_global_grad_norm()
    assert rates == [1, 1, 0.5] and norm.item() == float(norm) > 0 and f"{norm:.9f}" == f"{norm.item():.9f}"
    # A larger batch is more micro-steps, and the gradient their mean.
    engine.set_train_batch_size(24)
    assert (engine.gradient_accumulation_steps(), engine.global_samples) == (3, 3 * 8)
    for wrong in (0, 12, 24.0, True, "24", None):
        with pytest.raises(ValueError, match="the train batch size is a multiple of 8, found"):
            engine.set_train_batch_size(wrong)
    for wrong in (0, 2.5, True, "3"):
        with pytest.raises(ZeroEngineError, match="takes positive whole numbers"):
            engine.engine.set_gradient_accumulation_steps(wrong)
        with pytest.raises(ZeroEngineError, match="takes positive whole numbers"):
            engine.set_train_micro_batch_size(wrong)
    engine.save_checkpoint(folder, tag="larger")
    saved = json.loads(Path(folder, "larger", "zeroengine.json").read_text())["config"]
    assert (saved["gradient_accumulation_steps"], saved["train_batch_size"]) == (3, 24)
    plain = build()
    plain.load_state_dict(engine.engine.full_state_dict())
    for number in range(3):
        inputs, targets = batch(number)
        (nn.functional.mse_loss(plain(inputs), targets) / 3).backward()
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
        if number < 2:
            # Within a step nothing changes.
            with pytest.raises(ZeroEngineError, match="within a step"):
                engine.set_train_micro_batch_size(2)
            assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (4, 24)
    gradient = plain[0].weight.grad
    dist.all_reduce(gradient)
    expected = plain[0].weight.detach() - 0.5 * gradient / dist.get_world_size()
    torch.testing.assert_close(engine.engine.full_state_dict()["0.weight"], expected)
    assert engine.global_steps == 4 and engine.global_samples == 3 * 8 + 24
    engine.destroy()
    # Micro-steps of bf16 add up in fp32: each of these is too small to change a sum of bf16.
    wide = nn.Sequential(nn.Linear(1, 1, bias=False))
    engine, *_ = deepspeed.initialize(
        model=wide,
        config=settings(
            stage, gradient_accumulation_steps=512, gradient_clipping=0.0, bf16={"enabled": True}, optimizer=PLAIN
        ),
    )
    for _ in range(512):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
    assert engine.get_global_grad_norm().item() == 1.0
    engine.destroy()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3])
def test_what_scripts_do_by_habit_has_deepspeeds_effect_or_a_better_one(stage: int, tmp_path: Path) -> None:
    run_ranks(2, habits, stage, str(tmp_path))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_script_trains_as_under_ddp_and_resumes_exactly(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_ranks(2, train_and_resume, stage, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-6)
        assert result["resumed"] == result["losses"][2 * WINDOW :]
        assert result["facts"] == (STEPS, STEPS * WINDOW, STEPS * 16, 16)
        # `latest` names the checkpoint that was saved before the one with save_latest=False.
        assert (result["path"], result["client_state"]) == (str(tmp_path / "global_step2"), {"epoch": 3})
        assert result["has_state"] == (rank == 0)
    # The program beside the checkpoints writes the weights of a checkpoint, here of one before the last steps.
    script, folder = tmp_path / "zero_to_fp32.py", tmp_path / "fp32"
    assert os.access(script, os.X_OK)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), str(folder), "--tag", "other"])
    runpy.run_path(str(script), run_name="__main__")
    saved, last = torch.load(folder / "pytorch_model.bin"), torch.load(tmp_path / "pytorch_model.bin")
    assert saved.keys() == last.keys() and not any(torch.equal(saved[name], last[name]) for name in saved)


def train_with_muon() -> None:
    deepspeed.init_distributed()
    expected = losses_of_ddp(with_muon)
    keys = {"adam_lr": 1e-2, "weight_decay": 0.1, "ns_dtype": "fp32", "ns_method": "gram"}
    section = {"type": "muon", "params": keys}
    for stage, given, optimizer in ((0, True, {}), (3, True, {}), (2, False, {"optimizer": section})):
        model = build()
        config = {key: value for key, value in settings(stage).items() if key != "optimizer"} | optimizer
        # What DeepSpeed's users write.
        groups = None if given else [{"params": list(model.parameters())}]
        for param in () if given else model.parameters():
            param.use_muon = param.dim() == 2
        client = with_muon(model) if given else None
        engine, view, *_ = deepspeed.initialize(
            model=model, optimizer=client, model_parameters=groups, config=config, lr_scheduler=None
        )
        assert run_steps(engine, 0, STEPS) == pytest.approx(expected, rel=2e-6)
        assert sorted(group["lr"] for group in view.param_groups) == [1e-2, 0.02]
        assert not given or [group["use_muon"] for group in view.param_groups] == [False, True]
        engine.destroy()


def test_muon_trains_as_under_ddp_from_the_class_and_from_the_configuration() -> None:
    run_ranks(2, train_with_muon)


def boundaries(stage: int, folder: str) -> None:
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=build(), config=settings(stage, gradient_accumulation_steps=4))
    before = engine._zero3_consolidated_16bit_state_dict()

    def micro_step(number: int, is_last: bool, scale: bool = True) -> None:
        engine.set_gradient_accumulation_boundary(is_last)
        inputs, targets = batch(number)
        engine.backward(nn.functional.mse_loss(engine(inputs), targets), scale_wrt_gas=scale)

    micro_step(0, False)
    engine.step()
    assert not engine.was_step_applied() and engine.global_steps == 0
    # A checkpoint between micro-steps leaves the step in progress as it is.
    engine.save_checkpoint(folder, tag=f"inside-{stage}")
    scaled = deepspeed.utils.safe_get_full_grad(engine.module[0].bias)
    micro_step(1, True)
    assert engine.is_gradient_accumulation_boundary()
    engine.step()
    # The script's boundary ends the step after two micro-steps, and not the count of four.
    assert engine.was_step_applied() and engine.global_steps == 1
    after = engine._zero3_consolidated_16bit_state_dict()
    assert before is None or not torch.equal(before["0.weight"], after["0.weight"])
    micro_step(0, True, scale=False)
    unscaled = deepspeed.utils.safe_get_full_grad(engine.module[0].bias)
    assert 2 < float(unscaled.norm() / scaled.norm()) < 8
    engine.step()
    engine.destroy()


def test_the_scripts_boundary_decides_which_step_updates(tmp_path: Path) -> None:
    for stage in (1, 3):
        run_ranks(2, boundaries, stage, str(tmp_path))


def unmanaged(stage: int) -> dict[str, Any]:
    """Train by DeepSpeed's count of micro-steps, and by a step() after as many backwards."""
    deepspeed.init_distributed()
    losses: dict[str, Any] = {}
    for managed in (True, False):
        config = settings(stage, managed_gradient_accumulation=managed)
        engine, *_ = deepspeed.initialize(model=build(), config=config)
        assert engine.managed_gradient_accumulation() is managed
        losses[str(managed)] = []
        for number in range(STEPS * WINDOW):
            inputs, targets = batch(number)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            if managed or number % WINDOW == WINDOW - 1:
                engine.step()
                assert managed or engine.was_step_applied()
            losses[str(managed)].append(loss.item())
        if not managed:
            # A step may have any number of backwards, and counts the samples of all of them.
            for number in range(5):
                inputs, targets = batch(number)
                engine.backward(nn.functional.mse_loss(engine(inputs), targets))
            engine.step()
            assert (engine.global_steps, engine.global_samples) == (STEPS + 1, (STEPS * WINDOW + 5) * 4 * 2)
            with pytest.raises(AssertionError, match="managed_gradient_accumulation"):
                engine.set_gradient_accumulation_boundary(True)
            with pytest.raises(AssertionError, match="managed_gradient_accumulation"), engine.coalesce_grad_reduction():
                pass
        engine.destroy()
    return losses


def test_without_managed_accumulation_every_step_updates() -> None:
    for stage in (1, 3):
        for losses in run_ranks(2, unmanaged, stage):
            assert losses["False"] == losses["True"]


def sum_over_ranks(folder: str) -> None:
    deepspeed.init_distributed()
    norms = []
    inputs, targets = batch(0)
    for operation in ("mean", "sum"):
        section = {"tag_validation": "FAIL" if operation == "mean" else "WARN"}
        config = settings(2, gradient_accumulation_steps=1, gradient_allreduce_op=operation, checkpoint=section)
        engine, *_ = deepspeed.initialize(model=build(), config=config)
        engine.backward(nn.functional.mse_loss(engine(inputs), targets))
        gradient = deepspeed.utils.safe_get_full_grad(engine.module[0].bias).norm()
        engine.step()
        norms.append((gradient, engine.get_global_grad_norm()))
        tag = f"{operation}-{dist.get_rank()}"
        if operation == "mean":
            with pytest.raises(AssertionError, match="differently: 'mean-0', 'mean-1'"):
                engine.save_checkpoint(folder, tag=tag)
        else:
            engine.save_checkpoint(folder, tag=tag)
            assert (Path(folder) / "latest").read_text().strip() == "sum-0"
        engine.destroy()
    for mean, total in zip(*norms, strict=True):
        assert float(total) == pytest.approx(2 * float(mean), rel=1e-6)


def test_gradients_can_be_summed_over_ranks_and_tags_of_ranks_may_differ(tmp_path: Path) -> None:
    run_ranks(2, sum_over_ranks, str(tmp_path))


def sum_over_data_ranks() -> None:
    """The ranks that hold one model together add their gradients once."""
    deepspeed.init_distributed()
    norms = []
    for operation in ("mean", "sum"):
        config = settings(2, gradient_accumulation_steps=1, gradient_allreduce_op=operation)
        model = zeroengine.parallelize(build(), {"0": "colwise", "2": "rowwise"}, size=2)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        generator = torch.Generator().manual_seed(dist.get_rank() // 2)
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-6)


def test_gradients_of_a_split_model_can_be_summed_over_the_ranks_with_the_same_slices() -> None:
    run_ranks(4, sum_over_data_ranks)


def local_values_of_few_elements() -> list[int]:
    """Read the values of a parameter whose one element is on one of two ranks."""
    deepspeed.init_distributed()
    # Both ranks own elements of the last layer.
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH))
    engine, *_ = deepspeed.initialize(model=model, config=settings(3, gradient_accumulation_steps=1))
    inputs, targets = batch(0)
    bias = engine.module[0].bias
    engine.backward(nn.functional.mse_loss(engine(inputs), targets))
    found = [deepspeed.utils.safe_get_local_fp32_param(bias), deepspeed.utils.safe_get_local_grad(bias)]
    engine.step()
    found.append(deepspeed.utils.safe_get_local_optimizer_state(bias, "exp_avg"))
    assert deepspeed.utils.safe_get_local_optimizer_state(bias, "no such state") is None
    engine.destroy()
    # None on one rank alone would let scripts that check for it take different branches, and then wait forever.
    return [value.numel() for value in found]


def test_local_values_are_empty_tensors_where_a_rank_owns_nothing() -> None:
    sizes = run_ranks(2, local_values_of_few_elements)
    assert sorted(sizes) == [[0, 0, 0], [1, 1, 1]]


def values() -> None:
    deepspeed.init_distributed()
    rank = dist.get_rank()
    engine, optimizer, *_ = deepspeed.initialize(model=build(), config=settings(3, gradient_accumulation_steps=1))
    weight = engine.module[0].weight
    assert weight.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE and weight.ds_shape == (16, WIDTH)
    # Rank 1's values count, although both ranks write; what is written without a modifier rank by nobody stays.
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        assert weight.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE
        weight.data.fill_(float(rank + 1))
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full_like(weight, 2.0))
    inputs, targets = batch(0)
    engine.backward(nn.functional.mse_loss(engine(inputs), targets))
    gradient = deepspeed.utils.safe_get_full_grad(weight)
    assert gradient.shape == weight.shape and gradient.norm() > 0
    # The parts of the ranks are the whole.
    parts = [None, None]
    dist.all_gather_object(parts, deepspeed.utils.safe_get_local_grad(weight))
    torch.testing.assert_close(torch.cat(parts).view(weight.shape), gradient)
    local = torch.full(weight.ds_tensor.shape, float(rank))
    deepspeed.utils.safe_set_local_fp32_param(weight, local)
    assert torch.equal(deepspeed.utils.safe_get_local_fp32_param(weight), local)
    deepspeed.utils.safe_set_full_fp32_param(weight, torch.ones(16, WIDTH))
    engine.step()
    assert deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg").shape == weight.shape
    assert deepspeed.utils.safe_get_full_optimizer_state(weight, "no such state") is None
    owned = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    sizes = [0, 0]
    dist.all_gather_object(sizes, owned)
    assert sum(sizes) == sum(param.numel() for param in engine.module.parameters())
    with pytest.raises(ZeroEngineError, match="this rank owns"):
        deepspeed.utils.safe_set_local_fp32_param(weight, torch.ones(3))
    engine.destroy()
    # The attributes are those of a partitioned parameter, and leave with the engine.
    assert not any(name.startswith("ds_") for name in vars(weight))
    frozen, nothing, *_ = deepspeed.initialize(model=build(), config={"train_batch_size": 2})
    assert nothing is None and not frozen(inputs).requires_grad
    frozen.destroy()
    assert all(param.requires_grad for param in frozen.module.parameters())


def test_single_parameters_can_be_read_and_written() -> None:
    run_ranks(2, values)


def test_a_second_engine_of_a_process_saves_into_the_folder_of_the_first(tmp_path: Path) -> None:
    # So does a second Trainer of a notebook, while the first one still exists.
    engines = [deepspeed.initialize(model=build(), config=settings(2))[0] for _ in range(2)]
    for engine in engines:
        engine.save_checkpoint(str(tmp_path), tag="same")
    assert engines[0].load_checkpoint(str(tmp_path))[0] == str(tmp_path / "same")
    for engine in engines:
        engine.destroy()


def test_a_status_equals_the_status_of_the_moment() -> None:
    param = nn.Parameter(torch.zeros(2))
    status = parameters.StatusOfParameter(param)
    assert status == deepspeed.zero.ZeroParamStatus.AVAILABLE and status == parameters.StatusOfParameter(param)
    assert not status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    assert deepspeed.zero.ZeroParamStatus.AVAILABLE == status


@pytest.mark.slow
def test_the_example_trains_and_continues(tmp_path: Path) -> None:
    script = ROOT / "examples" / "deepspeed_script.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]

    def run(steps: int) -> dict[str, Any]:
        done: subprocess.CompletedProcess[str] = run_program(
            [*command, f"--steps={steps}", "--width=32", f"--save={tmp_path}"]
        )
        assert done.returncode == 0, done.stdout[-4000:]
        report: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return report

    first = run(6)
    assert first["steps"] == 6 and len(first["losses"]) == 12 and first["losses"][-1] < first["losses"][0]
    second = run(8)
    assert second["steps"] == 8 and len(second["losses"]) == 4
