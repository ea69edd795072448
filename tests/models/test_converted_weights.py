"""Weights of transformers models whose files have another layout than the model, in and out of an engine."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.models.test_families import FAMILIES, causal
from tests.models.test_transformers import HEADS, TOKENS, VOCAB, WIDTH, quietly
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import boxes_of_run
from zeroengine.weights import huggingface_format
from zeroengine.weights.huggingface_format import TensorSpec
from zeroengine.weights.sources import of_path, of_state_dict
from zeroengine.weights.transformers_conversion import as_model_names, plan_for_files

transformers = pytest.importorskip("transformers", minversion="5")


def gpt_neox() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TOKENS, **sizes))


def bart() -> nn.Module:
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIDE.items()}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=VOCAB, d_model=WIDTH, **sides))


def dinov2() -> nn.Module:
    """One projection of the files is two in the model."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "image_size": 16}
    settings = transformers.Dinov2Config(**sizes, patch_size=4, use_swiglu_ffn=True)
    return transformers.Dinov2ForImageClassification(settings)


SIDE = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 48}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
CONVERTED: dict[str, Callable[[], nn.Module]] = {
    "mixtral": FAMILIES["mixtral"][0],
    "qwen2_moe": causal("Qwen2Moe", shared_expert_intermediate_size=24, **EXPERTS),
    "dinov2": dinov2,
    "vit": FAMILIES["vit"][0],
}
PLAIN: dict[str, Callable[[], nn.Module]] = {name: FAMILIES[name][0] for name in ("llama", "t5")}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{name: FAMILIES[name][0] for name in ("mistral", "qwen2", "gemma2", "gpt2", "bert", "clip", "whisper")},
    "gemma": causal("Gemma", head_dim=8),
    "qwen3_moe": causal("Qwen3Moe", head_dim=8, **EXPERTS),
    "gpt_neox": gpt_neox,
    "bart": bart,
}


def random_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model without two equal values, so that none can take another's place."""
    model = build(factory, seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def engine_of(factory: Callable[[], nn.Module], stage: int) -> zeroengine.Engine:
    return zeroengine.initialize(random_model(factory, seed=7), config=config(stage))


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def from_pretrained(kind: Any, folder: Path) -> nn.Module:
    # transformers needs accelerate for another default device.
    default = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        return kind.from_pretrained(folder).to(default)
    finally:
        torch.set_default_device(default)


def assert_equal_values(model: nn.Module, other: nn.Module) -> None:
    values, others = model.state_dict(), other.state_dict()
    assert values.keys() == others.keys()
    different = [name for name, value in values.items() if not torch.equal(value, others[name])]
    assert not different


def round_trips(families: list[str], root: Path, stages: tuple[int, ...]) -> None:
    rank = start()
    for name in families:
        factory, folder = (CONVERTED | PLAIN | OTHERS)[name], root / name
        expected = random_model(factory, seed=11)
        if rank == 0:
            expected.save_pretrained(folder)
        torch.distributed.barrier()
        for stage in stages:
            engine = engine_of(factory, stage)
            assert engine.load_weights(folder) == ([], []), name
            out = root / f"{name}-{stage}"
            engine.save_weights(out)
            if rank == 0:
                assert names_in(out) == names_in(folder), name
                expected.config.save_pretrained(out)
                assert_equal_values(from_pretrained(type(expected), out), expected)
            engine.close()


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 3), marks=pytest.mark.slow)], ids=str)
def test_weights_of_converted_families_go_in_and_out_as_transformers_has_them(
    stages: tuple[int, ...], tmp_path: Path
) -> None:
    run_ranks(2, quietly, round_trips, [*CONVERTED, *PLAIN], tmp_path, stages)


@pytest.mark.slow
def test_weights_of_other_families_go_in_and_out_as_transformers_has_them(tmp_path: Path) -> None:
    run_ranks(2, quietly, round_trips, list(OTHERS), tmp_path, (0, 3), timeout=300)


# -- Mixtral, whose experts are merged ------------------------------------------------------------

MIXTRAL = CONVERTED["mixtral"]


def mixtral_in_other_ways(root: Path) -> None:
    rank, expected, folder = start(), random_model(MIXTRAL, seed=11), root / "files"
    if rank == 0:
        expected.save_pretrained(folder)
    torch.distributed.barrier()
    stored = load_file(folder / "model.safetensors")
    for given in (stored, expected.state_dict()):
        engine = engine_of(MIXTRAL, 3)
        # Of state dicts rank 0's counts, in the layout of the files or of the model.
        assert engine.load_weights(given if rank == 0 else None) == ([], [])
        assert_equal_values(expected, whole_model(engine))
        engine.close()
    with zeroengine.meta_init(values=False):
        model = MIXTRAL()
    engine = zeroengine.initialize(model, config=config(3, bf16={"enabled": True}))
    engine.load_weights(folder)
    engine.save_weights(root / "from-meta")
    engine.close()
    # What `from_pretrained` has converted by is known to the model then, and is what a save converts by.
    engine = zeroengine.initialize(from_pretrained(type(expected), folder), config=config(3))
    engine.save_weights(root / "from-pretrained", dtype="bf16", shard_size="20KB")
    engine.close()
    for name, value in stored.items():
        assert torch.equal(load_file(root / "from-meta" / "model.safetensors")[name], value)
    reloaded = from_pretrained(type(expected), with_config(expected, root / "from-pretrained", rank))
    assert_equal_values(reloaded, expected.to(torch.bfloat16).to(next(reloaded.parameters()).dtype))


