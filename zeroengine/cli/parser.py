"""Read the arguments of all zero-* commands, and turn an error into a message and an exit code.

The main function of a command is decorated with `command`, builds a `CommandParser`, parses `argv` with it, does the
work and returns the exit code.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from zeroengine.errors import ZeroEngineError
from zeroengine.launch.cluster.versions import installed_versions
from zeroengine.utils.files import replace_file

Parameters = ParamSpec("Parameters")


class CommandParser(argparse.ArgumentParser):
    """Parse the arguments of one command, with `--help` and `--version`.

    A wrong request raises `ZeroEngineError` with the usage, so that `command` reports it like any other error.

    Args:
        name: The command, such as `zero-io`.
        usage: One line, such as `zero-io PATH [options]`.
        description: One sentence for `--help`.
        examples: Text that `--help` prints at its end, unchanged.
    """

    def __init__(self, name: str, usage: str, description: str, examples: str = "") -> None:
        super().__init__(
            prog=name,
            usage=usage,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviation that works today would become ambiguous with the next option, and break scripts.
            allow_abbrev=False,
        )
        self.add_argument(
            "--version",
            action=_PrintVersions,
            nargs=0,
            default=argparse.SUPPRESS,
            help="print the versions of zeroengine, torch and Python",
        )

    def error(self, message: str) -> NoReturn:
        """Raise the error of a wrong request.

        Raises:
            ZeroEngineError: Always.
        """
        # argparse would print the usage and exit here. Raising keeps one way of reporting errors.
        raise ZeroEngineError(f"{message}. Usage: {self.usage}; {self.prog} --help lists the options")


def write_output(path: Path, text: str, option: str) -> None:
    """Write the file that an option names.

    Raises:
        ZeroEngineError: The system does not allow it.
    """
    try:
        replace_file(path, text)
    except OSError as error:
        raise ZeroEngineError(
            f"{option} {path}: it cannot be written ({error.strerror}): write a file in a folder that exists"
        ) from None
    print(f"wrote {path}", file=sys.stderr)


class _PrintVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(", ".join(f"{name} {version}" for name, version in installed_versions().items()))
        parser.exit()


def command(name: str) -> Callable[[Callable[Parameters, int]], Callable[Parameters, int]]:
    """Decorate the main function of a command, so that an error becomes a message and an exit code.

    Args:
        name: The command's name, which begins every error message.

    Returns:
        A decorator. The decorated function returns the exit code: what the function itself returns; 2 for a request
        that cannot be met, 1 where the system fails, 130 after Ctrl-C.
    """

    def decorate(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
        @functools.wraps(main)
        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except ZeroEngineError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
            except BrokenPipeError:
                # Nobody reads the output any more, as with `| head`. Without a stdout Python does not flush it again at
                # exit, which would fail once more.
                sys.stdout = None
                return 0
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                print(f"{name}: {error.strerror or error}{where}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                # Shells expect 128 plus the number of the signal.
                return 128 + signal.SIGINT

        return run

    return decorate
