"""What a rank's bytes become on the screen."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.conftest import COMMAND, Script
from zeroengine.launch.local.console import STDOUT, RankOutput


def rank_output() -> RankOutput:
    return RankOutput(0, STDOUT, False, b"> ")


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        (b"one\ntwo\n", b"> one\n> two\n"),
        (b"\n", b"> \n"),
        (b"unfinished", b"> unfinished\n"),
        (b"windows\r\n", b"> windows\n"),
        (b"\r10%\r50%\r100%\n", b"> 100%\n"),
        (b"10%\r50%\r", b"> 50%\n"),
        (b"", b""),
    ],
)
def test_a_pipe_prints_whole_lines_in_their_last_version(written: bytes, printed: bytes) -> None:
    for size in (1, 2, 3, 100):
        pipe = rank_output()
        out = b"".join(pipe.complete_lines(written[i : i + size]) for i in range(0, len(written), size))
        assert out + pipe.end_line() == printed


@pytest.mark.parametrize(
    ("written", "drawn"),
    [
        (b"one\n\ntwo", b"> one\n> \n> two"),
        (b"\r10%\r20%\n", b"\r> 10%\r> 20%\n"),
        (b"\r\x1b[2K\x1b[31mbar\x1b[0m", b"\r\x1b[2K> \x1b[31mbar\x1b[0m"),
        (b"one\r\ntwo\r\n", b"> one\r\n> two\r\n"),
        (b"\x1b[?25l\x1b[1A\x1b[2Kup", b"\x1b[?25l\x1b[1A\x1b[2K> up"),
    ],
)
def test_a_terminal_line_begins_with_its_prefix(written: bytes, drawn: bytes) -> None:
    for size in (1, 2, 3, 100):
        terminal = rank_output()
        out = b"".join(terminal.with_prefixes(written[i : i + size]) for i in range(0, len(written), size))
        assert out == drawn


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n"])))
def test_a_pipe_prints_the_same_however_the_output_is_cut(parts: list[bytes]) -> None:
    uncut, cut = rank_output(), rank_output()
    out = b"".join(map(cut.complete_lines, parts))
    assert out + cut.end_line() == uncut.complete_lines(b"".join(parts)) + uncut.end_line()


def test_a_long_line_takes_time_proportional_to_its_length() -> None:
    """64 MiB in pieces as they are read, to a pipe and to a terminal."""
    for print_ in (rank_output().complete_lines, rank_output().with_prefixes):
        start = time.monotonic()
        length = sum(len(print_(b"x" * (1 << 16))) for _ in range(1000)) + len(print_(b"\n"))
        assert length >= 1000 << 16
        assert time.monotonic() - start < 5.0


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\x1b[2K", b"\x1b[1m", b"\x1b", "é".encode()])))
def test_a_terminal_loses_nothing(parts: list[bytes]) -> None:
    terminal = rank_output()
    out = b"".join(terminal.with_prefixes(part) for part in parts) + terminal.incomplete_control
    assert out.replace(b"> ", b"") == b"".join(parts)


def test_rank_0_has_a_terminal_where_the_launcher_has(script: Script) -> None:
    """Its width leaves room for the prefix, and another rank's line does not break its progress bar."""
    body = """
if rank == 0:
    print(sys.stdout.isatty(), os.get_terminal_size(1).columns, os.environ["COLUMNS"])
    print("\\r50%", end="")
    open("drawn", "w").close()
    while not os.path.exists("said"): time.sleep(0.01)
    time.sleep(0.3)
    print("\\r100%")
else:
    while not os.path.exists("drawn"): time.sleep(0.01)
    time.sleep(0.3)
    print("from one", sys.stdout.isatty())
    open("said", "w").close()
"""
    master, slave = pty.openpty()
    command = [*COMMAND, "--nproc", "2", "--cpu", script(body)]
    environment = os.environ | {"NO_COLOR": "1"}
    with subprocess.Popen(["stty", "cols", "60"], stdin=slave) as stty:
        stty.wait()
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as launcher:
        os.close(slave)
        screen = b""
        while True:
            try:
                screen += os.read(master, 4096)
            except OSError:
                break
    assert launcher.returncode == 0
    text = re.sub(r"\x1b\[\?25h|\x1b\[0m", "", screen.decode()).replace("\r\n", "\n")
    assert text == ("[rank 0] True 51 51\n\r[rank 0] 50%\r\x1b[K[rank 1] from one False\n[rank 0] 50%\r[rank 0] 100%\n")


@pytest.mark.parametrize(
    ("redirection", "cause"),
    [pytest.param("> /dev/full", "No space left on device", marks=pytest.mark.slow), ("| true", "Broken pipe")],
)
def test_output_that_cannot_be_written_ends_the_run_with_the_cause(
    script: Script, redirection: str, cause: str
) -> None:
    name = script("while True: print('step', flush=True); time.sleep(0.01)")
    command = shlex.join([*COMMAND, "--nproc", "1", "--cpu", name])
    done = subprocess.run(f"{command} {redirection}", shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith(
        f"zero-launch: stopped, because stdout cannot be written ({cause}); every rank has ended. Send the output"
    )
