"""Frozen quantized bases are partitioned byte for byte, and train adapters as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed import quantized_models
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.quantized_models import FACTORIES, Linear4bit, QuantizedLM, in_4_bits, in_8_bits, of_torchao
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, start, take_steps, train_plainly
from zeroengine.config import load
from zeroengine.errors import CheckpointError, ReleasedParameterError, ZeroEngineError
from zeroengine.partition.cut import cut_units
from zeroengine.plan.api import model_facts
from zeroengine.plan.trace.activations import trace_micro_step
from zeroengine.plan.trace.model_facts import from_module
from zeroengine.runtime.quantized_parameters import split_quantized_parameters


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if hasattr(first, "qdata"):
        return torch.equal(first.qdata, second.qdata) and torch.equal(first.scale, second.scale)
    return first.dtype is second.dtype and torch.equal(first, second)


def check_base(engine: zeroengine.Engine, factory: Callable[[], nn.Module]) -> None:
    expected, state = build(factory).state_dict(), engine.full_state_dict()
    assert state.keys() == expected.keys()
    for name in (name for name in expected if ".base." in name):
        assert same(state[name], expected[name]), name


def frozen_bytes(engine: zeroengine.Engine) -> int:
    quantized = (unit for unit in engine.units if not unit.dtype.is_floating_point)
    return sum(unit.shard.nbytes for unit in quantized)


def resumes(engine: zeroengine.Engine, task: Task, folder: Path) -> None:
    tags = ("whole", "adapter") if task.factory is in_4_bits else ("whole",)
    for tag in tags:
        engine.save_checkpoint(folder, tag, frozen=tag == "whole")
    expected = take_steps(engine, range(10, 12))
    for tag in tags:
        # Without frozen parameters it resumes over its own base alone.
        model = build(task.factory, seed=5 if tag == "whole" else 0)
        other = zeroengine.initialize(model, task.optimizer(model), config(0, optimizer=None))
        other.load_checkpoint(folder, tag)
        assert take_steps(other, range(10, 12)) == expected, tag
        other.close()
    engine.load_checkpoint(folder, "whole")


def exchanges_weights(engine: zeroengine.Engine, factory: Callable[[], nn.Module], folder: Path) -> None:
    engine.save_weights(folder)
    # In bf16, the base and its scales keep their bytes; those of rank 0 count on every rank.
    other = zeroengine.initialize(build(factory, seed=engine.rank), config=config(3, bf16={"enabled": True}))
    take_steps(other, range(1))
    check_base(other, factory)
    if factory is in_4_bits:
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=r"a part of a quantized parameter: .*nested_offset is not"):
                other.load_weights(folder, strict=strict)
    else:
        other.load_weights(folder)
        check_base(other, factory)
    other.close()


def lives(root: Path, kinds: Sequence[str]) -> dict[str, list[list[float]]]:
    rank, losses = start(), {}
    x = torch.ones(1, 24)
    for kind in kinds:
        factory = FACTORIES[kind]
        task = Task(factory)
        engine = make_engine(task, 0)
        whole = frozen_bytes(engine)
        losses[kind] = [take_steps(engine, range(task.steps))]
        engine.close()
        engine = make_engine(task, 3)
        assert frozen_bytes(engine) == whole // 2
        losses[kind].append(take_steps(engine, range(task.steps)))
        check_base(engine, factory)
        loss = engine(*batch(0, rank))
        assert engine.memory().put_off == {} and loss.requires_grad, "no graph keeps the base gathered"
        block: Any = engine.module.blocks[1]
        with pytest.raises(ReleasedParameterError, match=r"blocks.1.up.base.weight\S* .* partitioned"):
            block.up.base(x)
        with zeroengine.gathered(block.up):
            assert torch.equal(copy.deepcopy(block.up)(x), block.up(x))
        engine.eval()
        with torch.no_grad():
            evaluated = engine(*batch(9, rank)).item()
        engine.train()
        resumes(engine, task, root / kind)
        exchanges_weights(engine, factory, root / f"{kind}-weights")
        engine.release()
        model = engine.module.eval()
        assert not any(key.startswith("_zeroengine") for param in model.parameters() for key in vars(param))
        for module in model.modules():
            if isinstance(module, Linear4bit):
                assert module.support_avx512bf16_for_cpu
                module.support_avx512bf16_for_cpu = False
        model(*batch(9, rank)).backward()
        assert model(*batch(9, rank)).item() == evaluated
    return losses


@pytest.mark.parametrize(
    "kinds",
    [("4 bits", "torchao"), pytest.param(("8 bits",), marks=pytest.mark.slow)],
    ids=["some", "other"],
)
def test_adapters_train_on_quantized_bases_as_in_one_process(kinds: Sequence[str], tmp_path: Path) -> None:
    ranks = run_ranks(2, lives, tmp_path, kinds)
    for kind in kinds:
        expected = train_plainly(Task(FACTORIES[kind])).losses
        for stage in range(2):
            means = [sum(values) / 2 for values in zip(*(losses[kind][stage] for losses in ranks), strict=True)]
            assert means == pytest.approx(expected, rel=1e-6), kind
        assert [losses[kind][0] for losses in ranks] == [losses[kind][1] for losses in ranks], kind


def test_a_plan_counts_the_bytes_of_a_quantized_base() -> None:
    settings = load(config(3)).resolve(world_size=2, model_dtype=torch.float32)
    for kind, factory in FACTORIES.items():
        model = build(factory)
        before = copy.deepcopy(model.state_dict())
        facts = model_facts(model, batch(0, 0))
        plans = facts.plans(settings)
        assert trace_micro_step(facts, settings, 2, checkpointing=False, device="cpu").saved_bytes > 0
        assert all(same(value, before[name]) for name, value in model.state_dict().items())
        expected = split(model)
        assert [(p.name, p.dtype, p.numel) for p in plans] == [(p.name, p.dtype, p.numel) for p in expected], kind
        for linear in {type(m) for m in model.modules() if type(m).__module__.startswith("bitsandbytes")}:
            with zeroengine.meta_init(values=False):
                unquantized = QuantizedLM(linear, quantized=False)
            assert [(p.name, p.numel) for p in from_module(unquantized).plans(settings)] == [
                (p.name, p.numel) for p in expected
            ]


def split(model: nn.Module) -> Any:
    split_quantized_parameters(model)
    return cut_units(model)


def changed(factory: Callable[[], nn.Module], change: Callable[[Any], object]) -> nn.Module:
    model: Any = build(factory)
    change(model.blocks[0].up.base.weight)
    return model


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not quantized": (
        lambda: QuantizedLM(Linear4bit, quantized=False),
        r'is a Params4bit of bitsandbytes that is not quantized yet, .* write `model.to\("cpu"\)`',
    ),
    "not quantized to 8 bits": (
        lambda: QuantizedLM(quantized_models.Linear8bitLt, quantized=False),
        r"is a Int8Params of bitsandbytes that is not quantized yet",
    ),
    "trainable": (
        lambda: changed(of_torchao, lambda weight: weight.requires_grad_()),
        r"a Int8Tensor of torchao and trainable: .* Freeze it, `model.get_parameter\('blocks.0.up.base.weight'\)",
    ),
    "without a state": (
        lambda: changed(in_4_bits, lambda weight: setattr(weight, "quant_state", None)),
        "a Params4bit of bitsandbytes with a layout that is not known: NoneType has no tensor absmax. zeroengine knows",
    ),
    "with another tensor": (
        lambda: changed(in_4_bits, lambda weight: setattr(weight.quant_state, "zeros", torch.ones(1))),
        "a Params4bit of bitsandbytes with a layout that is not known: QuantState has a tensor zeros",
    ),
    "packed anew": (
        lambda: changed(in_4_bits, lambda weight: setattr(weight.quant_state, "packing_format_for_cpu", True)),
        r"which an evaluation on the CPU packed anew. `model.state_dict\(\)` packs it as it was",
    ),
    "without scales": (
        lambda: changed(in_8_bits, lambda weight: setattr(weight, "SCB", None)),
        "a Int8Params of bitsandbytes with a layout that is not known: MatmulLtState has no tensor SCB",
    ),
    "a wrapper with an attribute that is no tensor": (
        lambda: changed(of_torchao, lambda weight: setattr(weight, "scale", 1.0)),
        "a Int8Tensor of torchao with a layout that is not known: scale is float, and no tensor in an attribute",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_unknown_layout_is_refused_before_anything_changes(case: str) -> None:
    factory, message = WRONG[case]
    model = factory()
    with pytest.raises(ZeroEngineError, match=r"parameter blocks.0.up.base.weight .*" + message):
        zeroengine.initialize(model, config=config(0))
    assert not any(key.startswith("_zeroengine") for param in model.parameters() for key in vars(param))


def test_other_wrappers_and_quantized_communication_are_refused() -> None:
    class Other(quantized_models.Int8Tensor):
        __module__ = "elsewhere"

    model: Any = TinyLM()
    weight = of_torchao().blocks[0].up.base.weight
    model.extra = nn.Parameter(Other(weight.qdata, weight.scale), requires_grad=False)
    Other.__mro__[1].__module__ = "elsewhere"
    try:
        with pytest.raises(ZeroEngineError, match="parameter extra is a Other, which wraps other tensors"):
            zeroengine.initialize(model, config=config(0))
    finally:
        Other.__mro__[1].__module__ = "torchao.quantization"
    for factory in FACTORIES.values():
        settings = config(3, zero_optimization={"zero_quantized_nontrainable_weights": True})
        with pytest.raises(ZeroEngineError, match=r"is quantized already, .* leave zero_quantized_nontrainable"):
            zeroengine.initialize(build(factory), config=settings)
