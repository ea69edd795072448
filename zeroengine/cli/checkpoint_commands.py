"""Run the commands `zero-export`, `zero-import` and `zero-inspect`.

Modules that need torch are imported once the request is known to be right.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from zeroengine.cli.parser import CommandParser, command
from zeroengine.errors import CheckpointError
from zeroengine.utils.formats import counted, format_byte_size, parse_byte_size
from zeroengine.weights.output_folder import DTYPES, OutputFolder, parse_dtype

if TYPE_CHECKING:
    from rich.table import Table

    from zeroengine.checkpoint.inspect import FolderInfo, TensorInfo

EXPORT = "zero-export DIR OUT [options]"
EXPORT_EXAMPLES = """\
examples:
  zero-export runs/a weights                      the newest checkpoint of runs/a, in fp32
  zero-export runs/a weights --tag step-200 --dtype bf16 --shard-size 2GB
"""
IMPORT = "zero-import DEEPSPEED_DIR OUT [options]"
IMPORT_EXAMPLES = """\
examples:
  zero-import runs/ds runs/a                      the newest checkpoint of runs/ds, into the new folder runs/a
  zero-import runs/ds runs/a --tag global_step200
Then engine.load_checkpoint("runs/a") goes on where DeepSpeed was, at any stage and number of ranks.
"""
INSPECT = "zero-inspect DIR [options]"
INSPECT_EXAMPLES = """\
examples:
  zero-inspect runs/a                             every checkpoint, and whether it is whole
  zero-inspect runs/a --tag step-200 --tensors    the tensors in one of them
