"""Every command of bin/ and every entry point answers `-h` and `--version`, without doing anything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

import zeroengine
from tests.conftest import ROOT
from zeroengine.config.__main__ import main as config_main

ENTRY_POINTS = dict(re.findall(r'^(zero-\w+) = "([\w.]+:\w+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
COMMANDS = {path.name for path in (ROOT / "bin").iterdir() if not path.name.startswith("_")}


def test_every_entry_point_is_a_command_of_a_checkout() -> None:
    assert ENTRY_POINTS and COMMANDS - ENTRY_POINTS.keys() == {"docs", "quickstart", "test"}
    assert ENTRY_POINTS.keys() <= COMMANDS


@pytest.mark.parametrize("option", ["-h", "--help", "--version"])
@pytest.mark.parametrize("name", [*ENTRY_POINTS, "python -m zeroengine.config"])
def test_an_entry_point_answers_and_ends(
    name: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, function = ENTRY_POINTS.get(name, ":").partition(":")
    main = getattr(importlib.import_module(module), function) if module else config_main
    monkeypatch.setattr(sys, "argv", [name, option])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    output = capsys.readouterr().out
    assert (zeroengine.__version__ if option == "--version" else name) in output


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_a_script_of_bin_answers_and_ends(name: str) -> None:
    for option, text in {"-h": "Arguments go to", "--help": "--version", "--version": zeroengine.__version__}.items():
        done = subprocess.run([ROOT / "bin" / name, option], capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "") and text in done.stdout
