"""`python -m zeroengine.config`: check a configuration before a run, or print its JSON Schema."""

from __future__ import annotations

import argparse
import json
import sys

from zeroengine import __version__
from zeroengine.config import reference
from zeroengine.config.loading import load
from zeroengine.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m zeroengine.config", description=__doc__)
    parser.add_argument("--version", action="version", version=f"zeroengine {__version__}")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of the file")
    commands = parser.add_subparsers(dest="command")
    check = commands.add_parser("check", help="check a file and print what it resolves to")
    check.add_argument("file", metavar="FILE", help="a JSON, YAML or HJSON file")
    check.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: one model)")
    check.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override")
    options = parser.parse_args(arguments)
    # The schema describes the format itself and needs no file.
    if options.schema:
        print(json.dumps(reference.json_schema(), indent=2))
    elif options.command == "check":
        try:
            config = load(options.file, options.overrides)
            # The ranks that hold one model together are the fewest.
            world_size = options.world_size or max(config.tensor_parallel.autotp_size, 1)
            resolved = config.resolve(world_size=world_size)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 1
        # Notices go to stderr, so that stdout holds the resolved configuration alone.
        for notice in config.notices:
            print(f"note: {notice}", file=sys.stderr)
        print(resolved.describe())
    else:
        parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
