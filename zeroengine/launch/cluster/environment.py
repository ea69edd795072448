"""Which environment variables reach the ranks on other hosts: an explicit list, and nothing else."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroengine.errors import LaunchError

FORWARDED = (
    "NCCL_*",
    "GLOO_*",
    "OMP_*",
    "MKL_*",
    "KMP_*",
    "TORCH_*",
    "PYTORCH_*",
    "CUDA_DEVICE_ORDER",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)
FILE = ".zero_env"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def collect(options: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the ranks elsewhere are given: the list above, then `.zero_env` (here or at home), then `--env` options.

    Raises:
        LaunchError: an option or a line of the file is malformed, or names a variable that is not set here.
    """
    found = {name: value for name, value in environ.items() if any(fnmatch.fnmatchcase(name, p) for p in FORWARDED)}
    return found | extra(options, environ)


def extra(options: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of `.zero_env` and of `--env` alone."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / FILE
        if path.is_file():
            found |= parse_file(path, environ)
    for option in options:
        name, value = parse(option, f"--env {option.partition('=')[0]}", environ)
        found[name] = value
    return found


def parse_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Lines `NAME=VALUE`, the value as it stands to the line's end, or `NAME` for the value that it has here."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, value = parse(line.lstrip(), f"{path}, line {number}", environ)
            found[name] = value
    return found


def parse(text: str, where: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Values are kept out of messages: they may be secret."""
    name, equals, value = text.partition("=")
    name = name if equals else name.strip()
    if not NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: {name!r} is no variable's name. Write NAME=VALUE, or NAME for the value it has here"
        )
    if equals:
        return name, value
    if name not in environ:
        raise LaunchError(f"{where}: {name} is not set here. Set it, or write {name}=VALUE")
    return name, environ[name]
