"""Divide a model between Muon and AdamW, for the type "Muon" of a configuration."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.caller_optimizer import add_param_group
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import plain_name
from zeroengine.partition.slices import whole_shape
from zeroengine.utils.formats import listed

# Parameters whose names contain one of these are embeddings or heads, as in DeepSpeed.
EMBEDDINGS = ("embed", "lm_head")
# So are parameters outside of numbered modules with one of these between the dots of their names.
HEADS = {"head", "heads", "classifier", "score"}
# The names that an error lists.
NUM_SHOWN = 8
_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "ns_dtype", "ns_method", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")
# The rates where a configuration has none, as in DeepSpeed.
MUON_LR, ADAM_LR = 0.02, 3e-4
# The modules of attention whose rows are heads, with the key of model.config that has their number.
_HEADS = dict.fromkeys(("q_proj", "query", "wq"), "num_attention_heads")
_HEADS |= dict.fromkeys(("k_proj", "key", "wk", "v_proj", "value", "wv"), "num_key_value_heads")


def build_muon(model: nn.Module, params: Sequence[Any], settings: Mapping[str, Any]) -> MixedOptimizer:
    """Return Muon over the hidden matrices of a model, and AdamW over its other parameters.

    Args:
        model: The model; its parameters may have no memory.
        params: The parameters to train, or groups of them, whose hyperparameters go before those of ``settings``.
        settings: The section ``optimizer.params``, see ``config.optimizers.MuonParams``.

    Raises:
        ZeroEngineError: No parameter is a hidden matrix, or a pattern matches no matrix, or the rows of a parameter do
            not divide into the matrices that it is said to hold.
    """
    groups = list(params) if params and isinstance(params[0], dict) else [{"params": list(params)}]
    wanted = {param for group in groups for param in group["params"]}
    named = {plain_name(name): param for name, param in model.named_parameters() if param in wanted}
    hidden = _hidden(model, named, settings["muon_params"])
    counts = _matrices_in(hidden, settings["matrices"], _heads_in(model, hidden) if settings["per_head_muon"] else {})
    count_of = {hidden[name]: count for name, count in counts.items()}
    muon_lr, adam_lr = (
        next(rate for rate in (settings[key], settings["lr"], default) if rate is not None)
        for key, default in (("muon_lr", MUON_LR), ("adam_lr", ADAM_LR))
    )
    matrices, others = [], []
    for group in groups:
        # These keys of a group are of AdamW.
        of_muon = {key: value for key, value in group.items() if key not in ("betas", "eps")}
        for count in sorted(set(counts.values())):
            part = [param for param in group["params"] if count_of.get(param) == count]
            matrices += [{**of_muon, "params": part, "num_matrices": count, "use_muon": True}] if part else []
        rest = [param for param in group["params"] if param not in count_of]
        others += [{**group, "params": rest, "use_muon": False}] if rest else []
    muon = Muon(matrices, lr=muon_lr, eps=settings["ns_eps"], **{name: settings[name] for name in _MUON})
    if not others:
        return MixedOptimizer([muon])
    base = torch.optim.AdamW if settings["adam_w_mode"] else torch.optim.Adam
    # A subclass has torch's undecorated ``add_param_group``, see there.
    adam = type(base.__name__, (base,), {"add_param_group": add_param_group})
    return MixedOptimizer([muon, adam(others, lr=adam_lr, **{name: settings[name] for name in _ADAM})])


def _hidden(
    model: nn.Module, named: Mapping[str, nn.Parameter], patterns: Sequence[str] | None
) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon updates, by name: by their attributes ``use_muon``, ``patterns`` or the rule."""
    matrices = {name: param for name, param in named.items() if param.ndim >= 2 and param.numel()}
    if patterns is None:
        tables = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        # A head that is not tied to the embedding has its shape.
        shapes = {param.shape for param in tables}
        hidden = {n: p for n, p in matrices.items() if not (p in set(tables) or p.shape in shapes or _is_outer(n))}
    else:
        hidden = {}
        for pattern in patterns:
            matching = _matching(matrices, pattern, "muon_params", "trainable parameter of two or more dimensions")
            hidden |= {name: matrices[name] for name in matching}
    # DeepSpeed's users mark parameters. Muon refuses a marked one that is no matrix.
    hidden = {name: param for name, param in named.items() if getattr(param, "use_muon", name in hidden)}
    if not hidden:
        raise ZeroEngineError(
            "optimizer: Muon finds no hidden matrix in the model, so AdamW would update everything. It takes trainable "
            "parameters of two or more dimensions that are no embedding and no head; here are "
            f'{listed(list(named), NUM_SHOWN)}. Write "type": "AdamW", or name matrices by "muon_params".'
        )
    return hidden


def _is_outer(name: str) -> bool:
    """Return whether the name is that of an embedding or a head."""
    parts = name.split(".")
    is_head = not HEADS.isdisjoint(parts) and not any(part.isdigit() for part in parts[:-1])
    return is_head or any(word in name.lower() for word in EMBEDDINGS)


def _heads_in(model: nn.Module, hidden: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return the number of heads of projections of queries, keys and values, as ``model.config`` has them.

    Raises:
        ZeroEngineError: There is no such projection whose rows are those heads.
    """
    config: Any = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    num_heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // num_heads
    heads = {}
    for name, param in hidden.items():
        key = _HEADS.get(name.split(".")[-2]) if "." in name else None
        count = 0 if key is None else getattr(config, key, None) or num_heads
        if count > 1 and param.ndim == 2 and whole_shape(param)[0] == count * width:
            heads[name] = count
    if not heads:
        raise ZeroEngineError(
            "optimizer.params.per_head_muon: model.config and the names of parameters do not say which are heads; "
            'write the number of heads by patterns of names, such as "matrices": {"*.q_proj.weight": 32}'
        )
    return heads


def _matrices_in(hidden: Mapping[str, Any], counts: Mapping[str, int], heads: Mapping[str, int]) -> dict[str, int]:
    """Return how many matrices each parameter holds: as ``counts`` says by patterns, or heads, stacked ones or one."""
    # A kernel of a convolution is one matrix. Experts that are stacked are a matrix each.
    num_matrices = {
        name: whole_shape(param)[0] if param.ndim == 3 and "expert" in name.lower() else 1
        for name, param in hidden.items()
    }
    num_matrices |= heads
    for pattern, count in counts.items():
        num_matrices |= dict.fromkeys(_matching(hidden, pattern, "matrices", "parameter that Muon updates"), count)
    return num_matrices


def _matching(names: Iterable[str], pattern: str, key: str, what: str) -> list[str]:
    matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        raise ZeroEngineError(
            f"optimizer.params.{key}: the pattern {pattern!r} matches no {what}; these are "
            f"{listed(list(names), NUM_SHOWN) or 'none'}"
        )
    return matching
