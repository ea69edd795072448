"""Which variables look secret, so that their values are neither shown nor written into what others may read."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"
FOLDERS = ("PWD", "OLDPWD")
WORDS = re.compile(  # the end of a word of the name: WANDB_API_KEY and PGPASSWORD, but not TOKENIZERS_PARALLELISM
    r"((?<![A-Z])(KEY|PASS|AUTH|PAT|COOKIE|PRIVATE|SIGNATURE|CREDENTIAL)|APIKEY|OAUTH|TOKEN|SECRET|PASSWORD|PASSWD|"
    r"PASSPHRASE|PWD)S?\d*(_|$)"
)
IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")  # https://user:password@proxy


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable looks secret: its name says so, or its value is a URL with a password."""
    return _has_secret_name(name) or bool(IN_URL.search(value))


def masked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as they may be shown."""
    return {
        name: MASK if value and _has_secret_name(name) else IN_URL.sub(rf"\1:{MASK}@", value)
        for name, value in environment.items()
    }


def _has_secret_name(name: str) -> bool:
    return name.upper() not in FOLDERS and WORDS.search(name.upper()) is not None
