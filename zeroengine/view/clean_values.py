"""Take from run.json and events.jsonl what has the type that readers expect: a damaged file must not stop them."""

from __future__ import annotations

from typing import Any

# No count, no time and no number of bytes is larger. Sums of larger numbers might overflow.
MAX_NUMBER = 2**100
NUMBER = (int, float)
# Keys of run.json, and their types. Other keys are kept as they are.
FACT_TYPES: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "zeroengine": str,
    "started": NUMBER,
    "world_size": int,
    "hosts": list,
    "device": str,
    "units": list,
    "model": dict,
    "config": dict,
    "versions": dict,
    "peak_flops": NUMBER,
    "steps_planned": int,
}
MODEL_TYPES: dict[str, type | tuple[type, ...]] = {"class": str, "parameters": NUMBER, "trainable": NUMBER}
EVENT_TYPES: dict[str, type | tuple[type, ...]] = {"time": NUMBER, "step": int, "kind": str, "text": str}


def clean_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the content of run.json without values of a wrong type."""
    facts = typed(raw, FACT_TYPES)
    for name in ("hosts", "units"):
        if name in facts:
            facts[name] = list(map(str, facts[name]))
    if "model" in facts:
        facts["model"] = typed(facts["model"], MODEL_TYPES)
    return facts


def clean_event(raw: dict[str, Any]) -> dict[str, Any]:
    """Return an event without values of a wrong type. It has a kind and a text."""
    return {"kind": "unknown", "text": ""} | typed(raw, EVENT_TYPES)


def typed(raw: dict[str, Any], types: dict[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the finite values whose keys have no type, or that are of their key's type."""
    values = {key: finite(value) for key, value in raw.items()}
    return {
        key: value
        for key, value in values.items()
        if key not in types or (isinstance(value, types[key]) and not isinstance(value, bool))
    }


def finite(value: Any) -> Any:
    """Return a tree of JSON types in which None stands for numbers that are not finite or absurdly large."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, NUMBER) and not abs(value) < MAX_NUMBER else value
