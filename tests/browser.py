"""A headless browser for tests of HTML pages. Tests are skipped where there is none (see CONTRIBUTING.md)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Chromium's own sandbox does not work for root, as whom containers run.
ARGUMENTS = ["--no-sandbox"]


@dataclass
class Tab:
    """A page in the browser, with everything that it must not do."""

    page: Any  # playwright's Page
    problems: list[str] = field(default_factory=list)  # console messages, errors and requests of the network


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Yield a running Chromium: playwright's own, or the one of the system."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        system = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        for path in (None, system):
            if path is None and not Path(playwright.chromium.executable_path).exists():
                continue
            with contextlib.suppress(sync_api.Error):
                chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
                yield chromium
                chromium.close()
                return
    pytest.skip("there is no Chromium: python -m playwright install chromium, or apt install chromium")


@contextlib.contextmanager
def open_page(browser: Any, path: Path, width: int = 1280, dark: bool = False, touch: bool = False) -> Iterator[Tab]:
    """Open a file in a fresh context and yield it; at the end it must have had no problem."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=touch)
    page = context.new_page()
    tab = Tab(page)
    page.on("console", lambda message: tab.problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: tab.problems.append(f"error: {error}"))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or tab.problems.append(request.url))
    page.goto(path.resolve().as_uri())
    try:
        yield tab
    finally:
        context.close()
    assert tab.problems == []
