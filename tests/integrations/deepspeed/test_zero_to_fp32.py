"""``zero_to_fp32`` of DeepSpeed: a checkpoint's weights under every name that the model has."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import zeroengine.integrations.deepspeed as deepspeed
from tests.distributed.ranks import run_ranks
from zeroengine.integrations.deepspeed import zero_to_fp32


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    model[0].weight = model[1].weight
    return model


def save(folder: str) -> None:
    # The folder for states on disk is made, as DeepSpeed makes it.
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": f"{folder}/states/of/run"},
        },
    }
    engine, *_ = deepspeed.initialize(model=build(), config=config)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_tied_weights_are_one_tensor_under_each_name(tmp_path: Path) -> None:
    run_ranks(1, save, str(tmp_path))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "torch")
    state = torch.load(tmp_path / "torch" / "pytorch_model.bin")
    assert state["0.weight"] is state["1.weight"]
    build().load_state_dict(state, strict=True)
    # safetensors has no shared tensors, so one name is left.
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    assert sorted(load_file(tmp_path / "safe" / "model.safetensors")) == ["0.weight", "1.bias"]
