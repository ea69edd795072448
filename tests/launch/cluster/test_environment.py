"""What of the environment reaches other hosts: what is on the list, unchanged, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.launch.conftest import Script
from zeroengine.cli.zero_launch import main
from zeroengine.errors import LaunchError
from zeroengine.launch.cluster import bootstrap
from zeroengine.launch.cluster.environment import forwarded_variables
from zeroengine.launch.cluster.protocol import encode
from zeroengine.launch.cluster.shells import RemoteShell

NASTY = st.text(
    st.one_of(st.sampled_from("'\"\\ $`(){};&|<>*?~!#\n\r\té\udc80"), st.characters(exclude_characters="\0"))
)
NAMES = st.from_regex(r"ZT_[A-Z]{1,8}", fullmatch=True)


def test_only_what_is_on_the_list_is_forwarded() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth1",
        "PYTHONPATH": "/x",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HOME": "/",
    }
    assert forwarded_variables([], environ) == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "PYTHONPATH": "/x"}
    assert forwarded_variables(["TOKEN=a=b", "HOME"], environ).items() >= {("TOKEN", "a=b"), ("HOME", "/")}


def test_the_file_and_the_options_add_to_it() -> None:
    Path(".zero_env").write_text("# ours\n\nA=1 # not a comment\nexport=x\n  B='q' \nTOKEN\n")
    assert forwarded_variables(["B=2"], {"TOKEN": "t"}) == {
        "A": "1 # not a comment",
        "export": "x",
        "B": "2",
        "TOKEN": "t",
    }


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("1A=x", "--env 1A: '1A' is no variable's name. Write NAME=VALUE, or NAME for the value it has here"),
        ("A B", "--env A B: 'A B' is no variable's name."),
        ("NOWHERE", "--env NOWHERE: NOWHERE is not set here. Set it, or write NOWHERE=VALUE"),
    ],
)
def test_wrong_options_are_refused(option: str, expected: str) -> None:
    with pytest.raises(LaunchError) as error:
        forwarded_variables([option], {})
    assert str(error.value).startswith(expected)


def test_a_wrong_line_is_named_without_its_value() -> None:
    Path(".zero_env").write_text("A=1\nmy-token=secret\n")
    with pytest.raises(LaunchError, match=r"\.zero_env, line 2: 'my-token' is no variable's name") as error:
        forwarded_variables([], {})
    assert "secret" not in str(error.value)


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(NAMES, NASTY, max_size=4))
def test_values_pass_a_real_shell_and_a_pipe_unchanged(values: dict[str, str]) -> None:
    """The way that ssh goes: a login shell gets one line, and all the rest comes over stdin."""
    values = {name: os.fsdecode(os.fsencode(value)) if _encodes(value) else "" for name, value in values.items()}
    show = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('ZT_')}))"
    source = (
        Path(bootstrap.__file__)
        .read_text()
        .replace('sys.executable, "-u", "-c", NODE', f"sys.executable, '-c', {show!r}")
    )
    command = RemoteShell(("sh", "-c")).starter("anywhere")
    assert not any(value in " ".join(command) for value in values.values() if len(value) > 8)
    wanted = encode({"folder": os.getcwd(), "environment": values})
    done = subprocess.run(command, input=f"exec({source!r})\n".encode() + wanted, capture_output=True)
    assert json.loads(done.stdout.splitlines()[-1]) == values, done.stderr.decode()


def _encodes(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


def test_the_starter_names_the_interpreter_safely() -> None:
    line = RemoteShell(("ssh", "{host}")).starter("a")[-1]
    assert line.startswith(f"exec {sys.executable} ") and "\n" not in line


@pytest.mark.parametrize(
    "options",
    [[], ["--hostfile", "hosts"], ["--launcher", "mpi"]],
)
def test_a_dry_run_shows_no_secret(
    options: list[str], script: Script, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(int("SIZE" in name)))
    Path(".zero_env").write_text("API_KEY=hush\nPLAIN=plain\n")
    Path("hosts").write_text("a slots=1\n")
    assert main(["--dry-run", "--cpu", *options, "--env", "HF_TOKEN=hush", "--env", "OTHER=other", script("")]) == 0
    out = capfd.readouterr().out
    assert "hush" not in out and "HF_TOKEN" in out and "OTHER=other" in out
