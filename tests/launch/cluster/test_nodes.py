"""Runs on several nodes, each behind a connection that a shell script stands for. See test_ssh for real ones."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, Result, Script, Start
from tests.launch.local.test_death import STUBBORN, pids
from tests.launch.local.test_repeated_failures import NOTICE, TRAIN
from tests.launch.processes import is_alive, wait_for
from zeroengine.cli.zero_launch import main
from zeroengine.launch.cluster import restart_loop

# Takes the last two words, host and command; knows two hosts that cannot be reached, one that is down while there is a
# file of that name, and some that cannot connect to others.
CONNECTION = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case $1 in
refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255;;
nowhere) echo "ssh: Could not resolve hostname nowhere: Name or service not known" >&2; exit 255;;
cut*) cut=cut;;
dies) printf '\\001zero-launch {"is": "hello", "python": "%s", "address": null}\\n' "$VERSION"; exit 255;;
esac
[ -e "down-$1" ] && { echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255; }
echo "Welcome to $1!"
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
exec env -i CUT="$cut" PATH="$PATH" HOME="$HOME" SSH_CONNECTION="$SSH_CONNECTION" sh -c "$2"
"""
WAITING = """
with open(f'part{rank}', 'w') as file: file.write(str(os.getpid()))
os.rename(f'part{rank}', f'pids{rank}')
time.sleep(600)
"""


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """zero-launch's arguments for some hosts."""
    script = tmp_path / "connect"
    script.write_text(CONNECTION)
    script.chmod(0o755)

    def build(*more: str, hosts: str = "a slots=1\nb slots=2\n") -> list[str]:
        (tmp_path / "hosts").write_text(hosts)
        return ["--hostfile", "hosts", "--ssh", str(script), "--cpu", *more]

    return build


@pytest.fixture
def launch_on_nodes(capfd: pytest.CaptureFixture[str], arguments: Callable[..., list[str]]) -> Launch:
    def run(*more: str, hosts: str = "a slots=1\nb slots=2\n") -> Result:
        code = main(arguments(*more, hosts=hosts))
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def started(start: Start, arguments: Callable[..., list[str]]) -> Start:
    """Start it as a command, on three ranks."""
    return lambda *more: start(*arguments(*more), ranks=3)


def test_ranks_are_counted_over_the_nodes_and_named_after_them(
    launch_on_nodes: Launch, script: Script, tmp_path: Path
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "ZEROENGINE_HOST")
    body = f"print(*(os.environ[name] for name in {names}), os.getcwd(), sys.executable, sep=',')\n"
    body += "print('err', rank, file=sys.stderr)"
    result = launch_on_nodes("--log-dir", "logs", script(body))
    assert (result.code, result.err.count("err")) == (0, 3), result.err
    here = f"{tmp_path},{sys.executable}"
    assert sorted(result.out.splitlines()) == [
        f"[a:0] 0,0,3,1,0,127.0.0.1,a,{here}",
        f"[b:1] 1,0,3,2,1,127.0.0.1,b,{here}",
        f"[b:2] 2,1,3,2,1,127.0.0.1,b,{here}",
    ]
    assert "err 2\n" in (tmp_path / "logs/rank2.log").read_text()


def test_nodes_form_one_process_group_and_get_arguments_and_listed_variables(
    launch_on_nodes: Launch, script: Script
) -> None:
    """Arguments and listed variables arrive unchanged, others not at all, and values are on no command line."""
    body = """
import glob, json, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
lines = [open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(path)]
seen = sum(os.environ["HIDDEN"].encode() in line for line in lines)
print(json.dumps([total.item(), sys.argv[1:], os.environ["TOKEN"], os.environ.get("SECRET"), seen]))
dist.barrier()
dist.destroy_process_group()
"""
    Path(".zero_env").write_text("HIDDEN=9f86d081884c7d65\n")
    words = ["--nproc", "a b", "", "$$x ${local_rank} $(id) `id`", "new\nline", "'\"\\", "--", "-m", "*~!"]
    os.environ["SECRET"] = "not to be seen"
    try:
        options = ["--env", "TOKEN=it's $(id)\n\""]
        result = launch_on_nodes(*options, script(body), *words, hosts="a slots=1\nb slots=1\n")
    finally:
        del os.environ["SECRET"]
    printed = [json.loads(line.partition("] ")[2]) for line in result.out.splitlines()]
    assert printed == [[3.0, words, "it's $(id)\n\"", None, 0]] * 2, result.err


