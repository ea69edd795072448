"""The example with images, small, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TINY = "--epochs 12 --images 256 --held-out 64 --batch 8 --size 16 --layers 2 --width 64".split()


@pytest.mark.slow
def test_it_learns_to_tell_shapes_apart() -> None:
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--nproc", "2", "--cpu"]
    command += ["examples/vit_images.py", "--stage", "3", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    shares = [float(number) for number in re.findall(r"held-out accuracy ([\d.]+)%", done.stdout)]
    assert len(shares) == 12
    # Guessing is right in a quarter of the cases.
    assert max(shares[-4:]) > 40


def test_images_follow_from_their_numbers_and_classes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import vit_images

    images = vit_images.Shapes(100, 8, 24)
    for index in range(8):
        image, label = images[index]
        assert image.shape == (3, 24, 24) and label == (100 + index) % 4
        assert torch.equal(image, images[index][0])
