"""The exchanges of ranks that share samples, against slices of whole tensors."""

from __future__ import annotations

import torch

import zeroengine
from tests.distributed.models import build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.sequence.models import CausalLM
from zeroengine.sequence.sequence_parallel import gather_heads, scatter_heads

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def exchange(transport: str) -> None:
    """Check scattered and gathered heads on this rank, at two degrees."""
    rank = start()
    for degree in (2, 4):
        settings = config(1, sequence_parallel_size=degree, comm={"transport": transport})
        engine = zeroengine.initialize(build(CausalLM), config=settings)
        group = engine.sequence_group
        assert (group.ranks, group.position) == (
            tuple(range(rank // degree * degree, rank // degree * degree + degree)),
            rank % degree,
        )
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(group.number)
            # Query, key and value, of other numbers and sizes of heads, [batch, heads, tokens, head size].
            whole = [
                torch.randn(2, heads, 3 * degree, size, generator=generator).to(dtype).requires_grad_()
                for heads, size in ((8, 5), (2, 5), (2, 3))
            ]
            parts = [x.chunk(degree, 2)[group.position].detach().requires_grad_() for x in whole]
            scattered = scatter_heads(group, *parts, "test")
            repeats = max(1, degree // 2)
            expected = [whole[0], *(x.repeat_interleave(repeats, dim=1) for x in whole[1:])]
            own_heads = [x.chunk(degree, 1)[group.position] for x in expected]
            for found, own in zip(scattered, own_heads, strict=True):
                assert torch.equal(found, own), (degree, dtype)
            gathered = [gather_heads(group, x, "test") for x in scattered]
            for found, x in zip(gathered, expected, strict=True):
                assert torch.equal(found, x.chunk(degree, 2)[group.position]), (degree, dtype)
            # The gradient of a sum with weights, which differ from token to token and from head to head.
            weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in expected]
            sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()  # type: ignore[union-attr]
            own_weights = [w.chunk(degree, 1)[group.position] for w in weights]
            sum((x * w).sum() for x, w in zip(scattered, own_weights, strict=True)).backward()  # type: ignore[union-attr]
            for found, x in zip(parts, whole, strict=True):
                assert found.grad is not None and x.grad is not None
                assert torch.equal(found.grad, x.grad.chunk(degree, 2)[group.position]), (degree, dtype)
        engine.close()


def test_exchanges_move_heads_and_gradients_to_their_places() -> None:
    run_ranks(4, exchange, "shm")


def test_gloo_exchanges_the_same() -> None:
    run_ranks(4, exchange, "gloo")