def whole_model(engine: zeroengine.Engine) -> nn.Module:
    model = build(MIXTRAL)
    model.load_state_dict(engine.full_state_dict(rank0_only=False))
    return model


def with_config(model: Any, folder: Path, rank: int) -> Path:
    if rank == 0:
        model.config.save_pretrained(folder)
    torch.distributed.barrier()
    return folder


def test_merged_experts_from_state_dicts_without_memory_and_from_pretrained(tmp_path: Path) -> None:
    run_ranks(2, quietly, mixtral_in_other_ways, tmp_path)


def wrong_input(root: Path) -> list[str]:
    rank, expected = start(), random_model(MIXTRAL, seed=11)
    engine, messages = engine_of(MIXTRAL, 3), []
    before = engine.full_state_dict(rank0_only=False)
    whole, other = root / "whole", root / "llama"
    if rank == 0:
        expected.save_pretrained(whole)
        random_model(PLAIN["llama"], seed=11).save_pretrained(other)
        stored = load_file(whole / "model.safetensors")
        without = {name: value for name, value in stored.items() if "0.block_sparse_moe.experts.3.w1" not in name}
        save_file(without, root / "expert.safetensors")
        three = {name: value for name, value in stored.items() if ".experts.3." not in name}
        save_file(three, root / "three.safetensors")
    torch.distributed.barrier()
    for path in (other, root / "expert.safetensors", root / "three.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            engine.load_weights(path)
        messages.append(str(caught.value).replace(str(root), "."))
    after = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(value, after[name]) for name, value in before.items())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writes = huggingface_format._write_all
    huggingface_format._write_all = full if rank == 1 else writes
    with pytest.raises(CheckpointError, match="the disk is full"):
        engine.save_weights(root / "out")
    huggingface_format._write_all = writes
    return messages


def test_merged_experts_that_do_not_fit_are_errors_on_every_rank(tmp_path: Path) -> None:
    for architecture, expert, three in run_ranks(2, quietly, wrong_input, tmp_path):
        assert "./llama is another model's" in architecture
        assert "model.layers.0.mlp.experts.gate_up_proj is not there" in architecture
        assert "Pass strict=False" in architecture
        assert "mlp.experts.gate_up_proj cannot be made of 3 tensors *.experts.*.w1.weight and 4 tensors *" in expert
        assert "model.layers.0.mlp.experts.gate_up_proj has shape (3, 96, 32) there and (4, 96, 32) here" in three


def test_a_rank_reads_the_experts_that_it_owns_and_holds_one_at_a_time(tmp_path: Path) -> None:
    model = build(MIXTRAL)
    model.save_pretrained(tmp_path)
    stored, names_read = of_path(tmp_path), []
    read = stored.read
    stored.read = lambda name, box: names_read.append(name) or read(name, box)
    source = as_model_names(stored, model, model.state_dict())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    spec = source.tensors[name]
    # A rank's part begins and ends within rows of the second and the third of four experts.
    start, stop = spec.nbytes // 4 // 3, spec.nbytes // 4 * 5 // 8
    for box in boxes_of_run(spec.shape, start, stop):
        assert torch.equal(
            source.read(name, box).flatten(), model.state_dict()[name].flatten()[box.start :][: box.numel]
        )
    expert = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    assert sorted(names_read) == [expert.format(i, kind) for i in (1, 2) for kind in ("w1", "w3")]


def test_names_that_transformers_passes_over_are_no_error() -> None:
    model = build(PLAIN["t5"])
    old = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(1)}
    source = of_state_dict({"shared.weight": torch.ones(2), **old}, "the state dict")
    assert list(as_model_names(source, model, model.state_dict()).tensors) == ["shared.weight"]


def test_half_of_what_the_files_merge_is_saved_under_the_models_own_name() -> None:
    model = build(dinov2)
    gates = {n: TensorSpec(tuple(v.shape), v.dtype) for n, v in model.state_dict().items() if "gate_proj" in n}
    plan = plan_for_files(model, gates)
    assert plan.groups == []
    assert plan.old_names == {name: name for name in gates} != {}
