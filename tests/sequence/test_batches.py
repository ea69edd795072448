"""Batches of whole sequences become parts that add up to them."""

from __future__ import annotations

from collections import UserDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from zeroengine import shard_sequence
from zeroengine.sequence.agreement import RankComparison
from zeroengine.sequence.batches import take_facts
from zeroengine.sequence.group import BatchFacts


class Group(SimpleNamespace):
    """The facts of a group, which may be referred to weakly."""

    def take(self, facts: BatchFacts) -> None:
        self.facts = facts


def parts(batch: Any, size: int = 4, *, bidirectional: bool = False) -> list[Any]:
    """Return the parts of all ranks of a group."""
    alone: Any = SimpleNamespace(has_peers=False)
    comparison = RankComparison(alone, torch.device("cpu"), size)
    shared: dict[str, Any] = {
        "size": size,
        "comparison": comparison,
        "is_bidirectional": bidirectional,
        "ranks": range(size),
        "averages_losses": True,
    }
    groups = [Group(position=position, exchanges=True, **shared) for position in range(size)]
    return [shard_sequence(batch, engine=SimpleNamespace(sequence_group=group)) for group in groups]


def whole(batch: Any, name: Any, **more: Any) -> torch.Tensor:
    return torch.cat([part[name] for part in parts(batch, **more)], dim=1)


IDS = torch.arange(20).view(2, 10)


def test_labels_are_shifted_before_the_cut_and_positions_are_added() -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    assert whole(batch, "input_ids")[:, :10].equal(IDS)
    assert whole(batch, "shift_labels")[:, :9].equal(IDS[:, 1:])
    assert (whole(batch, "shift_labels")[:, 9:] == -100).all() and (whole(batch, "labels")[:, 10:] == -100).all()
    assert whole(batch, "position_ids")[0].equal(torch.arange(12)), "padding is no document, so no mask is needed"
    assert "attention_mask" not in parts(batch)[0]
    assert whole(batch, "attention_mask", bidirectional=True)[0].tolist() == [1] * 10 + [0] * 2
    assert list(batch) == ["input_ids", "labels"], "the batch of the caller stays as it is"


def test_what_is_there_is_not_replaced() -> None:
    documents = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]).expand(2, -1)
    batch = {"input_ids": IDS, "position_ids": documents, "shift_labels": IDS + 1, "labels": None}
    assert whole(batch, "position_ids")[:, :10].equal(documents)
    assert whole(batch, "shift_labels")[:, :10].equal(IDS + 1)


def test_what_concerns_whole_samples_stays_whole() -> None:
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    batch = {"input_ids": IDS[:1], "labels": torch.tensor([1]), "cu_seq_lens_q": ends, "max_length_q": 7, "text": "a"}
    for part in parts(batch):
        assert part["labels"].equal(batch["labels"]) and "shift_labels" not in part
        assert part["cu_seq_lens_q"].tolist() == [0, 3, 10, 12], "padding is a document of its own"
        assert (part["max_length_q"], part["text"]) == (7, "a")
    assert parts(batch, size=2)[0]["cu_seq_lens_q"].equal(ends)
    two = {"input_ids": IDS, "labels": [{"boxes": IDS}], "cu_seqlens": torch.tensor([0, 3, 10, 15, 20])}
    assert parts(two)[0]["cu_seqlens"].tolist() == [0, 3, 10, 12, 17, 22, 24]


class Pair(NamedTuple):
    ids: torch.Tensor
    targets: torch.Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer returns, with attributes beside the items."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_batches_keep_their_type() -> None:
    for batch in ((IDS, IDS + 1), [IDS, IDS + 1], Pair(IDS, IDS + 1)):
        found = parts(batch, size=2)
        assert type(found[0]) is type(batch)
        assert torch.cat([part[1] for part in found], dim=1).equal(IDS + 1)
    assert torch.cat(parts(IDS, size=2), dim=1).equal(IDS)
    inside, labels = parts(({"input_ids": IDS}, IDS), size=2)[1]
    assert inside["input_ids"].equal(IDS[:, 5:]) and labels.equal(IDS[:, 5:])
    assert parts({"inputs": {"input_ids": IDS}}, size=2)[1]["inputs"]["input_ids"].equal(IDS[:, 5:])
    encoding = parts(Encoding({"input_ids": IDS}, "text"), size=2)[1]
    assert (type(encoding), encoding.encodings) == (Encoding, "text")
    assert encoding["input_ids"].equal(IDS[:, 5:])
    lists: Any = defaultdict(list, input_ids=IDS)
    assert parts(lists, size=2)[0]["nothing"] == []


def test_a_part_takes_the_facts_of_its_batch_to_the_engine_whose_forward_takes_it() -> None:
    comparison = RankComparison(SimpleNamespace(has_peers=False), torch.device("cpu"), 4)  # type: ignore[arg-type]
    engines: list[Any] = [
        SimpleNamespace(sequence_group=Group(size=4, position=0, exchanges=True, comparison=comparison, **more))
        for more in ({"is_bidirectional": False, "averages_losses": True}, {})
    ]
    group, other = (engine.sequence_group for engine in engines)
    padded, even = (shard_sequence({"input_ids": ids}, engine=engines[0]) for ids in (IDS, IDS[:, :8]))
    assert group.facts.padding == 0
    assert take_facts(group, padded).padding == group.facts.padding == 2
    other.facts = take_facts(group, even)
    assert take_facts(other, ((), padded)).padding == 2 and set(other.facts.notes) == {"batches"}
    # Inputs of unknown origin are no part of a batch that was cut for another engine.
    assert take_facts(other, {"input_ids": IDS}).padding == 0
