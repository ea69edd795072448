"""Write a run, two laid over each other, or how two differ, as one self-contained HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from zeroengine.view.clean_values import finite
from zeroengine.view.diff_report import DiffReport
from zeroengine.view.page_data import run_data
from zeroengine.view.run_reader import RunReader

# The scripts in the order in which they need each other. They share one scope of the page.
SCRIPTS = ("format.js", "elements.js", "chart.js", "panels.js", "cards.js", "page.js")
DIFF_SCRIPTS = (*SCRIPTS[:-1], "diff.js")
STYLES = ("theme.css", "charts.css", "lists.css", "layout.css")


def report_page(readers: Sequence[RunReader]) -> str:
    """Return the page of one run or two, which needs no network and no other file.

    Args:
        readers: The runs; the second one is laid over the first.
    """
    names = run_names(readers)
    data = {"runs": [run_data(reader, name) for reader, name in zip(readers, names, strict=True)]}
    return page_of(" and ".join(names), SCRIPTS, data)


def diff_page(report: DiffReport, readers: Sequence[RunReader]) -> str:
    """Return the page of a comparison of runs or checkpoints, which needs no network and no other file.

    Args:
        report: The comparison.
        readers: The runs, whose losses and configurations the page shows, too.
    """
    data = finite(vars(report)) | {"runs": [run_data(reader, str(reader.folder)) for reader in readers]}
    return page_of(" and ".join(report.names), DIFF_SCRIPTS, data)


def page_of(title: str, scripts: Sequence[str], data: Any) -> str:
    """Return a page that needs no network and no other file.

    Args:
        title: What the browser calls it.
        scripts: The names of its scripts, in order.
        data: What the scripts read, as JSON types.
    """
    parts = {
        "title": html.escape(title),
        "style": "\n".join(map(asset, STYLES)),
        "script": "\n".join(map(asset, scripts)),
        # In a script element text ends at "</script", whatever its language, so JSON without "<" is safe there.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # The template is cut at its marks first, so that a mark in the data or a name is left alone.
    page = []
    for index, text in enumerate(asset("report.html").split("@@")):
        page.append(parts[text] if index % 2 else text)
    return "".join(page)


def run_names(readers: Sequence[RunReader]) -> list[str]:
    """Return the shortest ends of the folders' paths that tell the runs apart."""
    paths = [reader.folder.resolve().parts for reader in readers]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]


def asset(name: str) -> str:
    """Return the text of a file in report_assets/."""
    return files("zeroengine.view").joinpath("report_assets", name).read_text(encoding="utf-8")
