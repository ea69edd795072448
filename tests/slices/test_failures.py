"""When a rank of a split model is killed, the others end soon, with errors that name ranks and units."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from tests.distributed.models import batch
from tests.distributed.ranks import run_ranks
from tests.emulated import cpu_alone
from tests.slices import test_experts as experts
from tests.slices.split_models import make_split_engine, small_lm
from zeroengine.errors import DivergenceError

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

LONG = 300.0  # seconds: comm.timeout_seconds
SOON = 30.0  # seconds: well within LONG, with room for a busy machine


def train_until_death(kind: str, stage: int, moment: str, victim: int, transport: str) -> tuple[str, str, float]:
    """On one rank: the class of the error that ends the training, its message, and after how many seconds it came."""
    comm = {"transport": transport, "timeout_seconds": LONG}
    if kind == "experts":
        engine = experts.make_engine(2, stage, comm=comm)
        data, share, layer = experts.batch, engine.rank, engine.module.blocks[1].experts
    else:
        engine = make_split_engine(2, stage, small_lm, {"comm": comm})
        data, share, layer = batch, engine.sample_group, engine.module.blocks[1].up
    began = time.monotonic()

    def die(*_: Any) -> None:
        if engine.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(8):
            if step == 2 and moment == "forward":
                layer.register_forward_pre_hook(die)
            if step == 2 and moment == "backward":
                next(layer.parameters()).register_hook(die)
            loss = engine(*data(step, share))
            engine.backward(loss)
            if step == 2 and moment == "step":
                die()
            engine.step()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "no error", 0.0


DEATHS = [
    pytest.param("layers", 3, "forward", 1, "shm", id="layers-forward"),
    pytest.param("layers", 2, "backward", 3, "gloo", id="layers-backward", marks=pytest.mark.slow),
    pytest.param("layers", 0, "step", 2, "shm", id="layers-step", marks=pytest.mark.slow),
    pytest.param("experts", 3, "forward", 1, "shm", id="experts-forward", marks=pytest.mark.slow),
    pytest.param("experts", 3, "backward", 2, "shm", id="experts-backward"),
    pytest.param("experts", 1, "step", 3, "gloo", id="experts-step", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "stage", "moment", "victim", "transport"), DEATHS)
def test_when_a_rank_dies_the_others_end_soon_and_say_where_they_are(
    kind: str, stage: int, moment: str, victim: int, transport: str
) -> None:
    found = run_ranks(4, train_until_death, kind, stage, moment, victim, transport, missing=(victim,))
    for rank in {0, 1, 2, 3} - {victim}:
        name, message, seconds = found[rank]
        assert name == "DivergenceError" and seconds < SOON, message
        # A rank that waits in a collective of the layer knows where it is, and no more.
        if f"rank {rank} could not finish a collective of a layer that is split over ranks" not in message:
            assert re.search(r"blocks\.\d|rest|norm|compare inputs", message), message
            assert re.search(r"has ended|rank \d could not finish", message), message


def run_a_forward_too_many() -> str:
    """On one rank: the error that ends a training in which rank 1 has run a forward that the others have not."""
    engine = experts.make_engine(2, 0, comm={"timeout_seconds": 4.0})
    with pytest.raises(DivergenceError) as raised:
        for step in range(3):
            if step == 1 and engine.rank == 1:
                with torch.no_grad():
                    engine(*experts.batch(9, 1))
            engine.backward(engine(*experts.batch(step, engine.rank)))
            engine.step()
    return str(raised.value)


def test_ranks_that_wait_in_an_exchange_of_tokens_for_others_end_after_the_timeout_of_the_configuration() -> None:
    for message in run_ranks(4, run_a_forward_too_many, timeout=60):
        assert re.search(r"could not finish|rank \d has waited 4 s", message), message
