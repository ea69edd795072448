"""Compares what the ranks were started with: the model, the optimizer and the configuration."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroengine.comm.group import Group
from zeroengine.config import Config
from zeroengine.errors import DivergenceError
from zeroengine.monitor.run_folder import RUN_FOLDER_VARIABLE
from zeroengine.partition.cut import UnitPlan
from zeroengine.partition.slices import whole_shape
from zeroengine.utils.flat_items import flat_items

# The number of differences of one rank that a message shows.
MAX_SHOWN = 3


def check_agreement(
    group: Group, config: Config, model: nn.Module, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer
) -> None:
    """Compare the model, optimizer and configuration of every rank with those of rank 0. A collective.

    Raises:
        DivergenceError: On every rank. The message names the first ranks that differ, and the differences.
    """
    facts = _facts(config, model, plans, optimizer)
    # The facts may be megabytes and almost always agree, so the ranks first exchange digests of 64 bytes.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    # Every rank has the same digests, so all ranks take the same branch.
    if len(set(group.all_gather_object(digest, "to compare models"))) == 1:
        return
    facts_by_rank = group.all_gather_object(facts, "of models")
    differences = [
        f"rank {rank}: {line}"
        for rank, other in enumerate(facts_by_rank)
        for line in _differences(facts_by_rank[0], other)[:MAX_SHOWN]
    ]
    shown = "\n  ".join(differences[: 2 * MAX_SHOWN])
    raise DivergenceError(
        f"the ranks were started differently; rank 0 is the reference:\n  {shown}\n"
        "Every rank must build the same model, optimizer and configuration."
    )


def _facts(
    config: Config, model: nn.Module, plans: Sequence[UnitPlan], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    # The order of parameters determines their places in the shards, so their numbers are part of the facts.
    group_of = {param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    rows = [(plan, name, param) for plan in plans for name, param in plan.params]
    parameters = {
        name: f"{_kind(whole_shape(param), plan.dtype)}, number {i}, in unit {plan.name}, "
        + (f"in param_groups[{group_of[param]}]" if plan.trainable else "frozen")
        for i, (plan, name, param) in enumerate(rows)
    }
    buffers = {name: _kind(buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}
    groups = {
        f"param_groups[{i}]": {"params": len(group["params"])}
        # Objects such as functions are left out, because their text contains an address, which differs in each process.
        | {k: repr(v) for k, v in group.items() if isinstance(v, (bool, int, float, tuple, str))}
        for i, group in enumerate(optimizer.param_groups)
    }
    sections = {
        "configuration": dict(flat_items(config.to_dict())),
        "parameter": parameters,
        "buffer": buffers,
        f"optimizer {type(optimizer).__name__}": dict(flat_items(groups)),
        # Different versions of torch may choose different algorithms or message formats.
        "version": {"torch": torch.__version__},
        # Ranks collect the records of steps together.
        "the run folder in": {RUN_FOLDER_VARIABLE: "set"} if os.environ.get(RUN_FOLDER_VARIABLE) else {},
    }
    return {f"{section} {name}": fact for section, facts in sections.items() for name, fact in facts.items()}


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def _differences(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    # A name may be missing on either side.
    return [
        f"{name} is {other.get(name, 'absent')}, on rank 0 {reference.get(name, 'absent')}"
        for name in sorted({*reference, *other})
        if reference.get(name, "absent") != other.get(name, "absent")
    ]
