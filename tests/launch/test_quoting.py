"""Arguments and values arrive unchanged, whatever is in them, through real shells and a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launch.cluster.test_nodes import CONNECTION
from tests.launch.conftest import Script
from zeroengine.cli.zero_launch import main
from zeroengine.launch.cluster.dry_run import describe_run
from zeroengine.launch.cluster.environment import FORWARDED_NAMES, FORWARDED_PREFIXES, forwarded_variables
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.cluster.shells import RemoteShell
from zeroengine.launch.local.job import Job, worker_command

NASTY = st.text(
    st.one_of(
        st.sampled_from("'\"\\ $`(){};&|<>*?~!#%\n\r\té\N{SNOWMAN}-="),
        st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
    )
)
ARGUMENTS = st.lists(st.one_of(NASTY, st.sampled_from(["--", "-m", "--nproc", "", "$$", "${local_rank}", "$(id)"])))
VARIABLES = st.dictionaries(st.from_regex(r"ZT_[A-Z]{1,8}", fullmatch=True), NASTY, max_size=4)
SHOW = "import json; given = {k: v for k, v in os.environ.items() if k.startswith('ZT_')}\n"


@pytest.fixture
def show(script: Script, tmp_path: Path) -> Path:
    """A script that writes down what each rank was given."""
    name = script(SHOW + "json.dump([sys.argv[1:], given], open(f'given{rank}', 'w'))")
    return tmp_path / name


def given_to(rank: int) -> list[object]:
    path = Path(f"given{rank}")
    arguments_and_variables: list[object] = json.loads(path.read_text())
    path.unlink()
    return arguments_and_variables


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ARGUMENTS, VARIABLES)
def test_the_lines_of_a_dry_run_survive_a_shell_on_both_sides(
    show: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    """The one here, and the one that ssh gives the command to."""
    request = ClusterRequest(
        [Host("a", 1)], 1, RemoteShell(("sh", "-c")), str(show.parent), [show.name, *arguments], environment=variables
    )
    for lines in (describe_run(request), Job(1, worker_command([show.name, *arguments]), variables).describe(29500)):
        line = lines.partition(", which starts\n")[2] or lines
        subprocess.run(["sh", "-c", line], check=True)
        assert given_to(0) == [arguments, variables]


@pytest.mark.slow  # test_nodes has a short form
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NASTY, min_size=20).flatmap(lambda many: ARGUMENTS.map(lambda few: few + many)), VARIABLES)
def test_a_run_on_two_nodes_gives_its_ranks_what_it_was_given(
    show: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    connect = show.parent / "connect"
    connect.write_text(CONNECTION)
    connect.chmod(0o755)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    options = ["--hostfile", "hosts", "--ssh", str(connect), "--cpu"]
    for name, value in variables.items():
        options += ["--env", f"{name}={value}"]
    assert main([*options, show.name, *arguments]) == 0
    assert given_to(0) == given_to(1) == [arguments, variables]


@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from(["NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH", "TORCH_HOME", "CUDA_VISIBLE_DEVICES"]),
            st.from_regex(r"(MY|X|_|AWS|HF|NCCLX?|GLOO|PATH)_?[A-Z_]{0,8}", fullmatch=True),
        ),
        NASTY,
    )
)
def test_only_listed_variables_are_forwarded(environ: dict[str, str]) -> None:
    listed = {name for name in environ if name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES)}
    assert forwarded_variables([], environ) == {name: environ[name] for name in listed}


@pytest.mark.slow  # test_nodes has them on no command line and on no other host
def test_unlisted_variables_appear_on_no_command_line_in_no_log_and_on_no_other_host(
    script: Script, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that fails: its report, too, holds nothing of it."""
    secret, hidden = "5e884898da280471", "9f86d081884c7d65"  # the second is forwarded, but on no command line
    body = f"""
from pathlib import Path
def read(path):
    try: return path.read_bytes()
    except OSError: return b""
own = Path(f"/proc/{{os.getpid()}}/environ").read_bytes()
lines = b"".join(read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
secret, hidden = (bytes.fromhex(text) for text in ("{secret.encode().hex()}", "{hidden.encode().hex()}"))
print(secret in own, hidden in own, secret in lines, hidden in lines)
raise SystemExit("the end")
"""
    connect = tmp_path / "connect"
    connect.write_text(CONNECTION)
    connect.chmod(0o755)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    Path(".zero_env").write_text("HIDDEN\n")
    environment = {**os.environ, "SECRET": secret, "HIDDEN": hidden}
    options = ["--hostfile", "hosts", "--ssh", str(connect), "--cpu", "--log-dir", "logs"]
    command = [sys.executable, "-m", "zeroengine.cli.zero_launch", *options, script(body)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("False True False False") == 2, done
    logs = [path.read_text() for path in (tmp_path / "logs").iterdir()]
    assert len(logs) == 2 and "False True False False" in logs[0]
    for text in (done.stdout, done.stderr, *logs):
        assert secret not in text and hidden not in text
