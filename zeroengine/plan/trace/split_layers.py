"""Let a traced model compute with one rank's slices of layers and experts, without other ranks.

[Note: What a slice computes]
The replica has the slices of rank 0 as its parameters, and no process group. A layer that is split by what it returns
gives its part to the next one, which gives terms of a sum in the shape of the whole. So the trace sees what a rank
computes and holds. Where ranks exchange activations, hooks count the bytes, and give results the shape that all ranks
make together. Of experts each token's results are sent to its rank as by transformers' ``AllToAllEP``; every rank is
taken to get as many tokens as it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from zeroengine.engine.parallelize import split_on_meta
from zeroengine.errors import ZeroEngineError
from zeroengine.partition.slices import SLICE_ATTRIBUTE, make_slice, slice_of
from zeroengine.plan.trace.meta_copy import copy_to_meta
from zeroengine.plan.trace.model_facts import LayerSplit, ModelFacts
from zeroengine.plan.trace.operation_trace import OperationTrace
from zeroengine.plan.trace.standard_decoder import StandardDecoder
from zeroengine.runtime.dtensors import dtensors_in, of_experts

# Styles of layers that return this rank's part. All others that are split by what they return gather it.
RETURN_PARTS = ("colwise", "packed_colwise")


def split_facts(
    facts: ModelFacts, size: int, expert_size: int, num_ranks: int, plan: Mapping[str, Any] | None
) -> ModelFacts:
    """Return the facts of a model that is split, of which each parameter has note of its slice on rank 0.

    Args:
        facts: The whole model.
        size: The ranks that layers are split over.
        expert_size: The ranks that experts are split over.
        num_ranks: All ranks.
        plan: See ``zeroengine.parallelize``.

    Raises:
        ZeroEngineError: The model cannot be split so.
    """
    if size == expert_size == 1:
        return facts
    if isinstance(facts.model, StandardDecoder) and plan is None and expert_size == 1:
        plan, heads = StandardDecoder.PLAN, facts.model.kv_heads
        if heads % size:
            raise ZeroEngineError(
                f"{facts.name} has {heads} heads of keys and values, which cannot be split over {size} ranks: write a "
                "number of ranks that divides it"
            )
    # A replica without values cannot compute with DTensors, so the model itself stays whole.
    split, model = copy_to_meta(facts.model), copy_to_meta(facts.model)
    styles = split_on_meta(split, plan, size, expert_size, num_ranks)
    params = dict(model.named_parameters())
    for name, param in dtensors_in(split):
        expert_ranks = num_ranks // expert_size if of_experts(param.device_mesh) else 0
        params[name].__dict__[SLICE_ATTRIBUTE] = make_slice(name, param, 0, expert_ranks)
    return replace(facts, model=model, split=LayerSplit(size, expert_size, styles))


class SliceExchange:
    """Counts what a rank exchanges with those that have the other slices of a model.

    Attributes:
        summed_bytes: Of the tensors that the ranks of a model group sum. One that they gather counts as half, because
            a sum is a reduce-scatter and a gather.
        num_sums: How many these are.
        sent_bytes: That leave the rank for the experts of others, or go back.
    """

    def __init__(self, trace: OperationTrace, split: LayerSplit) -> None:
        self._trace, self._split = trace, split
        self.summed_bytes = self.num_sums = self.sent_bytes = 0

    def connect(self, name: str, module: nn.Module, replica: nn.Module) -> None:
        """Let one module of the replica do what it does in a split model.

        Args:
            name: The name of the module.
            module: That of the model, whose parameters have notes of their slices.
            replica: That of the replica.
        """
        style, is_embedding = self._split.styles.get(name), isinstance(module, nn.Embedding)
        part = slice_of(module.weight) if isinstance(module, (nn.Linear, nn.Embedding)) else None
        # The rows of an embedding are what it takes.
        returns_part = part is not None and part.dim == int(is_embedding)
        if style == "ep_dispatch_experts":
            replica.num_experts = cast(Any, module).num_experts // self._split.expert_size
            replica.forward = partial(self._send_to_experts, replica.forward)
        if style == "moe_tp_experts" or (returns_part and not is_embedding):
            replica.register_forward_pre_hook(lambda _, args: self._sum_gradients(*args))
        if part is not None and returns_part:
            width = part.shape[int(is_embedding)]
            if isinstance(style, str) and style not in RETURN_PARTS:
                replica.register_forward_hook(lambda _, args, output: self._gather(output, -1, width))
        elif style in ("moe_tp_experts", "all_reduce") or (part is not None and not part.is_whole):
            replica.register_forward_hook(lambda _, args, output: self._sum(output))
            if isinstance(replica, nn.Embedding):
                # It may be that of another rank's row.
                replica.padding_idx = None
            elif part is not None:
                replica.register_forward_pre_hook(lambda _, args: self._take_part(args[0], -1, part.local_shape[-1]))

    def _sum(self, tensor: torch.Tensor, share: float = 1.0) -> None:
        self.num_sums += self._trace.weight
        self.summed_bytes += int(self._trace.weight * share * tensor.nbytes)

    def _sum_gradients(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._sum)

    def _gather(self, tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Return the whole of which ``tensor`` is this rank's part."""
        missing = size - tensor.shape[dim]
        padded = F.pad(tensor, (0, missing) if dim == -1 else (0, 0, 0, missing))
        self._sum(padded, 0.5)
        return padded

    def _take_part(self, tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Return this rank's part, whose gradient is gathered if ``tensor`` is the whole."""
        if tensor.shape[dim] == size:
            return tensor
        if tensor.requires_grad:
            tensor.register_hook(partial(self._sum, share=0.5))
        return tensor.narrow(dim, 0, size)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what other ranks send in exchange for ``tensor``, with a gradient that goes the other way."""

        def count_sent(sent: torch.Tensor) -> None:
            ranks = self._split.expert_size
            self.sent_bytes += self._trace.weight * sent.nbytes * (ranks - 1) // ranks

        count_sent(tensor)
        received = tensor.clone()
        if received.requires_grad:
            received.register_hook(count_sent)
        return received

    def _send_to_experts(
        self, experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts' results of tokens, as ``AllToAllEP`` of transformers does.

        Args:
            experts: The forward of this rank's experts.
            hidden: The tokens, of the shape tokens, width.
            index: The experts of each token, of the shape tokens, experts of a token.
            weights: Their weights, of the same shape.
        """
        num_tokens = hidden.shape[0]
        if self._split.size > 1:
            # The ranks of a model group have the same tokens, and each sends some of them.
            own = -(-num_tokens // self._split.size)
            hidden, weights = (self._take_part(tensor, 0, own) for tensor in (hidden, weights))
            index = index.narrow(0, 0, own)
        received = self._send(hidden.repeat_interleave(index.shape[-1], 0))
        one_expert = index.reshape(-1, 1)
        results = self._send(experts(received, one_expert, torch.ones_like(one_expert, dtype=received.dtype)))
        output = (results.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
        return output if self._split.size == 1 else self._gather(output, 0, num_tokens)
