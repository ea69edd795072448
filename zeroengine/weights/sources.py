"""Read weights a box at a time, from safetensors, files of `torch.save` with tensors alone, and state dicts."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zeroengine.checkpoint.dcp_metadata import METADATA
from zeroengine.checkpoint.directory import LATEST
from zeroengine.checkpoint.entries import part_of_box
from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.checkpoint.manifest import MANIFEST
from zeroengine.disk.mapped_memory import populate_pages
from zeroengine.disk.read_only_file import ReadOnlyFile
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box
from zeroengine.weights.chunked_reads import read_at
from zeroengine.weights.huggingface_format import DTYPE_NAMES, TensorSpec

SAFETENSORS, PICKLES = (".safetensors",), (".pt", ".bin", ".pth", ".ckpt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Scripts often keep the weights under one of these names among other things.
WRAPPERS = ("model", "state_dict", "model_state_dict", "module")


@dataclass
class WeightSource:
    """Tensors by name, whose values are not in memory yet.

    Attributes:
        where: Where they come from, for messages.
        tensors: Their shapes and dtypes.
        read: Returns a copy or a view of a box of a tensor.
        others: The other values by name; None where the kind of file holds tensors alone.
        locate: Returns the file that holds a tensor's elements one after another, as this machine has them in memory,
            and the offset of the first one in bytes; None where it is nowhere so.
    """

    where: str
    tensors: dict[str, TensorSpec]
    read: Callable[[str, Box], torch.Tensor] = field(repr=False)
    others: dict[str, Any] | None = None
    locate: Callable[[str], tuple[ReadOnlyFile, int] | None] = field(default=lambda name: None, repr=False)

    def read_whole(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor, on the CPU."""
        return self.read(name, Box.whole(self.tensors[name].shape)).to("cpu", copy=True)


def of_state_dict(state: Mapping[str, Any], where: str) -> WeightSource:
    """Return the tensors of a state dict.

    Raises:
        CheckpointError: It holds other values, or tensors that cannot be read.
    """
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in tensors.items():
        if (problem := _unreadable(value)) is not None:
            raise CheckpointError(f"{where} holds a tensor {problem} under {name!r}")
    specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    return WeightSource(
        where,
        specs,
        lambda name, box: part_of_box(tensors[name], [0] * len(box.sizes), box.offsets, box.sizes),
        {str(name): value for name, value in state.items() if name not in tensors},
    )


def check_others(where: str, others: Mapping[str, Any] | None, known: Collection[str]) -> None:
    """Check that values other than tensors are those of a state dict.

    Args:
        where: Where they are, for the message.
        others: The values by name.
        known: The names that the model has for such values.

    Raises:
        CheckpointError: Some are not.
    """
    for name, value in (others or {}).items():
        # Modules may store anything as their extra state.
        if name not in known and not is_extra_state(name):
            raise CheckpointError(
                f"{where} holds {type(value).__name__} under {name!r}: a state dict has names and tensors alone, as "
                "model.state_dict() gives"
            )


def is_extra_state(name: str) -> bool:
    """Return whether torch gives this name to the extra state of a module."""
    return name.endswith("_extra_state")


def _unreadable(tensor: torch.Tensor) -> str | None:
    """Return why no box of a tensor can be copied; None where it can."""
    if tensor.is_meta:
        return "without values, on the meta device: load values into it first"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}: weights are dense, as tensor.to_dense() gives"
    if tensor.is_quantized:
        return "that is quantized: weights are plain numbers, as tensor.dequantize() gives"
    return None


def of_path(path: Path) -> WeightSource:
    """Return the weights in a file, or in those of a folder.

    Raises:
        CheckpointError: There are none, or they are damaged, or they could run code.
    """
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    # The index counts where there is one, for a folder may hold other files as well.
    index = next((path / name for name in INDEXES if (path / name).is_file()), path)
    file_of = _read_index(index) if index.suffix == ".json" else {}
    files = [index.parent / name for name in dict.fromkeys(file_of.values())]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(absent[:3])}")
    # The files are opened at once, but values are read only when a box of them is asked for.
    sources = [_of_file(file) for file in files or [_file_in(path) if path.is_dir() else path]]
    owner: dict[str, WeightSource] = {}
    for source in sources:
        for name in source.tensors:
            if name in owner:
                raise CheckpointError(f"{name} is in {owner[name].where} and in {source.where}: name one of the files")
            owner[name] = source
    # A partial download leaves an index whose tensors are not all in the files.
    for name, file in file_of.items():
        if name not in owner:
            raise CheckpointError(f"{path} is incomplete: its index says that {name} is in {file}, and it is not")
    specs = {name: source.tensors[name] for name, source in owner.items()}
    others = [source.others for source in sources if source.others is not None]
    return WeightSource(
        str(path),
        specs,
        lambda name, box: owner[name].read(name, box),
        dict(ChainMap(*others)) if others else None,
        lambda name: owner[name].locate(name),
    )


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of each tensor's file, by the index in `path`."""
    with as_checkpoint_errors(f"{path} is no index of weights"):
        weight_map = json.loads(path.read_text())["weight_map"]
        if not weight_map:
            raise CheckpointError(f'{path} is no index of weights: it has no "weight_map"')
        # Only the last part of a name is used, so an index cannot point outside of its folder.
        return {str(name): os.path.basename(file) for name, file in weight_map.items()}


