"""Checks of models of transformers in tiles, which `train_like_ddp.py` runs among its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    set_seed,
)

import zeroengine
from tests.distributed.collective_log import RankLog, recording
from tests.integrations.transformers.models import VOCAB, Tokens
from zeroengine.errors import ConfigError, ZeroEngineError

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def checkpointed(**options: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_adapters() -> Any:
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(r=2, target_modules=["q_proj"]))


# Sequences of 12 tokens with a width of 8 have MLPs in two tiles.
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "Llama, tied and checkpointed": checkpointed,
    "adapters": with_adapters,
    "Gemma 2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=3.0)),
    "Cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "Granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}


# A head that is tied and checkpoints, a soft cap, and a sum of losses over a given count.
SOME_MODELS = ("Llama, tied and checkpointed", "Gemma 2", "Granite")


def settings(stage: int, tiling: dict[str, bool]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "tiling": tiling,
    }


def batch(seed: int) -> dict[str, torch.Tensor]:
    data = Tokens(2, seed)
    return {key: torch.stack([data[number][key] for number in range(2)]) for key in data[0]}


def train(name: str, stage: int, is_tiled: bool) -> tuple[dict[str, list[float]], list[str]]:
    """Return losses and norms, and the collectives of this rank after the first micro-step.

    In that one the head is gathered again for the loss, since no pass has shown that its unit is the last one.
    """
    set_seed(0)
    model, log, losses, norms, launches = MODELS[name](), RankLog(), [], [], []
    with recording(log):
        engine = zeroengine.initialize(model, config=settings(stage, {"loss": is_tiled, "mlp": is_tiled}))
        # The Trainer gives the number of labels of a step, and then the loss is a sum over it.
        more = {"num_items_in_batch": torch.tensor(15)} if name == "Granite" else {}
        for step in range(4):
            output = engine(**batch(step + 10 * engine.rank), **more)
            engine.backward(output.loss)
            if engine.step():
                norms.append(engine.grad_norm)
            losses.append(output.loss.item())
            if step == 0:
                log.launches.clear()
            launches = list(log.launches)
    if is_tiled and stage == 3:
        check_uses(engine, model, output.logits)
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any("_loss_function" in vars(module) for module in model.modules())
    return {"losses": losses, "norms": norms}, launches


def check_uses(engine: zeroengine.Engine, model: Any, logits: torch.Tensor) -> None:
    """Check that evaluation has logits, that copies train their own parameters, and that others uses are errors."""
    assert logits.shape == (2, 12, VOCAB) and logits.dtype is torch.float32
    for use in (lambda: logits.argmax(-1), lambda: logits.mul_(2), lambda: logits[0], lambda: torch.zeros(1) + logits):
        try:
            use()
        except ZeroEngineError as error:
            assert 'needs logits, which "tiling": {"loss": true} does not compute: write false' in str(error)
        else:
            raise AssertionError("the logits were used")
    model.eval()
    with torch.no_grad():
        output = engine(**batch(0))
        assert output.logits.isfinite().all() and output.loss.isfinite()
    with zeroengine.gathered(model):
        copied = copy.deepcopy(model).train()
    copied(**batch(0)).loss.backward()
    assert all(param.grad is not None for param in copied.parameters() if param.requires_grad)


def check_refusals() -> None:
    """Check that models without the parts that tiles need are refused by what they lack, and stay ordinary."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    own_loss = LlamaForCausalLM(LlamaConfig(**SIZES))
    own_loss.loss_function = torch.nn.functional.cross_entropy
    for model, key, text in (
        (
            LlamaForSequenceClassification(LlamaConfig(**SIZES)),
            "loss",
            "found ['NoneType', 'ForSequenceClassificationL",
        ),
        (own_loss, "loss", "found ['Linear', 'cross_entropy'] in LlamaForCausalLM"),
        (torch.nn.Linear(2, 2), "loss", "found ['NoneType', None] in Linear"),
        (OPTForCausalLM(OPTConfig(**sizes, ffn_dim=8, word_embed_proj_dim=8)), "mlp", "found [] in OPTForCausalLM"),
        (MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), "mlp", "'MixtralSparseMoeBlock'"),
    ):
        try:
            zeroengine.initialize(model, config=settings(0, {key: True}))
        except ConfigError as error:
            assert text in str(error) and f"call zeroengine.tiled_{key}()" in str(error), error
        else:
            raise AssertionError(text)
        assert not any("forward" in vars(module) for module in model.modules())


def check_models(names: Sequence[str], stages: Sequence[int]) -> None:
    """Check that models train in tiles as without, with the same collectives."""
    for name in names:
        for stage in stages:
            (plain, before), (tiled, now) = (train(name, stage, is_tiled) for is_tiled in (False, True))
            assert before == now, (name, stage, before, now)
            for key, values in plain.items():
                assert all(map(partial(math.isclose, rel_tol=2e-6), values, tiled[key])), (name, stage, plain, tiled)
    check_refusals()
