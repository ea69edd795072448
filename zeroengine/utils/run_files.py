"""The names of the files of a run folder, and the format of the digests in it, for writers and readers."""

from __future__ import annotations

RUN, STEPS, EVENTS, DIGESTS = "run.json", "steps.jsonl", "events.jsonl", "digests.jsonl"
# The number of the format of `digests.jsonl`, and of digests themselves. Others do not compare.
DIGEST_FORMAT = 1
# What each rank was given in a step, by the names of its digests beside those of states, in words.
GIVEN = {"inputs": "inputs of the model", "generators": "states of torch's random generators"}
