"""Weights into and out of a live engine: only boxes of them are ever on a rank."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroengine.checkpoint.entries import MODEL, StateEntries, StateEntry
from zeroengine.checkpoint.snapshot import SHOWN, EngineParts
from zeroengine.comm.group import check_same
from zeroengine.disk.mapped_memory import populate
from zeroengine.errors import CheckpointError
from zeroengine.partition.boxes import Box, boxes_of_run
from zeroengine.utils.byte_size import parse_byte_size
from zeroengine.utils.paths import checked_path
from zeroengine.utils.progress import progress
from zeroengine.weights import huggingface_format, sources
from zeroengine.weights.output_folder import OutputFolder, parse_dtype
from zeroengine.weights.sources import WeightSource

CHUNK = 1 << 22  # elements that are on their way at a time

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


class LoadResult(NamedTuple):
    """What ``load_state_dict`` gives: names that only one side has."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# -- out ------------------------------------------------------------------------------------------


def save(parts: EngineParts, directory: str | os.PathLike[str], dtype: Any, shard_size: str | int) -> None:
    """Writes the weights as ``zero-export`` does. A collective: every rank writes the boxes that it owns.

    Raises:
        CheckpointError: on every rank; what was in ``directory`` is as it was.
        DivergenceError: on every rank; they pass different arguments.
    """
    group = parts.group
    arguments: dict[str, object] = {}
    with group.collective_errors("to save weights", arguments) as every:
        name, most = parse_dtype(dtype), parse_byte_size(shard_size, "shard size", CheckpointError)
        named = checked_path(directory, "save_weights(directory)", CheckpointError)
        arguments |= {"directory": os.path.abspath(named), "dtype": name, "shard_size": most}
    check_same("save_weights()", every)
    with group.collective_errors("to save weights"):
        output = OutputFolder(directory)
        to = None if name is None else getattr(torch, name)
        entries = {name.removeprefix(MODEL): entry for name, entry in parts.state_index.model(once=True).items()}
        tied = {alias: kept for alias, kept in parts.state_index.aliases().items() if kept in entries}
        specs = {
            name: huggingface_format.TensorSpec(entry.shape, entry.dtype).cast(to) for name, entry in entries.items()
        }
        plan = huggingface_format.plan(specs, tied, most)
        writer = huggingface_format.SafetensorsWriter(output.writing, plan)
    try:
        with group.collective_errors("to save weights"), _telling(output):
            if group.rank == 0:
                output.check(force=True)
                output.begin(plan.nbytes)
                writer.create()
        total = sum(entry.nbytes for entry in entries.values())
        with (
            group.collective_errors("to save weights"),
            _telling(output),
            progress("saving", total, group.rank == 0) as report,
        ):
            for name, entry in entries.items():
                for box, tensor in entry.pieces:
                    flat = tensor.reshape(-1)
                    for first in range(0, box.numel, CHUNK):
                        populate(flat[first : first + CHUNK])
                        values = flat[first : first + CHUNK].cpu()
                        writer.write(name, box.offsets, box.sizes, first, values)
                        report(values.nbytes)
            writer.close()
            writer.sync()
        with group.collective_errors("to save weights"), _telling(output):
            if group.rank == 0:
                output.commit()
    except BaseException:
        writer.close()
        if group.rank == 0:
            output.abandon()
        raise


