"""Every snippet of README, docs and docstrings runs as it stands, or says in its fence why nobody runs it.

The first word of a fence is its language. ``no-run:`` and a reason behind it leave the snippet out.

====================  =================================================================================================
python                runs on two ranks. The snippets of a page go on from one another; what a page may take for granted
                      is in ``assumed_names``. A line that ends in a comment like ``# SomeError: ...`` must raise that
json, yaml            a configuration, or keys of one, that ``load`` accepts
bash                  every command exists, and its parser takes the arguments
console               the same for the lines that begin with ``$``; the others are what a command printed
text                  what was printed, a drawing, or a file of no language: nothing to run
dockerfile            must say why it is not run
====================  =================================================================================================
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from torch.utils.data import TensorDataset

import zeroengine
from tests.distributed.models import VOCAB, TinyLM
from tests.distributed.ranks import RankFailed, run_ranks
from tests.emulated import cpu_alone
from zeroengine.cli import launch_options as launch_options
from zeroengine.config import load

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
LANGUAGES = ("python", "json", "yaml", "bash", "console", "text", "dockerfile")
MARK = re.compile(r"no-run: \S.*")
RAISES = re.compile(r"#\s*(\w+Error): ")
MODULES_WITH_DOCSTRINGS = (
    "deferred_init.meta_init",
    "engine.dataloader",
    "engine.engine",
    "engine.parameter_access",
    "engine.gathered",
    "engine.initialize",
    "plan.api",
)


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int  # of its first line, from 1
    language: str
    mark: str  # what follows the language
    code: str

    @property
    def runs(self) -> bool:
        return not self.mark

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets_in(text: str, page: str) -> list[Snippet]:
    """Return the fenced and the indented blocks of a page; the latter are of no language."""
    found = []
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, mark = token.info.strip().partition(" ")
            line = token.map[0] + (2 if token.type == "fence" else 1)
            found.append(Snippet(page, line, language, mark.strip(), token.content))
    return found


SNIPPETS = [s for page in PAGES for s in snippets_in(page.read_text(), str(page.relative_to(ROOT)))]


def that_run(*languages: str) -> dict[str, list[Snippet]]:
    """Return the snippets in these languages that are not marked, by page."""
    pages: dict[str, list[Snippet]] = {}
    for snippet in SNIPPETS:
        if snippet.language in languages and snippet.runs:
            pages.setdefault(snippet.page, []).append(snippet)
    return pages


# -- fences -------------------------------------------------------------------------------------------


def faults_of_fences(snippets: Sequence[Snippet]) -> Iterator[str]:
    for snippet in snippets:
        if not snippet.language:
            yield f"{snippet}: no language; write ``` and one of {', '.join(LANGUAGES)}"
        elif snippet.language not in LANGUAGES:
            yield f"{snippet}: {snippet.language} is none of {', '.join(LANGUAGES)}"
        elif snippet.mark and not MARK.fullmatch(snippet.mark):
            yield f"{snippet}: {snippet.mark!r} says no reason; write no-run: and why"
        elif snippet.language == "dockerfile" and snippet.runs:
            yield f"{snippet}: nothing here runs it; write no-run: and why"


def test_every_fence_has_a_language_and_every_mark_a_reason() -> None:
    assert list(faults_of_fences(SNIPPETS)) == []


def test_a_fence_without_a_language_or_a_reason_is_found() -> None:
    fences = ["", "pyhton", "python no-run", "python no-run:", "python skip: slow", "dockerfile"]
    text = "\n\n".join(f"```{fence}\ncode\n```" for fence in [*fences, "python no-run: it needs a GPU", "text"])
    faults = list(faults_of_fences(snippets_in(f"{text}\n\n    indented\n", "page")))
    lines = [int(fault.split(":")[1]) for fault in faults]
    assert lines == [2, 6, 10, 14, 18, 22, 33]


# -- Python -------------------------------------------------------------------------------------------


class Model(TinyLM):
    """What pages call ``Model``: its forward takes a batch, and returns the loss."""

    def __init__(self) -> None:
        super().__init__(tied=False)


def assumed_names(page: str) -> dict[str, Any]:
    """Return what a page takes for granted: on every page a model and a data set; on some an engine, and its files.

    The working folder has ``zero2.json`` and ``zero3.json``, from ``configs/``, the latter once more with manual
    accumulation as ``manual.json``, and the page's first configuration as ``ds.json``.
    """
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (64, 9))
    dataset = TensorDataset(ids[:, :-1], ids[:, 1:])
    names = {"torch": torch, "zeroengine": zeroengine, "Path": Path, "Model": Model, "model": Model()}
    names |= {"dataset": dataset, "epochs": 1, "windows": [[dataset[:8], dataset[8:16]], [dataset[16:24]]]}
    if page in ("docs/checkpoints.md", "docs/offload.md", "docs/deferred-init.md", "docstrings"):
        engine = zeroengine.initialize(names["model"], config="zero3.json")
        loader = engine.dataloader(dataset)
        batch = next(iter(loader))
        engine.backward(engine(*batch))
        engine.step()
        engine.save_checkpoint("runs/a", tag="step-1000")
        engine.save_weights("weights")
        names |= {"engine": engine, "loader": loader, "batch": batch, "generate": lambda model: model(*batch)}
    if page == "docs/launch/failures.md":
        names["folder"] = Path("runs/a")
    return names


def expected_errors(code: str) -> dict[int, str]:
    """Return the error that each line says it raises, by the line's number from 1."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = ((token.start[0], RAISES.match(token.string)) for token in tokens if token.type == tokenize.COMMENT)
    return {line: match[1] for line, match in comments if match}


