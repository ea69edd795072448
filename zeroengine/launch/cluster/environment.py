"""Choose the environment variables that reach the ranks on other hosts: an explicit list, and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroengine.errors import LaunchError

FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_")
FORWARDED_NAMES = ("CUDA_DEVICE_ORDER", "PYTHONPATH", "LD_LIBRARY_PATH")
ENVIRONMENT_FILE = ".zero_env"
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def forwarded_variables(options: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of ranks on other hosts: those listed above, then those of `explicit_variables`.

    Args:
        options: The values of `--env`.
        environ: The launcher's environment.

    Raises:
        LaunchError: See `explicit_variables`.
    """
    variables = {
        name: value for name, value in environ.items() if name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES)
    }
    return variables | explicit_variables(options, environ)


def explicit_variables(options: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `.zero_env`, at home and in the working folder, and of `--env`; later ones win.

    Raises:
        LaunchError: An option or a line of the file is malformed, or names a variable that is not set here.
    """
    variables: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / ENVIRONMENT_FILE
        if path.is_file():
            variables |= parse_environment_file(path, environ)
    return variables | dict(parse_variable(option, f"--env {option.partition('=')[0]}", environ) for option in options)


def parse_environment_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file of lines `NAME=VALUE`, unquoted, or `NAME` for the value in `environ`.

    Raises:
        LaunchError: The file cannot be read, or a line is malformed.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: cannot be read ({error})") from None
    numbered = enumerate(map(str.lstrip, lines), 1)
    return dict(
        parse_variable(line, f"{path}, line {number}", environ)
        for number, line in numbered
        if line and not line.startswith("#")
    )


def parse_variable(text: str, source: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and value of `NAME=VALUE`, or of `NAME` with its value in `environ`.

    Args:
        text: The variable as it was written.
        source: Its name in messages. They never show a value, because it may be secret.
        environ: The launcher's environment.

    Raises:
        LaunchError: It is malformed or not set.
    """
    name, equals, value = text.partition("=")
    name = name if equals else name.strip()
    if not VARIABLE_NAME.fullmatch(name):
        raise LaunchError(
            f"{source}: {name!r} is no variable's name. Write NAME=VALUE, or NAME for the value it has here"
        )
    if equals:
        return name, value
    if name not in environ:
        raise LaunchError(f"{source}: {name} is not set here. Set it, or write {name}=VALUE")
    return name, environ[name]
