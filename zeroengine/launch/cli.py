"""The command `zero-launch`: starts a script in several processes on this machine, one rank each."""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import sys
from pathlib import Path
from typing import NoReturn

from zeroengine.errors import LaunchError, ZeroEngineError
from zeroengine.launch import job

USAGE = "zero-launch [options] script.py [arguments of the script]"
EXAMPLES = """\
examples:
  zero-launch train.py                                   a process per GPU, or two on the CPU
  zero-launch --nproc 4 --config zero3.json train.py     four processes; initialize() reads zero3.json
  zero-launch --set zero_optimization.stage=3 train.py   one value of the configuration, replaced
  zero-launch -m package.train --epochs 3                a module, as with python -m
"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. Usage: {USAGE}; zero-launch --help lists the options")


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zero-launch",
        usage=USAGE,
        description="Start a script in several processes on this machine, one rank each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", metavar="N", default="auto", help="processes: a number, or auto (one per GPU; 2 without GPUs)")
    add("--cpu", action="store_true", help="use no GPU, even where there are some")
    add("--config", metavar="FILE", help="the configuration that zeroengine.initialize reads, JSON or YAML")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="replace one value of it; may be repeated")
    add(
        "--log-dir", metavar="DIR", type=Path, help="also write each rank's output to DIR/rank0.log, DIR/rank1.log, ..."
    )
    add("--dry-run", action="store_true", help="print what would be started, per rank, and start nothing")
    add("--version", action="store_true", help="print the versions of zeroengine, torch and Python")
    add("-m", "--module", action="store_true", help="the script is a module's name, as with python -m")
    add("script", nargs="?", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: that of the first rank that failed, or 2 for a wrong request."""
    try:
        return launch(parser().parse_args(argv))
    except ZeroEngineError as error:
        print(f"zero-launch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before any rank was started
        return 128 + signal.SIGINT


def launch(options: argparse.Namespace) -> int:
    if options.version:
        print(versions())
        return 0
    if options.script is None:
        raise LaunchError(f"there is no script to run. Write {USAGE}")
    request = job.build(
        options.script,
        options.arguments,
        module=options.module,
        nproc=options.nproc,
        cpu=options.cpu,
        config=options.config,
        overrides=options.set,
    )
    if options.dry_run:
        print(request)
        return 0
    make_log_dir(options.log_dir)

    from zeroengine.launch import agent  # imports torch's elastic agent, which takes its time
    from zeroengine.launch.console import Console
    from zeroengine.launch.report import report

    with Console(request.nproc, options.log_dir) as console:
        outcome = agent.run(request, console)
    sys.stderr.write(report(outcome, console))
    return outcome.code


def make_log_dir(folder: Path | None) -> None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--log-dir {folder}: cannot be made a folder for logs ({error.strerror})") from None


def versions() -> str:
    import torch

    try:
        own = importlib.metadata.version("zeroengine")
    except importlib.metadata.PackageNotFoundError:
        own = "(not installed)"
    return f"zeroengine {own}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
