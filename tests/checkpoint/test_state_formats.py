"""Moments of 8 bits and 16-bit masters in checkpoints: raw for an exact resume, and converted to other precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.test_state_formats import ADAMW, IN_BF16, LION, MOMENTUM, ExactGradients
from tests.distributed.training import start
from tests.distributed.whole_states import whole_states
from zeroengine import ops

INT8: dict[str, Any] = {"optimizer_state_dtype": "int8"}
IN_FP16 = {"enabled": True, "fp16_master_weights_and_grads": True, "loss_scale": 4}
KEYS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
FP32: dict[str, Any] = {"optimizer": ADAMW}
FORMATS: dict[str, dict[str, Any]] = {
    "AdamW": FP32 | INT8,
    "bf16 masters": FP32 | INT8 | {"bf16": IN_BF16},
    "Lion": {"optimizer": LION, "bf16": {"enabled": True}} | INT8,
    "SGD": {"optimizer": MOMENTUM} | INT8,
}


def engine_at(stage: int, settings: dict[str, Any], seed: int = 0) -> zeroengine.Engine:
    torch.manual_seed(seed)
    zero = {"stage": stage, "param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **settings}
    return zeroengine.initialize(ExactGradients(), config=config)


def batch(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(-3, 4, (2, width), generator=generator).float() for width in (97, 73)]


def train(engine: zeroengine.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*batch(step)))
        engine.step()


def states(engine: zeroengine.Engine) -> dict[str, torch.Tensor]:
    return whole_states(engine, KEYS)


def save_all(root: Path, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    start()
    found = {}
    for name, settings in FORMATS.items():
        engine = engine_at(stage, settings)
        train(engine, range(3))
        engine.save_checkpoint(root / name, "a")
        found[name] = states(engine)
        train(engine, range(3, 5))
        found[f"{name}, later"] = states(engine)
        engine.close()
    return found


def load_all(root: Path, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    start()
    found = {}
    for name, settings in FORMATS.items():
        engine = engine_at(stage, settings, seed=1)
        engine.load_checkpoint(root / name)
        found[name] = states(engine)
        train(engine, range(3, 5))
        found[f"{name}, later"] = states(engine)
        engine.close()
    return found


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The states of each format when they were saved, and those after two more steps."""
    return run_ranks(2, save_all, folder, 3)[0]


