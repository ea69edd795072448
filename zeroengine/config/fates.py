"""Applies `deepspeed.TABLE` to a tree: what is refused, what has no effect, and what is left for our models."""

from __future__ import annotations

from typing import Any

from zeroengine.config import deepspeed_keys
from zeroengine.config.messages import Problem, unknown_keys
from zeroengine.config.optimizers import is_import_path
from zeroengine.config.source import KeyPath, Source, as_json, describe

COMMENTS = ("_comment", "$comment", "//")  # what the key of a comment begins with


class Fates:
    """Sorts one source's keys; `problems`, `notices` and `comments` (notices of keys ignored) grow as it does."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.comments: list[str] = []

    def sort(self, tree: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
        """Give the tree without the keys that are not ours."""
        rest: dict[str, Any] = {}
        for key, value in tree.items():
            here = (*path, str(key))
            row = deepspeed_keys.TABLE.get(".".join(here))
            if here[-1].startswith(COMMENTS):
                self.comments.append(f"{self._source.label(here)} is ignored: it is a comment.")
            elif row is not None:
                if not asleep(tree, path):
                    self._judge(row, here, value)
            elif here == ("optimizer", "params") and is_import_path(tree.get("type")):
                rest[key] = self._without_comments(value, here)  # the class says what it takes
            elif not path and key in deepspeed_keys.BLOCKS:
                self._sort_block(here, value)
            else:
                rest[key] = self.sort(value, here) if isinstance(value, dict) else value
        return rest

    def _without_comments(self, params: Any, path: KeyPath) -> Any:
        if not isinstance(params, dict):
            return params
        for key in [key for key in params if str(key).startswith(COMMENTS)]:
            self.comments.append(f"{self._source.label((*path, str(key)))} is ignored: it is a comment.")
        return {key: value for key, value in params.items() if not str(key).startswith(COMMENTS)}

    def _sort_block(self, here: KeyPath, value: Any) -> None:
        if isinstance(value, dict):
            self.problems += unknown_keys((*here, str(key)) for key in self.sort(value, here))
        elif value is not None:
            self.problems.append(Problem(here, f"found {describe(value)}; write an object, {{...}}."))

    def _judge(self, row: deepspeed_keys.Row, here: KeyPath, value: Any) -> None:
        if row.keys and isinstance(value, dict):
            known = row.keys.split()
            self.problems += unknown_keys((*here, str(key)) for key in value if key not in known)
        if row.is_off(value):
            return
        if row.fate == deepspeed_keys.REFUSED:
            shown = "" if isinstance(value, dict) else f"the value {as_json(value) or 'given'} is "
            self.problems.append(Problem(here, f"{shown}refused; {row.why}."))
        else:
            self.notices.append(f"{self._source.label(here)} has no effect: {row.why}.")


def asleep(tree: dict[str, Any], path: KeyPath) -> bool:
    """Whether the tree is a precision that is switched off; what else it says is then of no account."""
    enabled = tree.get("enabled")
    return path in (("fp16",), ("bf16",), ("torch_autocast",)) and enabled in (None, False)
