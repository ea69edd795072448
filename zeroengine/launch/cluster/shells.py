"""Programs that run a command on a host: ssh, or a scheduler's own way."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from dataclasses import dataclass

from zeroengine.errors import LaunchError

EXAMPLE = "a command such as --ssh 'ssh -p 2222 -i key'"
SSH_COMMAND = ["ssh", "-T", "-x", "-a"]
SSH_OPTIONS = {
    # Nobody can answer a question, so that it must be a failure.
    "BatchMode": "yes",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
}
# The Python on the node reads its program, one line, from stdin. Other users can read command lines, so they hold
# nothing else.
STARTER = 'import os; exec(os.fdopen(0, "rb", 0, closefd=False).readline())'


@dataclass(frozen=True)
class RemoteShell:
    """A program that runs a command on a host.

    Its words stand before the command, which is one word for a shell; `{host}` in them stands for the host.
    """

    words: tuple[str, ...]
    name: str = "ssh"

    def check_installed(self) -> None:
        """Check that the program exists.

        Raises:
            LaunchError: It does not.
        """
        if shutil.which(self.words[0]) is None:
            is_ssh = self.name == "ssh"
            remedy = f"Install it, or name another: write {EXAMPLE}" if is_ssh else "Is this a node of Slurm's?"
            raise LaunchError(f"there is no program {self.words[0]!r} here. {remedy}")

    def command(self, host: str, line: str) -> list[str]:
        """Return the local command that executes `line`, a line for a shell, on the host."""
        return [word.replace("{host}", host) for word in self.words] + [line]

    def starter(self, host: str) -> list[str]:
        """Return the local command that starts a node on the host, with this interpreter."""
        return self.command(host, f"exec {shlex.quote(sys.executable)} -u -c {shlex.quote(STARTER)}")


def ssh_shell(command: str | None = None, connect_timeout_s: float = 30.0) -> RemoteShell:
    """Return plain ssh, or the command that `--ssh` names instead, such as `ssh -p 2222 -i key`.

    Args:
        command: The value of `--ssh`.
        connect_timeout_s: The time for a whole connection. ssh has a third of it to reach the host, so that ssh can
            still report the reason of a failure.

    Raises:
        LaunchError: `command` is no command.
    """
    try:
        words = SSH_COMMAND if command is None else shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--ssh {command}: {str(error).lower()}. Write {EXAMPLE}") from None
    if not words:
        raise LaunchError(f"--ssh: an empty command. Write {EXAMPLE}")
    options = {**SSH_OPTIONS, "ConnectTimeout": str(math.ceil(connect_timeout_s / 3))}
    flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    return RemoteShell((*words, *flags, "--", "{host}"))


def srun_shell() -> RemoteShell:
    """Return srun, which makes a step of the Slurm allocation that this process is in."""
    # The step shares its node with the batch script (--overlap). Its one task starts all ranks, so it takes all cores
    # and memory, and it reads the launcher's messages from srun's stdin (--input=0).
    step = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--input=0", "--unbuffered", "--kill-on-bad-exit=0")
    resources = ("--cpu-bind=none", "--mem=0", f"--jobid={os.environ.get('SLURM_JOB_ID', '')}", "--nodelist={host}")
    return RemoteShell((*step, *resources, "sh", "-c"), "srun")
