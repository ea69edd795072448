"""Hugging Face models, as they are, from configurations alone: nothing is downloaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import (
    STAGES,
    Task,
    Trained,
    assert_close,
    assert_same_bits,
    make_engine,
    start,
    train_at,
)
from zeroengine import ZeroEngineError, gathered

pytest.importorskip("transformers")

VOCAB, WIDTH, HEADS = 61, 32, 4
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**TOKENS, **heads, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**TOKENS, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def t5() -> nn.Module:
    """One weight serves encoder, decoder and head; decoder blocks share the encoder's output and a position bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": HEADS}
    return T5ForConditionalGeneration(T5Config(**TOKENS, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **no_dropout, image_size=16, patch_size=4, num_labels=5))


def checkpointed(factory: Callable[[], nn.Module], **how: Any) -> nn.Module:
    model = factory()
    model.gradient_checkpointing_enable(**how)
    return model


def text(step: int, rank: int) -> tuple[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = (torch.randint(3, VOCAB, (2, 1), generator=generator) + torch.arange(9)) % (VOCAB - 3) + 3
    return ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)},)


def images(step: int, rank: int) -> tuple[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, 5, (2,), generator=generator)
    return ({"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels},)


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied llama": functools.partial(llama, True),
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
}
CHECKPOINTED: dict[str, dict[str, Any]] = {
    "tied llama": {},
    "gpt2": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "t5": {},
    "vit": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


def task_of(name: str, checkpoint: bool = False, **more: Any) -> Task:
    factory = FACTORIES[name]
    if checkpoint:
        factory = functools.partial(checkpointed, factory, **CHECKPOINTED[name])
    return Task(factory, images if name == "vit" else text, **{"steps": 3, **more})


TASKS = [(name, False) for name in FACTORIES] + [(name, True) for name in CHECKPOINTED]
# test_families has others without checkpoints.
SHORT = [("tied llama", False), ("t5", True)]


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """On a rank: no downloads, no advice."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return function(*args)


# -- training -----------------------------------------------------------------------------------------


def by_own_loss(task: Task, engine: zeroengine.Engine) -> tuple[list[float], list[float]]:
    """Trains, evaluates in between as every rank does, and watches how much is whole at one time."""
    losses, norms = [], []
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.gathered_bytes() for unit in engine.units))

    for module in engine.module.modules():
        module.register_forward_hook(look)
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(look)
    for step in range(task.steps):
        (inputs,) = task.data(step, engine.rank)
        out = engine(**inputs)
        losses.append(out.loss.item())
        engine.backward(out.loss)
        assert engine.step()
        norms.append(engine.grad_norm)
        with torch.no_grad():
            losses.append(engine.eval()(**inputs).loss.item())
        engine.train()
    sizes = sorted(unit.dtype.itemsize * unit.layout.numel for unit in engine.units)
    assert most <= sum(sizes[-2:]) + sizes[0] < sum(sizes), "a rank held most of the model at one time"
    return losses, norms


def plainly(task: Task, world_size: int = 2) -> Trained:
    """One process on what all ranks see."""
    model = build(task.factory)
    optimizer = task.optimizer(model)
    losses, norms = [], []
    for step in range(task.steps):
        every = [task.data(step, rank)[0] for rank in range(world_size)]
        joined = {key: torch.cat([inputs[key] for inputs in every]) for key in every[0]}
        loss = model(**joined).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model.eval()(**joined).loss.item())
        model.train()
    return Trained(losses, norms, model.state_dict())


def train_all(tasks: list[tuple[str, bool]], stages: tuple[int, ...], more: dict[str, Any]) -> list[list[Trained]]:
    return [quietly(train_at, stages, task_of(name, checkpoint), by_own_loss, more) for name, checkpoint in tasks]


@pytest.mark.parametrize("tasks", [SHORT, pytest.param(TASKS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_transformers_train_in_fp32_as_plain_pytorch_and_the_same_at_every_stage(tasks: list[tuple[str, bool]]) -> None:
    for each, *ranks in zip(tasks, *run_ranks(2, train_all, tasks, STAGES, {}), strict=True):
        for found in ranks:
            for stage, trained in enumerate(found):
                assert_same_bits(found[0], trained, (each, stage))
        assert_close([found[0] for found in ranks], quietly(plainly, task_of(*each)))


@pytest.mark.slow  # test_constructions has models in bf16
def test_transformers_train_in_bf16_within_its_rounding() -> None:
    tasks, stages = [each for each in TASKS if each[0] != "llama"], (1, 3)
    for each, *ranks in zip(tasks, *run_ranks(2, train_all, tasks, stages, BF16), strict=True):
        plain = quietly(plainly, task_of(*each))
        for number, stage in enumerate(stages):
            means = torch.tensor([found[number].losses for found in ranks]).mean(0).tolist()
            assert means == pytest.approx(plain.losses, rel=2e-2), (each, stage)
            assert ranks[0][number].norms == pytest.approx(plain.norms, rel=5e-2), (each, stage)


@pytest.mark.slow  # test_degrees has four ranks
def test_transformers_train_on_four_ranks_as_plain_pytorch() -> None:
    tasks = [("tied llama", False), ("t5", True)]
    for each, *ranks in zip(tasks, *run_ranks(4, train_all, tasks, (0, 3), {}), strict=True):
        for found in ranks:
            assert_same_bits(found[0], found[1], each)
        assert_close([found[0] for found in ranks], quietly(plainly, task_of(*each), 4))


BF16 = {"bf16": {"enabled": True}}

# -- everything else that a user does -------------------------------------------------------------------


def trained_with_a_copy(name: str, stage: int, **more: Any) -> tuple[zeroengine.Engine, nn.Module]:
    """An engine after a step, and a plain model of its values."""
    task = task_of(name)
    engine = make_engine(task, stage, **more)
    engine.backward(engine(**task.data(0, engine.rank)[0]).loss)
    engine.step()
    plain = build(task.factory)
    for param in plain.parameters():  # buffers keep their dtype
        param.data = param.data.to(engine.module.dtype)
    plain.load_state_dict(engine.full_state_dict())
    return engine.eval(), plain.eval()


# The model, the stage and the precision.
SOME_GENERATE: list[tuple[str, int, dict[str, Any]]] = [("llama", 3, {}), ("gpt2", 1, {}), ("t5", 3, BF16)]
ALL_GENERATE = [(n, stage, more) for n in ("llama", "gpt2", "t5") for stage, more in ((1, {}), (3, {}), (3, BF16))]


def generate_everywhere(cases: list[tuple[str, int, dict[str, Any]]]) -> None:
    rank = start()
    for name, stage, more in cases:
        engine, plain = trained_with_a_copy(name, stage, **more)
        model, inputs = engine.module, text(5, rank)[0]
        del inputs["labels"]
        same = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        other = {"max_new_tokens": 3 + 5 * rank, "min_new_tokens": 3 + 5 * rank, "do_sample": False}
        expected = plain.generate(**inputs, **other)
        with gathered(model):
            assert torch.equal(model.generate(**inputs, **other), expected)
            assert torch.equal(
                model.generate(**inputs, **other, num_beams=2), plain.generate(**inputs, **other, num_beams=2)
            )
        assert torch.equal(model.generate(**inputs, **other, synced_gpus=True), expected)
        assert torch.equal(model.generate(**inputs, **same), plain.generate(**inputs, **same))
        with torch.inference_mode():
            assert torch.equal(engine(**text(6, rank)[0]).loss, plain(**text(6, rank)[0]).loss)
        assert engine.memory().gathered == 0
        engine.train().backward(engine(**text(7, rank)[0]).loss)
        assert engine.step(), "and trains on"


@pytest.mark.parametrize(
    "cases", [SOME_GENERATE, pytest.param(ALL_GENERATE, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_ranks_generate_texts_of_different_lengths(cases: list[tuple[str, int, dict[str, Any]]]) -> None:
    run_ranks(2, quietly, generate_everywhere, cases)


def use_in_every_way(cases: list[tuple[str, int]], folder: Path) -> None:
    rank = start()
    for name, stage in cases:
        engine, plain = trained_with_a_copy(name, stage)
        model, (inputs,) = engine.module, task_of(name).data(1, rank)

        assert (model.device, model.dtype) == (plain.device, plain.dtype)
        assert model.num_parameters() == plain.num_parameters()
        assert model.get_memory_footprint() == plain.get_memory_footprint()

        tuples, expected = model(**inputs, return_dict=False), plain(**inputs, return_dict=False)
        assert torch.equal(tuples[0], expected[0]) and torch.equal(tuples[1], expected[1])

        state = engine.full_state_dict()
        with gathered(model):
            model.save_pretrained(folder / f"{name} {stage} gathered")
        if rank == 0:
            model.save_pretrained(folder / f"{name} {stage} state", state_dict=dict(state))
            for how in ("gathered", "state"):
                read = type(model).from_pretrained(folder / f"{name} {stage} {how}").state_dict()
                assert read.keys() == state.keys()
                assert all(torch.equal(value, state[key]) for key, value in read.items())

        engine.train()
        out = engine(**inputs, output_hidden_states=True)  # a loss of things inside of the output
        hidden = out.hidden_states if name != "t5" else out.decoder_hidden_states
        loss = out.loss + sum(h.square().mean() for h in hidden)
        plain.train()
        theirs = plain(**inputs, output_hidden_states=True)
        hidden = theirs.hidden_states if name != "t5" else theirs.decoder_hidden_states
        (theirs.loss + sum(h.square().mean() for h in hidden)).backward()
        engine.backward(loss)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            mean = other.grad if other.grad is not None else torch.zeros(other.shape)
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(zeroengine.full_gradient(mine), mean / 2, rtol=1e-4, atol=1e-6)
        assert engine.step()


SOME_USES = [("gpt2", 0), ("tied llama", 3), ("t5", 3), ("vit", 3)]
ALL_USES = [(name, stage) for name in FACTORIES for stage in (0, 3)]


@pytest.mark.parametrize("cases", [SOME_USES, pytest.param(ALL_USES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_transformers_attributes_outputs_and_save_pretrained_match_plain_models(
    cases: list[tuple[str, int]], tmp_path: Path
) -> None:
    run_ranks(2, quietly, use_in_every_way, cases, tmp_path)


def only_norms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def frozen_but_norms() -> nn.Module:
    """As for adapters: inputs of a frozen embedding that require gradients, through checkpoints."""
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("layernorm" in name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def odd_inputs() -> list[str]:
    rank = start()
    from transformers.modeling_outputs import BaseModelOutput

    task = Task(frozen_but_norms, text, only_norms, steps=3)
    found = []
    for stage in (0, 3):
        engine = make_engine(task, stage)
        found.append([])
        for step in range(3):
            out = engine(**text(step, rank)[0])
            engine.backward(out.loss)
            assert engine.step()
            found[-1].append(out.loss.item())
    assert found[0] == found[1] and found[0][-1] != found[0][0]

    messages = []
    for more in ({}, BF16, {**BF16, "keep_fp32_modules": ["encoder"]}):
        engine = make_engine(task_of("t5"), 3, **more)
        # Outputs of transformers are inputs too, and of modules inside.
        inputs = text(0, rank)[0]
        encoded = BaseModelOutput(last_hidden_state=torch.randn(2, 9, WIDTH))
        out = engine(encoder_outputs=encoded, labels=inputs["labels"])
        engine.backward(out.loss + engine(**inputs).loss)
        assert engine.step()
    engine = make_engine(task_of("llama"), 1)
    engine.module.resize_token_embeddings(VOCAB + 3)
    with pytest.raises(ZeroEngineError) as error:
        engine.backward(engine(**text(0, rank)[0]).loss)
    messages.append(str(error.value))
    return messages


def test_adapters_and_outputs_as_inputs_train_and_resized_embeddings_are_refused() -> None:
    for (message,) in run_ranks(2, quietly, odd_inputs):
        assert "given another shape after initialize(), (64, 32) where it had (61, 32)" in message
        assert "Change the model before initialize()." in message