def _file_in(folder: Path) -> Path:
    """Return the file of weights in a folder without an index."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    for kinds in (SAFETENSORS, PICKLES):
        candidates = [folder / name for name in names if name.endswith(kinds)]
        # One part without an index may be all that a broken download left.
        parts = [file.name for file in candidates if re.search(r"-\d+-of-\d+\.", file.name)]
        if parts:
            raise CheckpointError(f"{folder} holds {parts[0]}, one file of several, and no index of them")
        usual = [file for file in candidates if file.stem in ("model", "pytorch_model")]
        if usual or len(candidates) == 1:
            return (usual or candidates)[0]
        if candidates:
            some = ", ".join(file.name for file in candidates[:5])
            raise CheckpointError(
                f"{folder} holds {len(candidates)} files that could be weights ({some}): name one of them"
            )
    # A common mistake is to pass a folder of checkpoints, so the message names the right call.
    if any((folder / name).exists() for name in (LATEST, MANIFEST, METADATA)):
        raise CheckpointError(
            f"{folder} holds checkpoints: engine.load_checkpoint({str(folder)!r}, weights_only=True) loads the weights "
            "of one"
        )
    raise CheckpointError(f"{folder} holds no weights: no .safetensors, .bin or .pt file is in it")


# -- One file ------------------------------------------------------------------------------------


def _of_file(path: Path) -> WeightSource:
    if path.name.endswith(SAFETENSORS):
        return _safetensors(path)
    if path.name.endswith(PICKLES):
        return _pickled(path)
    kinds = ", ".join((*SAFETENSORS, *PICKLES))
    raise CheckpointError(f"{path}: weights are read from {kinds} files, a .json index of such, or a folder with them")


def _safetensors(path: Path) -> WeightSource:
    """Return the tensors of a file, which is read and not mapped.

    Pages of a mapped file count as memory of the process, and a failing disk under them is a SIGBUS.
    """
    from safetensors import safe_open

    with as_checkpoint_errors(f"{path} cannot be read, or is damaged"):
        with safe_open(path, framework="pt"):
            # Opening it checks its header, and that the file is as long as the header says.
            pass
        file = open(path, "rb", buffering=0)
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        if unknown := {info["dtype"] for info in header.values()} - dtypes.keys():
            raise CheckpointError(f"{path} has tensors of dtype {min(unknown)}: weights are not read from it")
        specs = {name: TensorSpec(tuple(info["shape"]), dtypes[info["dtype"]]) for name, info in header.items()}

    # The values follow the eight bytes of the length and the header.
    positions = {name: 8 + length + info["data_offsets"][0] for name, info in header.items()}
    open_once = functools.cache(lambda: ReadOnlyFile(path))

    def locate(name: str) -> tuple[ReadOnlyFile, int] | None:
        return (open_once(), positions[name]) if sys.byteorder == "little" else None

    def read(name: str, box: Box) -> torch.Tensor:
        dtype = specs[name].dtype
        values = torch.empty(box.numel, dtype=dtype, device="cpu")
        position = positions[name] + box.start * dtype.itemsize
        with as_checkpoint_errors(f"{path} cannot be read"):
            read_at(file, path, memoryview(values.view(torch.uint8).numpy()), position)  # type: ignore[arg-type]
        return values.view(box.sizes)

    return WeightSource(str(path), specs, read, locate=locate)


def _pickled(path: Path) -> WeightSource:
    with as_checkpoint_errors(f"{path} cannot be read, or is damaged"):
        try:
            # The file is mapped, so that only the boxes that are read take memory. `weights_only` refuses pickles that
            # could run code.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL (\S+)", str(error))
            kind = f"{match[1]}, which is no tensor" if match is not None else "more than tensors"
            raise CheckpointError(
                f"{path} holds {kind}: loading it could run code, so it is refused. Where you trust it, load it "
                "yourself, and save its state dict again, best as .safetensors."
            ) from error
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            raise CheckpointError(
                f"{path} is not what torch.save has written since torch 1.6, or is damaged. An older one converts by "
                "torch.save(torch.load(file, weights_only=True), file)."
            ) from error
    # A dict without tensors may be a wrapper around the weights.
    if isinstance(state, Mapping) and not any(isinstance(value, torch.Tensor) for value in state.values()):
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), Mapping)), state)
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{path} holds no state dict, but {type(state).__name__}")
    source = of_state_dict(state, str(path))

    def read(name: str, box: Box) -> torch.Tensor:
        values = source.read(name, box)
        # A failing disk would be a SIGBUS when the values are used.
        with as_checkpoint_errors(f"{path} cannot be read"):
            populate_pages(values)
        return values

    return replace(source, read=read)