@pytest.mark.slow  # the next test has a first failure, and test_agent a traceback
def test_the_first_failure_of_all_nodes_is_last_on_the_screen(launch_on_nodes: Launch, script: Script) -> None:
    result = launch_on_nodes(script("if rank == 2:\n    raise ValueError('boom')\ntime.sleep(60)"))
    assert result.code == 1
    assert result.err.splitlines()[-1] == "[b:2] ValueError: boom"
    assert "zero-launch: rank 2 (b) failed (exit code 1)" in result.err


def test_after_a_sudden_death_the_other_nodes_are_heard(launch_on_nodes: Launch, script: Script) -> None:
    body = """
if rank == 0:
    open("gone", "w")
    os._exit(5)
while not os.path.exists("gone"): time.sleep(0.1)
time.sleep(1)
raise RuntimeError("a rank is gone at blocks.4")
"""
    result = launch_on_nodes(script(body))
    assert result.code == 5
    assert "failed as well: RuntimeError: a rank is gone at blocks.4" in result.err
    assert result.err.splitlines()[-1] == "zero-launch: rank 0 (a) failed first (exit code 5)"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_stopped_launcher_leaves_nothing(
    started: Start, script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    launcher = started(script(STUBBORN + "time.sleep(600)"))
    assert len(pids(tmp_path)) == 6 and all(map(is_alive, pids(tmp_path)))
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=20)
    if number == signal.SIGINT:
        assert launcher.returncode == 130 and err.endswith("stopped by SIGINT; every rank has ended\n")
        assert not any(map(is_alive, pids(tmp_path)))
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


