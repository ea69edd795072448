"""Refuses a model that mixes tokens elsewhere than in an attention which exchanges heads.

A convolution, a state-space layer, pooling, or an attention of the model's own would see a part of the tokens, and
train something else without a word. So the first forward of training computes a short sequence twice, whole and in
parts, and compares what each module returns.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroengine.errors import DivergenceError, ZeroEngineError
from zeroengine.runtime.input_digest import digest_inputs
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.sequence.agreement import SEED_ALIKE
from zeroengine.sequence.batches import WHOLE_KEYS, take_facts
from zeroengine.sequence.group import SequenceGroup
from zeroengine.sequence.transformers_models import outermost_models
from zeroengine.utils.tensors import map_tensors, tensors_in
from zeroengine.utils.torch_internals import TorchDispatchMode

# The tokens of each rank's part of the short sequence.
NUM_TOKENS = 8
# The largest difference between the two forwards, relative to the largest value.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 0.1

LABEL = "check of the model"
REMEDY = (
    "Only attention may mix tokens, through transformers' attention interface or "
    "zeroengine.sequence_parallel.attention. A convolution, a state-space layer, pooling, an attention of its own, or "
    "a model that counts positions, shifts labels or takes the mean of its loss itself does so, too. Pass position_ids "
    "and shift_labels, as zeroengine.shard_sequence does, and take means with zeroengine.mean_loss; otherwise write "
    '"sequence_parallel_size": 1.'
)
# What each call of a module has returned, by the module's name and the number of the call.
_Outputs = dict[tuple[str, int], list[torch.Tensor]]


def install(model: nn.Module, group: SequenceGroup, undo: ExitStack) -> None:
    """Let forwards of ``model`` take the facts of their batches, and check the first one of training.

    In all forwards of training, what the ranks must draw alike is noted.

    Args:
        model: The model of the engine.
        group: The ranks that share each sample.
        undo: Removes the check.
    """
    devices: set[torch.device] | None = None

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal devices
        # A shallow copy of the model has the same hooks.
        if module is not model or not group.exchanges:
            return
        facts = take_facts(group, (args, kwargs))
        if module.training and torch.is_grad_enabled():
            is_first = devices is None
            devices = check_model(model, group, args, kwargs) if devices is None else devices
            # The short sequence has no padding, so the check took other facts.
            group.facts = facts
            for device in devices:
                state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
                group.comparison.note("random states", digest_inputs(state, group.comparison.device))
                # Ranks that decide differently may wait for each other in the forward that follows.
                if is_first and len(group.all_gather(state, LABEL).unique(dim=0)) > 1:
                    raise DivergenceError(
                        f"ranks {group.ranks[0]} to {group.ranks[-1]} share each sample: {SEED_ALIKE}."
                    )

    handle = model.register_forward_pre_hook(UncopiedHook(check), with_kwargs=True, prepend=True)
    undo.callback(handle.remove)


@torch.no_grad()
def check_model(model: nn.Module, group: SequenceGroup, args: Any, kwargs: Any) -> set[torch.device]:
    """Compare the forwards of a short sequence, whole and in parts. A collective of the group.

    Args:
        model: The model.
        group: The ranks that share each sample.
        args: The positional inputs of the model on this rank, whose tokens are those of its part.
        kwargs: Its other inputs.

    Returns:
        The devices on which the model draws random numbers for whole samples, as where layers are dropped at random.

    Raises:
        ZeroEngineError: A module returns other values in parts. Names the first one.
    """
    # A cache would be filled, and is refused by the forward itself unless it is empty.
    inputs = (args, {name: x for name, x in kwargs.items() if not name.startswith((*WHOLE_KEYS, "past_key_values"))})
    num_tokens = next((tensor.shape[1] for tensor in tensors_in(inputs) if tensor.dim() > 1), 0)
    length = min(NUM_TOKENS, num_tokens)
    # The tensors of the short sequence that have one value, or several, for each token.
    of_tokens: list[torch.Tensor] = []

    def shorten(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != num_tokens:
            return tensor
        of_tokens.append(group.all_gather(tensor[:1, :length], LABEL).transpose(0, 1).flatten(1, 2))
        return of_tokens[-1]

    whole = map_tensors(shorten, inputs)
    if not of_tokens:
        return set()
    # Contiguous positions are those of one document, and nothing is masked.
    for name, value in whole[1].items():
        if name == "position_ids":
            value.copy_(torch.arange(length * group.size, device=value.device))
        elif name == "attention_mask" and isinstance(value, torch.Tensor):
            value.fill_(1)
    own = slice(group.position * length, (group.position + 1) * length)
    part = map_tensors(lambda tensor: tensor[:, own] if any(tensor is x for x in of_tokens) else tensor, whole)
    if group.facts.has_added_positions and outermost_models(model):
        # Without sequence parallelism the model would get no positions, and may count them in another way.
        whole = (whole[0], {name: value for name, value in whole[1].items() if name != "position_ids"})
    with torch.random.fork_rng(devices=[tensor.device for tensor in of_tokens if tensor.is_cuda]), ExitStack() as undo:
        # Otherwise short sequences and hooks would use up the compilations that a function may have.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for buffer in model.buffers():
            undo.callback(buffer.copy_, buffer.clone())
        with ExitStack() as evaluation:
            # Dropout draws other numbers for parts.
            for module in [module for module in model.modules() if module.training]:
                evaluation.callback(setattr, module, "training", True)
                module.training = False
            try:
                with group.whole_sequences():
                    expected, _ = _run(model, whole)
            except Exception:
                # If the parts are refused by name, that says more.
                _run(model, part)
                raise
            # Only one rank may fail. It calls nothing more, since its peers wait for it until it ends.
            try:
                found, _ = _run(model, part)
            except ZeroEngineError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ZeroEngineError(
                    f"{type(model).__name__} takes a whole sequence and no part of it ({error}), so it cannot train "
                    f"with sequence_parallel_size. {REMEDY}"
                ) from error
        _compare(expected, found, group)
        _, draws = _run(model, part)
        with group.whole_sequences():
            pairs = zip(draws, _run(model, whole)[1], strict=False)
    # What a token draws has the size of the tokens.
    return {drawn.device for drawn, other in pairs if drawn.shape == other.shape}


def _run(model: nn.Module, inputs: Any) -> tuple[_Outputs, list[torch.Tensor]]:
    """Run the model.

    Args:
        model: The model.
        inputs: The positional inputs, and the others by name.

    Returns:
        What each call of a module returns, in the order in which they end, and what random operations return.
    """

    outputs: _Outputs = {}
    num_calls: Counter[str] = Counter()
    draws: list[torch.Tensor] = []

    def observe(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name, num_calls[name]] = [x.detach().clone() for x in tensors_in(output) if x.is_floating_point()]
        num_calls[name] += 1

    class DrawRecorder(TorchDispatchMode):
        """Keeps the results of operations that draw random numbers."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags:
                draws.append(next(tensors_in(result)))
            return result

    # All ranks of the group decide alike.
    torch.manual_seed(0)
    with DrawRecorder(), ExitStack() as undo:  # type: ignore[no-untyped-call]
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(UncopiedHook(partial(observe, name))).remove)
        model(*inputs[0], **inputs[1])
    return outputs, draws


