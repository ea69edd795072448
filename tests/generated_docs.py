"""Write the generated parts of docs and configs: python -m tests.generated_docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel

from tests.conftest import ROOT
from zeroengine.config import deepspeed_keys, reference
from zeroengine.config.keys import checked_models
from zeroengine.config.model import Config
from zeroengine.config.optimizers import ImportedOptimizerConfig
from zeroengine.migration.names import ARGUMENTS, DEEPSPEED, ENGINE, MODULE, Counterpart

SCHEMA = ROOT / "configs" / "schema.json"
CONFIGURATION, COMING_FROM = ROOT / "docs" / "configuration.md", ROOT / "docs" / "coming-from.md"


def honored_table() -> str:
    """Return every key of the models, its default, and its docstring, as a Markdown table."""
    spellings: dict[str, list[str]] = {}
    for written, canonical in deepspeed_keys.ALIASES.items():
        same_section = written.rpartition(".")[0] == canonical.rpartition(".")[0]
        spellings.setdefault(canonical, []).append(written.rpartition(".")[2] if same_section else written)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for path, default, text, kind in _honored(Config, ""):
        kinds.setdefault((path, default, text.replace("\n", " ")), []).append(kind)
    rows = []
    for (path, default, text), types in kinds.items():
        also = "".join(f" (also `{name}`)" for name in spellings.get(path, []))
        of = f" ({', '.join(types)})" if all(types) else ""
        rows.append((f"`{path}`{also}{of}", default, text))
    return markdown_table(("key", "default", "meaning"), rows)


def deepspeed_tables() -> Iterator[str]:
    """Yield a Markdown table for each way in which DeepSpeed's other keys are treated here."""
    for status in dict.fromkeys(row.status for row in deepspeed_keys.TABLE.values()):
        rows = [(f"`{row.path}`", row.reason) for row in deepspeed_keys.TABLE.values() if row.status == status]
        yield markdown_table((status, "why"), rows)


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table in which rows that differ in the first column alone are one row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    lines = [head, *((", ".join(same), *cells) for cells, same in names.items())]
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def _honored(model: type[BaseModel], prefix: str, kind: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the path, the default and the description of every key of `model`, whose path begins with `prefix`.

    The last value is the type of optimizer or schedule whose parameter the key is, or empty.
    """
    texts = reference.field_docstrings(model)
    for name, info in model.model_fields.items():
        path, inner = f"{prefix}{info.alias or name}", checked_models(info)
        if name in ("optimizer", "scheduler"):
            yield path, "`null`", texts[name], ""
            for member in inner:
                field, member_texts = member.model_fields["type"], reference.field_docstrings(member)
                # A class named by its import path has no fixed name that could stand in the table.
                named = member is not ImportedOptimizerConfig
                type_name = get_args(field.annotation)[0] if named else "package.Class"
                yield f'{path}.type = "{type_name}"', "", member_texts["type"], ""
                for params in checked_models(member.model_fields["params"]):
                    yield from _honored(params, f"{path}.params.", type_name)
                if not named:
                    yield f"{path}.params", "`{}`", member_texts["params"], ""
        elif inner:
            for section in inner:
                yield from _honored(section, f"{path}.")
        else:
            value = None if info.is_required() else info.get_default(call_default_factory=True)
            default = "required" if info.is_required() else f"`{json.dumps(value)}`"
            yield path, default, texts[name], kind


def migration_tables() -> Iterator[str]:
    """Yield the tables of names of other libraries: attributes of the engine, arguments, and names of the package."""
    for origin in dict.fromkeys(row.origin for row in ENGINE.values()):
        rows = {f"`engine.{name}`": row for name, row in ENGINE.items() if row.origin == origin}
        yield migration_table(origin, rows)
    rows = {f"`{call}({name}=)`": row for call, table in ARGUMENTS.items() for name, row in table.items()}
    yield migration_table("argument", rows)
    rows = {f"`{'deepspeed.' if row.origin == DEEPSPEED else ''}{name}`": row for name, row in MODULE.items()}
    yield migration_table("the package", rows)


def migration_table(origin: str, rows: Mapping[str, Counterpart]) -> str:
    cells = ((name, f"{row.text[:1].lower()}{row.text[1:]}") for name, row in rows.items())
    return markdown_table((origin, "here"), cells)


def integrations_table() -> str:
    """Return the title of each page of an integration, with a link, and the import that the page begins with."""
    rows = []
    for page in sorted((COMING_FROM.parent / "integrations").glob("*.md")):
        text = page.read_text()
        title = text.partition("\n")[0].removeprefix("# ")
        imported = re.search(r"^\s*((?:from|import) zeroengine\.integrations\S*.*?)(?:  #.*)?$", text, re.MULTILINE)
        assert imported is not None, page
        rows.append((f"[{title}](integrations/{page.name})", f"`{imported[1]}`"))
    return markdown_table(("keep your framework", "what you write"), rows)


def main() -> None:
    SCHEMA.write_text(json.dumps(reference.json_schema(), indent=2) + "\n")
    for path, tables in (
        (CONFIGURATION, (honored_table(), *deepspeed_tables())),
        (COMING_FROM, (*migration_tables(), integrations_table())),
    ):
        text = path.read_text()
        for table in tables:
            # A table is found by its first line, and ends with its last row.
            head = re.escape(table.splitlines()[0])
            text = re.sub(rf"^{head}\n(\|.*\n)+", lambda _, new=table: f"{new}\n", text, flags=re.MULTILINE)
        path.write_text(text)


if __name__ == "__main__":
    main()