@pytest.mark.slow
def test_a_node_whose_launcher_is_silent_ends(started: Start, script: Script, tmp_path: Path) -> None:
    launcher = started("--node-timeout", "5", script(STUBBORN + "time.sleep(600)"))
    launcher.send_signal(signal.SIGSTOP)
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 20)
    launcher.send_signal(signal.SIGCONT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 1


@pytest.mark.slow  # the elastic run below names one
def test_a_node_that_is_lost_is_named(started: Start, script: Script, tmp_path: Path) -> None:
    launcher = started(script(STUBBORN + "time.sleep(600)"))
    os.kill(node_of(tmp_path, 1), signal.SIGKILL)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "zero-launch: b was lost: its connection ended" in err and "(ranks 1, 2)" in err, err
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


def node_of(folder: Path, rank: int) -> int:
    """The process that a rank's node is, and so the connection to it."""
    worker = int((folder / f"pids{rank}").read_text().split()[0])
    parent = re.search(r"PPid:\s*(\d+)", Path(f"/proc/{worker}/status").read_text())
    assert parent is not None
    return int(parent[1])


def test_a_silent_node_is_named(started: Start, script: Script, tmp_path: Path) -> None:
    """As when its power or its network fails."""
    launcher = started("--node-timeout", "5", script(WAITING))
    node = node_of(tmp_path, 1)
    os.kill(node, signal.SIGSTOP)
    try:
        _, err = launcher.communicate(timeout=30)
        assert launcher.returncode == 1
        assert "zero-launch: b was lost: no sign of life for 5 s: the node or its network is down (ranks 1, 2)" in err
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher has ended the connection
            os.kill(node, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


@pytest.mark.slow
def test_a_flood_of_output_does_not_hide_a_lost_node(started: Start, script: Script, tmp_path: Path) -> None:
    """Not even where the screen is slow."""
    flood = "while rank == 0: sys.stdout.write('x' * 200 + '\\n')\ntime.sleep(600)"
    launcher = started("--node-timeout", "5", script(WAITING.replace("time.sleep(600)\n", flood)))
    assert launcher.stdout is not None and launcher.stderr is not None
    screen = launcher.stdout.fileno()
    threading.Thread(target=lambda: [time.sleep(0.05) for _ in iter(lambda: os.read(screen, 1 << 16), b"")]).start()
    node = node_of(tmp_path, 1)
    time.sleep(2)  # until everything between the rank and the screen is full
    os.kill(node, signal.SIGSTOP)
    start = time.monotonic()
    try:
        assert launcher.wait(60) == 1
        assert time.monotonic() - start < 25, "5 s of silence, and what it takes to end the ranks and to print the rest"
        assert "b was lost: no sign of life for 5 s" in launcher.stderr.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node, signal.SIGKILL)


def test_when_a_node_leaves_an_elastic_run_the_others_go_on(started: Start, script: Script, tmp_path: Path) -> None:
    body = "if os.environ['WORLD_SIZE'] == '1': sys.exit(print('alone', os.environ['ZEROENGINE_FULL_WORLD_SIZE']))\n"
    launcher = started("--nnodes", "1:2", "--run-folder", "run", script(body + WAITING))
    (tmp_path / "down-b").touch()
    os.kill(node_of(tmp_path, 1), signal.SIGKILL)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (0, "[a:0] alone 3\n"), err
    assert "zero-launch: b was lost: its connection ended" in err and "zero-launch: going on with a\n" in err
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["eviction", "restart", "end"] and "b was lost" in events[0]["text"]
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 10)


def test_nodes_that_cannot_be_reached_are_listed_in_one_table(launch_on_nodes: Launch, script: Script) -> None:
    result = launch_on_nodes(script("open('started', 'w')"), hosts="a slots=1\nrefused slots=1\nnowhere slots=1\n")
    assert result.code == 2 and result.out == ""
    assert result.err.splitlines() == [
        "zero-launch: 2 of 3 nodes cannot take part:",
        "  refused  ssh: connect to host refused port 22: Connection refused",
        "  nowhere  ssh: Could not resolve hostname nowhere: Name or service not known",
    ]
    assert not Path("started").exists()


