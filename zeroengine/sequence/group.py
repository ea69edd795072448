"""The ranks that share a sample, each of which holds a part of its tokens: sequence parallelism.

[Note: Exchange]
Between attention, a rank has all heads of its own tokens. An all-to-all gives it all tokens of its own heads, and one
more brings the result back: DeepSpeed-Ulysses (arXiv 2309.14509, section 3). Each of the two is the adjoint of the
other. What is sent is laid out token by token, so what arrives is one tensor of all tokens without a further copy.
"""

from __future__ import annotations

import gc
import math
import sys
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn

from zeroengine.comm.buffer_pool import send_memory
from zeroengine.comm.interfaces import Slices, Transport
from zeroengine.errors import ZeroEngineError
from zeroengine.monitor.timer import Timer
from zeroengine.partition.degrees import ranks_of_level
from zeroengine.sequence.agreement import Fact, RankComparison
from zeroengine.utils.compiler_disable import disable_compile, hidden_from_activation_checkpoint
from zeroengine.utils.formats import round_up

# The groups of all engines, by what ends each engine. Hooks of a model may keep its group when its engine is gone.
# A group has the engine's transport, which is to be freed together with the engine.
_groups: weakref.WeakKeyDictionary[ExitStack, weakref.ref[SequenceGroup]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class BatchFacts:
    """Has the facts of a batch that its parts do not show.

    Attributes:
        group: Refers to the ranks that it was cut for.
        padding: The number of tokens that were put behind each sequence.
        has_added_positions: Whether its tokens were numbered.
        notes: What the ranks compare.
    """

    group: weakref.ref[SequenceGroup]
    padding: int = 0
    has_added_positions: bool = False
    notes: Mapping[Fact, torch.Tensor | None] = field(default_factory=dict)


class SequenceGroup:
    """This rank's group: as many consecutive ranks as the degree, which share each sample.

    Args:
        model: The model of the engine.
        transport: Moves bytes between the ranks that the states are partitioned over.
        reader: The number of this rank among those that read samples, of which a model group is one; and their number.
        comparison: Compares what the ranks of a group must have alike. It knows their number, the degree.
        timer: Times the exchanges.
        undo: Lets functions without an engine find this group no more.

    Attributes:
        size: The degree. 1: every rank has samples of its own.
        ranks: The ranks of the group.
        position: The place of this rank among them, which is that of its part of a sample.
        number: The number of the group among all groups, which is that of its samples.
        num_groups: The number of groups.
        comparison: See above.
        is_bidirectional: Whether tokens attend to later ones, so that padding must be masked.
        facts: Those of the batch whose forward is in progress, or was the last one, or that was cut since then.
        modules: The modules of the model, and their names.
        documents: The number of the document of each token of the whole sequence, [batch, tokens], in the forward in
            progress of a model of transformers. None: one document.
        send_memory: What exchanges are sent from.
        averages_losses: Whether the loss function of a model of transformers returns the mean over all parts. False:
            the mean over the part of this rank, as scripts for DeepSpeed expect it.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        reader: tuple[int, int],
        comparison: RankComparison,
        timer: Timer,
        undo: ExitStack,
    ) -> None:
        size, (rank, num_readers) = comparison.group_size, reader
        self.size, self.position, self.number, self.num_groups = size, rank % size, rank // size, num_readers // size
        self.ranks = ranks_of_level(transport.rank, 1, size)
        self.is_bidirectional, self._has_whole_sequences = False, False
        self.facts, self.documents = BatchFacts(weakref.ref(self)), cast("torch.Tensor | None", None)
        self.modules = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self.comparison, self._transport, self._timer = comparison, transport, timer
        self.send_memory, self._sent_bytes = send_memory(transport, transport.exchange), 0
        self.averages_losses = True
        _groups[undo] = weakref.ref(self)
        undo.callback(_groups.pop, undo, None)

    @property
    def exchanges(self) -> bool:
        """Whether this rank has a part of each sequence, and not the whole."""
        return self.size > 1 and not self._has_whole_sequences

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Let forwards inside the ``with`` take whole sequences, as if every rank had samples of its own."""
        previous, self._has_whole_sequences = self._has_whole_sequences, True
        try:
            yield
        finally:
            self._has_whole_sequences = previous

    def take(self, facts: BatchFacts) -> None:
        """Take the facts of a batch, and let the ranks compare them."""
        self.facts = facts
        for fact, value in facts.notes.items():
            self.comparison.note(fact, value)

    @disable_compile
    def all_gather(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """Return the tensors of all ranks of the group, stacked in the order of ranks. A collective of the group.

        Args:
            values: Of one shape and dtype on all of these ranks.
            label: Names the collective.

        Returns:
            On the device that the model computes on.
        """
        # Each rank gets all bytes.
        piece = values.detach().to(self.comparison.device).reshape(-1).view(torch.uint8).expand(self.size, 1, -1)
        (received,) = self._exchange([piece], label)
        return received.view(values.dtype).view(self.size, *values.shape)

    def scatter_heads(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Return all tokens of this rank's heads. A collective of the group.

        Args:
            tensors: All heads of this rank's tokens, of one dtype: [batch, heads, tokens / degree, head size].
            label: Names the collective.

        Returns:
            Views of one buffer: [batch, heads / degree, tokens, head size].
        """
        pieces = [tensor.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4) for tensor in tensors]
        return [part.flatten(0, 1).permute(1, 2, 0, 3) for part in self._exchange(pieces, label)]

    def gather_heads(self, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Return all heads of this rank's tokens: the reverse of ``scatter_heads``, and its adjoint.

        Args:
            tensors: All tokens of this rank's heads, of one dtype: [batch, heads / degree, tokens, head size].
            label: Names the collective.

        Returns:
            New tensors, [batch, heads, tokens / degree, head size], in the memory order of
            [batch, tokens / degree, heads, head size].
        """
        pieces = [tensor.unflatten(2, (self.size, -1)).permute(2, 3, 0, 1, 4) for tensor in tensors]
        gathered = []
        for part in self._exchange(pieces, label):
            of_tokens = part.permute(2, 1, 0, 3, 4)
            gathered.append(self._empty(part.dtype, of_tokens.shape).copy_(of_tokens).flatten(2, 3).transpose(1, 2))
        return gathered

    def _empty(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        # On a CPU such memory lies in huge pages. Small pages, which come anew with each tensor, would take longer than
        # the copy.
        return self._transport.buffer(math.prod(shape), dtype, copied=True).tensor.view(shape)

    def _exchange(self, pieces: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """Give each rank its pieces, and order the current stream behind their arrival.

        Args:
            pieces: Tensors of one dtype, whose first dimension is the rank that gets the piece, and the second one that
                of tokens.
            label: Names the collective.

        Returns:
            Views of one buffer, of the same shapes, whose first dimension is the rank that sent the piece.
        """
        size, length, dtype = self.size, pieces[0].shape[1], pieces[0].dtype
        shapes = [piece.shape[2:] for piece in pieces]
        widths = [math.prod(shape) for shape in shapes]
        received = self._empty(dtype, (size, length, sum(widths)))
        nbytes = received.nbytes
        with hidden_from_activation_checkpoint(), torch.no_grad(), self._timer.span("exchange", label="exchange"):
            if self._transport.keeps_memory:
                # One size serves all exchanges and lengths. It grows in few steps, because this memory stays.
                self._sent_bytes = max(self._sent_bytes, round_up(nbytes, 1 << max(12, nbytes.bit_length() - 3)))
            memory = self.send_memory.take(self._sent_bytes or nbytes)
            sent = memory[:nbytes].view(dtype)
            for piece, target in zip(pieces, sent.view(received.shape).split(widths, dim=-1), strict=True):
                target.unflatten(-1, piece.shape[2:]).copy_(piece)
            work = self._transport.exchange.all_to_all(received.view(-1), sent, label, Slices(self.ranks))
            self._timer.count("exchange", nbytes * (size - 1) // size)
            self.send_memory.put_back(memory, work)
            work.wait_stream()
        columns = received.split(widths, dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(columns, shapes, strict=True)]


class HasSequenceGroup(Protocol):
    """An engine, as functions that take one see it."""

    @property
    def sequence_group(self) -> SequenceGroup:
        """The ranks that share each sample with this one."""


def groups_of(engine: HasSequenceGroup | None) -> list[SequenceGroup]:
    """Return the group of ``engine``, or those of all engines of this process."""
    if engine is not None:
        return [engine.sequence_group]
    return [group for reference in _groups.values() if (group := reference()) is not None]


def group_for(engine: HasSequenceGroup | None) -> SequenceGroup | None:
    """Return the group with which a function without access to a model shares each sample.

    Args:
        engine: The engine. None: the one whose model calls the function, or else the only one of this process.

    Returns:
        None if this rank has whole sequences: there is no engine, ``sequence_parallel_size`` is 1, or the function was
        called inside ``whole_sequences``.

    Raises:
        ZeroEngineError: There are several engines, none of their models calls, and the caller named none.
    """
    groups = groups_of(engine)
    if len(groups) > 1 and any(group.exchanges for group in groups):
        groups = _groups_of_caller()
    return groups[0] if groups and groups[0].exchanges else None


@disable_compile
def group_of_module(module: Any) -> SequenceGroup | None:
    """Return the group of the engine whose model has a module. None: there is none, or several, or it is no module."""
    owners = [group for group in groups_of(None) if isinstance(module, nn.Module) and module in group.modules]
    # Models may share modules without parameters.
    return owners[0] if len(owners) == 1 else None


@disable_compile
def _groups_of_caller() -> list[SequenceGroup]:
    """Return the group of the engine whose model calls, or that of the only engine, in a list.

    The calls in progress say which model calls, because an activation checkpoint runs a part of it again in backward.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if (group := group_of_module(frame.f_locals.get("self"))) is not None:
            return [group]
    # An engine that nothing refers to may have been left to the garbage collector.
    gc.collect()
    groups = groups_of(None)
    if len(groups) > 1:
        raise ZeroEngineError(
            f"this process has engines whose sequence_parallel_size is {' and '.join(str(x.size) for x in groups)}: "
            "say which one is meant, with engine=engine. Only what the model of an engine calls finds it by itself."
        )
    return groups
