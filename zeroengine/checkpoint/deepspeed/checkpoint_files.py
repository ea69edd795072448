"""Find the files of a DeepSpeed ZeRO checkpoint, and check that they can be imported. Needs no torch.

runs/a/
  latest                                             the tag of the newest checkpoint
  global_step200/
    mp_rank_00_model_states.pt                       stages 1 and 2: 16-bit weights, buffers, counters
    zero_pp_rank_0_mp_rank_00_model_states.pt        stage 3: the same of each rank, weights partitioned
    bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt   each rank's fp32 weights and optimizer state; no bf16_
                                                     before it except where training is in bf16

With tensor parallelism (AutoTP) each of its ranks has such files, whose names have its number after `mp_rank_`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zeroengine.checkpoint.directory import LATEST, natural_order
from zeroengine.checkpoint.manifest import MANIFEST
from zeroengine.errors import CheckpointError
from zeroengine.utils.files import checked_path

OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# These files lie beside the others where DeepSpeed did more than ZeRO.
UNSUPPORTED = (
    (re.compile(r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*"), "a mixture of experts (MoE)"),
    (re.compile(r"layer_\d+-.*"), "a pipeline-parallel model"),
    (re.compile(r"offloaded_tensors"), "a run whose optimizer state was on NVMe"),
)


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one tensor-parallel rank, by data-parallel rank; `model` has rank 0 alone at stages 1 and 2."""

    path: Path
    model: dict[int, Path]
    optimizer: dict[int, Path]

    def check(self, kind: str, world_size: int) -> None:
        """Check that each of `world_size` ranks has its file, and that there are no others.

        Raises:
            CheckpointError: Files are missing, or there are too many.
        """
        files: dict[int, Path] = getattr(self, kind)
        example = next(iter(files.values())).name
        # The names of the files differ between versions of DeepSpeed, so a missing one is named after one that exists.
        missing = [re.sub(r"pp_rank_\d+", f"pp_rank_{r}", example) for r in range(world_size) if r not in files]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{self.path} is of {world_size} ranks and lacks {', '.join(missing[:3])}{more}: copy the files of "
                "every rank into it"
            )
        # Ranks above the world size come from another run. Their files would be read as part of this one.
        spare = [path.name for rank, path in sorted(files.items()) if rank >= world_size]
        if spare:
            raise CheckpointError(f"{self.path} is of {world_size} ranks, and {spare[0]} of another run: remove it")


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None) -> Path:
    """Return the folder of a DeepSpeed checkpoint: `tag` of `directory`, or the newest, or `directory` itself.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(os.path.abspath(checked_path(directory, "the folder of DeepSpeed's checkpoint", CheckpointError)))
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {state}: name the folder that DeepSpeed's save_checkpoint wrote")
    # A user may name the wrong folder of the two, and the message then says what to call instead.
    if (path / MANIFEST).is_file() or next(path.glob(f"*/{MANIFEST}"), None) is not None:
        raise CheckpointError(f"{path} holds checkpoints of zeroengine already: engine.load_checkpoint loads them")
    folders = (entry.name for entry in path.iterdir() if entry.is_dir() and is_checkpoint(entry))
    tags = sorted(folders, key=natural_order)
    if tag is None:
        # The user may name the folder of one tag directly.
        if is_checkpoint(path):
            return path
        try:
            tag = (path / LATEST).read_text().strip()
        # `latest` is often left out when a checkpoint is copied. Guessing a tag could import the wrong one.
        except (OSError, UnicodeDecodeError):
            if not tags:
                raise CheckpointError(f"{path} holds no DeepSpeed checkpoint") from None
            raise CheckpointError(f"{path} has no file {LATEST!r}: choose with --tag, of {', '.join(tags)}") from None
    if not tag or not (path / tag).is_dir():
        others = f"there are: {', '.join(tags[-10:])}" if tags else "there is none"
        raise CheckpointError(f"checkpoint {tag!r} in {path} does not exist; {others}")
    return path / tag


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is the folder of one DeepSpeed checkpoint."""
    return (path / "zero").is_dir() or any(path.glob("*_states.pt"))


