"""What a configuration may show."""

from __future__ import annotations

from zeroengine.utils.masking import masked_tree


def test_texts_under_secret_names_are_masked_and_numbers_are_not() -> None:
    tree = {"wandb": {"api_key": "hush", "team": "a"}, "tokens": 3, "urls": ["http://me:hush@host/"]}
    shown = {"wandb": {"api_key": "***", "team": "a"}, "tokens": 3, "urls": ["http://me:***@host/"]}
    assert masked_tree(tree) == shown
    assert masked_tree({"secrets": ["hush"]}) == {"secrets": ["***"]}
