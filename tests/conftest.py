"""Which device tests compute on: the CPU, also where there is a GPU, unless they are marked ``gpu``.

With ``ZEROENGINE_TEST_DEVICE`` set to ``cuda`` or ``emulated``, processes started by ``run_ranks`` compute on a GPU,
which they share over Gloo: one that there is, or one that the CPU plays (``tests/emulated``).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.emulated import emulate_gpu, load, wanted

# A test that fails shows where.
os.environ.setdefault("ZEROENGINE_FULL_TRACEBACK", "1")

if wanted() == "emulated":
    load()  # before torch is imported

import hypothesis
import torch

from tests.distributed import ranks
from zeroengine.disk.mounts import mount_of

if wanted() == "emulated":
    emulate_gpu()

ROOT = Path(__file__).parents[1]
# Models are so small that threads only wait for each other, and for the ranks that run beside them.
torch.set_num_threads(1)
# A busy machine is no defect: times belong into benchmarks.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


def pytest_configure(config: pytest.Config) -> None:
    """Let checks of every stage take two of them where slow tests are left out: `tests.distributed.training.STAGES`."""
    os.environ.setdefault("ZEROENGINE_TEST_EVERY_STAGE", "0" if config.getoption("markexpr") == "not slow" else "1")


# What takes longest in tests/. Begun first, it leaves short files to the end, when a process may have to wait.
LONGEST = (
    "test_emulated.py",
    "integrations",
    "models",
    "launch",
    "distributed",
    "test_docs.py",
    "checkpoint",
    "weights",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let processes that share the tests begin with those that take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: order_of(item.path))


def order_of(path: Path) -> int:
    name = path.relative_to(ROOT / "tests").parts[0] if path.is_relative_to(ROOT / "tests") else ""
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run the files of an integration, whose scripts share the imports of a framework."""
    from xdist.scheduler import LoadFileScheduling

    class ByFramework(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return file.rpartition("/")[0] if file.startswith("tests/integrations/") else file

    return ByFramework(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for the tests that were found.

    Ranks of tests of models start with the models imported. And the garbage collector does not walk over every module
    and test again and again.
    """
    paths = {item.path for item in session.items}
    if any(path.is_relative_to(ROOT / "tests/models") or path.match("slices/test_transformers.py") for path in paths):
        ranks.preload("tests.models.preloaded")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> Iterator[None]:
    """Let the garbage collector not walk over what the tests of a file have imported, half a million objects in all."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def device_of_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which is to be undone when it would be
        if request.node.get_closest_marker("gpu") is None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setattr(ranks, "sharing_gpu", wanted() != "cpu")
        yield


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that is not in memory."""
    usual = tmp_path_factory.mktemp("disk")
    if not mount_of(usual).in_memory:
        yield usual
    elif not mount_of(ROOT).in_memory:
        with TemporaryDirectory(dir=ROOT, prefix=".disk-") as folder:
            yield Path(folder)
    else:
        pytest.skip("there is no disk here")
