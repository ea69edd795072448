"""What a schedule does for each style of model, event by event: the manual of the order.

    python -m tests.schedule.transcripts        # writes tests/schedule/transcripts/*.txt anew

Each file is one rank's: an event a line, beneath it the actions that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.schedule.simulation import ALONE, Block, Choice, Rank, call
from tests.schedule.test_histories import facts_of, play
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import UnitFacts

FOLDER = Path(__file__).parent / "transcripts"
STEP = ("forward", "backward", "step")


class Transcript(NamedTuple):
    """What one rank does.

    Attributes:
        about: What the file shows.
        blocks: The model.
        names: Its units.
        script: See ``test_histories.SCRIPTS``.
        choices: What the data of the rank decides in each forward.
        limits: How far to gather ahead.
        frozen: Units that are not trained.
        first: The operation from which on the file shows what happens.
    """

    about: str
    blocks: Sequence[Block]
    names: str
    script: Sequence[str] = STEP
    choices: Sequence[Choice] = (Choice(),)
    limits: PrefetchLimits = ALONE
    frozen: str = ""
    first: int = 0


EXPERTS = (call(0), Block("list", (1,), (call(2), call(3))))
ALL_AHEAD = PrefetchLimits(9, 9)
TRANSCRIPTS = {
    "dense": Transcript(
        "Three layers, one after another, at stage 3.", [call(0), call(1), call(2)], "first second third"
    ),
    "prefetched": Transcript(
        "The second step of three layers, which gathers ahead what followed in the first one.",
        [call(0), call(1), call(2)],
        "first second third",
        (*STEP, *STEP),
        (Choice(), Choice()),
        ALL_AHEAD,
        first=3,
    ),
    "tied": Transcript(
        "An embedding whose weight is also the head's: its backward reads no values, so the head's is followed by the "
        "release, and it is reduced last.",
        [Block("lookup", (0,)), call(1), call(0)],
        "embedding layer",
    ),
    "experts_called": Transcript(
        "A router and two experts, of which this rank calls the second one. See experts_skipped.txt.",
        EXPERTS,
        "embedding router expert0 expert1",
        choices=[Choice(called=((1,),))],
    ),
    "experts_skipped": Transcript(
        "A router and two experts, of which this rank calls none. Gathers and reduces are those of experts_called.txt.",
        EXPERTS,
        "embedding router expert0 expert1",
        choices=[Choice(called=((),))],
    ),
    "head_left_out": Transcript(
        "Two heads, of which the loss of this rank leaves out the last one: its backward passes over it.",
        [call(0), Block("head", (1,)), Block("head", (2,))],
        "body head0 head1",
        choices=[Choice(heads=(True, False))],
    ),
    "reentrant_checkpoint": Transcript(
        "A reentrant checkpoint around each of two layers runs it again in backward, with a backward of its own.",
        [Block("reentrant", inner=(call(0),)), Block("reentrant", inner=(call(1),))],
        "first second",
    ),
    "checkpointed_experts": Transcript(
        "A checkpoint that is not reentrant, around experts: the backward keeps all of them while it runs them again.",
        [call(0), Block("checkpoint", inner=EXPERTS[1:])],
        "embedding router expert0 expert1",
        choices=[Choice(called=((0,),))],
    ),
    "frozen": Transcript(
        "A frozen layer is gathered, and never reduced.", [call(0), call(1)], "frozen trained", frozen="frozen"
    ),
    "no_sync": Transcript(
        "Two micro-steps, the first one in no_sync: its gradients wait for the reduces of the second one.",
        [call(0), call(1)],
        "first second",
        ("forward", "backward in no_sync", "forward", "backward", "step"),
        (Choice(), Choice()),
    ),
    "plain_backward": Transcript(
        "A plain loss.backward(), after an evaluation between the forward and it.",
        [call(0), call(1)],
        "first second",
        ("forward", "evaluation", "plain backward", "step"),
        (Choice(), Choice()),
    ),
    "forwards_alone": Transcript(
        "Two forwards of frozen layers, one unit ahead: the first follows the order of registration, and the last "
        "layer is followed by the first one of the next forward.",
        [call(0), call(1), call(2)],
        "first second third",
        ("evaluation", "evaluation"),
        (Choice(), Choice()),
        PrefetchLimits(1, 9),
        frozen="first second third",
    ),
    "used_elsewhere": Transcript(
        "A parameter of the last layer that is also used before, outside of its module.",
        [call(0), Block("use", (1,)), call(1)],
        "first last",
    ),
}


def text_of(its: Transcript) -> str:
    """What the file of a transcript has."""
    names = its.names.split()
    facts = facts_of(its.blocks, [UnitFacts(name, 1, is_trained=name not in its.frozen.split()) for name in names])
    rank = Rank(its.blocks, facts, its.limits)
    choices = list(its.choices)
    num_before = sum(operation in ("forward", "evaluation") for operation in its.script[: its.first])
    play(rank, its.script[: its.first], choices[:num_before], facts)
    rank.transcript = []
    play(rank, its.script[its.first :], choices[num_before:], facts)
    return "\n".join([f"# {its.about}", *rank.transcript, ""])


if __name__ == "__main__":
    for name, transcript in TRANSCRIPTS.items():
        (FOLDER / f"{name}.txt").write_text(text_of(transcript))
