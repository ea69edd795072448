"""zero-launch --as-deepspeed: scripts that import DeepSpeed run on zeroengine, and nothing is patched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integrations.environments import python_of, run_program
from zeroengine.cli.launch_options import parse_arguments
from zeroengine.errors import LaunchError
from zeroengine.integrations import as_deepspeed

SCRIPT = Path(__file__).with_name("train_on_deepspeed_names.py")
TRAINER = SCRIPT.with_name("train_transformers.py")
LAUNCH = [sys.executable, "-m", "zeroengine.cli.zero_launch", "--cpu", "--nproc", "2"]


def installed_deepspeed(folder: Path) -> Path:
    """Make a folder of installed packages with a DeepSpeed in it."""
    package = folder / "deepspeed"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("raise RuntimeError('the real one')\n")
    return folder


def test_a_deepspeed_script_trains_in_the_ranks(tmp_path: Path) -> None:
    reports = tmp_path / "report"
    done = run_program([*LAUNCH, "--as-deepspeed", str(SCRIPT)], {"REPORT": str(reports)})
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        values = json.loads(Path(f"{reports}.{rank}").read_text())
        assert values["moved"] == pytest.approx(0.1, rel=1e-2)
        # Frameworks compare the version, and the names are those of that version.
        assert values["version"] == "0.19.8"
        assert "deepspeed.moe.sharded_moe is part of DeepSpeed" in values["message"]


def test_an_installed_deepspeed_is_refused_unless_forced(tmp_path: Path) -> None:
    folder = installed_deepspeed(tmp_path / "packages")
    environ = {"PYTHONPATH": str(folder)}
    with pytest.raises(LaunchError, match="--as-deepspeed=force"):
        as_deepspeed.python_path("absent", environ)
    # The folder is first, and the rest of the path stays. A rank that is a launcher itself does not add it twice.
    path = as_deepspeed.python_path("force", environ)
    assert path == f"{as_deepspeed.FOLDER}:{folder}"
    assert as_deepspeed.python_path("force", {"PYTHONPATH": path}) == path


def test_the_script_is_no_value_of_the_option() -> None:
    options = parse_arguments(["--as-deepspeed", "train.py", "--as-deepspeed"])
    assert (options.as_deepspeed, options.words) == ("absent", ["train.py", "--as-deepspeed"])
    assert parse_arguments(["--as-deepspeed=force", "train.py"]).as_deepspeed == "force"
    assert parse_arguments(["train.py"]).as_deepspeed is None


def test_the_metadata_has_the_version_whose_names_are_served() -> None:
    # Another version in the folder's name or in the file would mislead what frameworks check.
    (metadata,) = as_deepspeed.FOLDER.glob("*.dist-info/METADATA")
    version = metadata.parent.name.removeprefix("deepspeed-").removesuffix(".dist-info")
    served = (ROOT / "zeroengine/integrations/deepspeed/__init__.py").read_text()
    assert f"\nVersion: {version}\n" in metadata.read_text()
    assert f'version = "{version}"' in served


def test_the_metadata_is_part_of_the_wheel() -> None:
    (line,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("zeroengine = [")]
    patterns = json.loads(line.partition("= ")[2])
    packaged = {path for pattern in patterns for path in (ROOT / "zeroengine").glob(pattern)}
    assert packaged >= set(as_deepspeed.FOLDER.glob("*.dist-info/*"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_of_transformers_trains_with_deepspeed_as_under_ddp(tmp_path: Path, stage: int) -> None:
    reports = {}
    for name, number in (("ddp", 0), ("deepspeed", stage)):
        path = tmp_path / f"{name}.report"
        command = [str(python_of("transformers")), *LAUNCH[1:], "--as-deepspeed", str(TRAINER), str(tmp_path / name)]
        done = run_program([*command, str(number)], {"REPORT": str(path)})
        assert done.returncode == 0, done.stdout[-6000:]
        reports[name] = json.loads(Path(f"{path}.0").read_text())
    ddp, trained = reports["ddp"], reports["deepspeed"]
    assert trained["engine"] == "zeroengine.integrations.deepspeed.engine"
    assert trained["whole"] == pytest.approx(ddp["whole"], abs=1e-6)
    assert trained["evaluated"] == pytest.approx(ddp["evaluated"], abs=1e-6)
    # Resuming takes the same steps again, and what was saved are the whole weights.
    assert trained["resumed"] == trained["whole"]
    assert trained["resumed_evaluated"] == trained["evaluated"]
    assert trained["saved"] == pytest.approx(ddp["saved"], rel=1e-5)
