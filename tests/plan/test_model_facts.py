from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, build
from tests.distributed.ranks import run_ranks
from zeroengine.config import load
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.cut import UnitPlan, cut_units
from zeroengine.plan.trace.activations import trace_micro_step
from zeroengine.plan.trace.model_facts import from_function, from_huggingface, from_module, from_numbers
from zeroengine.runtime import mixed_precision

MODELS = "tests.plan.models_without_memory"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_plain_numbers_give_a_decoder_of_that_size() -> None:
    before = peak_bytes()
    facts = from_numbers(7e9, layers=32, width=4096, vocab=32000, sequence=4096)
    assert abs(facts.num_parameters / 7e9 - 1) < 1e-3
    assert facts.tokens_per_sample == 4096
    # 7 B parameters of fp32 take 28 GB.
    assert peak_bytes() - before < 512 << 20


def test_a_function_builds_a_model_without_memory() -> None:
    before = peak_bytes()
    facts = from_function(f"{MODELS}:large")
    assert facts.num_parameters > 1 << 34
    assert all(param.is_meta for param in facts.model.parameters())
    assert peak_bytes() - before < 512 << 20


def test_a_function_may_return_a_batch_function() -> None:
    facts = from_function(f"{MODELS}:with_batch")
    assert facts.make_batch is not None
    (x,), kwargs = facts.make_batch(3)
    assert tuple(x.shape) == (3, 4)
    assert not kwargs


def test_units_are_those_of_the_configuration() -> None:
    facts = from_numbers(1e6, layers=2, width=64, vocab=256, sequence=8)
    config = load({"bf16": {"enabled": True}, "keep_fp32_modules": ["*norm*"]}).resolve(world_size=2)
    dtypes = {str(plan.dtype) for plan in facts.plans(config)}
    assert dtypes == {"torch.bfloat16", "torch.float32"}


def cut_by_another_rule() -> tuple[list[str], list[str]]:
    """The names of the units of ``initialize`` and of the plan, with a rule that is passed where the note says."""

    def cut(model: nn.Module, **arguments: Any) -> list[UnitPlan]:
        return cut_units(model, **arguments | {"patterns": ["blocks.*.up"]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_precision, "cut_units", cut)
        engine = zeroengine.initialize(build(TinyLM), config={"optimizer": {"type": "Muon"}})
        names = [unit.name for unit in engine.units]
        engine.close()
        with torch.device("meta"):
            plans = from_module(TinyLM()).plans(engine.config)
        return names, [plan.name for plan in plans]


def test_another_rule_for_cutting_serves_initialize_and_the_plan() -> None:
    ((of_engine, of_plan),) = run_ranks(1, cut_by_another_rule)
    assert of_engine == of_plan
    assert "blocks.0.up" in of_plan


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("train.py", "module:function"),
        ("no_such_module:build", "cannot import"),
        (f"{MODELS}:no_such_function", "cannot import"),
        (f"{MODELS}:reads_a_value", "the function failed: RuntimeError: no data here"),
        (f"{MODELS}:allocates", "weight"),
        (f"{MODELS}:no_model", "returned str"),
    ],
)
def test_a_function_that_cannot_serve_says_why(spec: str, message: str) -> None:
    with pytest.raises(ZeroEngineError, match=message):
        from_function(spec)


def test_numbers_that_no_model_has_say_why() -> None:
    with pytest.raises(ZeroEngineError, match="without any feed-forward"):
        from_numbers(1e6, layers=32, width=4096, vocab=32000, sequence=8)
    with pytest.raises(ZeroEngineError, match="layers is 0"):
        from_numbers(1e6, layers=0, width=4096, vocab=32000, sequence=8)


def test_a_configuration_of_no_known_model_says_why(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ZeroEngineError, match="cannot read"):
        from_huggingface(file)
    file.write_text("{}")
    with pytest.raises(ZeroEngineError, match="model_type"):
        from_huggingface(file)
    pytest.importorskip("transformers")
    file.write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ZeroEngineError, match="no-such-type"):
        from_huggingface(tmp_path)


def test_a_lazy_model_and_numbers_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ZeroEngineError, match=r"0\.weight has no shape yet"):
        from_module(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(ZeroEngineError, match="params is inf"):
        from_numbers(params=math.inf, layers=2, width=64, vocab=100, sequence=16)


def test_an_encoder_decoder_needs_no_first_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.T5Config(num_layers=2, d_model=64, d_ff=128, num_heads=2, vocab_size=200)
    content = settings.to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
    content.pop("decoder_start_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    facts = from_huggingface(tmp_path, sequence=16)
    micro = trace_micro_step(facts, load({}).resolve(world_size=1), 1, checkpointing=True, device="cuda")
    assert any(operation.flops for operation in micro.forward)
