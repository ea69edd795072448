"""Merges adapters of every kind on the way out of an engine, and compares them with what peft merges.

The argument is a folder, which all ranks share. Reports the number of kinds and of the buckets with pieces of rows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, OFTConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, set_seed

import zeroengine
from tests.integrations.environments import report
from tests.integrations.transformers.models import VOCAB, tiny_llama
from zeroengine.errors import ZeroEngineError

FOLDER = Path(sys.argv[1])
ATTENTION = ["q_proj", "v_proj"]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(images))


def tied() -> Any:
    return tiny_llama(tie_word_embeddings=True)


def mixture() -> Any:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **sizes)
    )


def with_adapter(model: Any, *configs: Any) -> PeftModel:
    """Return a model with adapters, whose values are not those that merge to nothing."""
    peft_model = get_peft_model(model, configs[0])
    for number, config in enumerate(configs[1:]):
        peft_model.add_adapter(f"other{number}", config)
    if len(configs) > 1:
        peft_model.base_model.set_adapter(["default", "other0"])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in peft_model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)
    return peft_model


def merged_already(model: PeftModel) -> PeftModel:
    model.merge_adapter(["default"])
    return model


def disabled(model: PeftModel) -> PeftModel:
    model.base_model.disable_adapter_layers()
    return model


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": ATTENTION, **changes})


KINDS: dict[str, Callable[[], PeftModel]] = {
    "linear": lambda: with_adapter(tiny_llama(), lora(use_rslora=True)),
    "bias": lambda: with_adapter(tiny_llama(attention_bias=True), lora(lora_bias=True)),
    "dora": lambda: with_adapter(tiny_llama(), lora(use_dora=True, target_modules="all-linear")),
    "two adapters": lambda: with_adapter(tiny_llama(), lora(), lora(r=3, target_modules=["q_proj", "up_proj"])),
    "merged already": lambda: merged_already(with_adapter(tiny_llama(), lora(), lora(r=3))),
    "disabled": lambda: disabled(with_adapter(tiny_llama(), lora())),
    "embedding": lambda: with_adapter(tiny_llama(), lora(target_modules=["embed_tokens", "q_proj"])),
    "tied embedding": lambda: with_adapter(tied(), lora(target_modules=["embed_tokens", "q_proj"])),
    "tied head": lambda: with_adapter(tied(), lora(target_modules=["lm_head"])),
    "both tied": lambda: with_adapter(tied(), lora(target_modules=["embed_tokens", "lm_head"])),
    "modules to save": lambda: with_adapter(tied(), lora(modules_to_save=["lm_head", "norm"])),
    "tokens": lambda: with_adapter(tied(), lora(trainable_token_indices=[1, 5, 9])),
    "ia3": lambda: with_adapter(
        tiny_llama(), IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "oft": lambda: with_adapter(tiny_llama(), OFTConfig(oft_block_size=4, r=0, target_modules=ATTENTION)),
    "vera": lambda: with_adapter(tiny_llama(), VeraConfig(r=4, target_modules=["q_proj", "o_proj"])),
    "parameters": lambda: with_adapter(
        mixture(), lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    ),
    "convolution": lambda: with_adapter(Convolution(), lora(target_modules=["first"], modules_to_save=["norm"])),
}


def state_of_peft(model: Any) -> list[Any]:
    layers = [inner for inner in model.modules() if isinstance(inner, BaseTunerLayer)]
    return [(list(layer.merged_adapters), list(layer.active_adapters), layer.disable_adapters) for layer in layers]


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: object) -> None:
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), (where, name)


def streamed(engine: zeroengine.Engine, **arguments: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the tensors of a stream, and how many pieces of rows came."""
    tensors: dict[str, torch.Tensor] = {}
    pieces = 0
    for piece in engine.stream_weights(merge="peft", buffers=True, **arguments):
        pieces += not piece.is_whole
        whole = tensors.setdefault(piece.name, piece.values.new_empty(piece.shape))
        (whole[piece.row : piece.row + len(piece.values)] if piece.shape else whole).copy_(piece.values)
    return tensors, pieces


def partitioned(model: Any, stage: int) -> zeroengine.Engine:
    trainable = [param for param in model.parameters() if param.requires_grad]
    settings = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}
    return zeroengine.initialize(model, torch.optim.AdamW(trainable) if trainable else None, config=config)


def check_changes() -> None:
    """Check that a stream since an earlier one has the layers whose adapters count otherwise, with the same values."""
    model = with_adapter(tiny_llama(), lora())
    engine = partitioned(model, 3)
    first = engine.stream_weights(merge="peft", since=zeroengine.WeightsToken())
    num_tensors = len(list(first))
    layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    layer.scaling["default"] *= 2
    second = engine.stream_weights(merge="peft", since=first.token)
    assert len(list(second)) == 1 < num_tensors
    assert not list(engine.stream_weights(merge="peft", since=second.token))
    assert len(list(engine.stream_weights(since=second.token))) > 1, "the adapters themselves were not sent yet"
    engine.close()


def check_refusals() -> None:
    """Check that what cannot be merged is an error on all ranks, after which the engine works."""
    # peft finds out when it merges, which one rank does.
    engine = partitioned(with_adapter(tiny_llama(), lora(lora_bias=True)), 3)
    for call in (
        lambda: engine.full_state_dict(merge="peft", rank0_only=True),
        lambda: engine.save_weights(FOLDER / "refused", merge="peft"),
        lambda: list(engine.stream_weights(merge="peft", ranks=0)),
    ):
        expect_error(call, "the base layer has no bias")
    assert len(engine.full_state_dict())
    engine.close()
    engine = partitioned(tiny_llama(), 3)
    expect_error(lambda: engine.stream_weights(merge="peft"), "without adapters of peft")
    engine.close()


def expect_error(call: Callable[[], Any], text: str) -> None:
    try:
        call()
    except (ZeroEngineError, RuntimeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


def main() -> None:
    pieces = 0
    for kind, build in KINDS.items():
        base = copy.deepcopy(build()).merge_and_unload()
        expected = {name: value.clone() for name, value in base.state_dict().items()}
        # A stream has each tied tensor once, under the first name of the base.
        names = {*dict(base.named_parameters()), *dict(base.named_buffers())}
        once = {name: value for name, value in expected.items() if name in names}
        for stage in (0, 2, 3) if kind in ("linear", "tied embedding") else (3,):
            model = build()
            engine = partitioned(model, stage)
            before, peft_before = engine.full_state_dict(), state_of_peft(model)
            check_equal(engine.full_state_dict(merge="peft"), expected, (kind, stage))
            check_equal(streamed(engine)[0], once, (kind, stage, "stream"))
            on_one, in_rows = streamed(engine, ranks=0, bucket_bytes=6200)
            check_equal(on_one, once if engine.rank == 0 else {}, (kind, stage, "stream to one"))
            pieces += in_rows
            check_equal(engine.full_state_dict(), before, (kind, stage, "afterwards"))
            assert state_of_peft(model) == peft_before
            folder = FOLDER / f"{kind} {stage}"
            if kind == "parameters":
                expect_error(lambda: engine.save_weights(folder, merge="peft"), "in another layout")  # noqa: B023
            elif isinstance(base, LlamaForCausalLM):
                engine.save_weights(folder, merge="peft")
                if engine.rank == 0:
                    base.config.save_pretrained(folder)
                    check_equal(LlamaForCausalLM.from_pretrained(folder).state_dict(), expected, (kind, stage, "saved"))
            engine.close()
    check_refusals()
    check_changes()
    report([len(KINDS), pieces])


if __name__ == "__main__":
    main()
