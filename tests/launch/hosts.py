"""Hosts on this machine: network namespaces on one bridge, each with an address, a name and an sshd of its own.

The launcher runs in a namespace too. Processes of all hosts share one file system and one process table, so a test sees
what is left where.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.processes import is_alive, wait_for

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "zeroengine.cli.zero_launch"]
_numbers = itertools.count()  # of rigs in this process
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SSHD_CONFIG = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {keys}
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin yes
MaxStartups 100
SetEnv {environment}
"""
SSH_CONFIG = """\
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
"""


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "building hosts out of network namespaces needs root"
    for program in ("ip", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"building hosts out of network namespaces needs {program} (Debian: openssh-server, iproute2)"
    name = f"zt{os.getpid()}"
    namespace = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if namespace.returncode:
        return f"this system makes no network namespaces: {namespace.stderr.strip()}"
    try:
        bridge = subprocess.run(
            ["ip", "-n", name, "link", "add", "name", "hub", "type", "bridge"], capture_output=True, text=True
        )
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"this system makes no bridges: {bridge.stderr.strip()}" if bridge.returncode else None


@dataclass
class Machine:
    """One host. `pids` are the processes in its namespace but those of sshd."""

    name: str
    namespace: str
    address: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start_sshd(self) -> None:
        config = SSHD_CONFIG.format(
            address=self.address,
            folder=self.folder,
            keys=self.folder.parent / "key.pub",
            environment=" ".join(f'{key}="{value}"' for key, value in {"ZT": self.name, **self.environment}.items()),
        )
        (self.folder / "sshd_config").write_text(config)
        run("ip", "netns", "exec", self.namespace, SSHD, "-f", self.folder / "sshd_config", "-E", self.folder / "log")
        wait_for(lambda: "Server listening" in (self.folder / "log").read_text(), 10)

    def stop_sshd(self) -> None:
        """New connections are refused; those that are there stay."""
        pid_file = self.folder / "sshd.pid"
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not is_alive(pid), 10)
        (self.folder / "log").write_text("")

    def pids(self) -> list[int]:
        return [pid for pid in pids_in(self.namespace) if not name_of(pid).startswith("sshd")]

    def ranks(self) -> list[int]:
        """The processes there that are ranks."""
        return [pid for pid in self.pids() if b"launch/local/worker.py" in command_of(pid)]

    def kill_all(self) -> None:
        """As if its power had failed, but for the network and sshd itself."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def mount(self, size: str, path: Path) -> None:
        """An empty file system over a folder, on this host alone."""
        pid = (self.folder / "sshd.pid").read_text().strip()
        run("nsenter", "-t", pid, "-m", "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)

    def cover(self, path: Path, other: Path) -> None:
        """Another file in a file's place, on this host alone."""
        pid = (self.folder / "sshd.pid").read_text().strip()
        run("nsenter", "-t", pid, "-m", "mount", "--bind", other, path)

    def link(self, state: str) -> None:
        """`down` cuts its cable, `up` mends it."""
        run("ip", "-n", self.namespace, "link", "set", "eth0", state)


@dataclass
class Rig:
    """Some hosts, `node-a` first, and a namespace from which they are reached."""

    prefix: str
    folder: Path
    machines: list[Machine]

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/ssh_config"

    def hostfile(self, slots: int = 1, machines: Sequence[Machine] | None = None) -> Path:
        path = self.folder / "hosts"
        path.write_text("".join(f"{machine.name} slots={slots}\n" for machine in machines or self.machines))
        return path

    def popen(
        self, *arguments: str, command: Sequence[str] = LAUNCH, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start zero-launch, or another command, where the hosts can be reached."""
        options = [] if command is not LAUNCH else ["--cpu", "--ssh", self.ssh]
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{self.prefix}0", *command, *options, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_COLOR": "1", **(environment or {})},
        )

    def launch(
        self, *arguments: str, timeout: float = 120, **options: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        process = self.popen(*arguments, **options)  # type: ignore[arg-type]
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"zero-launch did not end within {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def wait_until_empty(self, seconds: float = 20) -> None:
        """No process is left on any host within so many seconds."""
        wait_for(lambda: not any(machine.pids() for machine in self.machines), seconds)


@contextlib.contextmanager
def build(count: int, environments: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[Rig]:
    """A rig of `count` hosts named node-a, node-b, ...; `environments` sets variables in the sessions of some.

    Names resolve in the namespaces only: `ip netns` mounts `/etc/netns/<name>/hosts` over `/etc/hosts` there.
    """
    prefix = f"zt{os.getpid()}x{next(_numbers)}x"
    folder = Path(tempfile.mkdtemp(prefix="zero-hosts-"))
    names = [f"node-{letter}" for letter in "abcdefgh"[:count]]
    addresses = [f"10.77.0.{10 + index}" for index in range(count)]
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        table = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in zip(names, addresses, strict=True))
        for index in range(count + 1):
            run("ip", "netns", "add", f"{prefix}{index}")
            undo.callback(subprocess.run, ["ip", "netns", "del", f"{prefix}{index}"], capture_output=True)
            etc = Path(f"/etc/netns/{prefix}{index}")
            etc.mkdir(parents=True)
            undo.callback(shutil.rmtree, etc, ignore_errors=True)
            # Programs there look up the machine's own host name.
            own_name = f"{addresses[index - 1]} {socket.gethostname()}\n" if index else ""
            (etc / "hosts").write_text(table + own_name)
            (etc / "resolv.conf").write_text("")
            run("ip", "-n", f"{prefix}{index}", "link", "set", "lo", "up")
        hub = f"{prefix}0"
        run("ip", "-n", hub, "link", "add", "name", "hub", "type", "bridge")
        run("ip", "-n", hub, "addr", "add", "10.77.0.1/24", "dev", "hub")
        run("ip", "-n", hub, "link", "set", "hub", "up")
        machines = []
        for index, (name, address) in enumerate(zip(names, addresses, strict=True), 1):
            space = f"{prefix}{index}"
            run("ip", "-n", hub, "link", "add", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "-n", hub, "link", "set", f"port{index}", "master", "hub", "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            home = folder / name
            home.mkdir()
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / "host_key")
            machine = Machine(name, space, address, home, dict((environments or {}).get(name, {})))
            machine.start_sshd()
            undo.callback(_end, machine)
            machines.append(machine)
        yield Rig(prefix, folder, machines)


def _end(machine: Machine) -> None:
    machine.kill_all()
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((machine.folder / "sshd.pid").read_text()), signal.SIGKILL)


def run(*words: str | os.PathLike[str]) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True, text=True)


def pids_in(namespace: str) -> list[int]:
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
    return [pid for pid in map(int, pids.split()) if is_alive(pid)]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
