"""Recognise variables that look secret. Their values are neither shown nor written where others may read them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# PWD means the working folder here, although it may stand for a password elsewhere.
FOLDER_NAMES = ("PWD", "OLDPWD")
# The end of a word of the name: WANDB_API_KEY and PGPASSWORD, but not TOKENIZERS_PARALLELISM.
SECRET_WORD = re.compile(
    r"((?<![A-Z])(KEY|PASS|AUTH|PAT|COOKIE|PRIVATE|SIGNATURE|CREDENTIAL)|APIKEY|OAUTH|TOKEN|SECRET|PASSWORD|PASSWD|"
    r"PASSPHRASE|PWD)S?\d*(_|$)"
)
# This finds the password in addresses such as https://user:password@proxy.
PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable looks secret: its name says so, or its value is a URL with a password."""
    return _has_secret_name(name) or bool(PASSWORD_IN_URL.search(value))


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as they may be shown."""
    return {
        name: MASK if value and _has_secret_name(name) else PASSWORD_IN_URL.sub(rf"\1:{MASK}@", value)
        for name, value in environment.items()
    }


def _has_secret_name(name: str) -> bool:
    return name.upper() not in FOLDER_NAMES and SECRET_WORD.search(name.upper()) is not None


def masked_tree(value: Any, name: str = "") -> Any:
    """Return a tree of JSON types as it may be shown.

    Args:
        value: Nested dicts, lists and plain values, such as a configuration.
        name: The key of the value. A text under a name that looks secret is masked; numbers are shown, since
            `tokens` may count those of a text.
    """
    if isinstance(value, Mapping):
        return {key: masked_tree(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_tree(item, name) for item in value]
    return masked({name: value})[name] if isinstance(value, str) else value