@pytest.mark.parametrize(("ranks", "stage"), [(3, 1), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_8_bit_moments_resume_with_the_same_bits_at_any_stage_and_number_of_ranks(
    ranks: int, stage: int, folder: Path, saved: dict[str, dict[str, torch.Tensor]]
) -> None:
    for name, found in run_ranks(ranks, load_all, folder, stage)[0].items():
        assert_equal_states(found, saved[name])


def model_after_steps(optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What plain PyTorch trains, on the batches of ``train``."""
    torch.manual_seed(0)
    model = ExactGradients()
    trained = optimizer(model.parameters())
    for step in range(3):
        plain_step(model, trained, step)
    return model, trained


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(*batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def save_plainly(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Save by torch alone, and return the values as ``whole_states`` names them."""
    names = {param: name for name, param in model.named_parameters()}
    state = {names[param]: values for param, values in optimizer.state.items()}
    dcp.save({"model": model.state_dict(), "optimizer": {"state": state}}, checkpoint_id=path, no_dist=True)
    found = {name: value.detach() for name, value in model.state_dict().items()}
    return found | {f"{name} {key}": value for name, values in state.items() for key, value in values.items()}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)


def rounded(values: torch.Tensor, key: str) -> torch.Tensor:
    """Values as 8 bits keep them, if these serve the parameter."""
    if values.numel() < 4096 or key not in ("exp_avg", "exp_avg_sq"):
        return values
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(-(-values.numel() // 256))
    ops.encode_moment(values.flatten(), codes, scales, is_signed=key == "exp_avg")
    return ops.decode_moment(codes, scales, is_signed=key == "exp_avg").view_as(values)


def conversions(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    start()
    on_disk = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(root)}}
    loads: dict[str, tuple[Path, dict[str, Any], int]] = {
        "int8 in fp32": (root / "AdamW", FP32, 3),
        "int8 in bf16": (root / "AdamW", FP32 | {"optimizer_state_dtype": "bf16"}, 1),
        "fp32 in int8": (root / "plain", FP32 | INT8 | {"zero_optimization": on_disk}, 3),
        "fp32 in bf16 masters": (root / "plain", FP32 | {"bf16": IN_BF16} | INT8, 2),
        "fp32 in fp16 masters": (root / "plain", FP32 | {"fp16": IN_FP16}, 1),
        "bf16 masters in fp32": (root / "bf16 masters", FP32, 1),
    }
    found = {}
    for name, (path, settings, stage) in loads.items():
        engine = engine_at(stage, settings, seed=1)
        engine.load_checkpoint(path, "a")
        found[name] = states(engine)
        engine.close()
    # SGD keeps no step count in torch, and its first step is another rule.
    engine = engine_at(1, {"optimizer": MOMENTUM})
    engine.load_checkpoint(root / "plain", "momentum")
    train(engine, range(3, 5))
    found["momentum"] = states(engine)
    engine.close()
    return found


def loads_of_another_optimizer(root: Path) -> dict[str, str]:
    start()
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = engine_at(1, sgd)
    train(engine, range(2))
    engine.save_checkpoint(root / "plain SGD", "a")
    engine.close()
    messages = {}
    for name, settings, folder in (
        ("Adam for Lion", {"optimizer": LION}, "AdamW"),
        ("Adam for SGD", sgd, "AdamW"),
        ("momentum for SGD", sgd, "SGD"),
        ("SGD for Adam", FP32, "plain SGD"),
        # Its momentum begins with the first step, as in plain PyTorch.
        ("SGD for momentum", {"optimizer": MOMENTUM}, "plain SGD"),
    ):
        engine = engine_at(1, settings)
        try:
            engine.load_checkpoint(root / folder, "a")
            messages[name] = "no error"
        except zeroengine.CheckpointError as error:
            messages[name] = str(error)
        engine.close()
    return messages


def test_state_of_another_rule_is_refused(folder: Path, saved: dict[str, dict[str, torch.Tensor]]) -> None:
    for messages in run_ranks(2, loads_of_another_optimizer, folder):
        assert messages.pop("SGD for momentum") == "no error"
        for name, message in messages.items():
            assert "holds the state of" in message and "Use the same optimizer" in message, (name, message)


def test_moments_and_masters_load_at_another_precision(folder: Path, saved: dict[str, dict[str, torch.Tensor]]) -> None:
    plain = save_plainly(folder / "plain" / "a", *model_after_steps(adamw))
    model, optimizer = model_after_steps(momentum)
    save_plainly(folder / "plain" / "momentum", model, optimizer)
    found = run_ranks(2, conversions, folder)[0]
    in_8_bits = saved["AdamW"]
    rounded_plain = {name: rounded(value, name.partition(" ")[2]) for name, value in plain.items()}
    changed = {name for name, value in rounded_plain.items() if not torch.equal(value, plain[name])}
    assert changed == {f"layers.{i}.linear.weight {key}" for i in (0, 1) for key in ("exp_avg", "exp_avg_sq")}

    def with_masters(dtype: torch.dtype, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value if " " in name else value.to(dtype).float() for name, value in values.items()}

    for name, expected in {
        "int8 in fp32": in_8_bits,
        "int8 in bf16": {n: v.bfloat16().float() if " exp" in n else v for n, v in in_8_bits.items()},
        "fp32 in int8": rounded_plain,
        "fp32 in bf16 masters": with_masters(torch.bfloat16, rounded_plain),
        "fp32 in fp16 masters": with_masters(torch.float16, plain),
        "bf16 masters in fp32": saved["bf16 masters"],
    }.items():
        for key, value in expected.items():
            assert torch.equal(found[name][key], value), (name, key)
    for step in range(3, 5):
        plain_step(model, optimizer, step)
    for key, value in model.named_parameters():
        assert torch.allclose(found["momentum"][key], value, rtol=1e-5, atol=1e-6), key


def loads_of_broken(root: Path, names: list[str]) -> dict[str, str]:
    start()
    messages = {}
    for number, settings in enumerate((FP32 | INT8, FP32)):
        engine = engine_at(1, settings)
        before = states(engine)
        for name in names:
            try:
                engine.load_checkpoint(root, name)
                messages[f"{name} {number}"] = "no error"
            except zeroengine.CheckpointError as error:
                messages[f"{name} {number}"] = str(error)
        assert_equal_states(states(engine), before)
        engine.close()
    return messages


def test_blocks_that_do_not_fit_are_an_error_that_names_the_parameter_and_changes_nothing(tmp_path: Path) -> None:
    model, _ = model_after_steps(adamw)
    name, good = "layers.1.linear.weight", {}
    for own, param in model.named_parameters():
        values = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        good[own] = values | {"step": torch.tensor(3.0)}
    numel = good[name]["exp_avg"].numel()
    codes, blocks = torch.zeros_like(good[name]["exp_avg"], dtype=torch.uint8), -(-numel // 256)
    broken: dict[str, dict[str, torch.Tensor]] = {
        "missing": {"exp_avg": codes},
        "blocks of 128": {"exp_avg": codes, "exp_avg.scales": torch.ones(-(-numel // 128))},
        "2-D": {"exp_avg": codes, "exp_avg.scales": torch.ones(1, blocks)},
        "bf16": {"exp_avg": codes, "exp_avg.scales": torch.ones(blocks, dtype=torch.bfloat16)},
        "no codes": {"exp_avg.scales": torch.ones(blocks)},
    }
    for tag, values in broken.items():
        state = good | {name: good[name] | values}
        dcp.save(
            {"model": model.state_dict(), "optimizer": {"state": state}}, checkpoint_id=tmp_path / tag, no_dist=True
        )
    for messages in run_ranks(2, loads_of_broken, tmp_path, list(broken)):
        for tag, message in messages.items():
            assert f"exp_avg of {name}" in message and "one for each 256" in message, (tag, message)
