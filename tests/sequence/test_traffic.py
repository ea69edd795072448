"""What an exchange sends, counted with torch's `fake` process group."""

from __future__ import annotations

from unittest import mock

import torch

import zeroengine
from tests.distributed.fake_group import init_fake_group
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.sequence.models import CausalLM
from zeroengine.comm.transports.nccl import NCCLChannel
from zeroengine.sequence.sequence_parallel import attention


def sizes(world_size: int, degree: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of ranks of each exchange of one attention, forward and backward."""
    init_fake_group(world_size)
    settings = config(1, sequence_parallel_size=degree)
    engine = zeroengine.initialize(build(CausalLM), config=settings)
    seen: list[tuple[int, int]] = []
    channel = engine.sequence_group._transport.exchange
    real = type(channel).all_to_all

    def all_to_all(self: NCCLChannel, received: torch.Tensor, sent: torch.Tensor, label: str, slices: object) -> object:
        seen.append((sent.nbytes, len(engine.sequence_group.ranks)))
        return real(self, received, sent, label, slices)  # type: ignore[arg-type]

    with mock.patch.object(type(channel), "all_to_all", all_to_all):
        query = torch.randn(1, 16, 6, 8, requires_grad=True)
        key, value = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(2))
        attention(query, key, value, is_causal=True, engine=engine).sum().backward()
    return seen


def test_an_attention_exchanges_its_heads_twice_forward_and_twice_backward_among_the_degree() -> None:
    element = 4
    query, key = 16 * 6 * 8 * element, 4 * 6 * 8 * element
    for degree, repeats in ((2, 1), (4, 1), (8, 2)):
        forward, back = query + 2 * repeats * key, query
        (found,) = run_ranks(1, sizes, 64, degree)
        assert found == [(forward, degree), (back, degree), (back, degree), (forward, degree)], degree
