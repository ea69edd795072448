"""Checks that all ranks were started with the same configuration, model and optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import DivergenceError
from zeroengine.partition.cut import UnitPlan

# At most so many differences of one rank are shown.
MAX_SHOWN = 3


def check_agreement(
    group: Group, config: Config, model: nn.Module, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer
) -> None:
    """Compare what every rank was started with to what rank 0 was started with. A collective.

    Raises:
        DivergenceError: On every rank, naming the first ranks that differ and what differs.
    """
    facts = _facts(config, model, plans, optimizer)
    # Ranks agree in almost every run, so they first exchange a digest of 64 bytes. The facts themselves may be
    # megabytes.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    # Every rank gathered the same digests, so all ranks take the same branch.
    if len(set(group.all_gather_object(digest))) == 1:
        return
    facts_by_rank = group.all_gather_object(facts)
    differences = []
    for rank, other in enumerate(facts_by_rank):
        differences += [f"rank {rank}: {line}" for line in _differences(facts_by_rank[0], other)[:MAX_SHOWN]]
    shown = "\n  ".join(differences[: 2 * MAX_SHOWN])
    raise DivergenceError(
        f"the ranks were started differently; rank 0 is the reference:\n  {shown}\n"
        "Every rank must build the same model, optimizer and configuration."
    )


def _facts(
    config: Config, model: nn.Module, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    # The order of parameters decides where each lies in a shard, so their numbers are part of the facts.
    group_of = {param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    rows = [(plan, name, param) for plan in plans for name, param in plan.params]
    parameters = {
        name: f"{_kind(param.shape, plan.dtype)}, number {i}, in unit {plan.name}, "
        + (f"in param_groups[{group_of[param]}]" if plan.trainable else "frozen")
        for i, (plan, name, param) in enumerate(rows)
    }
    buffers = {name: _kind(buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}
    groups = {
        f"param_groups[{i}]": {"params": len(group["params"])}
        # Objects such as functions have an address in their text, which differs in every process. They are left out.
        | {k: repr(v) for k, v in group.items() if isinstance(v, (bool, int, float, tuple, str))}
        for i, group in enumerate(optimizer.param_groups)
    }
    return {
        "configuration": dict(_flat(config.to_dict())),
        "parameter": parameters,
        "buffer": buffers,
        f"optimizer {type(optimizer).__name__}": dict(_flat(groups)),
        # Versions of torch that differ may choose different algorithms or message formats.
        "version": {"torch": torch.__version__},
    }


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def _differences(reference: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    # A name may be missing on either side, so the union of both is compared.
    for section in sorted({*reference, *other}):
        expected, actual = reference.get(section, {}), other.get(section, {})
        for key in sorted({*expected, *actual}):
            if expected.get(key, "absent") != actual.get(key, "absent"):
                line = f"{section} {key} is {actual.get(key, 'absent')}, on rank 0 {expected.get(key, 'absent')}"
                lines.append(line)
    return lines
