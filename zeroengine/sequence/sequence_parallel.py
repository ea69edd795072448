"""Attention over the whole sequence where each rank has a part of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zeroengine.errors import ZeroEngineError
from zeroengine.sequence.group import HasSequenceGroup, SequenceGroup, group_for, groups_of
from zeroengine.utils.compiler_disable import disable_compile


class _ExchangeHeads(torch.autograd.Function):
    """``SequenceGroup.scatter_heads`` or ``gather_heads``, each of which is the adjoint of the other."""

    @staticmethod
    def forward(ctx: Any, group: SequenceGroup, label: str, scatters: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reverse = group, label, not scatters
        return tuple((group.scatter_heads if scatters else group.gather_heads)(tensors, label))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_ExchangeHeads.apply(*ctx.reverse, *grads)  # type: ignore[no-untyped-call]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Callable[..., Tensor] | None = None,
    engine: HasSequenceGroup | None = None,
    name: str = "attention",
    **options: Any,
) -> Tensor:
    """Attend over all tokens of a sequence, of which each rank of the group has a part.

    It takes the place of the kernel in a model's own attention: an all-to-all gives each rank all tokens of a part of
    the heads, ``kernel`` computes their attention, and another all-to-all brings the result back
    (DeepSpeed-Ulysses, arXiv 2309.14509). With ``sequence_parallel_size`` of 1, or without an engine, it is the kernel.

    Args:
        query: [batch, heads, tokens of this rank, head size], whose positions are already encoded.
        key: [batch, key heads, tokens of this rank, head size]. The heads are those of ``query`` divided by a whole
            number. Where the ranks do not divide them, they are repeated before they travel.
        value: As ``key``; the head size may differ.
        kernel: Takes query, key, value and ``options``, and returns [batch, heads, tokens, head size of ``value``].
            None: ``torch.nn.functional.scaled_dot_product_attention``.
        engine: The engine whose ranks share the sample. None: the one whose model calls this, or the only one.
        name: Names the exchange in messages and records.
        options: For the kernel, such as ``is_causal=True``. They concern the whole sequence: a mask has all tokens.

    Returns:
        [batch, heads, tokens of this rank, head size of ``value``].

    Raises:
        ZeroEngineError: The ranks do not divide the heads.
    """
    group = group_for(engine)
    compute: Callable[..., Tensor] = F.scaled_dot_product_attention if kernel is None else kernel
    if group is not None:
        padding = group.facts.padding
        if kernel is None and padding and not options.get("is_causal") and options.get("attn_mask") is None:
            raise ZeroEngineError(
                f"{name} attends to later tokens, and {padding} were put behind a sequence whose length the "
                f"{group.size} ranks do not divide: pass attn_mask, of all tokens, or sequences of other lengths"
            )
        query, key, value = scatter_heads(group, query, key, value, name)
    if kernel is None:
        options = {"enable_gqa": key.shape[1] != query.shape[1], **options}
    attended = compute(query, key, value, **options)
    return attended if group is None else gather_heads(group, attended, name)


@contextmanager
def whole_sequences(*, engine: HasSequenceGroup | None = None) -> Iterator[None]:
    """Let forwards inside the ``with`` take whole sequences, such as to generate, or to evaluate short samples.

    Each rank then has samples of its own, as with ``sequence_parallel_size`` of 1. Use it for forwards without a
    backward.

    Args:
        engine: The engine. None: all engines of this process.
    """
    with ExitStack() as stack:
        for group in groups_of(engine):
            stack.enter_context(group.whole_sequences())
        yield


@disable_compile
def scatter_heads(group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor, name: str) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's heads, each [batch, heads / degree, tokens, head size]. A collective.

    Args:
        group: The ranks.
        query: [batch, heads, tokens / degree, head size].
        key: Fewer heads, perhaps.
        value: As many heads as ``key``.
        name: The name of the attention.
    """
    num_heads, num_key_heads, size = query.shape[1], key.shape[1], group.size
    if num_heads % num_key_heads:
        raise ZeroEngineError(f"{name} has {num_heads} heads of queries, which {num_key_heads} of keys do not divide")
    if num_heads % size:
        fitting = [number for number in range(2, num_heads + 1) if num_heads % number == 0]
        raise ZeroEngineError(
            f"{name} has {num_heads} heads, and sequence_parallel_size is {size}: each rank takes equally many heads. "
            f"Write a size that divides them: {', '.join(map(str, fitting)) or '1'}."
        )
    if num_key_heads % size:
        # The heads of keys are repeated as rarely as possible, so that those of the queries of a rank are its own. The
        # new number divides that of queries, as the number of keys and that of ranks do.
        repeats = math.lcm(num_key_heads, size) // num_key_heads
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return _ExchangeHeads.apply(group, name, True, query, key, value)  # type: ignore[no-untyped-call, no-any-return]


@disable_compile
def gather_heads(group: SequenceGroup, attended: Tensor, name: str) -> Tensor:
    """Return all heads of this rank's tokens, [batch, heads, tokens / degree, head size]. A collective.

    Args:
        group: The ranks.
        attended: [batch, heads / degree, tokens, head size].
        name: The name of the attention.
    """
    return _ExchangeHeads.apply(group, name, False, attended)[0]  # type: ignore[no-untyped-call, no-any-return]
