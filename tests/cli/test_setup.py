"""The commands in `bin/` find or make the Python environment of their own checkout, and change no other one's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

from tests.conftest import ROOT

COMMAND = """#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
install_checkout() { echo "installs"; }
prepare
"""


def make_checkout(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "csrc").mkdir()
    for name in ("pyproject.toml", "setup.py"):
        (folder / name).write_text("")
    shutil.copy(ROOT / "bin" / "_setup.sh", folder / "bin")
    (folder / "bin" / "command").write_text(COMMAND)
    return folder


def prepare(checkout: Path) -> subprocess.CompletedProcess[str]:
    # The suite may itself run in an environment that this variable names.
    environment = {name: value for name, value in os.environ.items() if name != "ZEROENGINE_PYTHON"}
    command = ["bash", checkout / "bin" / "command"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_checkout_does_not_replace_another_one_in_its_environment(tmp_path: Path) -> None:
    own, other = make_checkout(tmp_path / "own"), make_checkout(tmp_path / "other")
    venv.create(other / ".venv")
    (own / ".venv").symlink_to(other / ".venv")
    # Nothing is installed yet, so the environment is nobody's.
    assert prepare(own).stdout == "installs\n"
    (other / ".venv" / "zeroengine-stamp").unlink()
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(other / ".venv")}))
    info = packages / "zeroengine-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zeroengine\nVersion: 0.1\n")
    (info / "direct_url.json").write_text(json.dumps({"url": other.as_uri(), "dir_info": {"editable": True}}))
    refused = prepare(own)
    assert refused.returncode == 1 and refused.stdout == ""
    assert f".venv is a link to {other}/.venv, where the checkout {other} is installed" in refused.stderr
    assert f"ZEROENGINE_PYTHON={own}/.venv/bin/python" in refused.stderr
    assert prepare(other).stdout == "installs\n"
