"""Buffers and frozen parameters of every dtype reach every rank, at every stage, with the bits of rank 0."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import config, start

DTYPES = (
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64),
    *(torch.complex64, torch.complex128),
)


class Quantized(nn.Module):
    """A trained layer beside frozen weights, buffers and 0-d scales of every dtype, whose bytes are all ``byte``."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.ParameterList()
        for number, dtype in enumerate(DTYPES):
            values = torch.full((3, 16), byte, dtype=torch.uint8).view(dtype)
            self.frozen.append(nn.Parameter(values, requires_grad=False))
            self.register_buffer(f"buffer{number}", values.clone())
            self.register_buffer(f"scale{number}", values[0, 0].clone())
        self.register_buffer("conjugate", torch.full((3,), byte * 1j).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def bytes_of(value: torch.Tensor) -> set[int]:
    return set(value.flatten().view(torch.uint8).tolist())


def exchange(folder: Path) -> None:
    rank = start()
    for stage, transport in ((1, "shm"), (3, "gloo")):
        comm = {"transport": transport}
        model = Quantized(1 - rank)
        engine = zeroengine.initialize(model, config=config(stage, comm=comm))
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
        state = engine.full_state_dict()
        for number, dtype in enumerate(DTYPES):
            for name in (f"frozen.{number}", f"buffer{number}", f"scale{number}"):
                assert state[name].dtype is dtype and bytes_of(state[name]) == {1}, (stage, name)
        assert state["conjugate"].tolist() == [-1j] * 3
        engine.save_checkpoint(folder / str(stage))
        with torch.no_grad(), zeroengine.gathered(model.frozen):
            for param in model.frozen if rank == 1 else ():
                param.view(torch.uint8).zero_()
        written = engine.full_state_dict()
        assert all(bytes_of(written[f"frozen.{number}"]) == {0} for number in range(len(DTYPES)))
        engine.load_checkpoint(folder / str(stage))
        loaded = engine.full_state_dict()
        assert all(
            torch.equal(loaded[name].flatten().view(torch.uint8), state[name].flatten().view(torch.uint8))
            for name in state
            if name != "conjugate"
        )


def test_buffers_and_frozen_parameters_of_every_dtype_take_rank_0_s_bits(tmp_path: Path) -> None:
    run_ranks(2, exchange, tmp_path)


def mix() -> None:
    start()
    for stage in (0, 3):
        model = Quantized(1)
        bf16 = {"enabled": True}
        engine = zeroengine.initialize(model, config=config(stage, bf16=bf16, data_types={"buffer_dtype": "bf16"}))
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        state = engine.full_state_dict()
        for number, dtype in enumerate(DTYPES):
            is_quantized = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
            for name in (f"frozen.{number}", f"buffer{number}"):
                cast = dtype.is_floating_point and not is_quantized
                assert state[name].dtype is (torch.bfloat16 if cast else dtype), (stage, name)
                assert not is_quantized or bytes_of(state[name]) == {1}


def test_mixed_precision_leaves_quantized_weights_of_eight_bits_as_they_are() -> None:
    run_ranks(1, mix)
