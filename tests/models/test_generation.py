"""Generation between steps: loops of a different length on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import VOCAB, WIDTH, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import STAGES, Task, make_engine, start, take_steps
from tests.parametrization import TRANSPORTS, in_turn
from zeroengine import gathered

PRECISIONS = [pytest.param({}, id="fp32", marks=pytest.mark.slow), pytest.param({"bf16": {"enabled": True}}, id="bf16")]
END = 7


class Mixing(nn.Module):
    """A causal block: attention to what came before, with a cache of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        if cache is not None:
            key = cache["key"] = torch.cat([cache["key"], key], 1) if "key" in cache else key
            value = cache["value"] = torch.cat([cache["value"], value], 1) if "value" in cache else value
        causal = x.shape[1] == key.shape[1] and x.shape[1] > 1
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=causal))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, caches: Any = None) -> torch.Tensor:
        x = self.tok(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        logits = self.head(x).float()
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, limit: int) -> list[int]:
        """Greedily, until the end comes or the limit."""
        caches: list[dict[str, torch.Tensor]] = [{} for _ in self.blocks]
        found: list[int] = []
        while len(found) < limit and found[-1:] != [END]:
            logits = self(ids if not found else torch.tensor([found[-1:]]), caches=caches)
            found.append(int(logits[0, -1].argmax()))
        return found


def generate_between_steps(more: dict[str, Any]) -> list[list[int]]:
    rank = start()
    found = []
    for stage in STAGES:
        quiet, engine = (make_engine(Task(factory=Causal), stage, **more) for _ in range(2))
        expected = take_steps(quiet, range(4))
        losses = take_steps(engine, range(2))
        plain = build(Causal).to(next(engine.module.parameters()).dtype)
        plain.load_state_dict(engine.full_state_dict())
        engine.eval()
        with gathered(engine.module):
            for prompt in range(1 + 2 * rank):
                ids = batch(50 + prompt, rank, size=1)[0][:, : 3 + rank + prompt]
                found.append(engine.module.generate(ids, limit=4 + 5 * rank))
                assert found[-1] == plain.generate(ids, limit=4 + 5 * rank), stage
        engine.train()
        losses += take_steps(engine, range(2, 4))
        assert losses == expected, "generation changes nothing"
        assert quiet.global_steps == engine.global_steps == 4
        assert engine.memory().gathered == quiet.memory().gathered
        engine.close()
        quiet.close()
    return found


@in_turn(("precision", "transport"), PRECISIONS, TRANSPORTS)
def test_ranks_generate_as_much_as_they_like(precision: dict[str, Any], transport: str) -> None:
    ranks = run_ranks(2, generate_between_steps, precision | {"comm": {"transport": transport, "timeout_seconds": 20}})
    assert [len(found) for found in ranks] == [len(STAGES), 3 * len(STAGES)]
    assert ranks[0][:1] == ranks[0][-1:], "the same tokens at every stage"
