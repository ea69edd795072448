"""Finding and replacing tensors in whatever a module takes or returns."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from zeroengine.utils.tensors import map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = None


LEAVES = st.one_of(st.builds(lambda: torch.zeros(1)), st.none(), st.integers(), st.text(max_size=2), st.booleans())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.UserDict),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner, inner),
    ),
    max_leaves=12,
)


def shape(tree: Any) -> Any:
    """What a tree is but for its tensors."""
    if isinstance(tree, torch.Tensor):
        return "tensor"
    if isinstance(tree, collections.abc.Mapping):
        return type(tree), [(key, shape(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [shape(value) for value in tree]
    if isinstance(tree, Frozen):
        return Frozen, shape(tree.value), shape(tree.other)
    return tree


@given(TREES)
def test_mapping_replaces_every_tensor_and_nothing_else(tree: Any) -> None:
    before, found = shape(tree), list(tensors_in(tree))
    mapped = map_tensors(lambda t: t + 1, tree)
    assert shape(mapped) == shape(tree) == before
    assert [t.item() for t in tensors_in(mapped)] == [1.0] * len(found)
    assert all(t.item() == 0.0 for t in found)


@given(TREES)
def test_a_container_in_which_nothing_changes_is_not_copied(tree: Any) -> None:
    both = [tree, torch.zeros(1)]
    mapped = map_tensors(lambda t: t + 1 if t is both[1] else t, both)
    assert mapped is not both and mapped[0] is tree and mapped[1].item() == 1.0


def test_a_packed_sequence_keeps_its_batch_sizes() -> None:
    packed = pack_sequence([torch.zeros(2), torch.zeros(3)], enforce_sorted=False)
    mapped = map_tensors(lambda t: t.to("meta"), packed)
    assert isinstance(mapped, PackedSequence)
    assert [t.device.type for t in mapped] == ["meta", "cpu", "meta", "meta"], "torch takes them on the CPU alone"
