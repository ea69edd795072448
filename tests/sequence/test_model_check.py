"""The first forward refuses models that mix tokens elsewhere than in attention, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zeroengine
from tests.distributed.models import VOCAB, WIDTH, build, config
from tests.distributed.ranks import RankFailed, run_ranks
from tests.distributed.training import start
from tests.sequence.models import Attention, CausalLM, sample

Tensors = tuple[torch.Tensor, ...]


class Net(nn.Module):
    """Embeds tokens, mixes them, and returns scores of the next ones."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.tokens, self.mixer, self.head = nn.Embedding(VOCAB, WIDTH), mixer, nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixer(self.tokens(input_ids)))


class Convolution(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, size, padding=size - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x.mT)[..., : x.shape[1]].mT


class Pooling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.cells(x)[0]
        return output


class OwnAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.scaled_dot_product_attention(x, x, x)


class OwnPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions(torch.arange(x.shape[1]))


class WholeMask(nn.Module):
    """Has the size of a whole sequence, and would fail on a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.ones(1, 16, 1, dtype=torch.bool) & (x < 0), 0.0)


class Experts(nn.Module):
    """Each token goes through one of the experts, some of which may get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 5), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice, output = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                output[choice == number] = expert(x[choice == number])
        return x + output


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "mixer.convolution": lambda: Convolution(3),
    "mixer": Pooling,
    "mixer.cells": Recurrence,
    "mixer ": OwnAttention,
    "mixer  ": OwnPositions,
    "Net takes a whole sequence and no part of it": WholeMask,
}
ACCEPTED: list[Callable[[], nn.Module]] = [lambda: Convolution(1), Experts, Attention, nn.Identity]


class FailsOnOneRank(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 8 and torch.distributed.get_rank():
            raise ValueError("no part")
        return x


def first_forward(mixer: Callable[[], nn.Module]) -> str:
    engine = zeroengine.initialize(build(lambda: Net(mixer())), config=config(3, sequence_parallel_size=2))
    ids, _ = sample(0, 0)
    try:
        engine(**zeroengine.shard_sequence({"input_ids": ids[:, :16]})).sum()
        return ""
    except zeroengine.ZeroEngineError as error:
        return str(error)
    finally:
        engine.close()


def check_models() -> tuple[dict[str, str], list[str]]:
    start()
    refused = {name: first_forward(mixer) for name, mixer in REFUSED.items()}
    return refused, [first_forward(mixer) for mixer in ACCEPTED]


def test_models_that_mix_tokens_elsewhere_are_refused_by_name_on_all_ranks() -> None:
    for refused, accepted in run_ranks(2, check_models):
        for name, message in refused.items():
            assert message.startswith(name.strip()), (name, message)
            assert 'otherwise write "sequence_parallel_size": 1' in message
        assert accepted == [""] * len(ACCEPTED)


def fail_on_one_rank() -> None:
    start()
    engine = zeroengine.initialize(build(lambda: Net(FailsOnOneRank())), config=config(3, sequence_parallel_size=2))
    engine(**zeroengine.shard_sequence({"input_ids": sample(0, 0)[0][:, :16]}))


def test_a_part_that_fails_on_one_rank_ends_all_ranks() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, fail_on_one_rank)
    # Nobody has waited for the time-out.
    assert "rank 1 has ended" in failed.value.failures[0][1]
    assert "no part of it (no part)" in failed.value.failures[1][1]


class RandomDepth(CausalLM):
    """Skips the second block for some samples."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        def skip(module: nn.Module, args: Tensors, output: torch.Tensor) -> torch.Tensor:
            kept = torch.rand(output.shape[0], 1, 1) < 0.5 if module.training else 1
            return args[0] + kept * (output - args[0])

        with self.blocks[1].register_forward_hook(skip):
            return super().forward(*args, **kwargs)


class LayerDrop(CausalLM):
    """Leaves the second block out at random, with its exchanges."""

    def __init__(self) -> None:
        super().__init__(lambda block, x: x if block.training and torch.rand(()) < 0.5 else block(x))


class Dropout(CausalLM):
    """Draws numbers for each token, which parts may draw on their own."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        def drop(module: nn.Module, args: Tensors, output: torch.Tensor) -> torch.Tensor:
            return F.dropout(output, 0.1, module.training)

        with self.tokens.register_forward_hook(drop):
            return super().forward(*args, **kwargs)


def train_with_seeds() -> list[str]:
    messages = []
    rank = start()
    for factory, seed in ((RandomDepth, 0), (RandomDepth, rank), (LayerDrop, 5), (LayerDrop, rank), (Dropout, rank)):
        engine = zeroengine.initialize(build(factory), config=config(3, sequence_parallel_size=2))
        torch.manual_seed(seed)
        try:
            for step in range(2):
                ids, labels = sample(step, 0)
                engine.backward(engine(**zeroengine.shard_sequence({"input_ids": ids, "labels": labels})))
                engine.step()
            messages.append("")
        except zeroengine.ZeroEngineError as error:
            messages.append(str(error))
        engine.close()
    return messages


def test_decisions_for_whole_samples_need_the_same_seed_in_a_group_and_dropout_does_not() -> None:
    for alike, different, layers_alike, layers_different, dropout in run_ranks(2, train_with_seeds):
        assert (alike, layers_alike, dropout) == ("", "", "")
        for message in (different, layers_different):
            assert "torch.manual_seed(seed + engine.sample_group)" in message