def files_of(path: Path) -> list[DeepSpeedFiles]:
    """Return the files of the checkpoint in `path`: those of each tensor-parallel rank.

    Raises:
        CheckpointError: It is none, or of a kind that cannot be imported.
    """
    files_of_ranks: dict[int, DeepSpeedFiles] = {}
    for entry in sorted(path.iterdir()):
        # An unsupported checkpoint is refused by its file names, before gigabytes are read.
        for pattern, kind in UNSUPPORTED:
            if pattern.fullmatch(entry.name):
                raise CheckpointError(f"{path} is of {kind}, which zero-import does not read: it holds {entry.name}")
        for kind, pattern in (("model", MODEL), ("optimizer", OPTIMIZER)):
            if (match := pattern.fullmatch(entry.name)) is not None:
                files = getattr(files_of_ranks.setdefault(int(match[2]), DeepSpeedFiles(path, {}, {})), kind)
                # At stages 1 and 2 the model's file carries no data-parallel rank.
                rank = int(match[1] or 0)
                # Runs in different precisions name their files differently, so two runs in one folder give one rank
                # twice.
                if rank in files:
                    raise CheckpointError(f"{path} has {files[rank].name} and {entry.name}, of two runs: remove one")
                files[rank] = entry
    model, optimizer = (any(getattr(f, kind) for f in files_of_ranks.values()) for kind in ("model", "optimizer"))
    # A universal checkpoint is a derived form with other files, and the original has everything.
    if not optimizer and (path / "zero").is_dir():
        raise CheckpointError(f"{path} is a universal checkpoint: import the ZeRO checkpoint that it was made from")
    if not optimizer and not model:
        raise CheckpointError(f"{path} holds no DeepSpeed checkpoint: there is no *_states.pt file in it")
    if not optimizer:
        raise CheckpointError(
            f"{path} has no *_optim_states.pt files: it was saved at ZeRO stage 0, or they were not copied with it. "
            "engine.load_weights takes weights alone."
        )
    ranks = [files_of_ranks.get(rank, DeepSpeedFiles(path, {}, {})) for rank in range(len(files_of_ranks))]
    for rank, own in enumerate(ranks):
        name = f"mp_rank_{rank:02}"
        if 0 not in own.model:
            raise CheckpointError(f"{path} lacks the model's states, {name}_model_states.pt at stages 1 and 2")
        if not own.optimizer:
            raise CheckpointError(f"{path} lacks zero_pp_rank_0_{name}_optim_states.pt: copy all files into it")
    return ranks


def check_out(out: str | os.PathLike[str], source: str | os.PathLike[str], *, force: bool) -> Path:
    """Return the path of `out`, where checkpoints can be written.

    Raises:
        CheckpointError: It cannot be made, or holds files that would be lost.
    """
    out, source = Path(checked_path(out, "the folder of checkpoints to write", CheckpointError)), Path(source)
    # Links are resolved, so that one folder cannot pass as two.
    out_path, source_path = Path(os.path.realpath(out)), Path(os.path.realpath(source.expanduser()))
    if out_path == source_path or out_path in source_path.parents or source_path in out_path.parents:
        raise CheckpointError(f"{out} and {source} are one in the other: name a folder apart")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: checkpoints are kept in a folder")
    # Hidden entries are those of interrupted saves, which do no harm.
    entries = [entry for entry in out.iterdir() if not entry.name.startswith(".")] if out.is_dir() else []
    if entries and not force:
        raise CheckpointError(f"{out} is there already: name another folder, or add to it with --force")
    # A folder with checkpoints of both kinds would leave unclear which of them a tag or `latest` means.
    if any(is_checkpoint(entry) for entry in entries):
        raise CheckpointError(f"{out} holds checkpoints of DeepSpeed: name another folder")
    return out
