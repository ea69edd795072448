"""`python -m zeroengine.migration`: print the tables of docs/from-deepspeed.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from zeroengine.migration.names import ARGUMENTS, DEEPSPEED, ENGINE, MODULE


def tables() -> Iterator[str]:
    """Yield the tables of docs/from-deepspeed.md: of attributes of the engine, of arguments, of the package."""
    head = "| {} | here |\n|---|---|"
    for origin in dict.fromkeys(row.origin for row in ENGINE.values()):
        rows = {f"`engine.{name}`": row.text for name, row in ENGINE.items() if row.origin == origin}
        yield "\n".join([head.format(origin), *map(_line, rows.items())])
    for call, table in ARGUMENTS.items():
        rows = {f"`{name}=`": row.text for name, row in table.items()}
        yield "\n".join([head.format(f"`{call}`"), *map(_line, rows.items())])
    rows = {f"`{'deepspeed.' if row.origin == DEEPSPEED else ''}{name}`": row.text for name, row in MODULE.items()}
    yield "\n".join([head.format("the package"), *map(_line, rows.items())])


def _line(item: tuple[str, str]) -> str:
    name, text = item
    return f"| {name} | {text[:1].lower()}{text[1:]} |"


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables()) + "\n")
