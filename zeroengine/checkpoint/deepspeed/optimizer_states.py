"""Read the optimizer state of DeepSpeed's ranks, and find each parameter in it.

[Note: DeepSpeed's flat vectors]
Every rank's file holds one vector of fp32 weights for each optimizer group (stages 1 and 2) or sub-group of one (stage
3), and for each vector the optimizer's state, as long as it. With two ranks, parameters a of 5 and b of 4 elements:

    stages 1, 2    rank 0: a a a a a     rank 1: b b b b .      one row, cut; the padding is at its end
    stage 3        rank 0: a a a b b     rank 1: a a . b b      each parameter cut by itself, and padded

`param_shapes` names the parameters of each vector in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroengine.checkpoint.deepspeed.checkpoint_files import DeepSpeedFiles
from zeroengine.checkpoint.deepspeed.pickled_files import InertObject, load_pickled_file
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError

# The end of a message about a file with unexpected content.
NOT_DEEPSPEED = "is not what DeepSpeed writes at ZeRO stages 1 to 3"


@dataclass(frozen=True)
class ParameterSlice:
    """Some elements of a parameter, and where they lie in a vector of a rank.

    Attributes:
        first: The index of the first of them within the flattened parameter.
        offset: Its index within the vector.
    """

    rank: int
    vector: int
    first: int
    offset: int
    numel: int


@dataclass(frozen=True)
class RankState:
    """The content of one rank's file.

    Attributes:
        weights: The vectors, in fp32.
        states: The optimizer's state of each vector, by name.
        group_of: The index of each vector's optimizer group.
        groups: The hyperparameters of each optimizer group.
        paddings: The number of elements at the end of each vector that `weights` lack.
        gaps: The number of elements left free after each parameter of each vector.
        scaler: The loss scaler's attributes.
    """

    stage: int
    world_size: int
    weights: list[torch.Tensor]
    states: list[Mapping[str, Any]]
    group_of: list[int]
    groups: list[Mapping[str, Any]]
    paddings: list[int]
    gaps: list[list[int]] | None
    scaler: Mapping[str, Any]


def read_states(files: DeepSpeedFiles) -> list[RankState]:
    """Return the state of every rank.

    Raises:
        CheckpointError: Files are missing, damaged, or of a kind that is not supported.
    """
    first = min(files.optimizer)
    # Any file tells the number of ranks, and then the others can be checked before they are read.
    states_by_rank = {first: _read(files, first)}
    files.check("optimizer", states_by_rank[first].world_size)
    states = [states_by_rank.get(rank) or _read(files, rank) for rank in range(states_by_rank[first].world_size)]
    expected = (states[0].stage, states[0].world_size, len(states[0].weights))
    for rank, state in enumerate(states):
        # Files of another run may have the right names and the wrong content.
        if (state.stage, state.world_size, len(state.weights)) != expected:
            raise CheckpointError(
                f"{files.path} holds files of several runs: {files.optimizer[rank].name} is of stage {state.stage} and "
                f"{state.world_size} ranks, {files.optimizer[0].name} of {states[0].stage} and {states[0].world_size}"
            )
    return states


def _read(files: DeepSpeedFiles, rank: int) -> RankState:
    path = files.optimizer[rank]
    tree = load_pickled_file(path)
    with as_checkpoint_errors(f"{path} {NOT_DEEPSPEED}", prefix=f"{path} "):
        state = tree["optimizer_state_dict"]
        # The scaler is an object of DeepSpeed's, which is read as inert data and never built.
        scaler = state.get("loss_scaler")
        scaler = scaler.state if isinstance(scaler, InertObject) and isinstance(scaler.state, dict) else {}
        # Only stage 3 has this key, whatever the version of DeepSpeed.
        return (_of_stage_3 if "fp32_flat_groups" in state else _of_row)(state, scaler)


def _of_row(state: Mapping[str, Any], scaler: Mapping[str, Any]) -> RankState:
    """Return the state of stages 1 and 2, and of stage 1 with fp32 gradients, which DeepSpeed saves in another form."""
    weights = list(state["single_partition_of_fp32_groups"])
    base, counts = state["base_optimizer_state"], state["partition_count"]
    # An elastic checkpoint stores the state in a form that depends on the number of ranks.
    if isinstance(base, list):
        raise CheckpointError("was saved with zero_optimization.elastic_checkpoint, which zero-import does not read")
    counts = counts if isinstance(counts, list) else [counts]
    groups = list(base["param_groups"])
    if len(set(counts)) > 1 or any(group.get("moe") for group in groups):
        raise CheckpointError("is of a mixture of experts (MoE), which zero-import does not read")
    return RankState(
        # Stage 1 with fp32 gradients writes no stage.
        stage=_stage(state["zero_stage"]) if "zero_stage" in state else 1,
        world_size=int(counts[0]),
        weights=weights,
        states=[base["state"].get(group["params"][0], {}) for group in groups],
        group_of=list(range(len(weights))),
        groups=groups,
        paddings=list(state.get("group_paddings") or [0] * len(weights)),
        gaps=state.get("param_alignment_paddings"),
        scaler=scaler,
    )


def _of_stage_3(state: Mapping[str, Any], scaler: Mapping[str, Any]) -> RankState:
    weights, base = list(state["fp32_flat_groups"]), state["optimizer_state_dict"]
    if "ds_zero_partition_groups" in state:
        raise CheckpointError("is of a mixture of experts (MoE), which zero-import does not read")
    groups = list(base["param_groups"])
    group_of = {vector: i for i, group in enumerate(groups) for vector in group["params"]}
    # Every vector must belong to one group, or hyperparameters would be assigned to the wrong parameters.
    if sorted(group_of) != list(range(len(weights))):
        raise CheckpointError("holds optimizer groups that do not fit its fp32_flat_groups")
    return RankState(
        stage=_stage(state["zero_stage"]),
        world_size=int(state["partition_count"]),
        weights=weights,
        states=[base["state"].get(vector, {}) for vector in range(len(weights))],
        group_of=[group_of[vector] for vector in range(len(weights))],
        groups=groups,
        paddings=[0] * len(weights),
        gaps=None,
        scaler=scaler,
    )


# These are DeepSpeed's names of the stages, in order.
STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def _stage(value: Any) -> int:
    """Return the number of a ZeroStageEnum, which was pickled by value or by name."""
    stage = value.args[0] if isinstance(value, InertObject) else value
    return STAGES.index(stage) if isinstance(stage, str) else int(stage)


# -- Where parameters lie -------------------------------------------------------------------------


def locate_parameters(
    states: Sequence[RankState], shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, list[ParameterSlice]]:
    """Return the slices of each parameter, by name. See "DeepSpeed's flat vectors".

    Args:
        states: The state of every rank.
        shapes: The shapes of the parameters of each vector.

    Raises:
        CheckpointError: They do not fit each other.
    """
    if len(shapes) != len(states[0].weights):
        raise CheckpointError(f"has {len(states[0].weights)} vectors of weights and names parameters of {len(shapes)}")
    slices_by_name: dict[str, list[ParameterSlice]] = {}
    for vector, shapes_by_name in enumerate(shapes):
        gaps = states[0].gaps[vector] if states[0].gaps else [0] * len(shapes_by_name)
        # Where rank 0's vector is padded, all parameters lie in it. Otherwise all vectors are as long as this one.
        length = max(1, states[0].weights[vector].numel())
        position = 0
        for (name, shape), gap in zip(shapes_by_name.items(), gaps, strict=True):
            numel = math.prod(shape)
            if states[0].stage == 3:
                slices = cut(numel, vector, position, len(states))
                # Each parameter takes as much space in every rank's vector, padding included.
                position += -(-numel // len(states))
            else:
                slices = _cut_row(numel, vector, position, length)
                position += numel + gap
            slices_by_name[name] = list(slices)
            for slice_ in slices_by_name[name]:
                # Checking before the import begins turns a missing file into an error without a partial output.
                weights = states[slice_.rank].weights if slice_.rank < len(states) else []
                num_held = weights[vector].numel() if weights else 0
                needed = slice_.offset + slice_.numel
                if num_held < needed:
                    raise CheckpointError(
                        f"lacks part of {name}: vector {vector} of rank {slice_.rank} has {num_held} elements and "
                        f"{needed} are needed. Optimizer state that was on NVMe is not in a checkpoint."
                    )
    return slices_by_name


def _cut_row(numel: int, vector: int, start: int, length: int) -> Iterator[ParameterSlice]:
    """Yield the slice of each rank that has part of a parameter, as stages 1 and 2 cut a row at each `length`."""
    position, stop = start, start + numel
    while position < stop:
        # A parameter may begin in one rank's vector and end in the next one's.
        rank, offset = divmod(position, length)
        size = min(stop - position, length - offset)
        yield ParameterSlice(rank, vector, position - start, offset, size)
        position += size


def cut(numel: int, vector: int, position: int, world_size: int) -> Iterator[ParameterSlice]:
    """Yield the slice of each rank that has part of a parameter, as stage 3 cuts it at `position` of its vector."""
    part = -(-numel // world_size)
    for rank in range(world_size):
        first, stop = rank * part, min((rank + 1) * part, numel)
        if first < stop:
            yield ParameterSlice(rank, vector, first, position, stop - first)


# -- The optimizer's state ------------------------------------------------------------------------


def states_of_parameter(
    states: Sequence[RankState], name: str, slices: Sequence[ParameterSlice]
) -> dict[str, list[torch.Tensor]]:
    """Return the optimizer's state of a parameter: for each key one vector per slice, or one 0-d number.

    Raises:
        CheckpointError: Some of its elements have other state than the rest.
    """
    vectors_by_key: dict[str, list[torch.Tensor]] = {}
    for slice_ in slices:
        own_state = dict(_state_of_vector(states[slice_.rank], slice_.vector))
        # State that only some ranks have would leave old or zero values in the other elements.
        if vectors_by_key and own_state.keys() != vectors_by_key.keys():
            raise CheckpointError(f"lacks optimizer state of part of {name}")
        for key, value in own_state.items():
            values = vectors_by_key.setdefault(key, [])
            # Every slice repeats the number of the parameter, and one copy is enough.
            if value.dim() or not values:
                values.append(value)
    return vectors_by_key


def _state_of_vector(state: RankState, vector: int) -> Iterator[tuple[str, torch.Tensor]]:
    vector_state, group = state.states[vector], state.groups[state.group_of[vector]]
    # State may be saved with or without the padding at the end of the vector.
    lengths = {state.weights[vector].numel() + padding for padding in (0, state.paddings[vector])}
    # Old versions of DeepSpeed count the steps of a group rather than those of a parameter.
    if vector_state and "step" not in vector_state and "step" in group:
        vector_state = {**vector_state, "step": group["step"]}
    for key, value in vector_state.items():
        if isinstance(value, (bool, int, float)):
            yield key, torch.tensor(float(value), device="cpu")
        elif not isinstance(value, torch.Tensor) or (value.dim() and value.numel() not in lengths):
            raise CheckpointError(f"holds optimizer state {key!r} that is not of each element: it cannot be imported")
        else:
            yield key, value.flatten() if value.dim() else value
