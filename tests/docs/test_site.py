"""The site builds without a broken link, in an environment with the pinned generator, and needs no network."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from tests.browser import browser, open_page
from tests.integrations.environments import ROOT, python_of, run_program

__all__ = ["browser"]

# Tags whose address the browser loads by itself.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
FOREIGN = re.compile(r"(?:https?:)?//")


def build(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [str(python_of("docs")), "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return run_program([*command, *map(str, options)], {"NO_MKDOCS_2_WARNING": "true"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


class Loads(html.parser.HTMLParser):
    """The addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(values.get(LOADED[tag]) or "")


@pytest.mark.slow  # .ci/run builds the site before the tests
def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert pages == {page.relative_to(site) for page in site.rglob("*.html")} - {Path("404.html")}


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    foreign = []
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        foreign += [f"{page.name}: {address}" for address in loads.addresses if FOREIGN.match(address)]
    for sheet in site.rglob("*.css"):
        foreign += re.findall(r"url\([\"']?((?:https?:)?//[^)]*)", sheet.read_text())
    assert foreign == []


@pytest.mark.slow
def test_the_reference_has_the_public_names_with_their_docstrings(site: Path) -> None:
    import zeroengine

    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    missing = [name for name in zeroengine.__all__ if not re.search(rf'id="zeroengine\.[\w.]*{name}"', text)]
    assert missing == []
    engine = (site / "api" / "engine.html").read_text()
    for method in ("backward", "step", "save_checkpoint", "full_state_dict"):
        assert f'id="zeroengine.engine.engine.Engine.{method}"' in engine


def items(text: str) -> list[str]:
    """Return the kinds of lists of a page, and of their items, in the order of the page."""
    return [token.type for token in MarkdownIt().parse(text) if token.type in ("list_item_open",)]


@pytest.mark.slow
def test_lists_are_lists_in_the_site(site: Path) -> None:
    """Python-Markdown, which MkDocs uses, wants an empty line before a list; GitHub does not."""
    for page in (ROOT / "docs").rglob("*.md"):
        if "api" in page.parts:
            continue
        built = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        article = built.partition("<article")[2].partition("</article>")[0]
        assert article.count("<li>") >= len(items(page.read_text())), page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# A page\n\n[nowhere](absent.md)\n", "absent.md"),
        ("# A page\n\n[nowhere](index.md#absent)\n", "#absent"),
    ],
)
def test_a_broken_link_fails_the_build(page: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "index.md").write_text(page)
    settings = "site_name: a\nvalidation: {links: {anchors: warn}}\n"
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build(tmp_path / "site", "--config-file", tmp_path / "mkdocs.yml")
    assert done.returncode == 1 and message in done.stdout
    # The site itself asks for the same checks.
    assert "anchors: warn" in (ROOT / "mkdocs.yml").read_text()


def test_the_command_has_a_help() -> None:
    done = subprocess.run([ROOT / "bin" / "docs", "-h"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and "site/index.html" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_reader_finds_a_page_by_searching_without_a_network(site: Path, browser: Any, width: int, dark: bool) -> None:
    # No request but of files: open_page records every other one as a problem.
    with open_page(browser, site / "index.html", width=width, dark=dark) as tab:
        page = tab.page
        scheme = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert scheme == ("slate" if dark else "default")
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, "the page is wider than the screen"
        if width < 1000:
            page.locator("label[for=__search]").first.click()
        page.locator(".md-search__input").press_sequentially("NaN", delay=50)
        result = page.locator(".md-search-result__link", has_text="My loss is NaN").first
        result.wait_for(timeout=20_000)
        result.click()
        page.wait_for_url("**/trouble/nan.html*")
        assert page.locator("h1").first.inner_text().startswith("My loss is NaN")
