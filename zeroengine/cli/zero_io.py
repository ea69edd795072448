"""The command `zero-io`: how fast a disk is, and the settings that drive it best.

What needs torch is imported once the request is known to be right.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroengine.cli.parser import CommandParser, run_command
from zeroengine.errors import OffloadError
from zeroengine.utils.byte_size import parse_byte_size

if TYPE_CHECKING:
    from zeroengine.disk.probe import Disk, Settings, Speed

USAGE = "zero-io PATH [options]"
EXAMPLES = """\
examples:
  zero-io /local_nvme                                   what the disk of this folder gives, and the best settings
  zero-io /local_nvme --write-config ds.json            and put them into a configuration
  zero-io /local_nvme --size 8GB --json                 with a larger file, for programs
"""


def parser() -> CommandParser:
    about = "Measure how fast a disk reads and writes, and find the settings that drive it best."
    parser = CommandParser("zero-io", USAGE, about, EXAMPLES)
    add = parser.add_argument
    add("path", metavar="PATH", help='a folder on the disk, what "nvme_path" is to be')
    add("--size", metavar="SIZE", default="1GB", help="of the file to read and write: 1GB (default), 500MB, 8GiB, ...")
    add("--json", action="store_true", help="print all of it for programs")
    add(
        "--write-config", metavar="FILE", type=Path, help='put the best settings into this JSON configuration, as "aio"'
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command("zero-io", lambda: probe(parser().parse_args(argv)))


def probe(options: argparse.Namespace) -> int:
    nbytes = parse_byte_size(options.size, "--size", OffloadError)
    config = read_config(options.write_config)

    from zeroengine.disk.probe import Probe, best, candidates, disk_of, measure
    from zeroengine.disk.swap_files import SwapFolder

    folder = SwapFolder(options.path, rank=0, min_free_bytes=nbytes)
    disk, settings = disk_of(folder), candidates()
    work = Probe(folder, nbytes)
    with Progress() as progress:
        progress.begin("writing a file", work.num_pieces)
        for _ in work.fill():
            progress.step()
        progress.begin("trying settings", 2 * len(settings))
        speeds = measure(work, settings, progress.step)
    folder.close()
    winner = best(speeds)
    if options.json:
        print(json.dumps(report(disk, speeds, winner), indent=2))
    else:
        show(disk, speeds, winner)
    if options.write_config:
        write_config(options.write_config, config, keys(winner.settings))
        print(f'zero-io: "aio" is now in {options.write_config}', file=sys.stderr)
    return 0


def keys(settings: Settings) -> dict[str, Any]:
    """What stands under "aio" in a configuration."""
    return dataclasses.asdict(settings)


def report(disk: Disk, speeds: list[Speed], winner: Speed) -> dict[str, Any]:
    def entry(speed: Speed) -> dict[str, Any]:
        return keys(speed.settings) | {f"{name}_gb_s": getattr(speed, name) / 1e9 for name in ("read", "write", "both")}

    return {
        "disk": dataclasses.asdict(disk),
        "tried": [entry(speed) for speed in speeds],
        "best": entry(winner),
        "aio": keys(winner.settings),
    }


def show(disk: Disk, speeds: list[Speed], winner: Speed) -> None:
    from rich.console import Console
    from rich.table import Table

    kind = {None: "", True: ", rotational", False: ", solid state"}[disk.rotational]
    blocks = f", blocks of {disk.block_size} bytes" if disk.block_size else ""
    direct = (
        "works" if disk.direct else "does not work here: transfers go through the page cache, which these figures show"
    )
    print(f"{disk.path}: {disk.filesystem} on {disk.device}{kind}{blocks}, {disk.free_bytes / 1e9:,.1f} GB free")
    print(f"direct I/O {direct}\n")

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("backend")
    for name in ("queue_depth", "block_size", "read GB/s", "write GB/s", "both GB/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for speed in speeds:
        chosen = speed is winner
        table.add_row(
            speed.settings.backend,
            str(speed.settings.queue_depth),
            f"{speed.settings.block_size:,}",
            *(f"{x / 1e9:.2f}" for x in (speed.read, speed.write, speed.both)),
            "best" if chosen else "",
            style="bold green" if chosen else None,
        )
    Console().print(table)
    print(f'\nIn the configuration:\n\n"aio": {json.dumps(keys(winner.settings))}')


class Progress:
    """A bar on the terminal, where there is one."""

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._bar.start()
        return self

    def begin(self, what: str, total: int) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(what, total=total)

    def step(self) -> None:
        self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def read_config(path: Path | None) -> dict[str, Any]:
    """The configuration that the settings shall go into.

    Raises:
        OffloadError: it is not there, or is not a JSON object.
    """
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise OffloadError(f"--write-config {path}: it cannot be read ({error.strerror})") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise OffloadError(f"--write-config {path}: it is no JSON object; run without, and paste what zero-io prints")
    return config


def write_config(path: Path, config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Replaces the file by one with the settings, at once and as a whole."""
    old = config.get("aio")
    config["aio"] = (old if isinstance(old, dict) else {}) | settings
    path = Path(os.path.realpath(path))
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            json.dump(config, file, indent=2)
            file.write("\n")
        os.chmod(file.name, path.stat().st_mode & 0o7777)
        os.replace(file.name, path)
    except OSError as error:
        raise OffloadError(f"--write-config {path}: it cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(main())
