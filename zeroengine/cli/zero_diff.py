"""Run the command `zero-diff`: say where two runs, a run and a checkpoint, or two checkpoints differ first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from zeroengine.checkpoint.inspect import find_checkpoint
from zeroengine.checkpoint.manifest import Manifest
from zeroengine.cli.parser import CommandParser, command, write_output
from zeroengine.errors import CheckpointError, ZeroEngineError
from zeroengine.utils.files import DIGESTS, EVENTS, RUN, STEPS, path_argument
from zeroengine.utils.formats import MISSING, counted
from zeroengine.view.diff_report import (
    DiffReport,
    Side,
    compare_records,
    compare_runs,
    different_settings,
    read_side,
    rounding,
)
from zeroengine.view.digest_comparison import DigestComparison
from zeroengine.view.digest_table import (
    HOW_TO_WRITE,
    DigestTable,
    MissingDigestsError,
    read_digests,
    table_of_checkpoint,
)
from zeroengine.view.report import diff_page
from zeroengine.view.run_reader import RunReader
from zeroengine.view.terminal import add_cells, make_console, make_table

EXAMPLES = """\
examples:
  zero-diff runs/a runs/b                       the first step and unit at which two runs differ, and their settings
  zero-diff runs/a runs/b --html diff.html      the same with a picture of steps by units, as a page for a browser
  zero-diff runs/a saved/step-100               the digests of a run and those of a checkpoint
  zero-diff saved/step-100 other/step-100       two checkpoints, tensor by tensor