def _compare(whole: _Outputs, parts: _Outputs, group: SequenceGroup) -> None:
    # A loss of parts is a mean over ranks, unless it is that of a part.
    whole["", 0] = [value if value.dim() else value.view(1, 1) for value in whole["", 0]]
    parts["", 0] = [
        x if x.dim() or not group.averages_losses else group.all_gather(x, LABEL).mean().view(1, 1)
        for x in parts["", 0]
    ]
    places = (n for n, call in enumerate(parts) if not all(map(_has_rows, whole.get(call, ()), parts[call])))
    # The ranks of a group raise together: in a causal model the first one has no difference.
    first = int(group.all_gather(torch.tensor(next(places, len(parts))), LABEL).min())
    if first < len(parts):
        raise ZeroEngineError(
            f"{list(parts)[first][0] or 'the model'} returns other values for a part of a sequence than for the whole "
            f"sequence, so it would train wrongly with sequence_parallel_size. {REMEDY}"
        )


def _has_rows(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether each vector of ``part`` is in ``whole``, in any place.

    Experts of a mixture take the tokens that chose them, so neither shapes nor places need be the same.

    Args:
        whole: The output for the whole sequence, [..., features], or [..., features, tokens].
        part: The output for this rank's part of it. What has no vectors, or others, is not compared.
    """
    if min(whole.dim(), part.dim()) < 2 or not part.numel():
        return True
    if whole.shape[-1] != part.shape[-1]:
        whole, part = whole.mT, part.mT
    if whole.shape[-1] != part.shape[-1] or not whole.numel():
        return True
    rows, own = (tensor.reshape(-1, tensor.shape[-1]).nan_to_num().double() for tensor in (whole, part))
    distances = torch.cdist(own, rows, p=float("inf")).amin(1)
    return bool(distances.max() <= rows.abs().max() * TOLERANCE.get(whole.dtype, LOW_PRECISION_TOLERANCE) + 1e-7)
