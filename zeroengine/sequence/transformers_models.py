"""Sequence parallelism for models of transformers, whose code stays as it is.

Their attention asks a registry for its kernel by the name that their configuration has. Here that name becomes that
of a function which exchanges heads, runs the kernel that was there, and exchanges again. Another registry makes masks
by the same names, and here makes those of the whole sequence. The loss function of a model is an attribute, and becomes
the mean over all parts.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.sequence.batches import tokens_of
from zeroengine.sequence.group import SequenceGroup, group_of_module
from zeroengine.sequence.mean_loss import mean_of_group
from zeroengine.sequence.sequence_parallel import gather_heads, scatter_heads

# The groups of the models whose forwards are in progress, the innermost last.
_in_forward: list[SequenceGroup] = []
# Loss functions of transformers that are sums over tokens. The first shifts labels, unless it is given shifted ones.
CAUSAL_LOSS = "ForCausalLMLoss"
TOKEN_LOSSES = (CAUSAL_LOSS, "ForMaskedLMLoss", "ForTokenClassification")
# What a kernel may be given for each head, or for each pair of tokens, and would need whole.
PER_HEAD_OPTIONS = ("position_bias", "s_aux")
NO_PARTS = ', which sequence_parallel_size cannot divide into parts: write "sequence_parallel_size": 1'


def outermost_models(model: nn.Module) -> list[nn.Module]:
    """Return the models of transformers in ``model`` that are in no other one."""
    is_model = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if is_model is None:
        return []
    if isinstance(model, is_model):
        return [model]
    return [inner for child in model.children() for inner in outermost_models(child)]


def connect(model: nn.Module, group: SequenceGroup, undo: ExitStack) -> None:
    """Let the models of transformers in ``model`` compute with parts of sequences.

    Args:
        model: The model, or what wraps it.
        group: The ranks that share each sample.
        undo: Connects them to their own kernels and loss functions again.
    """
    for inner in outermost_models(model):
        _name_kernels(inner, undo)
        begin, end = UncopiedHook(partial(_begin_forward, group)), UncopiedHook(partial(_end_forward, group))
        undo.callback(inner.register_forward_pre_hook(begin, with_kwargs=True).remove)
        undo.callback(inner.register_forward_hook(end, always_call=True).remove)
        if any(not getattr(module, "is_causal", True) for module in inner.modules()):
            group.is_bidirectional = True
        if hasattr(type(inner), "loss_function"):
            replace_attribute(inner, "_loss_function", _UncopiedLoss(_loss_of_group, group, inner.loss_function), undo)


def replace_attribute(module: object, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute of ``module`` itself until ``undo`` is closed. The attributes of its class stay."""
    previous = vars(module).get(name)
    undo.callback(vars(module).pop if previous is None else partial(setattr, module), name, previous)
    setattr(module, name, value)


def _name_kernels(model: nn.Module, undo: ExitStack) -> None:
    """Give the kernels that the configurations of the model's modules name the names of functions from here.

    Other models may have the same configurations. Therefore the functions ask which model they compute for, and a
    configuration names its own kernel again when the last of its models does.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    found = [getattr(module, "config", None) for module in model.modules()]
    configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    # Setting the kernel of a configuration sets those of the configurations in it, too.
    kernels = [(config, config._attn_implementation) for config in configs.values()]
    names = [(config, _KernelName.of(kernel)) for config, kernel in kernels if kernel is not None]
    for config, name in names:
        AttentionInterface.register(name, partial(_attend, name.kernel))
        if name.kernel in AttentionMaskInterface._global_mapping:
            AttentionMaskInterface.register(name, partial(_make_mask, name.kernel))
        config._attn_implementation = name
        name.num_models += 1
    undo.callback(_restore_kernels, names)


def _restore_kernels(names: list[tuple[Any, _KernelName]]) -> None:
    for config, name in names:
        name.num_models -= 1
        if not name.num_models:
            config._attn_implementation = name.kernel


# -- the forward of a model -----------------------------------------------------------------------


def _begin_forward(
    group: SequenceGroup, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Find the documents that the whole sequence is packed from. A hook before the forward of the model."""
    _in_forward.append(group)
    group.documents = None
    if not group.exchanges:
        return None
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ZeroEngineError(
            "past_key_values with sequence_parallel_size: keys of earlier tokens are not in parts. Leave them out "
            "in training, and generate inside `with zeroengine.sequence_parallel.whole_sequences():`."
        )
    positions, mask, facts = kwargs.get("position_ids"), kwargs.get("attention_mask"), group.facts
    # The batch was cut for another engine, whose tokens attend to no later ones.
    if mask is None and group.is_bidirectional and facts.padding and facts.group() is not group:
        tokens = tokens_of({**dict(enumerate(args)), **kwargs})
        places = torch.arange(tokens.shape[1], device=tokens.device) + group.position * tokens.shape[1]
        mask = (places < group.size * tokens.shape[1] - facts.padding).long().expand(tokens.shape[:2])
        return args, {**kwargs, "attention_mask": mask}
    if isinstance(mask, Tensor) and mask.dim() > 2:
        raise ZeroEngineError(
            f"attention_mask has {mask.dim()} dimensions, and a rank has a part of the tokens: pass a mask of "
            "[batch, tokens], or position_ids that begin at 0 in each document, and masks are made of them"
        )
    # As in transformers itself, a mask says all, and documents are found in positions where there is none.
    if mask is not None or positions is None or positions.dim() != 2:
        return None
    whole = _whole(group, positions)
    begins_document = F.pad(whole.diff(dim=1) != 1, (1, 0))
    if not begins_document.any():
        return None
    group.documents = begins_document.cumsum(1)
    # A mask keeps the model from looking for documents in the positions of this part.
    return args, {**kwargs, "attention_mask": torch.ones_like(positions, device=whole.device)}


