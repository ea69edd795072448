"""Run DeepSpeed's own unit tests on zeroengine: ``python -m tests.integrations.deepspeed.upstream.run --source DIR``.

``DIR`` is a checkout of DeepSpeed at the commit that ``tests.txt`` names. Its tests are copied into a scratch folder
and run unmodified. Whatever they import as ``deepspeed`` comes from the folder that ``zero-launch --as-deepspeed`` puts
on the path.
``tests.txt`` lists the tests that apply on CPU, and ``exclusions.txt`` all others, each below what stops it when it is
run. Where a test would skip itself, such as on the CPU, it goes on (``lift_guards.py``).

Each test has its own timeout, since a rank that fails often leaves the other one waiting.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.integrations.deepspeed.upstream import lists
from tests.integrations.environments import ROOT, python_of

HERE = Path(__file__).parent
AS_DEEPSPEED = ROOT / "zeroengine" / "integrations" / "as_deepspeed"
# A process of pytest runs so many tests of a file: imports cost more than most tests.
TESTS_A_PROCESS = 40


class Runner:
    """Runs tests in processes of pytest, several at a time, and keeps what each test did."""

    def __init__(
        self,
        python: Path,
        tests: Path,
        scratch: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        results: Path | None,
        options: Sequence[str] = (),
    ) -> None:
        """Prepare to run tests.

        Args:
            python: The Python that runs them.
            tests: The folder that their ids are relative to.
            scratch: A folder for reports.
            environment: The variables of the tests.
            timeout_s: How long a test may take, in seconds.
            results: A file for each test's outcome and message, or None.
            options: More options of pytest.
        """
        self.results = results
        self.tests = tests
        self.scratch = scratch
        self.timeout_s = timeout_s
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.guards: dict[str, set[str]] = collections.defaultdict(set)
        self._python = str(python)
        self._environment = dict(environment)
        self._options = ["-p", "pytest_reports", "-p", "no:cacheprovider", *options]

    def collect(self, files: Sequence[str]) -> dict[str, int]:
        """Return every test in some files, with the ranks that it starts at most."""
        reports = self.scratch / "collected"
        self._start(
            ["--collect-only", "-q", "--continue-on-collection-errors", *files], reports, self.scratch / "output"
        ).wait()
        return {line["node"]: line["ranks"] for line in read_lines(reports) if "node" in line}

    def run(self, nodes: Sequence[str], jobs: int) -> None:
        """Run tests, `jobs` processes of pytest at a time."""
        waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        by_file = collections.defaultdict(list)
        for node in nodes:
            by_file[node.partition("::")[0]].append(node)
        for group in by_file.values():
            for first in range(0, len(group), TESTS_A_PROCESS):
                waiting.put(group[first : first + TESTS_A_PROCESS])

        def work(worker: int) -> None:
            while True:
                try:
                    group = waiting.get_nowait()
                except queue.Empty:
                    return
                while group:
                    group = self._run_group(group, worker)
                    if self.results is not None:
                        self.results.write_text(json.dumps(self._results(), indent=1))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_group(self, group: list[str], worker: int) -> list[str]:
        """Run tests in one process, and return those that are left because one of them ended it or was stopped."""
        reports = self.scratch / f"reports{worker}"
        reports.unlink(missing_ok=True)
        # Output goes to a file: a pipe that nobody reads would fill up and stop the tests.
        output = reports.with_suffix(".output")
        # The empty expression lets tests run that upstream deselects to run them one after another.
        options = ["-q", "-m", "", f"--basetemp={self.scratch / f'files{worker}'}"]
        process = self._start([*options, *group], reports, output)
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            new_size = reports.stat().st_size if reports.exists() else 0
            if new_size != size:
                size, since = new_size, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                break
        timed_out = process.poll() is None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        started, finished = None, set()
        for line in read_lines(reports):
            if "guard" in line:
                # While no test runs, the file is imported, and the guard is one of all its tests.
                for node in group if started is None else [started]:
                    self.guards[node].add(line["guard"])
                continue
            node, outcome = line["node"], line["outcome"]
            if outcome == "started":
                started = node
            elif outcome == "finished":
                finished.add(node)
                started = None
                self._print(node)
            elif self.outcomes.get(node, ("", ""))[0] != "failed":
                self.outcomes[node] = (outcome, line["text"])
        rest = [node for node in group if node not in finished]
        if not rest:
            return []
        text = output.read_text(errors="replace")
        what = f"no result within {self.timeout_s:.0f} s" if timed_out else f"exit code {process.returncode}"
        _, collecting, import_error = text.partition("ERROR collecting")
        if started is not None:
            stopped, text = [started], text[-6000:]
        elif collecting:
            # The file cannot be imported, so none of its tests can run.
            stopped, text = rest, import_error[:6000]
        else:
            stopped, text = rest[:1], text[-6000:]
        for node in stopped:
            self.outcomes[node] = ("failed", f"{text}\n{what}")
            self._print(node)
        return [node for node in rest if node not in stopped]

    def _results(self) -> dict[str, tuple[str, str, list[str]]]:
        """Return what each test did, its message, and the guards that were lifted for it."""
        return {
            node: (outcome, text, sorted(self.guards.get(node, ())))
            for node, (outcome, text) in self.outcomes.copy().items()
        }

    def _print(self, node: str) -> None:
        print(f"{self.outcomes.get(node, ('?', ''))[0]:8} {node}", flush=True)

    def _start(self, arguments: Sequence[str], reports: Path, output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                [self._python, "-m", "pytest", *self._options, *arguments],
                cwd=self.tests,
                env={**self._environment, "UPSTREAM_REPORTS": str(reports)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def environment_of_tests(use_deepspeed: bool, folders: Sequence[Path], timeout_s: float) -> dict[str, str]:
    """Return the variables of upstream's tests: no GPU, no network, and nothing of an outer run.

    Args:
        use_deepspeed: Whether ``import deepspeed`` finds the real DeepSpeed, and not zeroengine.
        folders: More folders to import from.
        timeout_s: How long a test may take, in seconds.
    """
    paths = [HERE, *folders] if use_deepspeed else [AS_DEEPSPEED, HERE, *folders, ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "DS_ACCELERATOR": "cpu",
        # Upstream's accelerator of the CPU counts so many devices.
        "LOCAL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRITON_INTERPRET": "0",
        "DS_UNITTEST_TIMEOUT": str(int(timeout_s) * 2),
    }
    # torchrun's variables of an outer run would reach the ranks.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


def read_lines(path: Path) -> list[dict[str, str]]:
    """Return the values of a file with a JSON object in each line; a last line may be half written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the runners of all upstream tests share."""
    parser.add_argument("--real", action="store_true", help="run them on the real DeepSpeed instead")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="write all tests with their ranks, and run none")
    parser.add_argument("--exclusions", action="store_true", help="run the excluded tests, and check their reasons")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tests whose id or heading contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes of pytest at a time")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for each test")
    parser.add_argument("--results", type=Path, help="also write a JSON file with each test's outcome and message")


def run_or_collect(
    runner: Runner, options: argparse.Namespace, files: Sequence[str], lists_of_tests: lists.Lists
) -> int:
    """Do what the options of ``add_options`` ask, and return the exit status.

    That is 0 if 90 % of the tests pass, and with ``--exclusions`` if each reason is true.
    """
    if options.collect is not None:
        collected = runner.collect(files)
        options.collect.write_text(json.dumps(collected, indent=1))
        print(f"{len(collected)} tests")
        return 0
    exclusions = lists_of_tests.exclusions()
    headings = exclusions if options.exclusions else lists_of_tests.tests()
    runner.run([node for node, heading in headings.items() if options.only in f"{node} {heading.text}"], options.jobs)
    if options.exclusions:
        return 0 if lists.print_untrue_reasons(runner.outcomes, exclusions) else 1
    return 0 if lists.print_table(runner.outcomes, runner.guards, {} if options.only else exclusions) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Run DeepSpeed's own unit tests on zeroengine")
    parser.add_argument("--source", type=Path, required=True, help="a checkout of DeepSpeed")
    parser.add_argument("--tests", type=Path, default=lists.DEEPSPEED.tests_file, help="the list of tests")
    parser.add_argument("--reuse-ranks", action="store_true", help="start ranks once for many tests, which is faster")
    parser.add_argument("--keep-guards", action="store_true", help="let tests skip themselves")
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upstream") as folder:
        tests = Path(folder, "tests")
        shutil.copytree(options.source / "tests", tests)
        environment = environment_of_tests(options.real or options.collect is not None, [tests], options.timeout)
        environment |= {"LOCAL_SIZE": "4", "UPSTREAM_REUSE_RANKS": "1" if options.reuse_ranks else ""}
        # With -s what a rank prints before it dies is in the output, which is the message where there is no result.
        more = ["-s"] if options.keep_guards else ["-s", "-p", "lift_guards"]
        runner = Runner(
            python_of("deepspeed"), tests, Path(folder), environment, options.timeout, options.results, more
        )
        return run_or_collect(
            runner, options, lists.FILES, dataclasses.replace(lists.DEEPSPEED, tests_file=options.tests)
        )


if __name__ == "__main__":
    sys.exit(main())
