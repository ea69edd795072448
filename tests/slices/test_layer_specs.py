"""DeepSpeed's specs of layers become a plan of ``parallelize``, and what is not honored is refused by its key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, config
from zeroengine.config import load
from zeroengine.engine.split_models import split_of_config

UP, DOWN = {"patterns": [r".*\.up\.weight$"]}, {"patterns": [r".*\.down"], "partition_type": "row"}
BLOCK = {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}


def plan(*specs: dict[str, Any], model_type: str = "llama", **more: Any) -> dict[str, str]:
    """Return the plan of a model of one block, whose output embedding is ``head``."""
    model: nn.Module = TinyLM(tied=False, blocks=1)
    model.config = SimpleNamespace(model_type=model_type)  # type: ignore[assignment]
    given = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": list(specs)} | more}
    given["autotp_size"] = given["partition_config"].pop("autotp_size", 2)
    size, expert_size, layers = split_of_config(model, load(config(1, tensor_parallel=given)), None, None)
    assert (size, expert_size) == (2, 1)
    return dict(layers)


def test_the_first_spec_that_matches_a_weight_decides() -> None:
    assert plan(UP, DOWN) == BLOCK
    skip = {"patterns": [r"blocks\.0\.down"], "partition_type": "skip"}
    assert plan(skip, UP, DOWN) == {"blocks.0.up": "colwise"}
    assert plan(UP, DOWN, skip, {"patterns": [".*up"], "partition_type": "row"}) == BLOCK


def test_what_embeddings_and_heads_return_is_whole() -> None:
    assert plan({"patterns": ["tok"]}) == {"tok": "rowwise_whole_input"}
    assert plan({"patterns": ["head"], "gather_output": True}) == {"head": "colwise_gathered"}
    row = {"patterns": ["head"], "partition_type": "row"}
    assert plan(row) == {"head": "rowwise"}
    assert plan(row, lm_head_patterns=["head"]) == {"head": "rowwise_whole_input"}


def test_specs_of_other_models_do_not_count() -> None:
    of_qwen = UP | {"model_types": ["Qwen2"]}
    assert plan(of_qwen, DOWN) == {"blocks.0.down": "rowwise"}
    assert plan(of_qwen, DOWN, model_type="qwen2") == BLOCK


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (UP | {"shape": [3, -1]}, r"layer_specs.0: shape is \[3, -1\]|layer_specs.0.shape: found \[3, -1\]"),
        (DOWN | {"grad_allreduce": True}, r"layer_specs.0.grad_allreduce: found true .* is not honored"),
        ({"patterns": ["("]}, r"layer_specs.0.patterns.0: found \"\(\" .* regular expression"),
        (UP | {"partition_dim": 1}, r"layer_specs.0: partition_dim 1 contradicts \"column\"; leave it out"),
        (UP | {"gather": True}, r"layer_specs.0.gather: unknown key. Did you mean .*gather_output"),
        ({"patterns": [r"\.up"]}, r"the layer_specs split no layer. .* such as: tok.weight, blocks.0.norm.weight"),
    ],
)
def test_what_is_not_honored_is_refused_by_its_key(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(zeroengine.ZeroEngineError, match=text):
        plan(spec)


def test_specs_without_a_number_of_ranks_are_an_error() -> None:
    with pytest.raises(zeroengine.ZeroEngineError, match=r"over how many ranks: write \"autotp_size\": 2 beside it"):
        plan(UP, autotp_size=1)