@pytest.mark.slow  # test_zero_launch refuses one on this machine
def test_a_wrong_configuration_is_refused(launch_on_nodes: Launch, script: Script, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    result = launch_on_nodes(
        "--config", "zero.json", "--set", "zero_optimization.stag=3", script("open('started', 'w')")
    )
    assert result.code == 2 and not Path("started").exists()
    assert result.err.startswith("zero-launch: ") and "stag" in result.err and "Did you mean" in result.err, result.err


@pytest.mark.slow  # test_preflight has every problem of a node
def test_a_port_in_use_is_refused(launch_on_nodes: Launch, script: Script) -> None:
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        result = launch_on_nodes("--port", str(port), script("open('started', 'w')"))
    assert result.code == 2
    assert result.err.splitlines() == [
        "zero-launch: 1 of 2 nodes cannot take part:",
        f"  a  port {port} is in use. Choose another with --port, or leave --port out",
    ]
    assert not Path("started").exists()


@pytest.mark.slow  # test_preflight has every problem of a node
def test_an_address_that_leads_elsewhere_is_refused(launch_on_nodes: Launch, script: Script) -> None:
    result = launch_on_nodes("--master-addr", "127.0.0.1.", script("open('started', 'w')"), hosts="a slots=1\n")
    assert result.code == 2
    _, row = result.err.splitlines()
    assert re.fullmatch(r"  a  --master-addr 127\.0\.0\.1\. does not lead to this node \(.+\)\. Leave it out", row)
    assert not Path("started").exists()


def test_a_connection_that_is_no_program_is_refused(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("a slots=1\n")
    for command, message in {
        "nosuchprogram -p 22": "there is no program 'nosuchprogram' here. Install it, or name another: write ",
        "ssh 'a": "--ssh ssh 'a: no closing quotation. Write a command such as --ssh 'ssh -p 2222 -i key'",
        "": "--ssh: an empty command. Write a command such as --ssh 'ssh -p 2222 -i key'",
    }.items():
        assert main(["--hostfile", "hosts", "--ssh", command, "--cpu", script("")]) == 2
        assert capfd.readouterr().err.startswith(f"zero-launch: {message}")


@pytest.mark.slow  # test_agent restarts on one machine, and the elastic runs restart on the others
def test_restarts_begin_again_on_all_nodes(launch_on_nodes: Launch, script: Script) -> None:
    body = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < 2 and rank == attempt: raise ValueError(f"attempt {attempt}")
while attempt == 0 or attempt == 1: time.sleep(0.1)
print("attempt", attempt)
"""
    result = launch_on_nodes("--max-restarts", "2", script(body))
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["[a:0] attempt 2", "[b:1] attempt 2", "[b:2] attempt 2"]
    assert "zero-launch: restart 1 of 2 with a, b" in result.err and "ValueError: attempt 1" in result.err


@pytest.mark.slow  # test_repeated_failures has the rule
def test_a_step_that_always_fails_on_any_node_ends_the_run(launch_on_nodes: Launch, script: Script) -> None:
    result = launch_on_nodes("--max-restarts", "5", script(TRAIN), hosts="a slots=1\nb slots=1\n")
    assert result.code == 1 and NOTICE in result.err.splitlines()[-1], result.err
    assert result.err.count("zero-launch: restart") == 2


def test_an_elastic_run_goes_on_without_a_node(launch_on_nodes: Launch, script: Script) -> None:
    body = "print(rank, os.environ['WORLD_SIZE'], os.environ['ZEROENGINE_FULL_WORLD_SIZE'])"
    result = launch_on_nodes("--nnodes", "1:2", script(body), hosts="a slots=2\nrefused slots=2\n")
    assert result.code == 0
    assert sorted(result.out.splitlines()) == ["[a:0] 0 2 4", "[a:1] 1 2 4"]
    assert "zero-launch: refused is left out: ssh: connect to host refused port 22: Connection refused" in result.err


@pytest.mark.slow  # the test above has one that refuses
def test_a_node_that_is_lost_before_it_has_answered_is_left_out_of_an_elastic_run(
    launch_on_nodes: Launch, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERSION", platform.python_version())
    hosts = "a slots=1\ndies slots=1\n"
    result = launch_on_nodes("--nnodes", "1:2", script("print(os.environ['WORLD_SIZE'])"), hosts=hosts)
    assert (result.code, result.out) == (0, "[a:0] 1\n"), result.err
    assert "zero-launch: dies is left out: its connection ended (exit code 255)" in result.err
    refused = launch_on_nodes(script(""), hosts=hosts)
    assert refused.code == 2 and "  dies  its connection ended (exit code 255)" in refused.err


@pytest.fixture
def cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose name begins with cut connect to nobody."""
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch/sitecustomize.py").write_text("""
import os, socket
def refuse(*_, **__): raise OSError(113, 'No route to host')
if os.environ.get('CUT'): socket.create_connection = refuse
""")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/patch:{os.environ['PYTHONPATH']}")


@pytest.mark.slow  # the test after it cuts the first node off
@pytest.mark.usefixtures("cut_off")
def test_an_elastic_run_goes_on_without_a_node_that_cannot_reach_the_first(
    launch_on_nodes: Launch, script: Script
) -> None:
    hosts = "a slots=1\ncut slots=1\nb slots=1\n"
    result = launch_on_nodes("--nnodes", "2:3", script("print(os.environ['WORLD_SIZE'])"), hosts=hosts)
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["[a:0] 2", "[b:1] 2"]
    assert re.search(
        r"cut was lost: .* on the first node cannot be reached \(No route to host\) \(rank 1\)", result.err
    )
    refused = launch_on_nodes(script("open('started', 'w')"), hosts=hosts)
    assert refused.code == 2 and not Path("started").exists()
    assert re.search(r"1 of 3 nodes cannot take part:\n  cut  .*No route to host", refused.err)


@pytest.mark.usefixtures("cut_off")
def test_an_elastic_run_leaves_the_first_node_out_if_the_others_cannot_reach_it(
    launch_on_nodes: Launch, script: Script
) -> None:
    hosts = "a slots=1\ncut1 slots=1\ncut2 slots=1\n"
    result = launch_on_nodes("--nnodes", "1:3", "--max-idle-rounds", "1", script("open('started', 'w')"), hosts=hosts)
    assert result.code == 1 and not Path("started").exists()
    assert "zero-launch: a was lost: 2 of 2 nodes cannot reach it: 127.0.0.1 port" in result.err


@pytest.mark.slow  # the run of the test above ends after one such round
def test_a_run_that_loses_its_nodes_in_every_round_ends(launch_on_nodes: Launch, script: Script) -> None:
    body = "open(f'round{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}', 'a')\n"
    body += "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    result = launch_on_nodes("--nnodes", "1:2", "--max-idle-rounds", "2", script(body), hosts="a slots=1\nb slots=1\n")
    assert result.code == 1
    assert sorted(path.name for path in Path().glob("round*")) == ["round0", "round1"]
    assert "no step was taken in that round; the next one begins in 1 s" in result.err
    assert "nodes were lost in 2 rounds in a row before a step was taken" in result.err


@pytest.mark.slow  # test_restart_loop has the arithmetic
def test_a_node_that_was_lost_twice_is_excluded(
    launch_on_nodes: Launch, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rounds in which a step was taken are not idle ones."""
    monkeypatch.setattr(restart_loop, "STEADY_ROUND_S", 0.0)
    body = """
from zeroengine.utils.launcher import report_step
count = int(os.environ['TORCHELASTIC_RESTART_COUNT'])
if os.environ['ZEROENGINE_HOST'] == 'b':
    report_step(1)
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60 if count < 3 else 5)
print(count)
"""
    result = launch_on_nodes("--nnodes", "1:2", "--max-idle-rounds", "1", script(body), hosts="a slots=1\nb slots=1\n")
    assert (result.code, result.out) == (0, "[a:0] 3\n"), result.err
    assert result.err.count("b was lost: ") == 2 and result.err.count("b is back") == 1
    assert "b was lost again: it is put aside for 10 minutes" in result.err


@pytest.mark.slow  # test_cli and test_quoting have shorter forms
def test_dry_run_lines_are_the_run(
    capfd: pytest.CaptureFixture[str], arguments: Callable[..., list[str]], script: Script
) -> None:
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(total.item(), sys.argv[1], os.environ["WORDS"], os.environ["ZEROENGINE_OVERRIDES"])
"""
    options = [
        "--dry-run",
        "--env",
        "WORDS=it's\n$(id)",
        "--set",
        "a=b c",
        "--port",
        "29511",
        "--master-addr",
        "127.0.0.1",
    ]
    assert main(arguments(*options, script(body), "x $y", hosts="a slots=1\nb slots=1\n")) == 0
    commands = re.split(r"\n(?=/)|\n(?=#)", capfd.readouterr().out)
    lines = [command for command in commands if not command.startswith("#")]
    assert len(lines) == 2
    shells = [subprocess.Popen(line, shell=True, stdout=subprocess.PIPE, text=True) for line in lines]
    outputs = [shell.communicate()[0].partition("!\n")[2] for shell in shells]
    assert outputs == ['3.0 x $y it\'s\n$(id) ["a=b c"]\n'] * 2