def _end_forward(group: SequenceGroup, *_: Any) -> None:
    # A forward inside this one may have ended without this hook, and this one may have failed before the other hook.
    while group in _in_forward and _in_forward.pop() is not group:
        pass


def _whole(group: SequenceGroup, part: Tensor) -> Tensor:
    """Return [batch, tokens] of the whole sequence."""
    return group.all_gather(part, "inputs").transpose(0, 1).flatten(1)


# -- masks ----------------------------------------------------------------------------------------


def _make_mask(kernel: str, **options: Any) -> Any:
    """Make the kernel's mask of the whole sequence, as transformers makes it. See ``create_causal_mask`` there."""
    from transformers.masking_utils import AttentionMaskInterface, and_masks, packed_sequence_mask_function

    group = _in_forward[-1] if _in_forward else None
    if group is not None and group.exchanges:
        length, mask, by_vmap = options["q_length"], options.get("attention_mask"), options.get("use_vmap")
        if length != options["kv_length"] or by_vmap:
            what = "makes masks by a function of its own" if by_vmap else "attends to other tokens than its own"
            raise ZeroEngineError(f"this model {what}{NO_PARTS}")
        options["q_length"] = options["kv_length"] = length * group.size
        if group.documents is not None:
            is_in_document = packed_sequence_mask_function(group.documents)
            options["mask_function"] = and_masks(options["mask_function"], is_in_document)
            options |= {"attention_mask": None, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        elif mask is not None:
            options["attention_mask"] = _whole(group, mask.to(torch.uint8)).bool()
    return AttentionMaskInterface._global_mapping[kernel](**options)


# -- attention ------------------------------------------------------------------------------------


def _attend(
    kernel: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    compute, group = _kernel(kernel, module), group_of_module(module)
    if group is None or not group.exchanges:
        return compute(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
    name = group.modules[module]
    _check_call(name, query, key, options)
    if "flash" in kernel and options.get("position_ids") is not None:
        # These kernels find packed documents in the positions.
        options["position_ids"] = _whole(group, options["position_ids"])
    own_query, own_key, own_value = scatter_heads(group, query, key, value, name)
    num_groups = own_query.shape[1] // own_key.shape[1]
    if getattr(module, "num_key_value_groups", num_groups) != num_groups:
        module = _AttentionView(module, num_groups)
    attended, _ = compute(module, own_query, own_key, own_value, mask, **options)
    return gather_heads(group, attended.transpose(1, 2), name).transpose(1, 2), None


def _kernel(kernel: str, module: nn.Module) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Each file of models has its own eager kernel, which is in no registry.
    file = sys.modules[type(module).__module__]
    eager: Any = getattr(file, "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager)  # type: ignore[no-any-return]


def _check_call(name: str, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
    if query.shape[2] != key.shape[2]:
        lengths = f"from {query.shape[2]} tokens to {key.shape[2]}"
        raise ZeroEngineError(f"{name} attends {lengths}, as cross-attention does{NO_PARTS}")
    needed = [option for option in PER_HEAD_OPTIONS if options.get(option) is not None]
    if needed:
        raise ZeroEngineError(f"{name} gives its kernel {needed[0]} of all heads{NO_PARTS}")


class _AttentionView:
    """A module of attention as its kernel sees it, with another number of query heads for each key head."""

    def __init__(self, module: nn.Module, num_key_value_groups: int) -> None:
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _UncopiedLoss(partial[Tensor]):
    """``_loss_of_group`` of a group and a loss function. In a copy of the model it is that loss function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, self.args[1:]


class _KernelName(str):
    """The name that a kernel is registered by here. In a copy of the configuration it is the kernel's own.

    Attributes:
        kernel: The kernel's own name.
        num_models: The number of models that are connected by it.
    """

    kernel: str
    num_models = 0

    @staticmethod
    def of(kernel: str) -> _KernelName:
        """Return the name, with which a configuration is still connected if another model has it."""
        name = kernel if isinstance(kernel, _KernelName) else _KernelName(f"zeroengine-{kernel}")
        name.kernel = getattr(kernel, "kernel", kernel)
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.kernel,)


def _loss_of_group(group: SequenceGroup, compute: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the mean of a loss function of transformers over the tokens of all parts."""
    if not (group.exchanges and group.averages_losses):
        return compute(*args, **kwargs)
    name = getattr(compute, "__name__", type(compute).__name__)
    labels = args[1] if len(args) > 1 else kwargs.get("labels")
    if name not in TOKEN_LOSSES:
        raise ZeroEngineError(
            f"the model's loss function, {name}, is no sum over tokens that sequence_parallel_size could divide. "
            "Compute the loss outside of the model, with zeroengine.mean_loss."
        )
    if name == CAUSAL_LOSS:
        labels = kwargs.get("shift_labels")
        if labels is None:
            raise ZeroEngineError(
                "the model was given labels without shift_labels: the label of the last token of a part belongs to the "
                "next part. Pass the batch through zeroengine.shard_sequence, which adds them."
            )
    num_items = kwargs.pop("num_items_in_batch", None)
    total = compute(*args, num_items_in_batch=1, **kwargs)
    count = (labels != kwargs.get("ignore_index", -100)).sum() if num_items is None else num_items / group.size
    return mean_of_group(group, total, count)
