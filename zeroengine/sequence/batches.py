"""Cuts a batch of whole sequences into the parts of the ranks that share it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.input_digest import digest_inputs
from zeroengine.sequence.agreement import Fact
from zeroengine.sequence.group import BatchFacts, HasSequenceGroup, SequenceGroup, group_for
from zeroengine.utils.tensors import map_tensors, tensors_in

IGNORE_INDEX = -100
# What is put behind a sequence whose length the ranks do not divide. Everything else is filled up with zeros.
PADDING: dict[Any, int] = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
# Tensors that name the beginnings of packed documents in the whole sequence.
WHOLE_KEYS = ("cu_seq_lens", "cu_seqlens", "max_length")
# The facts of the batches whose parts are alive, by the tensors of these parts.
_facts_of = WeakTensorKeyDictionary()


def shard_sequence(batch: Any, *, engine: HasSequenceGroup | None = None) -> Any:
    """Return the part of a batch that belongs to this rank, where ranks share each sample.

    All ranks of a group pass the same batch, which ``engine.dataloader`` gives them. Its tensors are cut along their
    second dimension, [batch, tokens, ...], after these have been added to a mapping:

    - ``position_ids``, so that each part knows where it begins.
    - ``shift_labels``, from ``labels``: for each token the label of the next one, which may belong to the next part.
    - Padding, where the ranks do not divide the length: zeros, and -100 as labels. A model in which tokens attend to
      later ones gets an ``attention_mask`` that leaves the padding out.

    Tensors of other lengths stay whole, and so do ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``max_length_*``, which
    concern the whole sequence. With ``sequence_parallel_size`` of 1, or without an engine, the batch is returned as it
    is.

    Args:
        batch: A mapping of tensors by the names of the model's arguments, of which ``input_ids``, ``inputs_embeds`` or
            the first one has the length of the sequence; or a tensor, or tensors in nested containers, which are cut
            and not shifted.
        engine: The engine whose ranks share the batch. None: the only one of this process.

    Raises:
        ZeroEngineError: The sequence has fewer tokens than there are ranks, or there is no tensor of tokens, or the
            process has several engines, and none is given.
    """
    group = group_for(engine)
    if group is None:
        return batch
    is_mapping = isinstance(batch, Mapping)
    items = dict(batch) if is_mapping else {0: batch}
    tokens = tokens_of(items)
    length = tokens.shape[1]
    if length < group.size:
        raise ZeroEngineError(
            f"shard_sequence(): a sequence of {length} tokens has less than one for each of the {group.size} ranks "
            "that share it (sequence_parallel_size). Leave such short sequences out, or put several into one."
        )
    notes: dict[Fact, torch.Tensor | None] = {"batches": digest_inputs(items, group.comparison.device)}
    # What belongs to tokens in a container of their own is there, too.
    is_named = is_mapping and any(value is tokens for value in items.values())
    has_added_positions = is_named and items.get("position_ids") is None
    if is_named:
        _add_positions_and_labels(items, tokens, group)
    padding = -length % group.size

    def part_of(name: Any, value: torch.Tensor) -> torch.Tensor:
        if padding and isinstance(name, str) and name.startswith(WHOLE_KEYS[:2]) and value.dim() == 1:
            # The samples lie behind one another, and the padding of each is a document of its own.
            ends = torch.arange(1, len(tokens) + 1, dtype=value.dtype, device=value.device) * (length + padding)
            return torch.cat([value + (value - 1).clamp(min=0) // length * padding, ends]).sort().values
        is_whole = isinstance(name, str) and name.startswith(WHOLE_KEYS)
        if is_whole or value.dim() < 2 or value.shape[1] != length:
            return value
        filler = value.new_full((value.shape[0], padding, *value.shape[2:]), PADDING.get(name, 0))
        if name == "position_ids" and has_added_positions:
            # Positions that go on belong to the same document, so attention needs no mask.
            filler += torch.arange(length, length + padding, device=value.device)
        value = torch.cat([value, filler], dim=1) if padding else value
        parts.append(value.chunk(group.size, dim=1)[group.position].contiguous())
        return parts[-1]

    parts: list[torch.Tensor] = []
    part = {name: map_tensors(partial(part_of, name), value) for name, value in items.items()}
    labels = part.get("shift_labels", part.get("labels"))
    if isinstance(labels, torch.Tensor) and group.averages_losses:
        notes["labels"] = (labels != IGNORE_INDEX).sum()
    facts = BatchFacts(weakref.ref(group), padding, has_added_positions, notes)
    _facts_of.update(dict.fromkeys(parts, facts))
    group.take(facts)
    if is_mapping:
        # A copy keeps the type and the attributes, whatever its constructor takes.
        result = copy.copy(batch)
        for name, value in part.items():
            result[name] = value
        return result
    return part[0]


def take_facts(group: SequenceGroup, inputs: Any) -> BatchFacts:
    """Let the forward of a model take the facts of the batch that its inputs are the part of, and return them.

    Inputs that are no longer the tensors that were cut count as the part of the batch that was last cut for ``group``.

    Args:
        group: The ranks that share the samples of the model.
        inputs: Tensors in nested containers.
    """
    own = group.facts if group.facts.group() is group else BatchFacts(weakref.ref(group))
    group.facts = next(filter(None, map(_facts_of.get, tensors_in(inputs))), own)
    if group.facts.group() is not group:
        group.take(group.facts)
    return group.facts


def tokens_of(items: Mapping[Any, Any]) -> torch.Tensor:
    """Return the tensor of [batch, tokens, ...] among the arguments of a model."""
    named = [items[name] for name in ("input_ids", "inputs_embeds") if name in items]
    tensors = [value for value in tensors_in((named, items)) if value.dim() > 1]
    if not tensors:
        raise ZeroEngineError(
            "shard_sequence() takes tensors of [batch, tokens, ...], and found none. Pass the batch as the model takes "
            'it, such as {"input_ids": ..., "labels": ...}.'
        )
    return tensors[0]


def _add_positions_and_labels(items: dict[Any, Any], tokens: torch.Tensor, group: SequenceGroup) -> None:
    length = tokens.shape[1]
    if items.get("position_ids") is None:
        items["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1)
    labels = items.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == tokens.shape[:2] and items.get("shift_labels") is None:
        items["shift_labels"] = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    if length % group.size and group.is_bidirectional and "attention_mask" not in items:
        items["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
