"""Run the command `zero-view`: show a run folder in the terminal, as JSON, or as an HTML page."""

from __future__ import annotations

import argparse
import json
import sys
import time

from rich.console import RenderableType
from rich.live import Live

from zeroengine.cli.parser import CommandParser, command, write_output
from zeroengine.errors import ZeroEngineError
from zeroengine.utils.files import path_argument
from zeroengine.view.live_line import plain_line
from zeroengine.view.run_reader import RunReader
from zeroengine.view.summary import summarize
from zeroengine.view.terminal import make_console, render_comparison, render_run

USAGE = "zero-view RUN [OTHER] [options]"
EXAMPLES = """\
examples:
  zero-view runs/a                           progress, loss, where the time and the memory go, events
  zero-view runs/a --follow                  the same of a running run, drawn again as it goes on
  zero-view runs/a --html report.html        one page for a browser; it needs no network
  zero-view runs/a runs/b --html both.html   two runs laid over each other
  zero-view runs/a --json | jq .run.split    for programs
"""
FOLLOW_INTERVAL_S = 1.0
# A run that has ended or failed may be started again at once, so its end is believed so many seconds later.
SETTLE_S = 10.0
# So many seconds lie between two lines where there is no terminal.
PLAIN_INTERVAL_S = 10.0


@command("zero-view")
def main(argv: list[str] | None = None) -> int:
    """Show a run and return the exit code."""
    about = "Show what a run wrote into its run folder: in the terminal, as JSON, or as an HTML page."
    parser = CommandParser("zero-view", USAGE, about, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", type=path_argument, help="the run folder")
    add("other", metavar="OTHER", type=path_argument, nargs="?", help="a second run, to compare with")
    # Earlier versions named the second run by this option.
    add("--compare", help=argparse.SUPPRESS)
    add("--follow", action="store_true", help="go on until the run ends, or Ctrl-C")
    add("--html", metavar="FILE", type=path_argument, help="write one self-contained page")
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    if options.compare is not None:
        raise ZeroEngineError(f"leave --compare out: write zero-view {options.run} {options.compare}")
    folders = [options.run, *filter(None, [options.other])]
    if options.follow and (options.json or options.html or len(folders) > 1):
        raise ZeroEngineError("--follow shows one run in the terminal. Leave out --json, --html and the second run")
    if options.follow:
        return follow(RunReader(options.run, wait=options.run.is_dir()))
    readers = [RunReader(folder) for folder in folders]
    if options.html:
        from zeroengine.view.report import report_page

        write_output(options.html, report_page(readers), "--html")
    if options.json:
        summaries = [summarize(reader) for reader in readers]
        print(json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=2))
    elif not options.html:
        console = make_console()
        if len(readers) > 1:
            console.print(render_comparison(readers))
        else:
            console.print(render_run(readers[0], console.width, console.color_system is not None))
    return 0


def follow(reader: RunReader) -> int:
    """Show a run until it ends. Without a terminal, print a line from time to time."""
    console = make_console()
    if not console.is_terminal:
        return follow_in_lines(reader)

    def render() -> RenderableType:
        return render_run(reader, console.width, console.color_system is not None)

    # A low terminal cuts the picture off while the run goes on. At the end the whole of it is printed.
    with Live(render(), console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        while not is_over(reader):
            time.sleep(FOLLOW_INTERVAL_S)
            reader.read()
            live.update(render(), refresh=True)
    console.print(render())
    return 0


def is_over(reader: RunReader) -> bool:
    """Return whether the run has ended or failed, and nothing was written since."""
    moments = [moment for event in reader.events[-1:] if isinstance(moment := event.get("time"), (int, float))]
    return reader.state() in ("ended", "failed") and time.time() > max(moments, default=0.0) + SETTLE_S


def follow_in_lines(reader: RunReader) -> int:
    """Print a line of figures now, every few seconds while the run goes on, and at its end."""
    printed = ""
    while True:
        line = plain_line(reader)
        if line != printed:
            print(line, flush=True)
            printed = line
        if is_over(reader):
            return 0
        deadline = time.monotonic() + PLAIN_INTERVAL_S
        # The end is noticed at once, although lines are rare.
        while time.monotonic() < deadline and not is_over(reader):
            time.sleep(FOLLOW_INTERVAL_S)
            reader.read()


if __name__ == "__main__":
    sys.exit(main())
