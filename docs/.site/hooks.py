"""Adapt the pages of docs/, which are written for GitHub as well, to MkDocs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

REASON = re.compile(r"^(\s*```\w+) no-run: .*$", re.MULTILINE)
MESSAGE = re.compile(r"^```text$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")
PACKAGES = "<!-- the packages of zeroengine.integrations -->\n"


def on_config(config: Any) -> Any:
    """Add the pages of integrations/ to the navigation, so that a new page needs no line in mkdocs.yml."""
    for section in config.nav:
        if "Integrations" in section:
            pages = integration_pages(Path(config.docs_dir))
            section["Integrations"] = [f"integrations/{page.name}" for page in pages]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page with its generated parts, and without the reasons why the suite does not run a fence."""
    docs = Path(config.docs_dir)
    if page.file.src_uri == "api/integrations.md":
        markdown = replaced(markdown, PACKAGES, integration_reference(docs.parent))
    if page.file.src_uri.startswith("trouble/"):
        # Messages are long lines, and are broken there. Elsewhere such blocks are tables and drawings.
        markdown = MESSAGE.sub("```{.text .message}", markdown)
    markdown = without_links_to_the_repository(markdown, Path(page.file.abs_src_path), docs)
    # MkDocs takes a fence with the language alone.
    return REASON.sub(r"\1", markdown)


def without_links_to_the_repository(markdown: str, page: Path, docs: Path) -> str:
    """Return a page in which a link to a file of the repository outside docs/ is only its label."""

    def label_or_link(link: re.Match[str]) -> str:
        target = (page.parent / link[2]).resolve()
        is_elsewhere = target.exists() and not target.is_relative_to(docs.resolve())
        return link[1] if is_elsewhere else link[0]

    return LINK.sub(label_or_link, markdown)


def replaced(text: str, placeholder: str, value: str) -> str:
    """Return the text with the value in the place of the placeholder.

    Raises:
        ValueError: The placeholder is absent.
    """
    if placeholder not in text:
        raise ValueError(f"the line {placeholder.strip()!r} is gone")
    return text.replace(placeholder, value)


def integration_pages(docs: Path) -> list[Path]:
    """Return the pages of the integrations."""
    return sorted((docs / "integrations").glob("*.md"))


def integration_reference(root: Path) -> str:
    """Return the directives for the public names of each package of zeroengine.integrations."""
    parts = []
    for package in sorted((root / "zeroengine" / "integrations").iterdir()):
        names = exported_names(package / "__init__.py") if (package / "__init__.py").is_file() else []
        if names:
            parts.append(f"## zeroengine.integrations.{package.name}\n\n")
            parts += [
                f"::: zeroengine.integrations.{package.name}.{name}\n    options: {{heading_level: 3}}\n\n"
                for name in names
            ]
    return "".join(parts)


def exported_names(file: Path) -> list[str]:
    """Return the names in a module's ``__all__``, without importing it."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []
