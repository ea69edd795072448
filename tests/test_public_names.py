"""What `import zeroengine` offers: every public name is there, and torch is not imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zeroengine


def test_every_public_name_is_listed_and_there() -> None:
    assert set(zeroengine.__all__) <= set(dir(zeroengine))
    assert all(getattr(zeroengine, name) is not None for name in zeroengine.__all__)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'zeroengine' has no attribute 'nothing'"):
        zeroengine.nothing  # noqa: B018


def test_importing_zeroengine_and_its_errors_does_not_import_torch() -> None:
    code = "import sys, zeroengine; print(zeroengine.ConfigError); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "imports", ["import zeroengine", "import zeroengine.plan.seconds", "import zeroengine.plan.api as api, zeroengine"]
)
def test_plan_is_a_package_that_can_be_called_in_every_order_of_imports(imports: str) -> None:
    code = (
        f"{imports}; import sys; assert zeroengine.plan is sys.modules['zeroengine.plan'] and callable(zeroengine.plan)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