The exit code is 1 where something is damaged.
"""
COLORS = {"whole": "green", "damaged": "bold red", "unfinished": "yellow"}


@command("zero-export")
def export(argv: list[str] | None = None) -> int:
    """Run `zero-export` and return its exit code."""
    about = "Write a checkpoint's weights as safetensors, sharded and with an index, as Hugging Face loads them."
    parser = CommandParser("zero-export", EXPORT, about, EXPORT_EXAMPLES)
    add = parser.add_argument
    add("dir", metavar="DIR", help="a folder of checkpoints, or one checkpoint; also of torch Distributed Checkpoint")
    add("out", metavar="OUT", help="the folder to write")
    add("--tag", metavar="TAG", help="which checkpoint (default: the newest)")
    add("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default: as saved; parameters are fp32)")
    add("--shard-size", metavar="SIZE", default="5GB", help="of a file at most: 5GB (default), 500MB, 2GiB, ...")
    add("--force", action="store_true", help="replace the weights in OUT; other files there stay")
    add("--no-verify", action="store_true", help="do not compare checksums")
    add("--ema", action="store_true", help="write the moving averages of the weights")
    add("--prefix", metavar="TEXT", help="what stands before parameter names in DIR (default: found out)")
    options = parser.parse_args(argv)
    # Wrong values are refused before torch is imported, which takes seconds.
    parse_dtype(options.dtype)
    parse_byte_size(options.shard_size, "shard size", CheckpointError)
    from zeroengine.checkpoint.inspect import find_checkpoint

    # The checkpoint and the output are checked here without torch, too. The export checks them again under its lock.
    path, _ = find_checkpoint(options.dir, options.tag)
    OutputFolder(options.out).check(force=options.force, apart_from=path)

    import torch

    from zeroengine.weights import export as out

    # The export waits for the disk, so more threads would only take cores from others.
    torch.set_num_threads(1)
    done = out.export(
        options.dir,
        options.out,
        options.tag,
        dtype=options.dtype,
        shard_size=options.shard_size,
        force=options.force,
        verify=not options.no_verify,
        prefix=options.prefix,
        ema=options.ema,
    )
    print(
        f"{options.out}: {_count_tensors(done.tensors, done.tied)} of {done.source.name} in "
        f"{counted(done.files, 'file')}, {format_byte_size(done.nbytes)}"
    )
    return 0


def _count_tensors(num_tensors: int, num_tied: int) -> str:
    also = f" and {counted(num_tied, 'tied name')}" if num_tied else ""
    return f"{counted(num_tensors, 'tensor')}{also}"


@command("zero-import")
def import_deepspeed(argv: list[str] | None = None) -> int:
    """Run `zero-import` and return its exit code."""
    about = "Turn a checkpoint of DeepSpeed's ZeRO stages 1 to 3 into one that engine.load_checkpoint resumes from."
    parser = CommandParser("zero-import", IMPORT, about, IMPORT_EXAMPLES)
    add = parser.add_argument
    add("dir", metavar="DEEPSPEED_DIR", help="what DeepSpeed's save_checkpoint wrote, or the folder of one tag in it")
    add("out", metavar="OUT", help="the folder of checkpoints to write")
    add("--tag", metavar="TAG", help="which checkpoint (default: the newest)")
    add("--force", action="store_true", help="add to the checkpoints in OUT, and replace the one of the same tag")
    # Only these checks run before torch is imported, so a wrong folder is reported at once.
    options = parser.parse_args(argv)
    from zeroengine.checkpoint.deepspeed import checkpoint_files as files

    files.files_of(files.find_checkpoint(options.dir, options.tag))
    files.check_out(options.out, options.dir, force=options.force)

    from zeroengine.checkpoint.deepspeed import checkpoint_import

    done = checkpoint_import.import_checkpoint(options.dir, options.out, options.tag, force=options.force)
    # Whatever the import left out goes to stderr, so that a program can read the summary from stdout.
    for note in done.notes:
        print(f"zero-import: left out: {note}", file=sys.stderr)
    manifest = done.manifest
    print(
        f"{done.path}: {_count_tensors(done.tensors, done.tied)} and the state of {manifest.optimizer} at step "
        f"{manifest.step}, {format_byte_size(manifest.nbytes)}, of {done.source} (stage {manifest.stage}, "
        f"{counted(manifest.world_size, 'rank')}, DeepSpeed {manifest.versions['deepspeed']})"
    )
    return 0


@command("zero-inspect")
def inspect(argv: list[str] | None = None) -> int:
    """Run `zero-inspect` and return its exit code."""
    about = "Show what is in a folder of checkpoints, and whether it is whole."
    parser = CommandParser("zero-inspect", INSPECT, about, INSPECT_EXAMPLES)
    add = parser.add_argument
    add("dir", metavar="DIR", help="a folder of checkpoints, or one checkpoint")
    add("--tag", metavar="TAG", help="this checkpoint alone")
    add("--tensors", action="store_true", help="list the tensors of a checkpoint: of TAG, or of the newest")
    add("--json", action="store_true", help="print JSON")
    add("--no-verify", action="store_true", help="do not read the files: compare sizes alone")
    options = parser.parse_args(argv)
    from zeroengine.checkpoint.inspect import find_checkpoint, inspect_folder, list_tensors

    # One damaged checkpoint must not hide the others, so problems are collected rather than raised.
    folder = inspect_folder(options.dir, options.tag, verify=not options.no_verify)
    listed: list[TensorInfo] | None = None
    if options.tensors:
        try:
            listed = list_tensors(find_checkpoint(options.dir, options.tag)[0])
        # The table still shows what else the folder holds.
        except CheckpointError as error:
            folder.problems.append(str(error))
    if options.json:
        tree: dict[str, Any] = {
            "directory": str(folder.path),
            "problems": folder.problems,
            "checkpoints": [checkpoint.to_dict() for checkpoint in folder.checkpoints],
        }
        if listed is not None:
            tree["tensors"] = [dataclasses.asdict(tensor) for tensor in listed]
        print(json.dumps(tree, indent=1))
    else:
        _print(_checkpoints(folder))
        for problem in [*folder.problems, *(f"{f.tag}: {p}" for f in folder.checkpoints for p in f.problems)]:
            print(problem)
        if listed is not None:
            _print(_tensors(listed))
    # The exit code lets a script act on damage without reading the table.
    return int(folder.damaged)


def _checkpoints(folder: FolderInfo) -> Table:
    # rich is imported where a table is built, because `--json` needs none of it.
    from rich.text import Text

    table = _table("tag", "step", "stage", "ranks", "precision", "optimizer", "size", "saved at", "versions", "state")
    for checkpoint in folder.checkpoints:
        manifest = checkpoint.manifest
        facts, versions = ["", "", "", "", ""], ""
        if manifest is not None:
            facts = [
                *map(str, (manifest.step, manifest.stage, manifest.world_size)),
                manifest.precision,
                manifest.optimizer,
            ]
            versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        # All times are in UTC, so the offset would only widen the column.
        when = checkpoint.saved_at.removesuffix("+00:00").replace("T", " ")
        without_frozen = ", without frozen parameters" if manifest is not None and manifest.left_out else ""
        state = Text(checkpoint.verdict, COLORS.get(checkpoint.verdict, "")) + Text(
            without_frozen + (", latest" if checkpoint.latest else "")
        )
        # Text is passed rather than strings: rich would take brackets in a name for markup.
        table.add_row(*map(Text, [checkpoint.tag, *facts, format_byte_size(checkpoint.nbytes), when, versions]), state)
    return table


def _tensors(listed: list[TensorInfo]) -> Table:
    from rich.text import Text

    table = _table("tensor", "shape", "dtype", "size")
    for tensor in listed:
        shape = " x ".join(str(size) for size in tensor.shape) or "scalar"
        # A tied tensor takes no bytes of its own, so its size would count twice.
        size = f"is {tensor.tied_to}" if tensor.tied_to is not None else format_byte_size(tensor.nbytes)
        table.add_row(Text(tensor.name), shape, tensor.dtype, Text(size))
    total_bytes = sum(tensor.nbytes for tensor in listed if tensor.tied_to is None)
    table.add_row(counted(len(listed), "tensor"), "", "", format_byte_size(total_bytes))
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Column, Table

    right = ("step", "stage", "ranks", "size")
    headers = [Column(name, justify="right" if name in right else "left") for name in columns]
    return Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console()
    # A program that reads the output expects one line for each row, so nothing may be wrapped.
    (console if console.is_terminal else Console(width=10_000)).print(table)
