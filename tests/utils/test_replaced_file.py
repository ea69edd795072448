from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroengine.utils.files import replace_file


def test_a_file_keeps_its_permissions_and_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    replace_file(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.json", "link.json"]


def test_a_text_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    replace_file(file, "old")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\ud800")
    assert file.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["a.json", "plain"]