@contextlib.contextmanager
def _telling(output: OutputFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{output.path} was not written: {error.strerror or error}") from error


# -- in -------------------------------------------------------------------------------------------


def load(parts: EngineParts, given: Weights, strict: bool) -> LoadResult:
    """Puts weights from files, or rank 0's state dict, into the shards. A collective.

    Raises:
        CheckpointError: on every rank, before anything is changed: they do not fit.
        DivergenceError: on every rank; they name different files.
    """
    group = parts.group
    source: WeightSource | None = None
    arguments: dict[str, object] = {"strict": strict}
    with group.collective_errors("to load weights", arguments) as every:
        source = _open(given)
        if isinstance(given, (str, os.PathLike)):
            arguments["weights"] = os.path.abspath(given)
    named = all("weights" in other for other in every)  # else rank 0 has a state dict, or they do not go together
    check_same("load_weights()", [other if named else {"strict": other["strict"]} for other in every])
    offers = group.all_gather_object(None if source is None else (isinstance(given, Mapping), _digest(source)))
    from_rank_0 = _check_offers(offers)
    found = group.all_gather_object((source.where, source.tensors) if source is not None and group.rank == 0 else None)[
        0
    ]
    assert found is not None
    entries = {name.removeprefix(MODEL): entry for name, entry in parts.state_index.model(once=False).items()}
    names, loaded = _match(*found, entries, parts.state_index.aliases(), strict)
    with group.collective_errors("to load weights"):
        mine = 0 if from_rank_0 else sum(entries[name].nbytes for name in names)
        specs = [found[1][there] for there in names.values()]
        sizes = [min(math.prod(spec.shape), CHUNK) * spec.dtype.itemsize for spec in specs]
        size = max(sizes) if from_rank_0 else 0  # one buffer, for the allocator may keep what many leave behind
        buffer = torch.empty(size, dtype=torch.uint8, device=group.device)
        with progress("loading", mine, group.rank == 0 and not from_rank_0) as report:
            for name, there in names.items():
                if from_rank_0:
                    _receive(parts, entries[name], found[1][there], source, there, buffer)
                else:
                    assert source is not None
                    _read(entries[name], source, there, report)
    parts.republish()
    return loaded


def _open(given: Weights) -> WeightSource | None:
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if isinstance(given, Mapping):
        return sources.of_state_dict(given, "the state dict")
    if isinstance(given, (str, os.PathLike)):
        return sources.of_path(Path(checked_path(given, "load_weights(weights)", CheckpointError)))
    raise CheckpointError(f"load_weights() takes a file, a folder or a state dict, found {type(given).__name__}")


def _digest(source: WeightSource) -> str:
    return hashlib.sha256(repr(sorted(source.tensors.items())).encode()).hexdigest()


def _check_offers(offers: list[tuple[bool, str] | None]) -> bool:
    """Whether rank 0's state dict is what is loaded; otherwise each rank reads files."""
    first = offers[0]
    if first is None:
        raise CheckpointError("load_weights(): rank 0 has no weights. It is the one whose state dict is loaded.")
    for rank, offer in enumerate(offers):
        if first[0] and offer is not None and not offer[0]:
            raise CheckpointError(f"load_weights(): rank 0 has a state dict and rank {rank} a path: give all the same")
        if not first[0] and (offer is None or offer[0]):
            raise CheckpointError(f"load_weights(): rank 0 has a path and rank {rank} none: give all the same")
        if not first[0] and offer != first:
            raise CheckpointError(f"load_weights(): rank {rank} finds other tensors in its files than rank 0")
    return first[0]


def _match(
    where: str,
    there: Mapping[str, huggingface_format.TensorSpec],
    entries: StateEntries,
    aliases: Mapping[str, str],
    strict: bool,
) -> tuple[dict[str, str], LoadResult]:
    """The names here that have values there, and what each is called there.

    Raises:
        CheckpointError: shapes differ or, where ``strict``, names do: the first ten of how many.
    """
    others: dict[str, list[str]] = {}
    for alias, kept in aliases.items():
        others.setdefault(kept, []).append(alias)
    prefix = _prefix(there, entries)
    known = {name: [prefix + other for other in (name, *others.get(name, ()))] for name in entries}
    names = {name: found for name, all_ in known.items() if (found := next((n for n in all_ if n in there), None))}
    expected = {name for all_ in known.values() for name in all_}
    loaded = LoadResult(
        [name for name in entries if name not in names], [name for name in there if name not in expected]
    )
    problems = [
        f"{name} has shape {there[found].shape} there and {entries[name].shape} here"
        for name, found in names.items()
        if there[found].shape != entries[name].shape
    ]
    hint = ""
    if not names:
        problems = ["it has none of the model's names"]
    elif strict and (loaded.missing_keys or loaded.unexpected_keys):
        hint = "" if problems else ". Pass strict=False to load what fits"
        problems += [f"{name} is not there" for name in loaded.missing_keys]
        problems += [f"{name} is not in the model" for name in loaded.unexpected_keys]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{where} is another model's: {'; '.join(problems[:SHOWN])}{more}{hint}.")
    return names, loaded


def _prefix(there: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    """What stands before the most names: nothing, or ``module.`` and the like of whoever wrapped the model."""
    candidates = {""}
    for name in list(names)[:3]:
        candidates |= {other.removesuffix(name) for other in there if other.endswith(f".{name}")}
    return max(sorted(candidates, key=len), key=lambda prefix: sum(prefix + name in there for name in names))


def _read(entry: StateEntry, source: WeightSource, name: str, report: Callable[[int], None]) -> None:
    """This rank's boxes from a file."""
    for box, piece in entry.pieces:
        for first in range(box.start, box.start + box.numel, CHUNK):
            for part in boxes_of_run(entry.shape, first, min(first + CHUNK, box.start + box.numel)):
                target = _within(piece, box, part)
                populate(target, write=True)
                target.copy_(source.read(name, part))
                report(target.nbytes)


def _receive(
    parts: EngineParts,
    entry: StateEntry,
    spec: huggingface_format.TensorSpec,
    source: WeightSource | None,
    name: str,
    buffer: torch.Tensor,
) -> None:
    """This rank's boxes from rank 0, which sends the whole tensor to all, by way of ``buffer``."""
    numel = math.prod(entry.shape)
    for first in range(0, numel, CHUNK):
        stop = min(first + CHUNK, numel)
        values = buffer[: (stop - first) * spec.dtype.itemsize].view(spec.dtype)
        if parts.group.rank == 0:
            assert source is not None
            for part in boxes_of_run(entry.shape, first, stop):
                values[part.start - first :][: part.numel].copy_(source.read(name, part).reshape(-1))
        parts.group.broadcast(values.view(torch.uint8))
        for box, piece in entry.pieces:
            for part in boxes_of_run(entry.shape, max(first, box.start), min(stop, box.start + box.numel)):
                target = _within(piece, box, part)
                populate(target, write=True)
                target.copy_(values[part.start - first :][: part.numel].view(part.sizes))


def _within(piece: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of ``piece``, which is ``box`` of a tensor, that is ``part`` of the tensor."""
    for dim, (start, base, size) in enumerate(zip(part.offsets, box.offsets, part.sizes, strict=True)):
        piece = piece.narrow(dim, start - base, size)
    return piece
