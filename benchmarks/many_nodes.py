"""How many nodes the launcher can look after, and what each costs it.

    python benchmarks/many_nodes.py --nodes 1024 --open-files 1024
    sudo python benchmarks/many_nodes.py --real 8

Nodes are processes of this machine that stand for ssh and a node at once: they speak the launcher's protocol and start
nothing, torch least of all. With `--real`, hosts made of network namespaces, each with an sshd, run a script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeroengine.launch.cluster.hosts import Host
from zeroengine.launch.cluster.nodes import Nodes
from zeroengine.launch.cluster.protocol import FAN_OUT
from zeroengine.launch.cluster.request import ClusterRequest
from zeroengine.launch.cluster.restart_loop import RestartLoop
from zeroengine.launch.cluster.shells import RemoteShell
from zeroengine.launch.cluster.versions import installed_versions
from zeroengine.launch.local.console import Console
from zeroengine.launch.local.run_events import LauncherEvents

STAND_IN = """
import json, os, select, sys, time

def say(kind, **more):
    more["is"], more["clock"] = kind, time.monotonic()
    os.write(1, b"\\x01zero-launch " + json.dumps(more).encode() + b"\\n")

def answer(message):
    do = message["do"]
    if do == "facts":
        say("facts", versions=json.loads(os.environ["STAND_IN_VERSIONS"]), gpus=0, missing=[], config_error=None)
    elif do == "listen":
        say("answer", address="127.0.0.1", port=29500)
    elif do == "reach":
        say("answer")
    elif do == "run":
        say("output", rank=0, target=1, data="hello\\n")
        say("finished")
    elif do in ("release", "stop"):
        say("ended", failures=[], interrupted=None)

say("hello", time=time.time(), python=".".join(map(str, sys.version_info[:3])), name="stand-in", address="127.0.0.1")
unfinished, beat = b"", time.monotonic()
while True:
    if select.select([0], [], [], 2.0)[0]:
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, unfinished = (unfinished + data).split(b"\\n")
        for line in lines:
            if line.startswith(b'{"do": '):
                answer(json.loads(line))
    if time.monotonic() > beat + 2.0:
        beat = time.monotonic()
        say("beat")
"""


def run_stand_ins(num_nodes: int, fan_out: int) -> None:
    """Connect to stand-ins for nodes, run one round on them, and print times, memory and descriptors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.py"
        path.write_text(STAND_IN)
        os.environ["STAND_IN_VERSIONS"] = json.dumps(installed_versions())
        hosts = [Host(f"node-{index}", 1) for index in range(num_nodes)]
        shell = RemoteShell((sys.executable, "-I", "-S", str(path), "{host}"), "the stand-in")
        request = ClusterRequest(hosts, num_nodes, shell, os.getcwd(), ["train.py"], cpu=True, fan_out=fan_out)
        screen, limit = os.dup(1), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        console, start = Console(), time.monotonic()
        with Nodes(request, console) as nodes:
            nodes.check()
            connected = time.monotonic()
            descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
            outcome = RestartLoop(request, nodes, console, LauncherEvents()).run()
            ended = time.monotonic()
        closed = time.monotonic()
        os.dup2(screen, 1)
    own = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{num_nodes} nodes, a limit of {limit} open files at the start, {fan_out} connected to at a time")
    print(f"exit code              {outcome.code}")
    print(f"connected and checked  {connected - start:.1f} s")
    print(f"a round                {ended - connected:.1f} s")
    print(f"closed                 {closed - ended:.1f} s")
    print(f"the launcher           {own.ru_utime + own.ru_stime:.1f} s of CPU time, {own.ru_maxrss / 1024:.0f} MiB,")
    print(f"                       {threads} threads, {descriptors} open files")


def run_real_hosts(num_hosts: int) -> None:
    """Run a script on hosts made of network namespaces, and print how long that took."""
    from tests.launch import hosts

    if reason := hosts.why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, hosts.build(num_hosts) as rig:
        os.chdir(folder)
        Path("train.py").write_text("import os; print(os.environ['RANK'])")
        start = time.monotonic()
        done = rig.launch("--hostfile", str(rig.hostfile(1)), "train.py", timeout=600)
        seconds = time.monotonic() - start
        assert done.returncode == 0 and len(done.stdout.splitlines()) == num_hosts, done.stderr
        rig.wait_until_empty()
    print(f"{num_hosts} hosts with an sshd each: a script that prints its rank took {seconds:.1f} s, start to end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--fan-out", type=int, default=FAN_OUT)
    parser.add_argument("--open-files", type=int, metavar="N", help="begin with this soft limit (ulimit -Sn N)")
    parser.add_argument("--real", type=int, metavar="N", help="N hosts made of network namespaces instead; needs root")
    options = parser.parse_args()
    if options.open_files:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.open_files, hard))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n", flush=True)
    if options.real:
        run_real_hosts(options.real)
    else:
        run_stand_ins(options.nodes, options.fan_out)


if __name__ == "__main__":
    main()
