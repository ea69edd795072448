"""Tiles in models of transformers, of which no class and no code is changed.

[Note: Lazy logits]
While the model trains, its output embedding returns logits that nothing computes: a tensor of their shape that refers
to the hidden states, and notes what models do to logits before the loss (factors, soft caps). The loss function of the
model, which is an attribute, passes both and the weight to ``tiled_loss``. Any other use is an error: it would take the
memory that tiles save, and after a forward the weight may be released. Code that asks no torch function finds NaN.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zeroengine.config.tiling import Tiling
from zeroengine.errors import ConfigError, ZeroEngineError
from zeroengine.runtime.released_parameter import METADATA, is_tracing
from zeroengine.sequence.tiled_loss import tiled_loss
from zeroengine.sequence.tiled_mlp import tiled_mlp
from zeroengine.sequence.transformers_models import replace_attribute
from zeroengine.utils.compiler_disable import disable_compile
from zeroengine.utils.torch_internals import BACKWARD_HOOKS, DisableTorchFunctionSubclass

# What lazy logits follow, if it is done with numbers.
_STEPS = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "tanh", "float")
# What the engine asks of an output, to follow the graph behind it.
_NAMES = ("requires_grad", "grad_fn", "is_leaf", BACKWARD_HOOKS)
_GRAPH = {torch.Tensor.register_hook, *(getattr(torch.Tensor, name).__get__ for name in _NAMES)}


def tile_model(model: nn.Module, tiling: Tiling, undo: ExitStack) -> None:
    """Let ``model``, or the model that it wraps, compute its loss and its MLPs in tiles, as ``tiling`` says.

    Args:
        model: The model.
        tiling: What to tile.
        undo: Gets the calls that make the model ordinary again.

    Raises:
        ConfigError: The model has not the parts that transformers' models have.
    """
    if tiling.mlp:
        lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
        children = (child for layers in lists for layer in layers for child in layer.named_children())
        mlps = dict.fromkeys(module for name, module in children if name in ("mlp", "feed_forward"))
        # Other arguments may be of other tokens, and what models collect of a router is of all tokens at once.
        if not mlps or any(hasattr(x, "experts") or len(inspect.signature(x.forward).parameters) > 1 for x in mlps):
            need = "layers with an mlp or feed_forward that takes the hidden states alone, and no mixture of experts"
            raise _error("mlp", need, model, sorted({type(mlp).__name__ for mlp in mlps}))
        for mlp in mlps:
            # A partial of a method is copied with its module, so a copy of the model calls its own modules.
            replace_attribute(mlp, "forward", partial(tiled_mlp, mlp.forward), undo)
    if tiling.loss:
        causal: Any = next((part for part in model.modules() if hasattr(type(part), "get_output_embeddings")), None)
        head, loss = causal and causal.get_output_embeddings(), getattr(causal, "loss_function", None)
        if type(head) is not nn.Linear or getattr(loss, "__name__", None) != "ForCausalLMLoss":
            need = "a model of transformers with an nn.Linear as output embedding and the loss ForCausalLMLoss"
            raise _error("loss", need, model, [type(head).__name__, getattr(loss, "__name__", loss)])
        replace_attribute(head, "forward", partial(_lazy_forward, head.forward), undo)
        tiled: Any = update_wrapper(partial(_tiled_causal_loss, loss), loss)  # type: ignore[arg-type]
        replace_attribute(causal, "_loss_function", tiled, undo)


def _error(key: str, need: str, model: nn.Module, found: object) -> ConfigError:
    what = f"tiling.{key} needs {need}; found {found} in {type(model).__name__}."
    return ConfigError(f"{what} Write false, and call zeroengine.tiled_{key}() in the forward of the model.")


class LazyLogits(torch.Tensor):
    """Logits that are not computed. See "Lazy logits".

    Attributes:
        source: The output embedding, its input, and what was done to the logits: functions and their other arguments.
    """

    source: Any

    @classmethod
    @disable_compile
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function that needs no values, or note one that models apply to logits.

        Raises:
            ZeroEngineError: The function needs values.
        """
        logits, kwargs, name = args[0] if args else None, kwargs or {}, getattr(func, "__name__", "")
        if isinstance(logits, LazyLogits):
            head, hidden, steps = logits.source
            if func in METADATA or func in _GRAPH or is_tracing():
                with DisableTorchFunctionSubclass():
                    return func(hidden if func in _GRAPH else logits, *args[1:], **kwargs)
            if name in _STEPS and not kwargs and all(type(number) in (int, float) for number in args[1:]):
                return _lazy(head, hidden, torch.float32 if name == "float" else logits.dtype, *steps, (func, args[1:]))
        raise ZeroEngineError(f'`{name}` needs logits, which "tiling": {{"loss": true}} does not compute: write false')


def _lazy(head: nn.Linear, hidden: torch.Tensor, dtype: torch.dtype, *steps: tuple[Any, Any]) -> LazyLogits:
    logits = torch.full((), torch.nan, dtype=dtype, device=hidden.device).expand(*hidden.shape[:-1], head.out_features)
    lazy = logits.as_subclass(LazyLogits)
    lazy.source = head, hidden, steps
    return lazy


def _run(steps: Any, logits: torch.Tensor) -> torch.Tensor:
    for func, numbers in steps:
        logits = func(logits, *numbers)
    return logits


@disable_compile
def _lazy_forward(forward: Any, hidden: torch.Tensor) -> torch.Tensor:
    if not (forward.__self__.training and torch.is_grad_enabled()):
        return forward(hidden)  # type: ignore[no-any-return]
    # This node has the place in the graph that the logits would have, so a backward comes to the head.
    return _lazy(forward.__self__, hidden.view_as(hidden), hidden.dtype)


@disable_compile
def _tiled_causal_loss(original: Any, logits: Any, labels: Any = None, *rest: Any, **named: Any) -> Any:
    """Compute the loss as transformers' ``ForCausalLMLoss`` does, in tiles if the logits are lazy."""
    if not isinstance(logits, LazyLogits) or len(rest) > 1:
        return original(logits, labels, *rest, **named)
    (head, hidden, steps), ignored = logits.source, named.get("ignore_index", -100)
    shifted, count = named.get("shift_labels"), named.get("num_items_in_batch")
    shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shifted is None else shifted
    options: Any = {"bias": head.bias, "ignore_index": ignored, "transform": partial(_run, steps)}
    # Where ranks share a sample, ``transformers_models`` gives a count, and takes the mean over all of them.
    count = (shifted != ignored).sum().clamp(min=1) if count is None else count
    total = tiled_loss(hidden, head.weight, shifted, **options, reduction="sum")
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)
