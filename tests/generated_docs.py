"""Write the generated parts of docs and configs: python -m tests.generated_docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel

from tests.conftest import ROOT
from zeroengine.config import deepspeed_keys, reference
from zeroengine.config.keys import checked_models
from zeroengine.config.model import Config
from zeroengine.config.optimizers import ImportedOptimizerConfig
from zeroengine.migration.names import ARGUMENTS, DEEPSPEED, ENGINE, MODULE

SCHEMA = ROOT / "configs" / "schema.json"
CONFIGURATION, FROM_DEEPSPEED, INTEGRATIONS = (
    ROOT / "docs" / name for name in ("configuration.md", "from-deepspeed.md", "integrations/index.md")
)


def honored_table() -> str:
    """Return every key of the models, its default, and its docstring, as a Markdown table."""
    spellings: dict[str, list[str]] = {}
    for written, canonical in deepspeed_keys.ALIASES.items():
        same_section = written.rpartition(".")[0] == canonical.rpartition(".")[0]
        spellings.setdefault(canonical, []).append(written.rpartition(".")[2] if same_section else written)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for path, default, text in _honored(Config, ""):
        also = "".join(f" (also `{name}`)" for name in spellings.get(path, []))
        rows.append(f"| `{path}`{also} | {default} | {text} |".replace("\n", " "))
    return "\n".join(rows)


def deepspeed_table() -> str:
    """Return DeepSpeed's other keys, and how each is treated here, as a Markdown table."""
    rows = ["| DeepSpeed key | here | why | silent where |", "|---|---|---|---|"]
    for row in deepspeed_keys.TABLE.values():
        off = ", ".join(f"`{json.dumps(value)}`" for value in row.off)
        rows.append(f"| `{row.path}` | {row.status} | {row.reason} | {off} |")
    return "\n".join(rows)


def _honored(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield the path, the default and the description of every key of `model`, whose path begins with `prefix`."""
    for name, info in model.model_fields.items():
        path, inner = f"{prefix}{info.alias or name}", checked_models(info)
        if name in ("optimizer", "scheduler"):
            yield path, "`null`", info.description or ""
            for member in inner:
                kind = member.model_fields["type"]
                # A class named by its import path has no fixed name that could stand in the table.
                named = member is not ImportedOptimizerConfig
                type_name = get_args(kind.annotation)[0] if named else "package.Class"
                yield f'{path}.type = "{type_name}"', "", kind.description or ""
                for params in checked_models(member.model_fields["params"]):
                    yield from _honored(params, f"{path}.params.")
                if not named:
                    yield f"{path}.params", "`{}`", member.model_fields["params"].description or ""
        elif inner:
            for section in inner:
                yield from _honored(section, f"{path}.")
        else:
            default = "required" if info.is_required() else f"`{json.dumps(info.default)}`"
            yield path, default, info.description or ""


def migration_tables() -> Iterator[str]:
    """Yield the tables of docs/from-deepspeed.md: of attributes of the engine, of arguments, of the package."""
    head = "| {} | here |\n|---|---|"
    for origin in dict.fromkeys(row.origin for row in ENGINE.values()):
        rows = {f"`engine.{name}`": row.text for name, row in ENGINE.items() if row.origin == origin}
        yield "\n".join([head.format(origin), *map(table_row, rows.items())])
    for call, table in ARGUMENTS.items():
        rows = {f"`{name}=`": row.text for name, row in table.items()}
        yield "\n".join([head.format(f"`{call}`"), *map(table_row, rows.items())])
    rows = {f"`{'deepspeed.' if row.origin == DEEPSPEED else ''}{name}`": row.text for name, row in MODULE.items()}
    yield "\n".join([head.format("the package"), *map(table_row, rows.items())])


def integrations_table() -> str:
    """Return the title of each page of an integration, the import that it begins with, and a link."""
    rows = ["| framework | what you write | page |", "|---|---|---|"]
    for page in sorted(page for page in INTEGRATIONS.parent.glob("*.md") if page != INTEGRATIONS):
        text = page.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        imported = re.search(r"^\s*((?:from|import) zeroengine\.integrations\S*.*?)(?:  #.*)?$", text, re.MULTILINE)
        assert imported is not None, page
        rows.append(f"| {title} | `{imported[1]}` | [{title}]({page.name}) |")
    return "\n".join(rows)


def table_row(item: tuple[str, str]) -> str:
    name, text = item
    return f"| {name} | {text[:1].lower()}{text[1:]} |"


def main() -> None:
    SCHEMA.write_text(json.dumps(reference.json_schema(), indent=2) + "\n")
    for path, tables in (
        (CONFIGURATION, (honored_table(), deepspeed_table())),
        (FROM_DEEPSPEED, migration_tables()),
        (INTEGRATIONS, (integrations_table(),)),
    ):
        text = path.read_text()
        for table in tables:
            # A table is found by its first line, and ends with its last row.
            head = re.escape(table.splitlines()[0])
            text = re.sub(rf"^{head}\n(\|.*\n)+", lambda _, new=table: f"{new}\n", text, flags=re.MULTILINE)
        path.write_text(text)


if __name__ == "__main__":
    main()
