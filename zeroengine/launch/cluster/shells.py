"""How the launcher gets a command onto a node: through ssh, or a scheduler's own way."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zeroengine.errors import LaunchError

EXAMPLE = "Write a command such as --ssh 'ssh -p 2222 -i key'"
SSH = ("ssh", "-T", "-x", "-a")
SSH_OPTIONS = {
    "BatchMode": "yes",  # a question that nobody can answer is a failure
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "LogLevel": "ERROR",
}
# Reads this file's successor, a line of Python, from stdin: no command line says more than that.
STARTER = 'import os; exec(os.fdopen(0, "rb", 0, closefd=False).readline())'


@dataclass(frozen=True)
class Shell:
    """A program that runs a command on a host: its words, `{host}` for the host, then the command as one word."""

    words: tuple[str, ...]
    name: str = "ssh"

    def find(self) -> None:
        """See that the program is there.

        Raises:
            LaunchError: it is not.
        """
        if shutil.which(self.words[0]) is None:
            remedy = (
                f"Install it, or name another: {EXAMPLE[0].lower()}{EXAMPLE[1:]}"
                if self.name == "ssh"
                else "Is this a node of Slurm's?"
            )
            raise LaunchError(f"there is no program {self.words[0]!r} here. {remedy}")

    def command(self, host: str, line: str) -> list[str]:
        """The local command that has `line`, for a shell, executed on the host."""
        return [word.replace("{host}", host) for word in self.words] + [line]

    def starter(self, host: str) -> list[str]:
        """That which starts a node there, with this interpreter."""
        return self.command(host, f"exec {shlex.quote(sys.executable)} -u -c {shlex.quote(STARTER)}")


def ssh(command: str | None = None, timeout: float = 30.0) -> Shell:
    """Plain ssh, or what `--ssh` says instead, such as `ssh -p 2222 -i key`.

    Args:
        timeout: seconds for a connection; ssh is given a third of it to reach the host, so that it can say why not.

    Raises:
        LaunchError: that is no command.
    """
    try:
        words: Sequence[str] = SSH if command is None else shlex.split(command)
    except ValueError as error:
        raise LaunchError(f"--ssh {command}: {str(error).lower()}. {EXAMPLE}") from None
    if not words:
        raise LaunchError(f"--ssh: an empty command. {EXAMPLE}")
    given = {**SSH_OPTIONS, "ConnectTimeout": str(math.ceil(timeout / 3))}
    options = [word for key, value in given.items() for word in ("-o", f"{key}={value}")]
    return Shell((*words, *options, "--", "{host}"))


def srun() -> Shell:
    """A step of the Slurm allocation that this process is in."""
    words = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--input=0", "--unbuffered", "--kill-on-bad-exit=0")
    whole = ("--cpu-bind=none", "--mem=0", f"--jobid={os.environ.get('SLURM_JOB_ID', '')}", "--nodelist={host}")
    return Shell((*words, *whole, "sh", "-c"), "srun")
