"""The line of zero-launch that says how a run goes, and what the launcher adds to the run folder."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import COMMAND, Launch, Script
from tests.view.generated_runs import write_run
from zeroengine.view import live_line
from zeroengine.view.live_line import LiveLine, live_parts
from zeroengine.view.run_reader import RunReader

TRAIN = """
import json
from tests.view.generated_runs import run_facts, run_lines
folder = os.environ["ZEROENGINE_RUN_FOLDER"]
if rank == 0:
    open(f"{folder}/run.json", "w").write(json.dumps(run_facts(2, 6, steps_planned=80)))
    for name, value in run_lines(2, 40):
        if name == "steps.jsonl":
            open(f"{folder}/{name}", "a").write(json.dumps(value | {"time": time.time()}) + "\\n")
            print("output", value["step"])
            time.sleep(0.04)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("too hot")
"""


def test_a_run_on_a_terminal_has_a_line_at_the_bottom_and_unchanged_output(script: Script, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    with subprocess.Popen(["stty", "cols", "200", "rows", "30"], stdin=slave) as stty:
        stty.wait()
    command = [*COMMAND, "--nproc", "2", "--cpu", "--max-restarts", "1", "--run-folder", "run", script(TRAIN)]
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
    screen = b""
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as launcher:
        os.close(slave)
        while True:
            try:
                screen += os.read(master, 4096)
            except OSError:
                break
    assert launcher.returncode == 0
    text = screen.decode().replace("\r\n", "\n")
    # Everything that the line draws, it draws between saving the cursor and restoring it.
    drawn, rest = "".join(re.findall("\x1b7.*?\x1b8", text)), re.sub("\x1b7.*?\x1b8", "", text)
    rest = re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|D)", "", rest)
    lines = [line for line in rest.split("\n") if line.startswith("[rank 0] output")]
    assert lines == [f"[rank 0] output {step}" for step in range(1, 41)] * 2
    assert re.search(r"step \d+/80 \(\d+ %\)", drawn) and "tokens/s" in drawn and "backward" in drawn
    # What remains on the screen names the command that shows more.
    assert re.search(
        r"zero-launch: step 40/80 \(50 %\), loss .*\nzero-launch: to look at this run: zero-view .*run\n$", rest
    )
    # The rows are all given back at the end.
    assert drawn.rindex("\x1b[r") > drawn.rindex("\x1b[1;29r")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["text"], event["step"]) for event in events] == [
        ("error", "rank 0 failed: ValueError: too hot", 40),
        ("restart", "restart 1 of 1", 40),
        ("end", "all ranks have ended", 40),
    ]


@pytest.mark.slow  # the next test has a shorter form
def test_without_a_terminal_plain_lines_come_from_time_to_time(
    launch: Launch, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_line, "PLAIN_INTERVAL_S", 0.5)
    result = launch("--run-folder", "run", script(TRAIN))
    lines = [line for line in result.err.splitlines() if line.startswith("zero-launch: step ")]
    assert lines and all(re.match(r"zero-launch: step \d+/80 \(\d+ %\), loss \d", line) for line in lines)
    assert "\x1b7" not in result.err


@pytest.mark.parametrize("is_live", [True, False])
def test_a_step_that_takes_long_is_pointed_out(tmp_path: Path, is_live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    folder = write_run(tmp_path / "run", steps=20)
    (folder / "events.jsonl").write_text(
        json.dumps({"time": time.time() - 20, "step": 20, "kind": "checkpoint", "text": "saving step-20"}) + "\n"
    )
    lines = (folder / "steps.jsonl").read_text().splitlines()
    now = [json.dumps(json.loads(line) | {"time": time.time() - 20}) for line in lines]
    (folder / "steps.jsonl").write_text("\n".join(now) + "\n")
    master, slave = pty.openpty()
    # The line began before these steps.
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        line = LiveLine(folder, slave, is_live)
    deadline, text = time.monotonic() + 10, ""
    # A terminal without rows has no row to spare.
    assert not is_live or line.update() == ""
    with subprocess.Popen(["stty", "cols", "200", "rows", "30"], stdin=slave) as stty:
        stty.wait()
    while "so far" not in text and time.monotonic() < deadline:
        text = line.update()
        time.sleep(0.05)
    assert re.search(r"the next step takes 2\d s so far: saving step-20", text)
    assert ("\x1b[30;1H" in text) is is_live
    line.close()
    os.close(master)
    os.close(slave)


def test_steps_of_an_earlier_start_are_no_progress(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run", steps=20))
    assert reader.last is not None
    now = reader.last.end + 86400.0
    assert live_parts(reader, now, since=now - 5.0) == [("no step yet after step 20", "cyan", 0)]


def test_wrong_requests_are_refused(launch: Launch, script: Script) -> None:
    assert "Add --run-folder DIR" in launch("--no-live", script("")).err
    Path("file").touch()
    assert "--run-folder" in launch("--run-folder", "file", script("")).err
