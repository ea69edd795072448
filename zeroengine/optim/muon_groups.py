"""Divide a model between Muon and AdamW, for the type "Muon" of a configuration."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.errors import ZeroEngineError
from zeroengine.optim.mixed_optimizer import MixedOptimizer
from zeroengine.optim.muon import Muon
from zeroengine.partition.cut import plain_name
from zeroengine.utils.listed import listed

# Parameters whose names contain one of these are embeddings or heads, as in DeepSpeed.
EMBEDDINGS = ("embed", "lm_head")
# So are parameters outside of numbered modules with one of these between the dots of their names.
HEADS = {"head", "heads", "classifier", "score"}
# The names that an error lists.
NUM_SHOWN = 8
_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "ns_dtype", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")


def build_muon(model: nn.Module, params: Sequence[nn.Parameter], settings: Mapping[str, Any]) -> MixedOptimizer:
    """Return Muon over the hidden matrices of a model, and AdamW over its other trainable parameters.

    Args:
        model: The model; its parameters may have no memory.
        params: Its trainable parameters.
        settings: The section ``optimizer.params``, see ``config.optimizers.MuonParams``.

    Raises:
        ZeroEngineError: No parameter is a hidden matrix, or a pattern matches no matrix, or the rows of a parameter do
            not divide into the matrices that it is said to hold.
    """
    wanted = set(params)
    named = {plain_name(name): param for name, param in model.named_parameters() if param in wanted}
    hidden = _hidden(model, named, settings["muon_params"])
    counts = _matrices_in(hidden, settings["matrices"])
    muon_lr, adam_lr = (settings["lr"] if settings[key] is None else settings[key] for key in ("muon_lr", "adam_lr"))
    groups = [
        {"params": [param for name, param in hidden.items() if counts[name] == count], "num_matrices": count}
        for count in sorted(set(counts.values()))
    ]
    shared = {name: settings[name] for name in _MUON}
    # Subclasses have torch's undecorated ``add_param_group``, see there.
    undecorated = {"add_param_group": MixedOptimizer.add_param_group}
    muon = type("Muon", (Muon,), undecorated)(groups, lr=muon_lr, eps=settings["ns_eps"], **shared)
    rest = [param for name, param in named.items() if name not in hidden]
    if not rest:
        return MixedOptimizer([muon])
    adam = type("AdamW", (torch.optim.AdamW,), undecorated)
    return MixedOptimizer([muon, adam(rest, lr=adam_lr, **{name: settings[name] for name in _ADAM})])


def _hidden(
    model: nn.Module, named: Mapping[str, nn.Parameter], patterns: Sequence[str] | None
) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon updates, by name, by ``patterns`` or by the rule of the documentation."""
    matrices = {name: param for name, param in named.items() if param.ndim >= 2 and param.numel()}
    if patterns is None:
        tables = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        # A head that is not tied to the embedding has its shape.
        shapes = {param.shape for param in tables}
        hidden = {n: p for n, p in matrices.items() if not (p in set(tables) or p.shape in shapes or _is_outer(n))}
    else:
        hidden = {}
        for pattern in patterns:
            matching = {n: p for n, p in matrices.items() if fnmatch.fnmatchcase(n, pattern)}
            if not matching:
                raise ZeroEngineError(
                    f"optimizer.params.muon_params: the pattern {pattern!r} matches no trainable parameter of two or "
                    f"more dimensions; these are {listed(list(matrices), NUM_SHOWN) or 'none'}"
                )
            hidden |= matching
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


def _matrices_in(hidden: Mapping[str, nn.Parameter], counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many matrices each parameter holds: as ``counts`` says by patterns, or stacked ones, or one."""
    # A kernel of a convolution is one matrix. Experts that are stacked are a matrix each.
    found = {name: param.shape[0] if param.ndim == 3 and _is_stacked(name) else 1 for name, param in hidden.items()}
    for pattern, count in counts.items():
        matching = fnmatch.filter(hidden, pattern)
        if not matching:
            raise ZeroEngineError(
                f"optimizer.params.matrices: the pattern {pattern!r} matches no parameter that Muon updates; these are "
                f"{listed(list(hidden), NUM_SHOWN)}"
            )
        found |= dict.fromkeys(matching, count)
    return found


def _is_stacked(name: str) -> bool:
    return "expert" in name.lower()
