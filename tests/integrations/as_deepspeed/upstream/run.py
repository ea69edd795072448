"""Run the DeepSpeed tests of transformers or accelerate on zeroengine.

``python -m tests.integrations.as_deepspeed.upstream.run transformers --source DIR``, where ``DIR`` is a checkout of the
project at the commit that ``transformers_tests.txt`` or ``accelerate_tests.txt`` names. The tests are copied into a
scratch folder and run unmodified, in the environment ``as_deepspeed``. Whatever they import as ``deepspeed`` comes from
the folder that ``zero-launch --as-deepspeed`` puts on the path. Models and metrics that they name on the hub come from
``local_models.py`` and ``local_metrics``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.deepspeed.upstream.lists import Lists
from tests.integrations.deepspeed.upstream.run import Runner, add_options, environment_of_tests, run_or_collect
from tests.integrations.environments import python_of

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Project:
    """Whose tests are run, and how.

    Attributes:
        lists: The tests that apply, and those that do not.
        files: The files of tests, as the lists name them.
        copied: What the tests need of the checkout.
        variables: More variables of the tests.
        plugins: More plugins of pytest, in this folder.
    """

    lists: Lists
    files: tuple[str, ...]
    copied: tuple[str, ...]
    variables: dict[str, str]
    plugins: tuple[str, ...] = ()


PROJECTS = {
    "transformers": Project(
        Lists(HERE / "transformers_tests.txt", HERE / "transformers_exclusions.txt"),
        ("tests/deepspeed",),
        (
            "conftest.py",
            "pyproject.toml",
            "examples/pytorch",
            "tests/*.py",
            "tests/deepspeed",
            "tests/fixtures",
            "tests/trainer",
        ),
        {"TRANSFORMERS_TEST_DEVICE_SPEC": "cpu_device.py"},
        ("use_cpu",),
    ),
    "accelerate": Project(
        Lists(HERE / "accelerate_tests.txt", HERE / "accelerate_exclusions.txt"),
        ("tests/deepspeed",),
        ("tests/deepspeed",),
        {},
        ("run_without_gpu",),
    ),
}


def copy_tests(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Copy the paths of a checkout that match some patterns."""
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy(path, target)
    # transformers' tests know the root of the checkout by its folders "src" and "tests".
    (folder / "src").mkdir()


def add_stand_ins(checkout: Path) -> None:
    """Put beside the tests what they look for in the working folder: the device, and metrics by their names."""
    shutil.copy(HERE / "cpu_device.py", checkout)
    for metric in ("accuracy", "sacrebleu"):
        (checkout / metric).mkdir()
        shutil.copy(HERE / "local_metrics" / f"{metric}.py", checkout / metric)


def write_launcher(folder: Path, python: Path) -> None:
    """Write the command ``deepspeed``, with which transformers' tests start ranks: zero-launch with its options.

    Their scripts take ``--use_cpu``, without which transformers refuses bf16 on a machine without a GPU.
    """
    folder.mkdir()
    script = folder / "deepspeed"
    script.write_text(
        "#!/usr/bin/env bash\n"
        "# deepspeed --num_nodes 1 --num_gpus RANKS --master_port PORT SCRIPT ...\n"
        "ranks=$4; shift 6\n"
        f'exec {python} -m zeroengine.cli.zero_launch --cpu --nproc "$ranks" --as-deepspeed "$@" --use_cpu\n'
    )
    script.chmod(0o755)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the DeepSpeed tests of a framework on zeroengine")
    parser.add_argument("project", choices=sorted(PROJECTS))
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the project")
    add_options(parser)
    # Many of these tests listen on one port that they share.
    parser.set_defaults(jobs=1)
    options = parser.parse_args()
    project, python = PROJECTS[options.project], python_of("as_deepspeed")
    with tempfile.TemporaryDirectory(prefix="upstream") as folder:
        scratch = Path(folder)
        checkout = scratch / "checkout"
        copy_tests(options.source.resolve(), checkout, project.copied)
        write_launcher(scratch / "bin", python)
        environment = environment_of_tests(options.real, [HERE, checkout], options.timeout)
        environment |= {"HF_HOME": str(scratch / "home"), "RUN_SLOW": "1", **project.variables}
        environment["PATH"] = f"{scratch / 'bin'}:{python.parent}:{environment['PATH']}"
        add_stand_ins(checkout)
        if options.collect is None:
            subprocess.run([python, HERE / "local_models.py", environment["HF_HOME"]], env=environment, check=True)
        plugins = [argument for plugin in project.plugins for argument in ("-p", plugin)]
        runner = Runner(python, checkout, scratch, environment, options.timeout, options.results, plugins)
        return run_or_collect(runner, options, project.files, project.lists)


if __name__ == "__main__":
    sys.exit(main())
