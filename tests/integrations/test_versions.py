from __future__ import annotations

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.integrations import versions


@pytest.mark.parametrize(
    ("installed", "fits"), [("5.22.9", False), ("5.23.0", True), ("5.23.0.dev0", True), ("6.0", True)]
)
def test_a_version_that_is_too_old_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: installed)
    if fits:
        versions.require_versions("transformers", "transformers")
    else:
        with pytest.raises(ZeroEngineError, match=r"found transformers 5\.22\.9.*'transformers>=5\.23'"):
            versions.require_versions("transformers", "transformers")


def test_a_package_that_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.OLDEST, "no-such-package", (1, 0))
    with pytest.raises(ZeroEngineError, match=r"zeroengine\[lightning\]"):
        versions.require_versions("lightning", "no-such-package")
