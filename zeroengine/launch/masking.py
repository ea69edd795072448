"""Which variables look secret, so that their values are neither shown nor written into what others may read."""

from __future__ import annotations

import re
from collections.abc import Mapping

WORDS = frozenset("AUTH CREDENTIAL CREDENTIALS KEY KEYS PASS PASSPHRASE PASSWORDS PAT SECRETS".split())
ENDS = ("APIKEY", "PASSWD", "PASSWORD", "SECRET", "TOKEN")  # as in PGPASSWORD
IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # https://user:password@proxy
MASK = "***"


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks secret: a word of its name says so, or its value is a URL with a password."""
    words = name.upper().split("_")
    return any(word in WORDS or word.endswith(ENDS) for word in words) or bool(IN_URL.search(value))


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables as they may be shown."""
    return {name: MASK if value and is_secret(name, value) else value for name, value in environment.items()}
