"""A DeepSpeed ZeRO checkpoint into one of ours, with neither DeepSpeed nor a process group nor a GPU.

Tensors stay in DeepSpeed's files, mapped, until a piece of them is written: no more than that is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.dcp_errors import failure_reason
from zeroengine.checkpoint.dcp_metadata import ZEROENGINE_PREFIX
from zeroengine.checkpoint.dcp_save import ReadPiece, describe_files, save_files
from zeroengine.checkpoint.directory import TAG, CheckpointDirectory
from zeroengine.checkpoint.entries import MODEL, OPTIMIZER, StateEntry
from zeroengine.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from zeroengine.checkpoint.snapshot import Snapshot, storable, versions
from zeroengine.disk.mapped_memory import populate_pages
from zeroengine.errors import CheckpointError
from zeroengine.integrations.deepspeed.checkpoint_files import DeepSpeedFiles, check_out, files_of, find_checkpoint
from zeroengine.integrations.deepspeed.optimizer_states import (
    ParameterSlice,
    RankState,
    cut,
    kept_of,
    places_of,
    read_states,
)
from zeroengine.integrations.deepspeed.pickled_files import load_pickled_file
from zeroengine.optim.loss_scaler import LossScaler
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.partition.cut import plain_name
from zeroengine.utils.progress import progress

PIECE = 1 << 27  # bytes in memory at a time
# Of the model's file, what DeepSpeed puts there; the rest is the user's client state.
OWN = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions universal_checkpoint_info csr_tensor_module_names "
    "sparse_tensor_module_names".split()
)
EXPERTS = ("num_experts", "ds_autoep_layers", "autoep_layers")
# Of a group: how an optimizer goes about its work, or what has another place here.
NOT_KEPT = frozenset("params step bias_correction foreach fused capturable differentiable".split())
# An optimizer by what it keeps, where the configuration does not name it.
BY_KEYS = {
    frozenset({"exp_avg", "exp_avg_sq"}): "AdamW",
    frozenset({"exp_avg"}): "Lion",
    frozenset({"momentum_buffer"}): "SGD",
    frozenset({"sum"}): "Adagrad",
}


@dataclass(frozen=True)
class ImportResult:
    """What was done.

    Attributes:
        path: the new checkpoint.
        source: DeepSpeed's.
        tensors: parameters and buffers, tied ones once.
        notes: what was not taken over.
    """

    path: Path
    source: Path
    manifest: Manifest
    tensors: int
    tied: int
    notes: list[str]


def import_checkpoint(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, *, force: bool = False
) -> ImportResult:
    """Writes ``out/TAG``, from which an engine resumes at any stage and world size, of a ZeRO checkpoint.

    Args:
        directory: what DeepSpeed's ``save_checkpoint`` wrote at stage 1, 2 or 3, or one tag's folder in it.
        out: a folder that is not there yet; with ``force`` also one of our checkpoints, where the tag is replaced.
        tag: which checkpoint; the newest where None.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of a kind that is not supported, or ``out`` is
            there. Nothing is left of what was begun.
    """
    source = find_checkpoint(directory, tag)
    files = files_of(source)
    check_out(out, directory, force=force)
    with _understanding(source):
        found = _Checkpoint(files)
        entries = {name: whole.entry() for name, whole in found.wholes.items()}
        snapshot = Snapshot(entries, found.objects(), found.aliases, found.about())
    tag = source.name if TAG.fullmatch(source.name) else f"step-{snapshot.about['step']}"
    manifest = _write(snapshot, Path(out), tag, lambda name, *piece: found.wholes[name].read(*piece))
    tensors = sum(name.startswith(MODEL) for name in entries)
    return ImportResult(Path(out) / tag, source, manifest, tensors, len(snapshot.aliases), found.notes)


@contextlib.contextmanager
def _understanding(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not what DeepSpeed writes at ZeRO stages 1 to 3: {type(error).__name__}: {error}"
        ) from error


class _Checkpoint:
    """What the files hold, in our words.

    Attributes:
        wholes: every tensor, tied ones once, by the name of its entry.
        aliases: further names of tied parameters and shared buffers, and the entry of each.
        notes: what is not taken over.
    """

    def __init__(self, files: DeepSpeedFiles) -> None:
        self._path = files.path
        self._models: list[Mapping[str, Any]] = [load_pickled_file(files.model[0])]
        self._model = model = self._models[0]
        self._config = model["ds_config"] if isinstance(model.get("ds_config"), dict) else {}
        for wrong, what in (
            (model.get("mp_world_size", 1) != 1, "of a tensor-parallel model"),
            (any(model.get(key) for key in EXPERTS), "of a mixture of experts (MoE)"),
            (self._config.get("zero_optimization", {}).get("mics_shard_size", -1) > 0, "partitioned by MiCS"),
            (not model.get("param_shapes"), "of ZeRO stage 0, or without optimizer state"),
        ):
            if wrong:
                raise CheckpointError(f"{files.path} is {what}, which zero-import does not read")
        self._states = read_states(files)
        if self._states[0].stage == 3:
            files.check("model", len(self._states))
            self._models += [load_pickled_file(files.model[rank]) for rank in range(1, len(self._states))]
        self.aliases: dict[str, str] = {}
        self.notes: list[str] = []
        with self._naming_path():
            self._places = places_of(self._states, model["param_shapes"])
        self.wholes = self._wholes()

    @contextlib.contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self._path} {error}") from None

    # -- tensors ----------------------------------------------------------------------------------

    def _wholes(self) -> dict[str, _ScatteredTensor]:
        """Every tensor, tied ones once."""
        found: dict[str, _ScatteredTensor] = {}
        shapes = {name: tuple(shape) for named in self._model["param_shapes"] for name, shape in named.items()}
        for name, shape in shapes.items():
            places = self._places[name]
            values = [self._states[place.rank].weights[place.vector] for place in places]
            found[_in_model(name)] = _ScatteredTensor.of(shape, places, values)
        for name, whole in (*self._frozen(), *self._buffers()):
            found.setdefault(_in_model(name), whole)
        shared = (self._model.get("shared_params") or {}).items()
        self.aliases |= {_in_model(name): _in_model(kept) for name, kept in shared if _in_model(kept) in found}
        for alias in self.aliases:
            found.pop(alias, None)
        for name, shape in shapes.items():
            with self._naming_path():
                kept = kept_of(self._states, name, self._places[name])
            for key, values in kept.items():
                number = values[0].dim() == 0
                found[f"{OPTIMIZER}{plain_name(name)}.{key}"] = (
                    _ScatteredTensor.given(values[0])
                    if number
                    else _ScatteredTensor.of(shape, self._places[name], values)
                )
        return found

    def _frozen(self) -> Iterator[tuple[str, _ScatteredTensor]]:
        """Parameters that no optimizer holds, as they are: there is no fp32 copy of them."""
        shapes = self._model.get("frozen_param_shapes")
        if shapes is None and self._states[0].stage < 3:  # stage 1: what is left of the model's state dict
            known = {*self._places, *self._model["buffer_names"], *(self._model.get("shared_params") or {})}
            for name, value in self._model["module"].items():
                if name not in known and isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
                    yield name, _ScatteredTensor.given(value)
        for name, shape in (shapes or {}).items():
            if math.prod(shape) == 0:
                continue
            fragments = [model["frozen_param_fragments"][name].flatten() for model in self._models]
            spans = cut(math.prod(shape), 0, len(fragments))  # at stage 2 there is one fragment, whole
            places = [ParameterSlice(rank, 0, span) for rank, span in spans]
            if any(fragments[place.rank].numel() < place.span.numel for place in places):
                raise CheckpointError(f"{self._path} lacks part of the frozen parameter {name}")
            if not all(fragment.is_floating_point() for fragment in fragments):
                raise CheckpointError(f"{self._path} holds the frozen parameter {name} quantized: not supported")
            yield name, _ScatteredTensor.of(tuple(shape), places, [fragments[place.rank] for place in places])

    def _buffers(self) -> Iterator[tuple[str, _ScatteredTensor]]:
        first: dict[Any, str] = {}
        for name in self._model["buffer_names"]:
            value = self._model["module"].get(name)
            if not isinstance(value, torch.Tensor):
                continue
            same = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            kept = first.setdefault(same, name) if value.numel() else name
            if kept == name:
                yield name, _ScatteredTensor.given(value)
            else:
                self.aliases[_in_model(name)] = _in_model(kept)

    # -- everything else --------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = {f"{ZEROENGINE_PREFIX}client_state": self._client_state()}
        schedule = self._schedule()
        if schedule is not None:
            objects[f"{ZEROENGINE_PREFIX}lr_scheduler"] = schedule
        for i, group in enumerate(self._groups()):
            objects |= {f"optimizer.param_groups.{i}.{key}": value for key, value in group.items()}
        return objects

    def _client_state(self) -> dict[str, Any] | None:
        kept = {}
        for key, value in self._model.items():
            if key in OWN:
                continue
            try:
                kept[key] = storable(key, value)
            except CheckpointError:
                self.notes.append(f"client state {key!r}: it holds objects that no checkpoint may")
        for key in ("data_sampler", "random_ltd"):
            if self._model.get(key):
                self.notes.append(f"{key}: zeroengine has nothing of the kind")
        return kept or None

    def _schedule(self) -> Any:
        state = self._model.get("lr_scheduler")
        if isinstance(state, dict) and state.keys() == {"last_batch_iteration"}:
            # DeepSpeed's own, which count from -1; ours by the same names are torch's.
            steps, groups = int(state["last_batch_iteration"]) + 1, self._groups()
            rates = [group["lr"] for group in groups if "lr" in group]
            return {
                "last_epoch": steps,
                "_step_count": steps + 1,
                "_last_lr": rates,
                "lr_lambdas": [None] * len(groups),
            }
        try:
            return storable("the LR schedule", state)
        except CheckpointError:
            self.notes.append("the LR schedule: its state holds objects that no checkpoint may")
            return None

    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with names for parameters."""
        state = self._states[0]
        groups: list[dict[str, Any]] = []
        for group in state.groups:
            values = {key: _plain(value) for key, value in group.items() if key not in NOT_KEPT}
            groups.append({key: value for key, value in values.items() if _is_plain(value)} | {"params": []})
        for named, i in zip(self._model["param_shapes"], state.group_of, strict=True):
            groups[i]["params"] += [plain_name(name) for name in named]
        return groups

    def about(self) -> dict[str, Any]:
        state, config = self._states[0], self._config
        skipped = int(self._model.get("skipped_steps", 0))
        taken = int(self._model["global_steps"]) - skipped  # DeepSpeed counts those that it skipped as well
        micro_steps = config.get("gradient_accumulation_steps")
        micro_steps = micro_steps if isinstance(micro_steps, int) else 1
        if not all(group.get("bias_correction", True) for group in state.groups):
            self.notes.append("bias_correction false: Adam's moments are always corrected here")
        return {
            "step": taken,
            "stage": state.stage,
            "world_size": state.world_size,
            "precision": str(self._dtype()).removeprefix("torch."),
            "optimizer": self._optimizer(),
            "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": versions() | {"deepspeed": str(self._model.get("ds_version", "unknown"))},
            "counters": {
                "global_steps": taken,
                "micro_steps": (taken + skipped) * micro_steps,
                "skipped_steps": skipped,
            },
            "param_groups": json.loads(json.dumps(self._groups(), default=str)),
            "loss_scaler": _scaler(state),
            "config": json.loads(json.dumps(config, default=str)),
        }

    def _dtype(self) -> torch.dtype:
        """What the model computes in."""
        values = (self._model["module"].get(name) for name in self._places)
        return next((v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), torch.float32)

    def _optimizer(self) -> str:
        asked = self._config.get("optimizer") or {}
        kind, params = str(asked.get("type", "")), asked.get("params") or {}
        if kind.lower() == "adam":
            return "AdamW" if params.get("adam_w_mode", True) else "Adam"
        keys = frozenset(self._states[0].states[0] if self._states[0].states else ()) - {"step"}
        return kind or BY_KEYS.get(keys, "unknown")


