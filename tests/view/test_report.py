"""The HTML page: what is in it, and what a person who clicks through it sees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser, open_page
from tests.view.generated_digests import UNITS, write_digests
from tests.view.generated_runs import data_of, run_facts, run_lines, write_run
from zeroengine.cli.zero_diff import main as diff
from zeroengine.cli.zero_view import main
from zeroengine.view.report import report_page
from zeroengine.view.run_reader import RunReader
from zeroengine.view.summary import summarize

__all__ = ["browser"]
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>@@title@@"


def write_page(*folders: Path) -> Path:
    page = folders[0].with_suffix(".html")
    assert main([*map(str, folders), "--html", str(page)]) == 0
    return page


def test_the_page_stands_alone_and_shows_no_secret(tmp_path: Path) -> None:
    page = report_page([RunReader(write_run(tmp_path / "run", steps=30))])
    assert not re.findall(r"(?:src|href)=[\"']?(?!data:)[^\"'\s>]+|@import|url\((?!#)", page)
    assert "hidden-key" not in page and "://" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(("ranks", "steps"), [(2, 10), (2, 3_000), (1024, 30)])
def test_a_page_stays_small_and_its_figures_exact(tmp_path: Path, ranks: int, steps: int) -> None:
    folder = write_run(tmp_path / "run", ranks=ranks, steps=steps, layers=3)
    page = report_page([RunReader(folder)])
    assert len(page) < 1_500_000
    (run,) = data_of(page)["runs"]
    points, columns = run["points"], run["columns"]
    assert sum(points["steps"]) == sum(columns["steps"]) == steps
    assert len(points["steps"]) <= 600 and len(columns["ranks"]["rows"]) <= 128
    tokens = sum(json.loads(line)["tokens"] for line in open(folder / "steps.jsonl"))
    rate, seconds = run["summary"]["run"]["tokens_per_second"], run["summary"]["progress"]["seconds"]
    in_checkpoints = run["summary"]["run"]["split"]["checkpoint"] * run["summary"]["progress"]["records"]
    assert rate * (seconds - in_checkpoints) == pytest.approx(tokens)
    # The rank that the generated run slows down stands out in the heat map, however many ranks share a row.
    own = [max(range(len(column)), key=column.__getitem__) for column in columns["ranks"]["own"]]
    row = next(i for i, (first, last) in enumerate(columns["ranks"]["rows"]) if first <= ranks * 2 // 3 <= last)
    assert row in own


def test_a_person_clicks_through_the_page(tmp_path: Path, browser: Any) -> None:
    file = write_page(write_run(tmp_path / "run", ranks=4, steps=300, restart=True))
    with open_page(browser, file) as tab:
        page = tab.page
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate(background) != light
        # The numbers of a point are shown under the mouse, and the cursor stands in all charts.
        loss = page.locator("svg[aria-label^='Loss']")
        loss.hover(position={"x": 250, "y": 100})
        tip = page.locator("#tip").inner_text()
        assert re.search(r"step \d+, after .*\nLoss\s+\d\.\d+", tip)
        assert page.locator("line.cursor").count() == page.locator("svg.chart").count()
        # Dragging chooses a range, which changes lines, bars and tables.
        shown = ["svg[aria-label^='Learning rate'] .line", ".units", "[aria-label='Events']"]
        before = [page.locator(selector).first.evaluate("e => e.outerHTML") for selector in shown]
        box = loss.bounding_box()
        page.mouse.move(box["x"] + 120, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 80, steps=4)
        page.mouse.up()
        after = [page.locator(selector).first.evaluate("e => e.outerHTML") for selector in shown]
        assert all(old != new for old, new in zip(before, after, strict=True))
        first, last = (page.get_by_label(f"{end} of the range").input_value() for end in ("First", "Last"))
        assert 0 < int(first) < int(last) < 300
        # The same range on the axis of time, and everything again.
        page.get_by_role("button", name="Time", exact=True).click()
        assert float(page.get_by_label("Last of the range").input_value()) < 130
        page.get_by_role("button", name="Show all").click()
        page.get_by_role("button", name="Steps", exact=True).click()
        assert [page.locator(selector).first.evaluate("e => e.outerHTML") for selector in shown[1:]] == before[1:]
        page.get_by_role("button", name="Share").click()
        page.get_by_role("button", name="Waiting").click()
        page.get_by_role("button", name=re.compile("^skip")).click()
        assert "not finite" not in page.locator("[aria-label='Events']").inner_text()


def test_the_charts_are_reached_by_keys(tmp_path: Path, browser: Any) -> None:
    with open_page(browser, write_page(write_run(tmp_path / "run", steps=120))) as tab:
        page = tab.page
        page.locator("svg[aria-label^='Loss']").focus()
        page.keyboard.press("End")
        assert "step 120" in page.locator("#said").inner_text()
        for _ in range(3):
            page.keyboard.press("Shift+PageUp")
        page.keyboard.press("Enter")
        assert page.get_by_label("First of the range").input_value() == "90"
        page.keyboard.press("Escape")
        assert page.get_by_label("First of the range").input_value() == "0"
        page.get_by_label("First of the range").fill("50")
        page.keyboard.press("Enter")
        assert page.get_by_role("button", name="Show all").is_enabled()


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_runs_fit_a_phone(tmp_path: Path, browser: Any, dark: bool) -> None:
    first, second = (
        write_run(tmp_path / "a", ranks=2, steps=80),
        write_run(tmp_path / "b", ranks=64, steps=120, layers=40),
    )
    rows = [json.loads(line) for line in (first / "steps.jsonl").read_text().splitlines()]
    rows[39]["user"] |= {"held_out_loss": 3.0}
    (first / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarize(RunReader(first))["user"] == rows[-1]["user"] | {"held_out_loss": 3.0}
    with open_page(browser, write_page(first, second), width=390, dark=dark, touch=True) as tab:
        page = tab.page
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator("svg[aria-label^='Loss']").tap()
        tip = page.locator("#tip").inner_text()
        assert "a: step" in tip and "b: step" in tip
        assert page.get_by_role("heading", name=re.compile("Slow ranks: b")).count() == 1
        assert page.locator("tr.changed", has_text="world_size").inner_text().split() == ["world_size", "2", "64"]
        # Charts of one kind have one scale; what the user logged as a loss is in the chart of losses.
        ticks = "e => [...e.querySelectorAll('.tick[text-anchor=end]')].map((t) => t.textContent)"
        scales = [chart.evaluate(ticks) for chart in page.locator("svg[aria-label^='Where a step']").all()]
        assert len(scales) == 2 and scales[0] == scales[1]
        assert page.locator(".legend", has_text="a: held_out_loss").count() == 1
        lines = page.locator("svg[aria-label^='Loss'] .line")
        before = lines.count()
        page.get_by_role("button", name="Mean of 11").click()
        assert lines.count() == before + 2, "the points stay behind their means"


def test_text_of_a_run_stays_text(tmp_path: Path, browser: Any) -> None:
    folder = write_run(tmp_path / "run", steps=20, units=[HOSTILE] * 8, hosts=[HOSTILE] * 2)
    facts = json.loads((folder / "run.json").read_text())
    facts |= {"model": {"class": HOSTILE}, "config": {HOSTILE: HOSTILE}, "device": HOSTILE}
    (folder / "run.json").write_text(json.dumps(facts))
    with open(folder / "events.jsonl", "a") as events:
        events.write(json.dumps({"time": 0, "step": 3, "kind": HOSTILE, "text": HOSTILE}) + "\n")
    with open_page(browser, write_page(folder)) as tab:
        assert tab.page.title() == "run - zeroengine" and tab.page.locator("img").count() == 0
        assert HOSTILE in tab.page.locator("[aria-label='Events']").inner_text()


def test_runs_without_steps_ranks_or_facts_have_a_page(tmp_path: Path, browser: Any) -> None:
    empty, one, bare = (tmp_path / name for name in ("empty", "one", "bare"))
    empty.mkdir()
    (empty / "run.json").write_text(json.dumps(run_facts(2, 2)))
    write_run(one, ranks=1, steps=1)
    bare.mkdir()
    record = next(value for name, value in run_lines(2, 3) if name == "steps.jsonl")
    (bare / "steps.jsonl").write_text(json.dumps({key: record[key] for key in ("step", "time", "seconds")}) + "\n")
    for folder, text in ((empty, "No steps yet"), (one, "layers.0"), (bare, "there is no run.json")):
        with open_page(browser, write_page(folder)) as tab:
            assert text in tab.page.locator("body").inner_text()


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    assert main([str(folder), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "write a file in a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_page_of_a_comparison_shows_what_differs_where(tmp_path: Path, browser: Any, dark: bool) -> None:
    units = [HOSTILE, *UNITS[1:]]
    a = write_digests(tmp_path / "a", units=units)
    b = write_digests(tmp_path / "b", units=units, changes=[(37, "parameters", [0])], config={HOSTILE: HOSTILE})
    page_file = tmp_path / "page.html"
    assert diff([str(a), str(b), "--html", str(page_file)]) == 1
    with open_page(browser, page_file, width=390 if dark else 1280, dark=dark) as tab:
        page = tab.page
        assert page.locator("svg[aria-label^='Loss'] .line").count() == 2
        assert page.locator("img").count() == 0 and "differ first at step 37" in page.locator("main").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= (390 if dark else 1280)
        assert HOSTILE in page.locator("[aria-label=Settings]").inner_text()
        canvas = page.locator("canvas")
        box = canvas.bounding_box()
        # The picture begins at the right of the names, so a step's place is found from the right.
        canvas.hover(position={"x": box["width"] - 2, "y": 4})
        assert page.locator("#tip").inner_text().split("\n")[:3] == [HOSTILE, "step 100", "gradients differ"]
        colors = "e => { const c = e.getContext('2d'); return [...c.getImageData(e.width - 3, 4, 1, 1).data] }"
        before = canvas.evaluate(colors)
        assert before[0] > before[2], "orange stands for gradients"
