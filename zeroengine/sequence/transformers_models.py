"""Sequence parallelism for models of transformers, whose code stays as it is.

Their attention asks a registry for its kernel by the name that their configuration has. Here that name becomes that
of a function which exchanges heads, runs the kernel that was there, and exchanges again. Another registry makes masks
by the same names, and here makes those of the whole sequence. The loss function of a model is an attribute, and becomes
the mean over all parts.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroengine.errors import ZeroEngineError
from zeroengine.runtime.uncopied_hook import UncopiedHook
from zeroengine.sequence.group import SequenceGroup
from zeroengine.sequence.mean_loss import mean_of_group
from zeroengine.sequence.sequence_parallel import gather_heads, scatter_heads

# Engines of one process register functions under names of their own.
_numbers = itertools.count()
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
        connection = _Connection(inner, group)
        connection.register(undo)
        hook = UncopiedHook(connection.begin_forward)
        undo.callback(inner.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if any(not getattr(module, "is_causal", True) for module in inner.modules()):
            group.is_bidirectional = True
        if hasattr(type(inner), "loss_function"):
            replace_attribute(inner, "_loss_function", _UncopiedLoss(_loss_of_group, group, inner.loss_function), undo)


def replace_attribute(module: object, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute of ``module`` itself until ``undo`` is closed. The attributes of its class stay."""
    previous = vars(module).get(name)
    undo.callback(vars(module).pop if previous is None else partial(setattr, module), name, previous)
    setattr(module, name, value)


class _Connection:
    """One model's kernels and masks.

    Args:
        model: The model.
        group: The ranks that share each sample.
    """

    def __init__(self, model: nn.Module, group: SequenceGroup) -> None:
        self._group, self._number = group, next(_numbers)
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        # The number of the document of each token of the whole sequence, [batch, tokens], in the forward in progress.
        # None: one document.
        self._documents: Tensor | None = None

    def register(self, undo: ExitStack) -> None:
        """Register a function for each kernel that the configurations of the model's modules name."""
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        found = [getattr(module, "config", None) for module in self._names]
        configs: dict[int, Any] = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
        # Setting the kernel of a configuration sets those of the configurations in it, too.
        kernels = [(config, config._attn_implementation) for config in configs.values()]
        for config, kernel in kernels:
            undo.callback(setattr, config, "_attn_implementation", kernel)
        for config, kernel in kernels:
            if kernel is None:
                continue
            name = _KernelName(f"zeroengine-{self._number}-{kernel}")
            name.kernel = kernel
            functions = {AttentionInterface: partial(self._attend, kernel)}
            if kernel in AttentionMaskInterface._global_mapping:
                functions[AttentionMaskInterface] = partial(self._make_mask, kernel)
            for interface, function in functions.items():
                interface.register(name, function)
                undo.callback(interface._global_mapping.pop, name, None)
            config._attn_implementation = name

    # -- the forward of the model -----------------------------------------------------------------

    def begin_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Find the documents that the whole sequence is packed from. A hook before the forward of the model."""
        self._documents = None
        if not self._group.exchanges:
            return None
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            raise ZeroEngineError(
                "past_key_values with sequence_parallel_size: keys of earlier tokens are not in parts. Leave them out "
                "in training, and generate inside `with zeroengine.sequence_parallel.whole_sequences():`."
            )
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() > 2:
            raise ZeroEngineError(
                f"attention_mask has {mask.dim()} dimensions, and a rank has a part of the tokens: pass a mask of "
                "[batch, tokens], or position_ids that begin at 0 in each document, and masks are made of them"
            )
        # As in transformers itself, a mask says all, and documents are found in positions where there is none.
        if mask is not None or positions is None or positions.dim() != 2:
            return None
        whole = self._whole(positions)
        begins_document = F.pad(whole.diff(dim=1) != 1, (1, 0))
        if not begins_document.any():
            return None
        self._documents = begins_document.cumsum(1)
        # A mask keeps the model from looking for documents in the positions of this part.
        return args, {**kwargs, "attention_mask": torch.ones_like(positions, device=whole.device)}

    def _whole(self, part: Tensor) -> Tensor:
        """Return [batch, tokens] of the whole sequence."""
        return self._group.all_gather(part, "inputs").transpose(0, 1).flatten(1)

    # -- masks ------------------------------------------------------------------------------------

    def _make_mask(self, kernel: str, **options: Any) -> Any:
        """Make the kernel's mask of the whole sequence, as transformers makes it. See ``create_causal_mask`` there."""
        from transformers.masking_utils import AttentionMaskInterface, and_masks, packed_sequence_mask_function

        if self._group.exchanges:
            length, mask, by_vmap = options["q_length"], options.get("attention_mask"), options.get("use_vmap")
            if length != options["kv_length"] or by_vmap:
                what = "makes masks by a function of its own" if by_vmap else "attends to other tokens than its own"
                raise ZeroEngineError(f"this model {what}{NO_PARTS}")
            options["q_length"] = options["kv_length"] = length * self._group.size
            if self._documents is not None:
                is_in_document = packed_sequence_mask_function(self._documents)
                options["mask_function"] = and_masks(options["mask_function"], is_in_document)
                options |= {"attention_mask": None, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            elif mask is not None:
                options["attention_mask"] = self._whole(mask.to(torch.uint8)).bool()
        return AttentionMaskInterface._global_mapping[kernel](**options)

    # -- attention --------------------------------------------------------------------------------

    def _attend(
        self, kernel: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        compute, group = _kernel(kernel, module), self._group
        if not group.exchanges:
            return compute(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
        name = self._names.get(module, type(module).__name__)
        _check_call(name, query, key, options)
        if "flash" in kernel and options.get("position_ids") is not None:
            # These kernels find packed documents in the positions.
            options["position_ids"] = self._whole(options["position_ids"])
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
    """The name that a kernel is registered by here. In a copy of the configuration it is the kernel's own."""

    kernel: str

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