def _in_model(name: str) -> str:
    return MODEL + plain_name(name)


@dataclass(frozen=True)
class _ScatteredTensor:
    """A tensor, and the runs of its elements as they lie in the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: list[tuple[int, torch.Tensor]]  # from which element on; 1-D, in order

    @classmethod
    def of(
        cls, shape: tuple[int, ...], places: Sequence[ParameterSlice], values: Sequence[torch.Tensor]
    ) -> _ScatteredTensor:
        """A tensor whose elements lie at ``places`` of ``values``."""
        spans = [(place.span, value) for place, value in zip(places, values, strict=True)]
        runs = [(s.param_offset, value[s.shard_offset : s.shard_offset + s.numel]) for s, value in spans]
        return cls(shape, values[0].dtype, runs)

    @classmethod
    def given(cls, value: torch.Tensor) -> _ScatteredTensor:
        return cls(tuple(value.shape), value.dtype, [(0, value.detach().flatten())])

    def entry(self) -> StateEntry:
        """In pieces of ``PIECE`` bytes at most, and of whole rows where these are smaller; without values."""
        numel, row, most = math.prod(self.shape), math.prod(self.shape[1:]), PIECE // self.dtype.itemsize
        step = most // row * row if 0 < row <= most else most
        boxes = [b for at in range(0, numel, step) for b in boxes_of_run(self.shape, at, min(at + step, numel))]
        pieces = [(b, torch.empty(b.sizes, dtype=self.dtype, device="meta")) for b in boxes]
        return StateEntry(self.shape, self.dtype, pieces)

    def read(self, box: Box, into: torch.Tensor) -> None:
        start, stop = box.start, box.start + box.numel
        for first, run in self.runs:
            part = run[max(start - first, 0) : max(stop - first, 0)]
            if part.numel():
                at = max(first - start, 0)
                populate_pages(part)  # it is mapped, and a disk that fails would be SIGBUS
                into.view(-1)[at : at + part.numel()] = part


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _scaler(state: RankState) -> dict[str, Any]:
    ours, theirs = LossScaler().state_dict(), state.scaler
    names = {
        "scale": "cur_scale",
        "hysteresis_left": "cur_hysteresis",
        "steps": "cur_iter",
        "last_overflow": "last_overflow_iter",
    }
    for name, their in names.items():
        if isinstance(_plain(theirs.get(their)), (int, float)):
            ours[name] = type(ours[name])(_plain(theirs[their]))
    return ours


# -- out ------------------------------------------------------------------------------------------


def _write(snapshot: Snapshot, out: Path, tag: str, read: ReadPiece) -> Manifest:
    if (out / tag).exists() and not (out / tag / MANIFEST).is_file():
        raise CheckpointError(f"{out / tag} is there already, and no checkpoint of zeroengine: name another folder")
    there, directory = out.exists(), CheckpointDirectory(out)
    try:
        directory.open()
        writing = directory.begin(tag, snapshot.nbytes)
        try:
            with progress(f"importing {tag}", snapshot.nbytes) as report:
                written = save_files(writing, snapshot.entries, snapshot.objects, snapshot.aliases, None, report, read)
            files = describe_files(writing, written)
            manifest = Manifest(format=FORMAT, tag=tag, files=files, **snapshot.about)
            directory.commit(writing, manifest, None)
        except BaseException as error:  # which DCP's own is
            directory.abandon(writing)
            if isinstance(error, (CheckpointError, KeyboardInterrupt, SystemExit)):
                raise
            raise CheckpointError(f"{out} was not written: {failure_reason(error).removeprefix('rank 0: ')}") from error
    except BaseException:
        if not there:
            shutil.rmtree(out, ignore_errors=True)
        raise
    finally:
        directory.close()
    return manifest
