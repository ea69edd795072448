"""What zeroengine's commands share: how they read their arguments, and what an error makes of the exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from zeroengine.errors import ZeroEngineError


class Parser(argparse.ArgumentParser):
    """Raises a wrong request as an error of zeroengine, with the usage."""

    def __init__(self, name: str, usage: str, description: str, examples: str) -> None:
        super().__init__(
            prog=name,
            usage=usage,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ZeroEngineError(f"{message}. Usage: {self.usage}; {self.prog} --help lists the options")


def run(name: str, command: Callable[[], int]) -> int:
    """The exit code of ``command``: 2 and one line for a request that cannot be met, 1 where the machine fails."""
    try:
        return command()
    except ZeroEngineError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads any more, as in `| head`
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except OSError as error:
        print(f"{name}: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