def run_python(snippet: Snippet, names: dict[str, Any]) -> None:
    """Run a snippet statement by statement; tracebacks show the page and its line."""
    errors = expected_errors(snippet.code)
    for statement in ast.parse(snippet.code).body:
        error = errors.get(statement.end_lineno or 0)
        module = ast.Module([ast.increment_lineno(statement, snippet.line - 1)], type_ignores=[])
        code = compile(module, snippet.page, "exec", dont_inherit=True)
        if error is None:
            exec(code, names)
            continue
        try:
            exec(code, names)
        except Exception as raised:
            assert type(raised).__name__ == error, f"{snippet.page}:{statement.lineno} raises {raised!r}"
        else:
            raise AssertionError(f"{snippet.page}:{statement.lineno} does not raise {error}")


def run_page(snippets: Sequence[Snippet], folder: Path, disk: Path) -> None:
    """On one rank: run the snippets of a page one after another. ``/local_nvme`` is ``disk``."""
    os.chdir(folder)
    os.environ["ZEROENGINE_OVERRIDES"] = '["zero_optimization.stage3_param_persistence_threshold=0"]'  # units are tiny
    os.environ["ZEROENGINE_SNAPSHOT_FOLDER"] = str(folder / "memory")  # as zero-launch does
    # Data loaders may have workers, made as in a script: this process is a daemon with a fork server otherwise.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    with contextlib.redirect_stdout(io.StringIO()):
        names = assumed_names(snippets[0].page)
        for snippet in snippets:
            run_python(replace(snippet, code=snippet.code.replace("/local_nvme", str(disk))), names)
        if isinstance(names.get("engine"), zeroengine.Engine):
            names["engine"].close()


def prepare(folder: Path, page: str) -> Path:
    for stage in (2, 3):
        shutil.copy(ROOT / "configs" / f"zero{stage}.json", folder)
    manual = json.loads((folder / "zero3.json").read_text()) | {"gradient_accumulation_steps": "manual"}
    (folder / "manual.json").write_text(json.dumps(manual))
    for snippet in that_run("json").get(page, [])[:1]:
        (folder / "ds.json").write_text(snippet.code)
    return folder


@cpu_alone("snippets compute where they are told, and FSDP2's would need NCCL")
@pytest.mark.parametrize("page", that_run("python"))
def test_python_runs_as_it_stands(page: str, tmp_path: Path, disk: Path) -> None:
    run_ranks(2, run_page, that_run("python")[page], prepare(tmp_path, page), disk)


def test_a_snippet_that_fails_is_reported_with_its_page_and_line(tmp_path: Path) -> None:
    text = "# A page\n\n```python\nx = 1\nassert x == 1\nx.y()\n```\n"
    with pytest.raises(RankFailed, match=r'File "page", line 6'):
        run_ranks(1, run_page, snippets_in(text, "page"), tmp_path, tmp_path)
    for line, error in [
        ("1 / 0  # ZeroDivisionError: ...", None),
        ("1 / 0  # KeyError: ...", "raises ZeroDivisionError"),
    ]:
        with contextlib.nullcontext() if error is None else pytest.raises(AssertionError, match=error):
            run_python(Snippet("page", 1, "python", "", line), {})
    with pytest.raises(AssertionError, match="page:7 does not raise KeyError"):
        run_python(Snippet("page", 6, "python", "", "x = 1\nx += 1  # KeyError: 'x'"), {})


def docstrings() -> Iterator[Snippet]:
    """Yield the code, which is indented, of the docstrings of public classes and functions."""
    for name in MODULES_WITH_DOCSTRINGS:
        module = importlib.import_module(f"zeroengine.{name}")
        public = [value for key, value in vars(module).items() if not key.startswith("_")]
        own = [value for value in public if getattr(value, "__module__", "") == module.__name__]
        methods = [m for c in own if isinstance(c, type) for k, m in vars(c).items() if not k.startswith("_")]
        for thing in [module, *own, *methods]:
            if isinstance(inspect.getdoc(thing), str) and (inspect.ismodule(thing) or callable(thing)):
                where = f"{name}: {getattr(thing, '__qualname__', 'module')}"
                yield from snippets_in(inspect.getdoc(thing) or "", where)


def run_docstrings(snippets: Sequence[Snippet], folder: Path) -> None:
    os.chdir(folder)
    names = assumed_names("docstrings")
    for snippet in snippets:
        run_python(snippet, dict(names))


