"""Families of transformers models in a custom loop: DDP's losses, and the same bits at stages 0 and 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, start
from tests.models.test_transformers import HEADS, TOKENS, VOCAB, WIDTH, gpt2, images, llama, quietly, t5, text, vit

transformers = pytest.importorskip("transformers")

Inputs = dict[str, Any]
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3}
ATTENTION: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32}
STEPS = 3


def causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    """A factory of a tiny decoder of a family."""

    def factory() -> nn.Module:
        settings_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
        settings = settings_class(**TOKENS, **SIZES, **ATTENTION, **more)
        return getattr(transformers, f"{name}ForCausalLM")(settings)

    return factory


def bert() -> nn.Module:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = transformers.BertConfig(vocab_size=VOCAB, num_attention_heads=HEADS, **SIZES, **no_dropout)
    return transformers.BertForMaskedLM(settings)


def falcon() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**TOKENS, **sizes))


def mamba() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 3, "use_cache": False}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**TOKENS, **sizes))


def clip() -> nn.Module:
    sides = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    words = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    settings = transformers.CLIPConfig(
        text_config={**sides, **words, "projection_dim": 16},
        vision_config={**sides, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        projection_dim=16,
    )
    return transformers.CLIPModel(settings)


def whisper() -> nn.Module:
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in WHISPER_SIDE.items()}
    tokens = TOKENS | {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    sizes = {
        "d_model": WIDTH,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "dropout": 0.0,
    }
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**tokens, **sides, **sizes))


WHISPER_SIDE = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 48}


def pairs(step: int, rank: int) -> tuple[Inputs]:
    (words,), (pictures,) = text(step, rank), images(step, rank)
    words.pop("labels")
    words["input_ids"][:, -1] = 2
    return ({**words, "pixel_values": pictures["pixel_values"], "return_loss": True},)


def sounds(step: int, rank: int) -> tuple[Inputs]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return ({"input_features": torch.randn(2, 8, 20, generator=generator), "labels": text(step, rank)[0]["labels"]},)


EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Inputs]]]] = {
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "qwen2": (causal("Qwen2", tie_word_embeddings=True), text),
    "qwen3": (causal("Qwen3", head_dim=8), text),
    "mistral": (causal("Mistral", sliding_window=4), text),
    "mixtral": (causal("Mixtral", **EXPERTS), text),
    "gemma2": (causal("Gemma2", head_dim=8, sliding_window=4), text),
    "gemma3": (causal("Gemma3", head_dim=8, sliding_window=4), text),
    "phi3": (causal("Phi3"), text),
    "falcon": (falcon, text),
    "mamba": (mamba, text),
    "bert": (bert, text),
    "t5": (t5, text),
    "vit": (vit, images),
    "clip": (clip, pairs),
    "whisper": (whisper, sounds),
}
# Reentrant checkpoints are a backward within the backward; where the library offers no checkpoints there are none.
CHECKPOINTED = ("llama", "qwen3", "mixtral", "gemma3", "t5", "whisper", "bert")


def train(name: str, how: int | str, checkpoints: bool | None = None) -> list[float]:
    """This rank's losses, by DDP or by the engine at a stage; ``checkpoints``: whether they are reentrant."""
    factory, data = FAMILIES[name]
    rank, model = start(), build(factory).train()
    if checkpoints is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
        model.enable_input_require_grads()
    optimizer = adamw(model)
    called: Any
    if how == "ddp":
        # Of experts those without a token have no gradient; and DDP knows of no backward within the backward.
        called = DistributedDataParallel(model, find_unused_parameters=checkpoints is None)
    else:
        called = zeroengine.initialize(model, optimizer, config(int(how), optimizer=None))
    losses = []
    for step in range(STEPS):
        loss = called(**data(step, rank)[0]).loss
        losses.append(loss.item())
        if isinstance(called, zeroengine.Engine):
            called.backward(loss)
            assert called.step()
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(called, zeroengine.Engine):
        called.close()
    return losses


def train_all(
    names: list[str], checkpoints: list[bool | None], stages: tuple[int, ...]
) -> dict[Any, dict[int | str, list[float]]]:
    return {(n, c): {how: train(n, how, c) for how in ("ddp", *stages)} for n in names for c in checkpoints}


def assert_as_ddp(names: list[str], checkpoints: list[bool | None], stages: tuple[int, ...]) -> None:
    ranks = run_ranks(2, quietly, train_all, names, checkpoints, stages, timeout=400)
    for case, first in ranks[0].items():
        for found in (rank[case] for rank in ranks):
            assert all(found[stage] == found[3] for stage in stages), case
            assert found[3] == pytest.approx(found["ddp"], rel=1e-5), case
        assert first[3] != ranks[1][case][3], case


# What is not one block of attention after another, or shares weights; transformers' tests have llama and t5.
SHORT = ("qwen2", "mixtral", "gemma3", "falcon", "mamba", "clip", "whisper")


@pytest.mark.parametrize(
    ("names", "stages"),
    [pytest.param(SHORT, (3,), id="some"), pytest.param(tuple(FAMILIES), (0, 3), id="all", marks=pytest.mark.slow)],
)
def test_families_of_models_have_the_losses_of_ddp(names: tuple[str, ...], stages: tuple[int, ...]) -> None:
    assert_as_ddp(list(names), [None], stages)


@pytest.mark.slow
def test_families_with_checkpoints_have_the_losses_of_ddp() -> None:
    assert_as_ddp(list(CHECKPOINTED), [True, False], (0, 3))
