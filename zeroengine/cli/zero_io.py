"""Run the command ``zero-io``: measure how fast a disk is, and find the settings that drive it best.

Modules that need torch are imported after the request was checked, so that a wrong one is refused at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from zeroengine.cli.parser import CommandParser, command
from zeroengine.errors import OffloadError
from zeroengine.utils.formats import parse_byte_size
from zeroengine.utils.progress import progress

if TYPE_CHECKING:
    from zeroengine.disk.probe import DiskInfo, DiskSpeed

USAGE = "zero-io PATH [options]"
EXAMPLES = """\
examples:
  zero-io /local_nvme                                   what the disk of this folder gives, and the best settings
  zero-io /local_nvme --size 8GB --json                 with a larger file, for programs
"""


@command("zero-io")
def main(argv: list[str] | None = None) -> int:
    """Measure the disk, print the result, and return the exit code."""
    about = "Measure how fast a disk reads and writes, and find the settings that drive it best."
    parser = CommandParser("zero-io", USAGE, about, EXAMPLES)
    add = parser.add_argument
    add("path", metavar="PATH", help='a folder on the disk, what "nvme_path" is to be')
    add("--size", metavar="SIZE", default="1GB", help="of the file to read and write: 1GB (default), 500MB, 8GiB, ...")
    add("--json", action="store_true", help="print all of it for programs")
    # Earlier versions wrote the settings into a file.
    add("--write-config", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.write_config is not None:
        raise OffloadError('leave --write-config out, and paste "aio" into the configuration, which zero-io prints')
    nbytes = parse_byte_size(options.size, "--size", OffloadError)

    from zeroengine.disk.probe import TRANSFER_BYTES, Probe, candidate_settings, describe_disk, fastest, measure
    from zeroengine.disk.swap_files import SwapFolder

    folder = SwapFolder(options.path, min_free_bytes=nbytes)
    disk, candidates = describe_disk(folder), candidate_settings()
    probe = Probe(folder, nbytes)
    # Blocks of a new file may not exist on the disk until they are written, so reading them first would measure
    # nothing.
    with progress("writing a file", probe.num_transfers * TRANSFER_BYTES) as advance:
        for written_bytes in probe.fill():
            advance(written_bytes)
    with progress("trying settings", 2 * len(candidates), in_bytes=False) as advance:
        speeds = measure(probe, candidates, lambda: advance(1))
    # The folder removes its files, and a long table must not keep the disk full.
    folder.close()
    best = fastest(speeds)
    if options.json:
        print(json.dumps(make_report(disk, speeds, best), indent=2))
    else:
        print_table(disk, speeds, best)
    return 0


def make_report(disk: DiskInfo, speeds: list[DiskSpeed], best: DiskSpeed) -> dict[str, Any]:
    """Return everything that was measured, for programs."""

    def entry(speed: DiskSpeed) -> dict[str, Any]:
        speeds_gb_s = {f"{name}_gb_s": getattr(speed, name) / 1e9 for name in ("read", "write", "both")}
        return dataclasses.asdict(speed.settings) | speeds_gb_s

    return {
        "disk": dataclasses.asdict(disk),
        "tried": [entry(speed) for speed in speeds],
        "best": entry(best),
        "aio": dataclasses.asdict(best.settings),
    }


def print_table(disk: DiskInfo, speeds: list[DiskSpeed], best: DiskSpeed) -> None:
    """Print the disk, a table of all speeds, and the configuration of the best settings."""
    from rich.console import Console
    from rich.table import Column, Table

    direct = (
        "works" if disk.direct else "does not work here: transfers go through the page cache, which these figures show"
    )
    print(f"{disk.path}: {disk.filesystem} on {disk.device}, {disk.free_bytes / 1e9:,.1f} GB free")
    print(f"direct I/O {direct}\n")

    names = ("queue_depth", "block_size", "read GB/s", "write GB/s", "both GB/s")
    columns = [Column(name, justify="right") for name in names]
    table = Table("backend", *columns, "", box=None, pad_edge=False, header_style="bold")
    for speed in speeds:
        is_best = speed is best
        table.add_row(
            speed.settings.backend,
            str(speed.settings.queue_depth),
            f"{speed.settings.block_size:,}",
            *(f"{x / 1e9:.2f}" for x in (speed.read, speed.write, speed.both)),
            "best" if is_best else "",
            style="bold green" if is_best else None,
        )
    Console().print(table)
    print(f'\nIn the configuration:\n\n"aio": {json.dumps(dataclasses.asdict(best.settings))}')


if __name__ == "__main__":
    sys.exit(main())
