"""Convert what DeepSpeed's files hold to what a checkpoint of zeroengine holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from zeroengine.checkpoint.content import storable, versions
from zeroengine.checkpoint.dcp_metadata import ZEROENGINE_PREFIX
from zeroengine.checkpoint.deepspeed.checkpoint_files import DeepSpeedFiles
from zeroengine.checkpoint.deepspeed.optimizer_states import (
    NOT_DEEPSPEED,
    ParameterSlice,
    RankState,
    cut,
    locate_parameters,
    read_states,
    states_of_parameter,
)
from zeroengine.checkpoint.deepspeed.pickled_files import load_pickled_file
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntry
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.partition.boxes import pieces_of_run
from zeroengine.partition.cut import plain_name

# DeepSpeed puts these into the model's file. Everything else in it is the user's client state.
DEEPSPEED_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions universal_checkpoint_info csr_tensor_module_names "
    "sparse_tensor_module_names".split()
)
# At most so many bytes of a tensor are in memory at a time.
PIECE = 1 << 27
EXPERTS = ("num_experts", "ds_autoep_layers", "autoep_layers")
# The keys of a group that say how an optimizer computes, or that have another place here.
UNUSED_GROUP_KEYS = frozenset("params step bias_correction foreach fused capturable differentiable".split())
# The optimizer by the keys of its state, where the configuration does not name it.
OPTIMIZER_BY_KEYS = {
    frozenset({"exp_avg", "exp_avg_sq"}): "AdamW",
    frozenset({"exp_avg"}): "Lion",
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"sum"}): "Adagrad",
}


def _entry(shape: tuple[int, ...], runs: Sequence[tuple[int, torch.Tensor]]) -> StateEntry:
    """Return a tensor in pieces of `PIECE` bytes at most.

    Args:
        shape: Its shape.
        runs: The index of each run's first element within the flattened tensor, and its elements (1-D), in order.
    """
    entry = StateEntry(shape, runs[0][1].dtype)
    for first, run in runs:
        for values in run.split(PIECE // run.dtype.itemsize):
            entry.pieces += pieces_of_run(shape, first, values)
            first += values.numel()
    return entry


def _entry_of_slices(
    shape: tuple[int, ...], slices: Sequence[ParameterSlice], vectors: Sequence[torch.Tensor]
) -> StateEntry:
    """Return the tensor whose elements are `slices` of `vectors`."""
    both = zip(slices, vectors, strict=True)
    return _entry(shape, [(part.first, vector[part.offset :][: part.numel]) for part, vector in both])


def _entry_of_tensor(value: torch.Tensor) -> StateEntry:
    """Return a tensor that lies in one file."""
    return _entry(tuple(value.shape), [(0, value.detach().flatten())])


class ConvertedState:
    """The state of one tensor-parallel rank of a DeepSpeed checkpoint, as one of zeroengine's holds it.

    Args:
        files: The files of the rank.
        num_ranks: The number of tensor-parallel ranks that have files.

    Attributes:
        split_info: How parameters are split over these ranks, as DeepSpeed writes it.
        tensors: Every tensor, tied ones once, by the name of its entry.
        aliases: Further names of tied parameters and shared buffers, and the entry of each.
        notes: What is not converted.
    """

    def __init__(self, files: DeepSpeedFiles, num_ranks: int) -> None:
        self._path = files.path
        self._models: list[Mapping[str, Any]] = [load_pickled_file(files.model[0])]
        self._model = model = self._models[0]
        self._config = model["ds_config"] if isinstance(model.get("ds_config"), dict) else {}
        # These kinds are partitioned in ways that are not known here. Importing them would mix up weights without an
        # error.
        for is_kind, kind in (
            (any(model.get(key) for key in EXPERTS), "of a mixture of experts (MoE)"),
            (self._config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0, "partitioned by MiCS"),
            (not model.get("param_shapes"), "of ZeRO stage 0, or without optimizer state"),
        ):
            if is_kind:
                raise CheckpointError(f"{files.path} is {kind}, which zero-import does not read")
        if (expected := model.get("mp_world_size", 1)) != num_ranks:
            raise CheckpointError(
                f"{files.path} is of {expected} tensor-parallel ranks, and has files of {num_ranks}: copy the files of "
                f"mp_rank_00 to mp_rank_{expected - 1:02} into it, and no others"
            )
        self.split_info: Mapping[str, Any] = model.get("universal_checkpoint_info") or {}
        self._states = read_states(files)
        # At stage 3 each rank's file of the model holds its own part of frozen parameters and further facts.
        if self._states[0].stage == 3:
            files.check("model", len(self._states))
            self._models += [load_pickled_file(files.model[rank]) for rank in range(1, len(self._states))]
        self.aliases: dict[str, str] = {}
        self.notes: list[str] = []
        # The errors within do not know the path.
        with as_checkpoint_errors(f"{files.path} {NOT_DEEPSPEED}", prefix=f"{files.path} "):
            # The fp32 weights are located first, since the positions of the optimizer's state follow from them.
            self._places = locate_parameters(self._states, model["param_shapes"])
        self.tensors = self._collect_tensors()

    # -- Tensors ----------------------------------------------------------------------------------

    def _collect_tensors(self) -> dict[str, StateEntry]:
        """Return every tensor, tied ones once."""
        tensors: dict[str, StateEntry] = {}
        shapes = {name: tuple(shape) for named in self._model["param_shapes"] for name, shape in named.items()}
        for name, shape in shapes.items():
            places = self._places[name]
            values = [self._states[place.rank].weights[place.vector] for place in places]
            tensors[_model_name(name)] = _entry_of_slices(shape, places, values)
        # Trained parameters come first, so that a 16-bit copy in the model's state dict does not replace the fp32
        # weights.
        for name, tensor in (*self._frozen(), *self._buffers()):
            tensors.setdefault(_model_name(name), tensor)
        shared = (self._model.get("shared_params") or {}).items()
        names = [(_model_name(alias), _model_name(name)) for alias, name in shared]
        self.aliases |= {alias: name for alias, name in names if name in tensors}
        # A tied parameter is stored once, under the name that holds the weights.
        for alias in self.aliases:
            tensors.pop(alias, None)
        for name, shape in shapes.items():
            with as_checkpoint_errors(f"{self._path} {NOT_DEEPSPEED}", prefix=f"{self._path} "):
                state = states_of_parameter(self._states, name, self._places[name])
            for key, values in state.items():
                tensor = _entry_of_tensor(values[0])
                # A step count is one number for the parameter, although each rank has a copy of it.
                if values[0].dim():
                    tensor = _entry_of_slices(shape, self._places[name], values)
                tensors[f"{OPTIMIZER}{plain_name(name)}.{key}"] = tensor
        return tensors

    def _frozen(self) -> Iterator[tuple[str, StateEntry]]:
        """Yield the parameters that no optimizer holds, as they are: there is no fp32 copy of them."""
        shapes = self._model.get("frozen_param_shapes")
        # At stage 1 the frozen parameters are those of the model's state dict that nothing else explains.
        if shapes is None and self._states[0].stage < 3:
            explained = {*self._places, *self._model["buffer_names"], *(self._model.get("shared_params") or {})}
            for name, value in self._model["module"].items():
                if name not in explained and isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                    yield name, _entry_of_tensor(value)
        for name, shape in (shapes or {}).items():
            # A parameter without elements has nothing to store.
            if math.prod(shape) == 0:
                continue
            fragments = [model["frozen_param_fragments"][name].flatten() for model in self._models]
            # At stage 2 there is one fragment with all elements.
            places = list(cut(math.prod(shape), 0, 0, len(fragments)))
            if any(fragments[place.rank].numel() < place.numel for place in places):
                raise CheckpointError(f"{self._path} lacks part of the frozen parameter {name}")
            if not all(fragment.is_floating_point() for fragment in fragments):
                raise CheckpointError(f"{self._path} holds the frozen parameter {name} quantized: not supported")
            yield name, _entry_of_slices(tuple(shape), places, [fragments[place.rank] for place in places])

    def _buffers(self) -> Iterator[tuple[str, StateEntry]]:
        first_names: dict[Any, str] = {}
        for name in self._model["buffer_names"]:
            value = self._model["module"].get(name)
            if not isinstance(value, torch.Tensor):
                continue
            # Buffers that share memory were one tensor when they were saved.
            memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            first_name = first_names.setdefault(memory, name) if value.numel() else name
            if first_name == name:
                yield name, _entry_of_tensor(value)
            else:
                self.aliases[_model_name(name)] = _model_name(first_name)

    # -- Everything else --------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Return the values that are no tensors, by name."""
        objects: dict[str, Any] = {f"{ZEROENGINE_PREFIX}client_state": self._client_state()}
        schedule = self._schedule()
        if schedule is not None:
            objects[f"{ZEROENGINE_PREFIX}lr_scheduler"] = schedule
        for i, group in enumerate(self._groups()):
            objects |= {f"optimizer.param_groups.{i}.{key}": value for key, value in group.items()}
        return objects

    def _client_state(self) -> dict[str, Any] | None:
        client_state = {}
        for key, value in self._model.items():
            if key in DEEPSPEED_KEYS:
                continue
            try:
                client_state[key] = storable(key, value)
            except CheckpointError:
                # A value that cannot be kept is reported, and the rest of the checkpoint is still imported.
                self.notes.append(f"client state {key!r}: it holds objects that no checkpoint may")
        for key in ("data_sampler", "random_ltd"):
            if self._model.get(key):
                self.notes.append(f"{key}: zeroengine has nothing of the kind")
        return client_state or None

    def _schedule(self) -> Any:
        try:
            return storable("the LR schedule", self._model.get("lr_scheduler"))
        except CheckpointError:
            self.notes.append("the LR schedule: its state holds objects that no checkpoint may")
            return None

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with names for parameters."""
        state = self._states[0]
        groups: list[dict[str, Any]] = []
        for group in state.groups:
            # Keys that configure kernels have no meaning for another implementation.
            values = {key: _plain(value) for key, value in group.items() if key not in UNUSED_GROUP_KEYS}
            groups.append({key: value for key, value in values.items() if _is_plain(value)} | {"params": []})
        for named, i in zip(self._model["param_shapes"], state.group_of, strict=True):
            groups[i]["params"] += [plain_name(name) for name in named]
        return groups

    def about(self) -> dict[str, Any]:
        """Return the fields of the manifest."""
        state, config = self._states[0], self._config
        skipped = int(self._model.get("skipped_steps", 0))
        # DeepSpeed's global_steps include the steps that it skipped.
        num_steps = int(self._model["global_steps"]) - skipped
        per_step = config.get("gradient_accumulation_steps")
        micro_steps = (num_steps + skipped) * (per_step if isinstance(per_step, int) else 1)
        counters = {"global_steps": num_steps, "micro_steps": micro_steps, "skipped_steps": skipped}
        if not all(group.get("bias_correction", True) for group in state.groups):
            self.notes.append("bias_correction false: Adam's moments are always corrected here")
        return {
            "step": num_steps,
            "stage": state.stage,
            "world_size": state.world_size,
            "precision": str(self._dtype()).removeprefix("torch."),
            "optimizer": self._optimizer(),
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions() | {"deepspeed": str(self._model.get("ds_version", "unknown"))},
            "counters": counters,
            # Values that JSON does not know are kept as text, for a person to read.
            "param_groups": json.loads(json.dumps(self._groups(), default=str)),
            "loss_scaler": _scaler(state) if self._dtype() is torch.float16 else {},
            "config": json.loads(json.dumps(config, default=str)),
        }

    def _dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in."""
        values = (self._model["module"].get(name) for name in self._places)
        return next((v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), torch.float32)

    def _optimizer(self) -> str:
        config = self._config.get("optimizer") or {}
        kind, params = str(config.get("type", "")), config.get("params") or {}
        # DeepSpeed's "Adam" decouples weight decay by default, which torch calls AdamW.
        if kind.lower() == "adam":
            return "AdamW" if params.get("adam_w_mode", True) else "Adam"
        # Without a name in the configuration, the keys of the state tell which rule wrote it.
        keys = frozenset(self._states[0].states[0] if self._states[0].states else ()) - {"step"}
        return kind or OPTIMIZER_BY_KEYS.get(keys, "unknown")


def _model_name(name: str) -> str:
    return MODEL + plain_name(name)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _scaler(state: RankState) -> dict[str, Any]:
    # The defaults fill in whatever DeepSpeed's version does not have.
    converted, scaler = LossScaler().state_dict(), state.scaler
    names = {
        "scale": "cur_scale",
        "hysteresis_left": "cur_hysteresis",
        "steps": "cur_iter",
        "last_overflow": "last_overflow_iter",
    }
    for name, deepspeed_name in names.items():
        if isinstance(_plain(scaler.get(deepspeed_name)), (int, float)):
            converted[name] = type(converted[name])(_plain(scaler[deepspeed_name]))
    return converted
