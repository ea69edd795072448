"""The launcher looks after many nodes within the limits of one process. Nodes are stand-ins that start nothing."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys

import pytest

from tests.launch.hosts import ROOT
from zeroengine.errors import LaunchError
from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.nodes import Nodes
from zeroengine.launch.cluster.protocol import MESSAGE_PREFIX
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.cluster.shells import RemoteShell, ssh_shell
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.descriptors import allow_descriptors


def test_more_nodes_than_the_soft_limit_of_open_files_allows() -> None:
    command = [sys.executable, f"{ROOT}/benchmarks/many_nodes.py", "--nodes", "50", "--open-files", "128"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert re.search(r"^exit code +0$", done.stdout, re.MULTILINE), done.stderr
    assert "a limit of 128 open files" in done.stdout and " 2 threads" in done.stdout


def test_more_nodes_than_the_hard_limit_allows_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2048))
    with pytest.raises(LaunchError, match=r"1000 nodes need 3100 open files, and 2048 are allowed.*ulimit -n 3100"):
        allow_descriptors(3000, "1000 nodes")


def lost_nodes(script: str, count: int, **limits: float) -> tuple[list[str | None], int]:
    """Return why each node was lost, and how many nodes were connected to at most at a time."""
    hosts = [Host(f"node-{index}", 1) for index in range(count)]
    shell = RemoteShell(("sh", "-c", script, "{host}"))
    request = ClusterRequest(hosts, count, shell, os.getcwd(), ["train.py"], fan_out=2, **limits)  # type: ignore[arg-type]
    most = 0
    with Nodes(request, Console()) as nodes:

        def all_lost() -> bool:
            nonlocal most
            most = max(most, sum(node.is_connected() and node.loss is None for node in nodes.connections))
            return all(node.loss for node in nodes.connections)

        assert nodes.wait(all_lost, 20)
        return [node.loss for node in nodes.connections], most


def test_fan_out_limits_how_many_nodes_are_connected_to_at_a_time() -> None:
    why = "ssh does not connect within 0.3 s (--connect-timeout)"
    assert lost_nodes("exec cat >/dev/null", 5, connect_timeout_s=0.3) == ([why] * 5, 2)


def test_the_time_to_import_torch_is_an_option() -> None:
    hello = f"""{MESSAGE_PREFIX.decode()}{{"is": "hello", "python": "3", "address": null}}"""
    why = "its Python has not imported torch within 0.3 s (--import-timeout)"
    assert lost_nodes(f"echo {shlex.quote(hello)}; exec cat >/dev/null", 1, import_timeout_s=0.3) == ([why], 1)


def test_a_program_that_cannot_be_started_is_a_lost_node() -> None:
    request = ClusterRequest([Host("a", 1)], 1, RemoteShell(("/nonexistent",)), os.getcwd(), ["train.py"])
    with Nodes(request, Console()) as nodes:
        assert nodes.connections[0].loss == "ssh cannot be started: No such file or directory"


def test_ssh_has_a_third_of_the_time_to_reach_the_host() -> None:
    assert "ConnectTimeout=10" in ssh_shell().words and "ConnectTimeout=34" in ssh_shell("ssh -p 22", 100.0).words
