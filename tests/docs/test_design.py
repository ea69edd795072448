"""What docs/design.md says of files and layers is so, and each file of the core is in its tree."""

from __future__ import annotations

import re
from collections import Counter

from tests.conftest import ROOT
from tests.test_layers import TIERS

PAGE = (ROOT / "docs" / "design.md").read_text()
SOURCES = ROOT / "zeroengine"
CORE = ("partition", "schedule", "runtime", "optim", "ops", "comm", "checkpoint", "engine", "memory", "offload", "disk")


def block(heading: str) -> str:
    """Return the first fenced block below a heading."""
    return PAGE.split(f"## {heading}\n")[1].split("```text\n")[1].split("```")[0]


def test_the_tree_names_each_file_of_the_core_once() -> None:
    named: Counter[str] = Counter()
    folder = ""
    for line in block("The tree").splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            named[f"{folder}{name}"] += 1
        else:
            folder = name
    files = {
        str(path.relative_to(SOURCES))
        for package in CORE
        for path in (SOURCES / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert named == Counter(files)


def test_the_page_has_the_layers_of_the_sources() -> None:
    tiers = [set(re.split(r",\s*", tier.strip())) for tier in block("The layers").split("<")]
    assert tiers == TIERS


def test_what_the_page_names_exists() -> None:
    paths = set(re.findall(r"`([\w/.-]+/[\w.-]*)`", PAGE))
    assert not [path for path in sorted(paths) if not ((SOURCES / path).exists() or (ROOT / path).exists())]
