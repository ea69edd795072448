"""Models of transformers are split by their own plan, and train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroengine
from tests.distributed.models import config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.emulated import cpu_alone

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

STEPS = 3
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Llama: queries share keys and values. Qwen3: the head is tied to the embedding. Mixtral: fused experts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHAPE),
    "qwen3": ("Qwen3ForCausalLM", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", SHAPE | EXPERTS),
}


def make_model(name: str) -> Any:
    model_class, fields = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    return cls(cls.config_class(**fields))


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))


@dataclass(frozen=True)
class Case:
    """A model, the stages that it trains at, and whether the configuration asks for the split or ``parallelize``."""

    name: str
    stages: tuple[int, ...]
    by_key: bool = True


def train_cases(cases: Sequence[Case], folder: Path) -> list[list[dict[str, Any]]]:
    start()
    return [train_split(case, folder) for case in cases]


def train_split(case: Case, folder: Path) -> list[dict[str, Any]]:
    """On one rank: train at each stage, split over 2 ranks."""
    found = []
    for stage in case.stages:
        model = make_model(case.name)
        if dist.get_rank():
            # The values of rank 0 count.
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
        optimizer = adamw(model)
        settings = config(stage, optimizer=None)
        if case.by_key:
            settings["tensor_parallel"] = {"autotp_size": 2}
        else:
            zeroengine.parallelize(model, size=2, optimizer=optimizer)
        engine = zeroengine.initialize(model, optimizer, settings)
        losses, norms = [], []
        for step in range(STEPS):
            ids = tokens(step, engine.sample_group)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.grad_norm)
        state = engine.full_state_dict()
        engine.save_weights(folder / case.name)
        # The files have the layout of the library's, in which each expert is by itself.
        engine.load_weights(folder / case.name)
        for key, value in engine.full_state_dict().items():
            assert torch.equal(value, state[key]), key
        assert engine.memory().gathered == 0
        engine.close()
        found.append({"losses": losses, "norms": norms, "state": state})
    return found


def train_plainly(name: str) -> dict[str, Any]:
    model = make_model(name)
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        samples = [tokens(step, rank) for rank in range(2)]
        loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in samples]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


def check(case: Case, ranks: Sequence[Sequence[dict[str, Any]]], folder: Path) -> None:
    """Check what each rank saw at each stage, and what it saved."""
    name, plain = case.name, train_plainly(case.name)
    for number, stage in enumerate(case.stages):
        found = [rank[number] for rank in ranks]
        means = [sum(losses) / 4 for losses in zip(*(rank["losses"] for rank in found), strict=True)]
        assert means == pytest.approx(plain["losses"], rel=1e-5), stage
        for rank in found:
            assert rank["norms"] == pytest.approx(plain["norms"], rel=1e-5)
            assert rank["state"].keys() == plain["state"].keys()
            for key, value in plain["state"].items():
                torch.testing.assert_close(rank["state"][key], value, rtol=1e-4, atol=1e-5, msg=f"stage {stage} {key}")
    # What is saved loads into a model that is not split.
    whole = make_model(name)
    whole.config.save_pretrained(folder / name)
    whole.generation_config.save_pretrained(folder / name)
    loaded = type(whole).from_pretrained(folder / name)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, ranks[0][-1]["state"][key]), key


LLAMA, QWEN3, MIXTRAL = Case("llama", (1, 3)), Case("qwen3", (3,), by_key=False), Case("mixtral", (1, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[list[list[dict[str, Any]]]]:
    return run_ranks(4, train_cases, (LLAMA, QWEN3), folder)


def test_llama_with_shared_keys_trains_by_its_own_plan_as_one_process_does(trained: list[Any], folder: Path) -> None:
    check(LLAMA, [rank[0] for rank in trained], folder)


def test_qwen3_with_tied_embeddings_trains_by_its_own_plan_as_one_process_does(
    trained: list[Any], folder: Path
) -> None:
    check(QWEN3, [rank[1] for rank in trained], folder)


@pytest.mark.slow  # its forward is slow; the tests above go through the same plan
def test_mixtral_with_split_experts_trains_by_its_own_plan_as_one_process_does(folder: Path) -> None:
    check(MIXTRAL, [rank[0] for rank in run_ranks(4, train_cases, (MIXTRAL,), folder)], folder)
