"""Checks a configuration when it is imported: pydantic makes its validators at the first check of a process."""

from zeroengine.config import load

load({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