The exit code is 0 where nothing differs, 1 where something does, and 2 for trouble.
"""
# The tensors that the terminal shows, the characters of a setting, and how the figures of a tensor are written.
MAX_TENSORS, MAX_VALUE = 20, 60
FIGURES = {"elements": ",", "differing": ",", "absolute": ".3g", "relative": ".3g", "ulps": ","}


@command("zero-diff")
def main(argv: list[str] | None = None) -> int:
    """Compare and return the exit code."""
    about = "Say at which step, in which units and states two runs or checkpoints differ first, and in what settings."
    parser = CommandParser("zero-diff", "zero-diff A B [options]", about, EXAMPLES)
    add = parser.add_argument
    add("a", metavar="A", type=path_argument, help="a run folder, or a checkpoint; of a folder of some the newest")
    add("b", metavar="B", type=path_argument, help="another one")
    add("--html", metavar="FILE", type=path_argument, help="write one self-contained page, too")
    options = parser.parse_args(argv)
    try:
        report = compare([options.a, options.b])
    except OSError as error:
        # As in diff, 1 means that the two differ.
        raise ZeroEngineError(f"{error.filename}: {error.strerror}") from None
    if options.html:
        readers = [RunReader(path) for path in (options.a, options.b) if _is_run(path)]
        write_output(options.html, diff_page(report, readers), "--html")
    show(report)
    return int(bool(report.differences))


def compare(paths: list[Path]) -> DiffReport:
    """Return how two runs, a run and a checkpoint, or two checkpoints differ.

    Raises:
        ZeroEngineError: One of them is neither, or they cannot be compared.
    """
    if not any(map(_is_run, paths)):
        return _compare_checkpoints(paths)
    sides, tables = zip(*map(_read, paths), strict=True)
    try:
        return compare_runs(DigestComparison([read() for read in tables], [side.name for side in sides]), sides)
    except MissingDigestsError as error:
        if (report := compare_records(sides, str(error))) is None:
            raise
        return report


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RUN, STEPS, EVENTS, DIGESTS))


def _read(path: Path) -> tuple[Side, Callable[[], DigestTable]]:
    if _is_run(path):
        return read_side(path, str(path)), partial(read_digests, path)
    checkpoint = _find_checkpoint(path)
    return _side_of(path, *checkpoint), partial(_digests_of_checkpoint, *checkpoint)


def _find_checkpoint(path: Path) -> tuple[Path, Manifest | None]:
    try:
        return find_checkpoint(path, None)
    except CheckpointError as error:
        raise CheckpointError(
            f'{error} For a run, write its folder, as in "monitor": {{"folder": "runs/a"}} of its configuration.'
        ) from None


def _digests_of_checkpoint(path: Path, manifest: Manifest | None) -> DigestTable:
    if manifest is None or not manifest.digests:
        raise ZeroEngineError(
            f"{path} has no digests, without which it does not compare with a run: {HOW_TO_WRITE}, and save at a step "
            "with digests. Two checkpoints are compared without"
        )
    return table_of_checkpoint(manifest.digests, manifest.num_steps, manifest.world_size)


def _side_of(path: Path, found: Path, manifest: Manifest | None) -> Side:
    # Of a folder, the newest checkpoint is compared, and its name belongs to what is said.
    name = str(path if path.name == found.name else path / found.name)
    if manifest is None:
        return Side(name, {})
    facts = manifest.model_dump(include={"config", "step", "world_size", "precision", "optimizer", "versions"})
    # The names of parameters are those of the tensors.
    groups = [{key: group[key] for key in group if key != "params"} for group in manifest.param_groups]
    return Side(name, facts | {"param_groups": {str(number): group for number, group in enumerate(groups)}})


def _compare_checkpoints(paths: list[Path]) -> DiffReport:
    # Only the tensors need torch, whose import takes seconds.
    checkpoints = list(map(_find_checkpoint, paths))
    from zeroengine.checkpoint.tensor_differences import compare_checkpoints

    tensors, sentences = compare_checkpoints([path for path, _ in checkpoints])
    sides = [_side_of(path, *checkpoint) for path, checkpoint in zip(paths, checkpoints, strict=True)]
    settings = different_settings(sides)
    rows = sorted((t for t in tensors if t.differing), key=lambda tensor: -tensor.relative)
    if rows:
        most = max(rows, key=lambda tensor: tensor.absolute)
        count = sum(tensor.differing for tensor in rows)
        sentences = [
            f"{len(rows):,} of {len(tensors):,} tensors differ, in {counted(count, 'element')}.",
            f"The largest difference is {most.absolute:.3g}, in {most.name}, and the largest relative one "
            f"{rows[0].relative:.3g}, in {rows[0].name}.",
            *sentences,
            *rounding(sides, settings, [side.facts.get("world_size", 0) for side in sides]),
        ]
    names, elements = [side.name for side in sides], sum(tensor.elements for tensor in tensors)
    coverage = [f"Compared: {counted(len(tensors), 'tensor')} with {counted(elements, 'element')}."]
    return DiffReport(names, sentences, coverage, settings, tensors=[vars(tensor) for tensor in rows])


def show(report: DiffReport) -> None:
    """Print a comparison for people."""
    console = make_console()
    first, *others = report.differences or [f"{report.names[0]} and {report.names[1]} are equal."]
    for style, sentences in {"bold": [first], "": others, "dim": report.coverage}.items():
        for sentence in sentences:
            console.print(sentence, markup=False, style=style)
    shown = report.tensors[:MAX_TENSORS]
    tensors = [[row["name"], *(format(row[key], how) for key, how in FIGURES.items())] for row in shown]
    if len(report.tensors) > MAX_TENSORS:
        tensors.append([f"and {len(report.tensors) - MAX_TENSORS:,} more"])
    settings = [[str(MISSING if value is None else value)[:MAX_VALUE] for value in row] for row in report.settings]
    for what, names, rows in (("Tensors", FIGURES, tensors), ("Settings", report.names, settings)):
        if rows:
            columns = [(name, "right" if names is FIGURES else "left") for name in names]
            table = make_table(f"{what} that differ", [("", "left"), *columns])
            for row in rows:
                add_cells(table, *row)
            console.print("", table, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
