"""What `zero-view` prints: with a terminal, without one, of a running run, and of two runs."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.view.generated_runs import run_facts, run_lines, write_run
from zeroengine.cli.zero_view import main
from zeroengine.view.live_line import fit, live_parts
from zeroengine.view.run_reader import RunReader
from zeroengine.view.terminal import COLORS, letter_of, render_run, sparkline


def test_a_run_is_shown_as_plain_text_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", ranks=4, steps=300, restart=True)
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for part in ("300 of 300", "tokens/s", "MFU", "gather", "optimizer 1.2 GiB", "restart 1 of 3", "node1 was lost"):
        assert part in text
    assert "rank 2 computes" in text and "30 taken again after a restart" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_run_fits_the_terminal_and_text_of_a_run_is_no_markup(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "run", steps=30)
    with open(folder / "events.jsonl", "a") as events:
        events.write(
            json.dumps({"time": 0, "step": 1, "kind": "warning", "text": "[red]no markup[/red]\x1b[2J"}) + "\n"
        )
    console = Console(
        width=width, force_terminal=True, color_system="truecolor", record=True, file=open("/dev/null", "w")
    )
    console.print(render_run(RunReader(folder), width))
    lines = console.export_text(clear=False).splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in console.export_text(clear=False) + "".join(lines)
    assert "[red]" in "".join(line.strip() for line in lines).replace(" ", "")


def test_a_locale_without_blocks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True))
    assert main([str(write_run(tmp_path / "run", steps=30))]) == 0
    text = output.getvalue().decode("ascii")
    assert "30 of 30  ????????" in text


def test_figures_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=30)
    assert main([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["step"] == 30


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_run(tmp_path / "a", steps=60), write_run(tmp_path / "b", steps=80, seed=1)
    assert main([str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert "loss at step 60" in text and "1.333" in text and "  backward" in text


def test_a_run_without_steps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_facts(2, 2, None)))
    assert main([str(tmp_path)]) == 0
    assert "no step was recorded yet" in capsys.readouterr().out


def test_a_running_run_is_followed_to_its_end_in_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroengine.cli.zero_view.FOLLOW_INTERVAL_S", 0.02)
    monkeypatch.setattr("zeroengine.cli.zero_view.PLAIN_INTERVAL_S", 0.05)
    monkeypatch.setattr("zeroengine.cli.zero_view.SETTLE_S", 0.2)

    def write() -> None:
        for name, value in run_lines(2, 40):
            with open(tmp_path / name, "a") as file:
                file.write(json.dumps(value | {"time": time.time()}) + "\n")
            time.sleep(0.01)

    (tmp_path / "run.json").write_text(json.dumps(run_facts(2, 6, 40)))
    writer = threading.Thread(target=write)
    writer.start()
    assert main([str(tmp_path), "--follow"]) == 0
    writer.join()
    lines = capsys.readouterr().out.splitlines()
    assert 3 <= len(lines) <= 60 and lines[-1].startswith("step 40/40 (100 %), loss ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--compare", "b"], "leave --compare out: write zero-view a b"),
        (["a", "--follow", "--json"], "--follow shows one run in the terminal"),
        (["a"], "there is no such folder"),
    ],
)
def test_wrong_requests_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_narrow_line_keeps_the_most_important_parts(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run", steps=200, steps_planned=400, restart=True))
    assert reader.last is not None
    parts = live_parts(reader, reader.last.end)
    for width in (20, 40, 80, 120, 300):
        line = fit(parts, width)
        assert line.cell_len <= width and line.plain.startswith("step 200/400 (50 %)")
    assert "loss" in fit(parts, 40).plain and "tokens/s" in fit(parts, 80).plain
    assert "backward" in fit(parts, 300).plain and "1 restart" in fit(parts, 300).plain


def test_parts_of_a_step_have_letters_that_differ() -> None:
    assert len({letter_of(name) for name in COLORS}) == len(COLORS)


def test_a_sparkline_follows_the_numbers() -> None:
    assert sparkline([1.0, 2.0, None, 3.0], 10) == "▁▅█" and sparkline([], 5) == "" and sparkline([2.0], 5) == "▁"
    assert sparkline(list(map(float, range(1000))), 8) == "▁▂▃▄▅▆▇█"
