"""The page of a plan: it needs no network, shows every shown candidate, and can be read on a phone and by keyboard."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.browser import browser, open_page
from zeroengine.plan.api import machine_with
from zeroengine.plan.bytes.model_facts import from_numbers
from zeroengine.plan.report.result import Plan
from zeroengine.plan.seconds.known_machines import load_machine

__all__ = ["browser"]
GIB = 2**30
VOID = {"meta", "link", "br", "img", "input"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = from_numbers(5e6, 2, width=256, vocab=2000, sequence=128)
    machine = machine_with(load_machine("a100-40gb"), device_bytes=int(1.6 * GIB), disk_bytes=GIB)
    return zeroengine.plan(model, {"bf16": {"enabled": True}}, machine, checkpointing=False)


class Outline(HTMLParser):
    """Collects links, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.bars += ("class", "bar") in attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(plan: Plan) -> None:
    outline = Outline()
    outline.feed(page := plan.to_html())
    assert outline.open == [] and outline.links == [] and not re.search(r"url\(|@import|https?:", page)
    assert outline.bars >= 2 * plan.num_shown


def test_names_of_the_user_are_text_on_the_page() -> None:
    class Model(nn.Linear):
        pass

    Model.__name__ = "<script>alert(1)</script>"
    page = zeroengine.plan(Model(4, 4), None, "h200", example=torch.zeros(1, 4)).to_html()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@pytest.mark.parametrize("width", [390, 1280])
def test_parts_of_bars_show_their_sizes_by_mouse_tap_and_keyboard(
    plan: Plan, width: int, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "plan.html").write_text(plan.to_html())
    with open_page(browser, tmp_path / "plan.html", width, touch=width < 500) as tab:
        page = tab.page
        # Nothing but tables, which scroll by themselves, is wider than the screen.
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        tip, segment = page.locator("#tip"), page.locator("#memory .c8.segment").first
        if width < 500:
            segment.tap()
        else:
            segment.hover()
        assert tip.is_visible() and tip.inner_text() == segment.get_attribute("data-text")
        page.locator("#memory .bar").first.focus()
        page.keyboard.press("Tab")
        first = tip.inner_text()
        page.keyboard.press("ArrowRight")
        assert tip.is_visible() and first != tip.inner_text()
        page.keyboard.press("Escape")
        assert not tip.is_visible()
