"""Refuses a model that mixes tokens elsewhere than in an attention which exchanges heads.

A convolution, a state-space layer, pooling, or an attention of the model's own would see a part of the tokens, and
train something else without a word. So the first forward of training computes a short sequence twice, whole and in
parts, and compares what each module returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.sequence.batches import WHOLE_KEYS
from zeroengine.sequence.group import SequenceGroup
from zeroengine.utils.tensor_tree import map_tensors, tensors_in

# The tokens of each rank's part of the short sequence.
NUM_TOKENS = 8
# The largest difference between the two forwards, relative to the largest value.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1


class _Output(NamedTuple):
    name: str
    values: list[torch.Tensor]


def install(model: nn.Module, group: SequenceGroup, undo: ExitStack) -> None:
    """Check ``model`` in its first forward of training.

    Args:
        model: The model of the engine.
        group: The ranks that share each sample.
        undo: Removes the check, if there was no forward.
    """

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        # A shallow copy of the model has the same hooks.
        if module is model and group.exchanges and module.training and torch.is_grad_enabled():
            handle.remove()
            check_model(model, group, args, kwargs)

    handle = model.register_forward_pre_hook(UncopiedHook(check), with_kwargs=True, prepend=True)
    undo.callback(handle.remove)


@torch.no_grad()
def check_model(model: nn.Module, group: SequenceGroup, args: Any, kwargs: Any) -> None:
    """Compare the forwards of a short sequence, whole and in parts. A collective of the group.

    Args:
        model: The model.
        group: The ranks that share each sample.
        args: The positional inputs of the model on this rank, whose tokens are those of its part.
        kwargs: Its other inputs.

    Raises:
        ZeroEngineError: A module returns other values in parts. Names the first one.
    """
    inputs = (args, {name: value for name, value in kwargs.items() if not name.startswith(WHOLE_KEYS)})
    num_tokens = next((tensor.shape[1] for tensor in tensors_in(inputs) if tensor.dim() > 1), 0)
    length = min(NUM_TOKENS, num_tokens)
    # The tensors of the short sequence that have one value, or several, for each token.
    of_tokens: list[torch.Tensor] = []

    def shorten(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != num_tokens:
            return tensor
        of_tokens.append(group.all_gather(tensor[:1, :length], "check of the model").transpose(0, 1).flatten(1, 2))
        return of_tokens[-1]

    whole = map_tensors(shorten, inputs)
    if not of_tokens:
        return
    # Contiguous positions are those of one document, and nothing is masked.
    for name, value in whole[1].items():
        if name == "position_ids":
            value.copy_(torch.arange(length * group.size, device=value.device))
        elif name == "attention_mask" and isinstance(value, torch.Tensor):
            value.fill_(1)
    own = slice(group.position * length, (group.position + 1) * length)
    part = map_tensors(lambda tensor: tensor[:, own] if any(tensor is x for x in of_tokens) else tensor, whole)
    devices = {tensor.device for tensor in of_tokens if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), _evaluating(model):
        with group.whole_sequences():
            expected = _outputs(model, group, whole, own)
        found = _outputs(model, group, part, None)
    _compare(expected, found, group)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, which draws other numbers for parts."""
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def _outputs(model: nn.Module, group: SequenceGroup, inputs: Any, own: slice | None) -> list[_Output]:
    """Run the model, and return this rank's tokens of what each module returns, in the order in which they end.

    Args:
        model: The model.
        group: The ranks that share each sample.
        inputs: The positional inputs, and the others by name.
        own: The tokens of this rank, where the inputs are those of the whole sequence. None: they are its part.
    """
    outputs: list[_Output] = []
    length = None if own is None else (own.stop - own.start) * group.size

    def part_of(value: torch.Tensor) -> torch.Tensor:
        if own is None:
            # A loss of parts is a mean over ranks.
            return value if value.dim() else group.all_gather(value, "check of the model").mean()
        dim = next((dim for dim, size in enumerate(value.shape) if size == length), None)
        return value if dim is None else value.narrow(dim, own.start, own.stop - own.start)

    def observe(name: str, module: nn.Module, args: Any, output: Any) -> None:
        values = [value.detach() for value in tensors_in(output) if value.is_floating_point()]
        outputs.append(_Output(name, [part_of(value).clone() for value in values]))

    args, kwargs = inputs
    with ExitStack() as undo:
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(UncopiedHook(partial(observe, name))).remove)
        model(*args, **kwargs)
    return outputs


def _compare(whole: list[_Output], parts: list[_Output], group: SequenceGroup) -> None:
    differing = (
        index
        for index, (expected, found) in enumerate(zip(whole, parts, strict=False))
        if expected.name != found.name or not _are_close(expected.values, found.values)
    )
    # The ranks of a group raise together: a rank whose tokens come first may find no difference.
    own = torch.tensor(next(differing, len(parts)))
    first = int(group.all_gather(own, "check of the model").min())
    if first < len(parts):
        name = parts[first].name or "the model"
        raise ZeroEngineError(
            f"{name} returns other values for a part of a sequence than for the whole sequence, so it would train "
            "wrongly with sequence_parallel_size. Only attention may mix tokens, through transformers' attention "
            "interface or zeroengine.sequence_parallel.attention; a convolution, a state-space layer, pooling, or a "
            "model that counts positions or shifts labels itself does so, too. Pass position_ids and shift_labels, as "
            'zeroengine.shard_sequence does; otherwise write "sequence_parallel_size": 1.'
        )


def _are_close(whole: list[torch.Tensor], parts: list[torch.Tensor]) -> bool:
    # Some kernels return the weights of the attention, which parts do not have.
    for expected, found in zip(whole, parts, strict=False):
        if expected.shape != found.shape:
            return False
        tolerance = TOLERANCE.get(found.dtype, LOW_PRECISION_TOLERANCE)
        largest = expected.abs().nan_to_num().max() if expected.numel() else torch.zeros(())
        if not torch.allclose(expected, found, rtol=0.0, atol=float(largest * tolerance) + 1e-7, equal_nan=True):
            return False
    return True
