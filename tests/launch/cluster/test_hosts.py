"""Which hosts and slots a request means, and what is said about one that means none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import Host, limit_hosts, parse_hosts, processes_on, read_hostfile, select_hosts

HOSTS = [Host("a", 4), Host("root@b", 2), Host("c")]


def message(function: object, *arguments: object) -> str:
    assert callable(function)
    with pytest.raises(LaunchError) as error:
        function(*arguments)
    return str(error.value)


def test_a_hostfile_names_hosts_and_slots() -> None:
    text = "# ours\n\na slots=4  # fast\nroot@b slots=2\n\tc\n10.0.0.7 slots=1\n"
    assert parse_hosts(text, "hosts") == [*HOSTS, Host("10.0.0.7", 1)]
    assert parse_hosts("fe80::1\nme@fe80::2%eth0", "hosts") == [Host("fe80::1"), Host("me@fe80::2%eth0")]


def test_a_hostfile_may_come_from_an_editor_that_marks_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=4\r\nc\r\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("a", 4), Host("c")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=4\nb\na", "hosts, line 3: a is there already, on line 1. Keep one of them"),
        (
            "a slot=4",
            "hosts, line 1: 'a slot=4' is not understood. Write a host and its processes, from 1 to 4096, such",
        ),
        ("\na slots=0", "hosts, line 2: 'a slots=0' is not understood."),
        ("a slots=4 slots=4", "hosts, line 1: 'a slots=4 slots=4' is not understood."),
        ("a slots=99999999999", "hosts, line 1: 'a slots=99999999999' is not understood."),
        ("a slots=" + 5000 * "9", "hosts, line 1: 'a slots=999"),
        ("a\n\nroot@a", "hosts, line 3: a is there already, on line 1. Keep one of them"),
        ("a:4", "hosts, line 1: 'a:4' is not understood."),
        ("a slots=x", "hosts, line 1: 'a slots=x' is not understood."),
        ("-oProxyCommand=id", "hosts, line 1: '-oProxyCommand=id' is not understood."),
        ("$(id)", "hosts, line 1: '$(id)' is not understood."),
        ("# nothing\n", "hosts: there are no hosts in it."),
    ],
)
def test_a_wrong_line_is_named(text: str, expected: str) -> None:
    assert message(parse_hosts, text, "hosts").startswith(expected)


def test_an_absent_hostfile_is_named(tmp_path: Path) -> None:
    assert "nowhere: cannot be read (No such file or directory)" in message(read_hostfile, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, ["a", "root@b", "c"]),
        ("c@a", None, ["a", "c"]),
        ("a:2,0@b", None, ["a:0,2", "root@b"]),
        ("root@b:1", None, ["root@b:1"]),
        (None, "a:0@b", ["a:1,2,3", "c"]),
        ("a:0,2", "a:2", ["a:0"]),
        (None, "b:0,1@c", ["a"]),
    ],
)
def test_filters_choose_hosts_and_slots(include: str | None, exclude: str | None, expected: list[str]) -> None:
    assert list(map(str, select_hosts(HOSTS, include, exclude))) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("d", None, "--include d: there is no host 'd'."),
        ("a:4", None, "--include a:4: a has no slot 4, its 4 slots count from 0"),
        ("c:0", None, "--include c:0: the hostfile does not say how many slots c has. Add slots=N"),
        ("a@a", None, "--include a@a: a is there twice."),
        ("a:", None, "--include a:: 'a:' is not understood."),
        ("a,b", None, "--include a,b: there is no host 'a,b'."),
        ("a", "a", "--include a and --exclude a: no host is left of a, root@b, c"),
        (None, "a@b@c", "--exclude a@b@c: no host is left of a, root@b, c"),
        (None, "a:0,1,2,3@b@c", "--exclude a:0,1,2,3@b@c: no host is left of a, root@b, c"),
    ],
)
def test_wrong_filters_are_refused(include: str | None, exclude: str | None, expected: str) -> None:
    assert message(select_hosts, HOSTS, include, exclude).startswith(expected)


@given(st.sets(st.sampled_from(range(4))), st.booleans())
def test_included_and_excluded_slots_are_each_other_s_rest(slots: set[int], whole: bool) -> None:
    rest = set(range(4)) - slots
    if slots and rest:
        text = "a:" + ",".join(map(str, slots))
        (included,) = select_hosts(HOSTS[:1], text, None)
        (excluded,) = select_hosts(HOSTS[:1], None, text)
        assert set(included.chosen or ()) == slots and set(excluded.chosen or ()) == rest


def test_nnodes_limits_the_hosts() -> None:
    assert limit_hosts(HOSTS, None) == (HOSTS, 3)
    assert limit_hosts(HOSTS, "2") == (HOSTS[:2], 2)
    assert limit_hosts(HOSTS, "2:3") == (HOSTS, 2)
    assert limit_hosts(HOSTS, "1:9") == (HOSTS, 1)
    for wrong in ("0", "two", "3:2", "1:2:3", "-1", ""):
        assert f"--nnodes {wrong}: not a number of nodes" in message(limit_hosts, HOSTS, wrong)
    assert "--nnodes 4: there are 3 hosts (a, root@b, c)" in message(limit_hosts, HOSTS, "4")


def test_no_more_processes_than_slots() -> None:
    assert processes_on(HOSTS[0], "auto") == 4 and processes_on(HOSTS[2], "auto") is None
    assert processes_on(HOSTS[0], "3") == 3 and processes_on(HOSTS[2], "9") == 9
    assert message(processes_on, HOSTS[1], "3") == (
        "--nproc 3: root@b has 2 slots. Write --nproc 2, or more slots in the hostfile"
    )
    assert "not a number from 1 to 4096" in message(processes_on, HOSTS[0], "0")
    assert "not a number from 1 to 4096" in message(processes_on, HOSTS[2], "99999999999")