def test_code_in_docstrings_runs(tmp_path: Path) -> None:
    snippets = list(docstrings())
    assert {"engine.engine: Engine", "deferred_init.meta_init: meta_init"} <= {snippet.page for snippet in snippets}
    run_ranks(1, run_docstrings, snippets, prepare(tmp_path, ""))


# -- configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("snippet", [s for found in that_run("json", "yaml").values() for s in found], ids=str)
def test_configurations_are_accepted(snippet: Snippet, tmp_path: Path) -> None:
    code = snippet.code
    if snippet.language == "json" and not code.lstrip().startswith("{"):
        code = f"{{{code}}}"  # some keys of a file
    file = tmp_path / f"ds.{snippet.language}"
    file.write_text(code)
    load(file).resolve(world_size=2)


# -- commands -----------------------------------------------------------------------------------------

TOOLS = {"pip", "kubectl", "mpirun", "rsync", "ssh-copy-id"}  # of others: that they are spelt so is all that is checked
PREFIXES = {"sudo", "exec", "do"}


def entry_points() -> dict[str, str]:
    """Return zeroengine's commands, and the function of each as ``module:function``."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2].partition("\n[")[0]
    return dict(re.findall(r'^(\S+) = "(\S+)"$', section, re.MULTILINE))


class Parsed(BaseException):
    """A command has taken its arguments, and would begin to work now."""


def parse(main: Callable[[], Any], what: str) -> None:
    """Run a command as far as its parser.

    Raises:
        AssertionError: it does not take the arguments.
    """

    def stop(parser: argparse.ArgumentParser, *arguments: Any) -> Any:
        real(parser, *arguments)
        raise Parsed

    real = argparse.ArgumentParser.parse_args
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with contextlib.suppress(Parsed, SystemExit):
            main()
            errors.write("it has not looked at its arguments")
    assert not errors.getvalue(), f"{what}: {errors.getvalue()}"


def run_script(file: Path, arguments: list[str]) -> Callable[[], Any]:
    def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(file), *arguments])
            patch.syspath_prepend(file.parent)
            runpy.run_path(str(file), run_name="__main__")

    return main


def lines_of(snippet: Snippet) -> Iterator[str]:
    """Yield the lines of a shell snippet, continued ones as one."""
    for line in snippet.code.replace("\\\n", " ").splitlines():
        if snippet.language == "bash":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


def commands_in(line: str) -> Iterator[list[str]]:
    """Yield the words of each simple command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|;&"):
            if words and words[0] not in ("for", "done"):
                yield words
            words = []
        elif words or word not in PREFIXES:
            words.append(word)


def check_command(words: list[str]) -> None:
    """
    Raises:
        AssertionError: there is no such command, or it does not take these arguments.
    """
    own = entry_points()
    missing = [
        w for w in words if w.startswith(("bin/", "configs/", "examples/", "benchmarks/")) and not (ROOT / w).is_file()
    ]
    assert not missing, f"there is no {', '.join(missing)}"
    start = next((i for i, w in enumerate(words) if Path(w).name in own or w == "python"), None)
    if start is None or start > 0:
        assert words[0] in TOOLS or (ROOT / words[0]).is_file(), f"{words[0]} is no known command"
    if start is None:
        return
    (command, *arguments), what = words[start:], shlex.join(words)
    if command == "python" and arguments[0] == "-m":
        main = importlib.import_module(f"{arguments[1]}.__main__").main
        parse(lambda: main(arguments[2:]), what)
    elif command == "python":
        parse(run_script(ROOT / arguments[0], arguments[1:]), what)
    else:
        module, _, function = own[Path(command).name].partition(":")
        parse(lambda: getattr(importlib.import_module(module), function)(arguments), what)
    if Path(command).name == "zero-launch":
        options = launch_options.parse_arguments(arguments)
        launch_options.check_options(options)
        script, *words = options.words
        if (ROOT / script).is_file():
            parse(run_script(ROOT / script, words), what)


@pytest.mark.parametrize("page", that_run("bash", "console"))
def test_commands_exist_and_take_their_arguments(page: str) -> None:
    for snippet in that_run("bash", "console")[page]:
        if snippet.language == "bash":
            done = subprocess.run(["bash", "-n"], input=snippet.code, capture_output=True, text=True)
            assert done.returncode == 0, f"{snippet}: {done.stderr}"
        for line in lines_of(snippet):
            for words in commands_in(line):
                check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "zero-lunch train.py",
        "zero-launch --nporc 2 train.py",
        "zero-launch --submit train.py",
        "zero-export runs/a",
        "zero-launch --config configs/zero4.json train.py",
        "zero-launch --config configs/zero3.json examples/train_lm.py --stpes 3",
        "mpirun -n 2 zero-launch --luancher mpi train.py",
        "python benchmarks/peers.py --size s --runds 3",
        "python -m zeroengine.config chekc configs/zero2.json",
    ],
)
def test_a_command_that_would_be_refused_is_found(line: str) -> None:
    with pytest.raises((AssertionError, zeroengine.ZeroEngineError)):
        for words in commands_in(line):
            check_command(words)
