"""The picture in README.md is drawn from the committed figures, and those are the ones of docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.conftest import ROOT

FIGURES = json.loads((ROOT / "benchmarks" / "peers.json").read_text())


def test_the_committed_pictures_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "readme_picture.py", "--output", tmp_path], check=True)
    for name in ("peers-light.svg", "peers-dark.svg"):
        drawn = (tmp_path / name).read_text()
        assert drawn == (ROOT / "docs" / "assets" / name).read_text(), "run python benchmarks/readme_picture.py"
        texts = [element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
        for row in FIGURES["engines"]:
            assert f"{row['speed']:.2f}" in texts and f"{row['peak_mib']:,}" in texts


def test_the_benchmarks_page_has_the_same_figures() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    names = {"ddp": "DDP", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "zeroengine": "zeroengine"}
    for row in FIGURES["engines"]:
        figures = f"{row['speed']:.2f} | {row['lowest']:.2f} | {row['highest']:.2f} | {row['peak_mib']}"
        assert f"| {names[row['engine']]} | {row['stage']} | {figures} |" in page
