"""Run the Python of a page about a framework, in that framework's environment.

``tests/test_docs.py`` runs the other pages. There the framework is not installed, so each snippet says ``no-run:`` and
where it does run, which is here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python no-run: tests/integrations/\w+ runs it[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: str, names: dict[str, Any]) -> int:
    """Run the snippets of a page one after another, each with the names of those before, and return their number.

    Args:
        page: The page, relative to the repository.
        names: What the page takes for granted.
    """
    text = (ROOT / page).read_text()
    snippets = list(FENCE.finditer(text))
    for snippet in snippets:
        # Empty lines before the code give errors the lines of the page.
        lines_above = text.count("\n", 0, snippet.start(1))
        exec(compile("\n" * lines_above + snippet[1], page, "exec", dont_inherit=True), names)
    return len(snippets)
