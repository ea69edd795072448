"""Trains families of transformers with whole samples and with parts of them, and reports losses, norms and refusals.

The arguments are "some" or "all": how many families, kernels and batches.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import zeroengine
from tests.integrations.environments import report

VOCAB, LENGTH = 61, 30
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# Two key heads, so four ranks repeat them; the feed-forward layer of most families.
SIZES |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# The family, its own settings, the kernel, and the case. Each family, kernel and case is in "some" or in "all".
Case = tuple[str, dict[str, Any], str, str]
SOME: list[Case] = [
    ("llama", {}, "sdpa", "packed"),
    ("qwen3_moe", EXPERTS, "sdpa", "checkpoints"),
]
ALL: list[Case] = [
    ("gemma2", {"sliding_window": 7, "head_dim": 8}, "eager", "mask"),
    ("mistral", {"sliding_window": 7}, "eager", "reentrant adapter"),
    ("qwen3", {"head_dim": 8}, "sdpa", "mask"),
    ("gemma3_text", {"sliding_window": 7, "head_dim": 8}, "sdpa", "packed"),
    ("phi", NO_DROPOUT, "sdpa", "adapter"),
    ("gpt_neox", {}, "eager", "packed reentrant"),
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, "sdpa", "mask"),
    ("modernbert", {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}, "sdpa", "plain"),
    ("llama", {}, "eager", "left mask"),
    ("qwen3", {"head_dim": 8}, "sdpa", "packed tiles checkpoints"),
]
REFUSED: list[Case] = [
    ("mamba", {"state_size": 4}, "eager", "plain"),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager", "plain"),
    ("llama", {}, "sdpa", "prefix"),
    ("llama", {}, "sdpa", "without shift_labels"),
    ("llama", {}, "sdpa", "mask of four dimensions"),
]
ALL_REFUSED: list[Case] = [
    ("t5", {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}, "eager", "plain"),
    ("bart", {"d_model": 32, "decoder_start_token_id": 0}, "eager", "plain"),
    ("falcon", {"alibi": True}, "eager", "plain"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "sdpa", "plain"),
    ("bert", {}, "sdpa", "plain"),
    ("roberta", {}, "sdpa", "plain"),
]


def model_of(family: str, changes: dict[str, Any], kernel: str, case: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | changes))
    kind: Any = AutoModelForCausalLM
    if "bert" in family:
        kind = AutoModelForMaskedLM
    elif family in ("t5", "bart"):
        kind = AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation=kernel).train()
    model.config.use_cache = False
    if "reentrant" in case or "checkpoints" in case:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in case})
    if "adapter" in case:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    if "prefix" in case:
        model = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    return model


def batch_of(step: int, case: str) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, :7] = labels[1, 12:20] = -100
    batch = {"input_ids": ids, "labels": labels}
    if "mask" in case:
        batch["attention_mask"] = torch.ones_like(ids)
        if "left" in case:
            batch["attention_mask"][0, :9] = 0
            # The last hidden token attends to nothing, or to all, so it predicts no label.
            labels[0, :10] = -100
        else:
            batch["attention_mask"][0, 22:] = 0
            labels[0, 22:] = -100
    if "dimensions" in case:
        batch["attention_mask"] = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    if "packed" in case:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (11, 6, LENGTH - 17)]).expand(2, -1)
    return batch


def train(case: Case, degree: int, steps: int) -> tuple[list[float], list[float], Any]:
    model = model_of(*case)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": degree,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
    }
    if "tiles" in case[3]:
        settings["tiling"] = {"loss": True, "mlp": True}
    engine = zeroengine.initialize(model, config=settings)
    losses, norms = [], []
    try:
        for step in range(steps):
            batch = batch_of(step, case[3])
            part = zeroengine.shard_sequence(batch, engine=engine)
            if case[3].startswith("without"):
                del part["shift_labels"]
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.grad_norm or 0.0)
        if case[0] == "llama":
            check_copies(engine, model)
    finally:
        engine.close()
    return losses, norms, model


def check_copies(engine: zeroengine.Engine, model: PreTrainedModel) -> None:
    """Neither copies nor saved models know the name of the kernel that exchanges heads."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        engine.save_weights(shared[0])
        dist.barrier()
        for file in Path(shared[0]).glob("config.json"):
            assert "zeroengine" not in file.read_text(), file.read_text()
        dist.barrier()
    with zeroengine.gathered(model):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert "zeroengine" not in json.dumps(copied.config.to_dict())


def check_models_side_by_side() -> None:
    """An encoder beside an older decoder, with which it shares batches, and two models with one configuration."""
    kinds = {"decoder": AutoModelForCausalLM, "encoder": AutoModelForMaskedLM}
    configs = {"decoder": AutoConfig.for_model("llama", **SIZES), "encoder": AutoConfig.for_model("bert", **SIZES)}
    configs["decoder"].use_cache = False
    settings = {"sequence_parallel_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}

    def start(kind: str, seed: int) -> zeroengine.Engine:
        torch.manual_seed(seed)
        model = type(kinds[kind].from_config(configs[kind]))(configs[kind]).train()
        # Dropout draws other numbers where two models draw in turns.
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return zeroengine.initialize(model, config=settings)

    def step(engine: zeroengine.Engine, number: int, owner: zeroengine.Engine) -> float:
        part = zeroengine.shard_sequence({"input_ids": batch_of(number, "")["input_ids"][:, :-1]}, engine=owner)
        scores = engine(**part).logits
        loss = zeroengine.mean_loss(scores.square().sum(), scores.numel(), engine=engine)
        engine.backward(loss)
        engine.step()
        return loss.item()

    cases = [("decoder", 0), ("encoder", 1), ("decoder", 2)]
    alone = []
    for case in cases:
        engine = start(*case)
        alone.append([step(engine, number, engine) for number in range(2)])
        engine.close()
    engines = [start(*case) for case in cases]
    ordinary: Any = type(engines[0].module)(configs["decoder"]).eval()
    expected = [[step(engine, number, engines[0]) for engine in engines] for number in range(2)]
    assert [list(losses) for losses in zip(*expected, strict=True)] == alone, (expected, alone)
    ids = batch_of(0, "")["input_ids"]
    while_connected = ordinary(ids).logits
    for engine in engines:
        engine.close()
    assert ordinary(ids).logits.equal(while_connected)


def registered() -> list[list[str]]:
    kinds = (AttentionInterface, AttentionMaskInterface)
    return [sorted(name for name in map(str, kind._global_mapping) if "zeroengine" not in name) for kind in kinds]


def main() -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    everything = sys.argv[1] == "all"
    steps = 20 if everything else 3
    before = registered()
    check_models_side_by_side()
    found: dict[str, Any] = {"equal": {}, "refused": {}}
    for case in SOME + ALL * everything:
        runs = found["equal"][" ".join((case[0], *case[2:]))] = []
        for degree in (1, 2, 4) if everything else (1, 2):
            # At degree 1 all ranks have the same samples, so the mean over ranks is that of one.
            losses, norms, model = train(case, degree, steps)
            runs.append((losses, norms))
            assert model.config._attn_implementation == case[2]
            assert "_loss_function" not in vars(getattr(model, "base_model", model))
            assert registered() == before
    for case in REFUSED + ALL_REFUSED * everything:
        try:
            train(case, 2, steps)
            found["refused"][f"{case[0]} {case[3]}"] = ""
        except zeroengine.ZeroEngineError as error:
            found["refused"][f"{case[0]} {case[3]}"] = str(error)
    report(found)


if __name__ == "__main__":
    main()
