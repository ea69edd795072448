"""Models of transformers are split by their own plan, and train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import zeroengine
from tests.distributed.models import config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from tests.slices.test_checkpoints import assert_same, whole_states
from tests.weights.test_stream import same, taken

transformers = pytest.importorskip("transformers", minversion="5.0")

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

STEPS = 3
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FINE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# Llama: queries share keys and values; biases. Qwen3: the head is tied to the embedding. Mixtral: fused experts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", SHAPE | {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", SHAPE | EXPERTS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SHAPE | FINE_EXPERTS),
}


def make_model(name: str) -> Any:
    model_class, fields = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    return cls(cls.config_class(**fields))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A large eps keeps 20 steps from magnifying the order of additions."""
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))


def unchanged(model: Any) -> None:
    """Train the model as it is."""


def freeze_parts(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)
    model.lm_head.requires_grad_(False)


def choose_two_experts(model: Any) -> None:
    """Let all tokens take the same two experts, so that some ranks have experts without tokens."""
    for layer in model.model.layers:
        layer.mlp.gate.weight.detach().zero_()
        layer.mlp.gate.weight.requires_grad_(False)


def checkpoint_layers(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpoint_layers_reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


@dataclass(frozen=True)
class Case:
    """A training of a model that is split.

    Attributes:
        name: Of the model.
        stages: Trained one after another.
        size: The ranks that layers are split over.
        expert_size: Those that experts are split over.
        num_ranks: All.
        by_key: Whether the configuration asks for the split, or ``parallelize``.
        steps: The number of steps.
        micro_steps: Of each step.
        prepare: Changes the model before it is split.
        more: Further keys of the configuration.
        evaluates: Whether it evaluates before each step, and generates in the end.
        tolerance: Of losses and parameters; that of norms is a tenth of it in fp32.
    """

    name: str
    stages: tuple[int, ...]
    size: int = 2
    expert_size: int = 1
    num_ranks: int = 4
    by_key: bool = True
    steps: int = STEPS
    micro_steps: int = 1
    prepare: Callable[[Any], None] = unchanged
    more: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    tolerance: float = 1e-5

    def __str__(self) -> str:
        changes = [key for key in ("prepare", "more") if getattr(self, key) not in (unchanged, {})]
        names = [self.prepare.__name__ if key == "prepare" else next(iter(self.more)) for key in changes]
        return "-".join([self.name, f"{self.size}x{self.expert_size}", f"{self.num_ranks}ranks", *names])


def train_cases(cases: Sequence[Case], folder: Path) -> list[list[dict[str, Any]]]:
    start()
    return [train_split(case, folder) for case in cases]


def train_split(case: Case, folder: Path) -> list[dict[str, Any]]:
    """On one rank: train at each stage."""
    found = []
    for stage in case.stages:
        model = make_model(case.name)
        case.prepare(model)
        if dist.get_rank():
            # The values of rank 0 count.
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
        optimizer = adamw(model)
        settings = config(stage, optimizer=None, gradient_accumulation_steps=case.micro_steps, **case.more)
        if case.by_key:
            settings["tensor_parallel"] = {"autotp_size": case.size}
            settings["expert_parallel"] = {"enabled": case.expert_size > 1, "autoep_size": case.expert_size}
        else:
            zeroengine.parallelize(model, size=case.size, expert_size=case.expert_size, optimizer=optimizer)
        engine = zeroengine.initialize(model, optimizer, settings)
        seen: dict[str, Any] = {"losses": [], "norms": [], "generated": None}
        for micro_step in range(case.steps * case.micro_steps):
            ids = tokens(micro_step, engine.sample_group)
            evaluated = evaluate(engine, ids) if case.evaluates else None
            loss = engine(input_ids=ids, labels=ids).loss
            assert evaluated in (None, loss.item())
            engine.backward(loss)
            if engine.step():
                seen["norms"].append(engine.grad_norm)
            seen["losses"].append(loss.item())
        if case.evaluates:
            engine.eval()
            seen["generated"] = generate(engine.module, engine.sample_group)
            with zeroengine.gathered(engine.module):
                assert torch.equal(generate(engine.module, engine.sample_group), seen["generated"])
        seen["state"] = engine.full_state_dict()
        engine.save_weights(folder / str(case))
        # The files have the layout of the library's, in which each expert is by itself.
        engine.load_weights(folder / str(case))
        for key, value in engine.full_state_dict().items():
            assert torch.equal(value, seen["state"][key]), key
        assert engine.memory().gathered == 0
        engine.close()
        found.append(seen)
    return found


def evaluate(engine: zeroengine.Engine, ids: torch.Tensor) -> float:
    engine.eval()
    with torch.no_grad():
        loss: float = engine(input_ids=ids, labels=ids).loss.item()
    engine.train()
    return loss


def generate(model: Any, rank: int) -> torch.Tensor:
    found: torch.Tensor = model.generate(input_ids=tokens(99, rank)[:, :4], max_new_tokens=5, do_sample=False)
    return found


def train_plainly(case: Case) -> dict[str, Any]:
    model = make_model(case.name)
    case.prepare(model)
    optimizer = adamw(model)
    ranks = range(case.num_ranks // case.size)
    losses, norms = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        for micro_step in range(step * case.micro_steps, (step + 1) * case.micro_steps):
            samples = [tokens(micro_step, rank) for rank in ranks]
            loss = torch.stack([model(input_ids=ids, labels=ids).loss for ids in samples]).mean()
            (loss / case.micro_steps).backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    model.eval()
    generated = [generate(model, rank) for rank in ranks] if case.evaluates else []
    return {"losses": losses, "norms": norms, "state": model.state_dict(), "generated": generated}


def check(case: Case, ranks: Sequence[Sequence[dict[str, Any]]], folder: Path) -> None:
    """Check what each rank saw at each stage, and what it saved."""
    plain, in_fp32 = train_plainly(case), not case.more
    for number, stage in enumerate(case.stages):
        found = [rank[number] for rank in ranks]
        means = [sum(losses) / len(ranks) for losses in zip(*(rank["losses"] for rank in found), strict=True)]
        assert means == pytest.approx(plain["losses"], rel=case.tolerance), stage
        for index, rank in enumerate(found):
            tolerance = case.tolerance * (0.1 if in_fp32 else 10)
            assert rank["norms"] == pytest.approx(plain["norms"], rel=tolerance), stage
            assert rank["state"].keys() == plain["state"].keys()
            for key, value in plain["state"].items():
                difference = (rank["state"][key].float() - value).norm()
                assert difference <= case.tolerance * (1 if in_fp32 else 10) * value.norm(), (stage, key)
            if case.evaluates:
                assert torch.equal(rank["generated"], plain["generated"][index // case.size])
            if in_fp32 and case.micro_steps == 1:
                first = ranks[index][0]
                assert (rank["losses"], rank["norms"]) == (first["losses"], first["norms"]), "bits differ"
                assert all(torch.equal(value, first["state"][key]) for key, value in rank["state"].items())
    # What is saved loads into a model that is not split.
    whole = make_model(case.name)
    whole.config.save_pretrained(folder / str(case))
    whole.generation_config.save_pretrained(folder / str(case))
    loaded = type(whole).from_pretrained(folder / str(case), dtype="auto")
    for key, value in loaded.state_dict().items():
        own = ranks[0][-1]["state"][key]
        # Files have the masters.
        assert torch.equal(value.to(own.dtype), own), key


LLAMA, QWEN3 = Case("llama", (1, 3)), Case("qwen3", (3,), by_key=False)
QWEN3_MOE = Case("qwen3_moe", (3,), expert_size=4, steps=2, evaluates=True)


def refuse_heads(num_ranks: int) -> str:
    start()
    with pytest.raises(zeroengine.ZeroEngineError) as caught:
        zeroengine.parallelize(make_model("llama"), size=num_ranks)
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[list[list[dict[str, Any]]]]:
    return run_ranks(4, train_cases, (LLAMA, QWEN3, QWEN3_MOE), folder)


def test_llama_with_shared_keys_trains_by_its_own_plan_as_one_process_does(trained: list[Any], folder: Path) -> None:
    check(LLAMA, [rank[0] for rank in trained], folder)


def test_qwen3_with_tied_embeddings_trains_by_its_own_plan_as_one_process_does(
    trained: list[Any], folder: Path
) -> None:
    check(QWEN3, [rank[1] for rank in trained], folder)


def test_split_layers_and_experts_train_evaluate_and_generate_as_one_process_does(
    trained: list[Any], folder: Path
) -> None:
    check(QWEN3_MOE, [rank[2] for rank in trained], folder)


@pytest.mark.slow  # the import of the model on each rank takes most of the time
def test_heads_that_the_ranks_do_not_divide_are_refused_by_name() -> None:
    for message in run_ranks(3, refuse_heads, 3):
        assert "LlamaForCausalLM has num_attention_heads of 8, which cannot be split over 3 ranks" in message


ALL_STAGES, LONG = (0, 1, 2, 3), 20
MANY_STEPS = [
    Case("llama", ALL_STAGES, steps=LONG),
    Case("llama", ALL_STAGES, size=4, steps=LONG),
    Case("qwen3", ALL_STAGES, size=4, steps=LONG, evaluates=True),
    Case("mixtral", (1, 3), steps=LONG),
    Case("mixtral", ALL_STAGES, size=1, expert_size=4, steps=LONG, evaluates=True),
    Case("qwen3_moe", ALL_STAGES, size=1, expert_size=2, steps=LONG),
    Case("qwen3_moe", ALL_STAGES, size=2, expert_size=4, steps=LONG),
    Case("qwen3_moe", (0, 3), size=2, expert_size=2, steps=LONG),
    Case("qwen3_moe", (0, 3), size=2, expert_size=4, num_ranks=8, steps=LONG),
    Case("mixtral", (3,), size=2, expert_size=4, num_ranks=8, steps=LONG),
]
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}
FEATURES = [
    Case("mixtral", (1, 3), size=1, expert_size=2, micro_steps=2),
    Case("mixtral", (1, 3), size=2, expert_size=4, micro_steps=2),
    Case("mixtral", (0, 3), size=1, expert_size=4, prepare=choose_two_experts),
    Case("mixtral", (0, 3), size=2, expert_size=4, prepare=choose_two_experts),
    Case("mixtral", (1, 3), size=2, expert_size=4, prepare=freeze_parts),
    Case("mixtral", (3,), size=1, expert_size=2, prepare=checkpoint_layers),
    Case("mixtral", (3,), size=2, expert_size=4, prepare=checkpoint_layers),
    Case("mixtral", (3,), size=2, expert_size=4, prepare=checkpoint_layers_reentrant),
    Case("mixtral", (3,), size=2, expert_size=4, more=BF16, tolerance=5e-3),
    Case("mixtral", (3,), size=2, expert_size=4, more=FP16, tolerance=5e-3),
]


@pytest.mark.slow  # many steps, of models whose forward is slow; the tests above go through the same plans
@pytest.mark.parametrize("case", MANY_STEPS, ids=str)
def test_twenty_steps_at_each_degree_are_those_of_one_process(case: Case, folder: Path) -> None:
    check(case, [rank[0] for rank in run_ranks(case.num_ranks, train_cases, (case,), folder, timeout=400)], folder)


@pytest.mark.slow  # as above
def test_features_work_with_split_experts_as_in_one_process(folder: Path) -> None:
    ranks = run_ranks(4, train_cases, FEATURES, folder, timeout=400)
    for index, case in enumerate(FEATURES):
        check(case, [rank[index] for rank in ranks], folder)


def read_mixtures(folder: Path) -> list[dict[str, dict[str, str]]]:
    """On one rank: digests of a whole mixture, and with split layers and experts, whose streams are compared."""
    start()
    sections: dict[str, dict[str, Any]] = {
        "whole": {},
        "layers": {"tensor_parallel": {"autotp_size": 2}},
        "experts": {"expert_parallel": {"enabled": True, "autoep_size": 4}},
    }
    found = []
    for name, section in sections.items():
        engine = zeroengine.initialize(make_model("mixtral"), config=config(3, **section))
        found.append(engine.state_digests())
        if section:
            # In the layout of files each expert is by itself.
            got = taken(engine.stream_weights(layout="files", bucket_bytes="16KiB"))
            engine.save_weights(folder / name)
            files = [load_file(path) for path in (folder / name).glob("*.safetensors")]
            assert same(got, {key: value for file in files for key, value in file.items()}), name
        engine.close()
    return found


def test_a_split_mixture_has_the_digests_of_the_whole_one_and_streams_the_tensors_of_its_files(tmp_path: Path) -> None:
    for whole, layers, experts in run_ranks(4, read_mixtures, tmp_path):
        assert layers == whole and experts == whole


def save_or_load(stage: int, size: int, expert_size: int, source: Path | None, target: Path) -> dict[str, torch.Tensor]:
    """On one rank: the masters and moments after two steps, or those of a checkpoint, which are saved again."""
    start()
    model = make_model("qwen3_moe")
    split = {"tensor_parallel": {"autotp_size": size}}
    split["expert_parallel"] = {"enabled": expert_size > 1, "autoep_size": expert_size}
    engine = zeroengine.initialize(model, adamw(model), config(stage, optimizer=None, **split))
    if source is not None:
        engine.load_checkpoint(source)
    for step in range(0 if source else 2):
        ids = tokens(step, engine.sample_group)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(target)
    states = whole_states(engine)
    engine.close()
    return states


@pytest.mark.slow  # tests of checkpoints move layers and experts, one at a time
def test_a_checkpoint_of_split_layers_and_experts_moves_to_whole_ones_and_back_with_equal_bits(tmp_path: Path) -> None:
    split, whole, back = (tmp_path / name for name in ("split", "whole", "back"))
    saved = run_ranks(4, save_or_load, 3, 2, 2, None, split)[0]
    moved = run_ranks(3, save_or_load, 1, 1, 1, split, whole)
    returned = run_ranks(4, save_or_load, 3, 2, 4, whole, back)
    for found in (*moved, *returned):
        assert_same(found, saved, "checkpoint")
