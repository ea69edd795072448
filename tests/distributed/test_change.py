"""A change of the configuration in a running engine: the bits of a run that was started so, or nothing changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zeroengine
from tests.distributed.counter import Counter
from tests.distributed.imagined_hosts import imagine_hosts
from tests.distributed.models import TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.test_muon import Mixed, muon
from tests.distributed.training import Task, Trained, adamw, assert_same_bits, make_engine, start
from tests.emulated import wanted
from zeroengine.errors import DivergenceError, ReleasedParameterError, ZeroEngineError


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def degrees(optimizer: int, gradients: int, parameters: int) -> dict[str, Any]:
    return zero(
        3 if parameters > 1 else 2, degrees={"optimizer": optimizer, "gradients": gradients, "parameters": parameters}
    )


def places(folder: Path) -> list[dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return [
        *(zero(stage) for stage in range(4)),
        zero(3, offload_optimizer=nvme),
        zero(3, offload_optimizer=nvme, offload_param=nvme),
    ]


def every_pair(count: int) -> list[int]:
    """A walk over `count` settings that goes from each to each other one once: it begins with 0."""
    left = {first: [second for second in range(count) if second != first] for first in range(count)}
    # Hierholzer's way to a circuit.
    stack, walk = [0], list[int]()
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    assert len(walk) == count * (count - 1) + 1
    return walk[::-1]


def steps(engine: zeroengine.Engine, numbers: range, micro_steps: int = 1) -> Trained:
    losses, norms = [], []
    for number in range(numbers.start * micro_steps, numbers.stop * micro_steps):
        loss = engine(*batch(number, engine.rank))
        engine.backward(loss)
        if engine.step():
            norms.append(engine.grad_norm or 0.0)
        losses.append(loss.item())
    return Trained(losses, norms, {})


def both(first: Trained, second: Trained, engine: zeroengine.Engine) -> Trained:
    return Trained(first.losses + second.losses, first.norms + second.norms, engine.full_state_dict())


def walk(task: Task, more: dict[str, Any], settings: Sequence[dict[str, Any]]) -> list[Trained]:
    """Train with the first settings, and with the settings of a walk, one after another."""
    start()
    engine = make_engine(task, 0, **{**more, **settings[0]})
    whole = steps(engine, range(len(settings)))
    found = [both(whole, Trained([], [], {}), engine)]
    engine.close()
    engine = make_engine(task, 0, **{**more, **settings[0]})
    parts = [steps(engine, range(1))]
    for number, change in enumerate(settings[1:], 1):
        engine.change(change)
        parts.append(steps(engine, range(number, number + 1)))
    losses, norms = (list(itertools.chain(*(getattr(part, name) for part in parts))) for name in ("losses", "norms"))
    found.append(Trained(losses, norms, engine.full_state_dict()))
    engine.close()
    return found


def check_walk(num_ranks: int, task: Task, more: dict[str, Any], settings: Sequence[dict[str, Any]]) -> None:
    for whole, changed in run_ranks(num_ranks, walk, task, more, settings):
        assert len(whole.losses) == len(settings)
        assert_same_bits(whole, changed)


def test_thirty_pairs_of_stages_and_places_have_the_bits_of_a_run_without_a_change(tmp_path: Path) -> None:
    settings = places(tmp_path)
    check_walk(2, Task(), {}, [settings[index] for index in every_pair(len(settings))])


def test_one_process_moves_its_states_to_a_disk_and_back(tmp_path: Path) -> None:
    settings = places(tmp_path)
    check_walk(1, Task(), {}, [settings[index] for index in (3, 5, 0, 4, 3)])


@pytest.mark.slow  # the arithmetic of degrees is that of stages
def test_pairs_of_degrees_on_four_ranks_have_the_bits_of_a_run_without_a_change() -> None:
    settings = [zero(3), degrees(4, 2, 1), degrees(2, 2, 2), degrees(4, 4, 2), zero(1), zero(0)]
    check_walk(4, Task(), {}, [settings[index] for index in every_pair(len(settings))])


class Averaging(torch.optim.Optimizer):
    """Somebody's own, with a state of each element and a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param] or self.state[param].update(count=0, mean=torch.zeros_like(param))
                state = self.state[param]
                state["count"] += 1
                state["mean"].mul_(0.5).add_(param.grad.mul(0.5))
                param.sub_(state["mean"].mul(group["lr"] * 2.0 ** -state["count"]))


def averaging(model: nn.Module) -> torch.optim.Optimizer:
    return Averaging(model.parameters())


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)


class PartlyFrozen(TinyLM):
    """A block that does not train, and a norm of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


KINDS: dict[str, tuple[Task, dict[str, Any]]] = {
    "moving averages": (Task(), {"ema": {"decay": 0.9}}),
    "bf16": (Task(), {"bf16": {"enabled": True}}),
    "fp16 with overflows": (Task(), {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}),
    "8 bits": (Task(), {"optimizer_state_dtype": "int8"}),
    "of elements": (Task(optimizer=averaging), {}),
    "of whole parameters": (Task(optimizer=adafactor), {}),
    "begun before the first step": (Task(optimizer=adagrad), {}),
    "Muon and AdamW": (Task(factory=Mixed, optimizer=muon), {}),
    "partly frozen": (Task(factory=PartlyFrozen), {"bf16": {"enabled": True}}),
    "skipped steps": (Task(), {"skip_steps": {"sigma": 1.0, "window": 8, "at_most": 50}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_moves(kind: str) -> None:
    task, more = KINDS[kind]
    check_walk(2, task, more, [zero(stage) for stage in (3, 0, 3, 1, 2)])


# -- the precision of moments ----------------------------------------------------------------------


class Wide(nn.Module):
    """Matrices that are large enough for moments of 8 bits, beside small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(64, 72), nn.Linear(72, 64)
        self.blocks = nn.ModuleList(nn.Linear(72, 72) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def change_precision(folder: Path) -> list[tuple[Any, Trained, Trained, Any, Any]]:
    start()
    task, found = Task(factory=Wide), []
    for number, (before, after) in enumerate(itertools.permutations(("fp32", "bf16", "int8"), 2)):
        earlier = {"optimizer_state_dtype": before, **zero(3 if number % 2 else 0)}
        later = {"optimizer_state_dtype": after, **zero(0 if number % 3 else 3)}
        engine = make_engine(task, 0, **earlier)
        steps(engine, range(2))
        engine.save_checkpoint(folder, f"{before}-{after}")
        engine.change(later)
        changed, digests = both(steps(engine, range(2, 4)), Trained([], [], {}), engine), engine.state_digests()
        engine.close()
        engine = make_engine(task, 0, **later)
        engine.load_checkpoint(folder, f"{before}-{after}")
        loaded = both(steps(engine, range(2, 4)), Trained([], [], {}), engine)
        found.append(((before, after), changed, loaded, digests, engine.state_digests()))
        engine.close()
    return found


def test_a_change_of_the_moments_precision_has_the_bits_of_a_checkpoint_that_loads_so(tmp_path: Path) -> None:
    for pair, changed, loaded, digests, digests_loaded in run_ranks(2, change_precision, tmp_path)[0]:
        assert_same_bits(changed, loaded, pair)
        assert digests == digests_loaded, pair


# -- batches ---------------------------------------------------------------------------------------


def change_batch() -> list[Any]:
    start()
    engine = make_engine(Task(), 1, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1)
    first = steps(engine, range(1))
    engine.change({"train_micro_batch_size_per_gpu": 2, **zero(3)})
    sizes = [engine.config.train_batch_size, engine.config.gradient_accumulation_steps]
    changed = both(first, steps(engine, range(1, 3), 2), engine)
    engine.change({"gradient_accumulation_steps": "manual"})
    sizes.append(engine.config.gradient_accumulation_steps)
    engine.close()
    engine = make_engine(Task(), 3, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1)
    first = steps(engine, range(1))
    engine.set_gradient_accumulation_steps(2, 2)
    expected = both(first, steps(engine, range(1, 3), 2), engine)
    engine.close()
    return [sizes, changed, expected]


def test_a_smaller_micro_batch_accumulates_to_the_same_batch() -> None:
    for sizes, changed, expected in run_ranks(2, change_batch):
        assert sizes == [8, 2, "manual"]
        assert_same_bits(changed, expected)


# -- what the user holds ---------------------------------------------------------------------------


def keep_objects(folder: Path) -> None:
    rank = start()
    model = build(TinyLM)
    optimizer = adamw(model)
    schedule = StepLR(optimizer, 2, 0.5)
    engine = zeroengine.initialize(model, optimizer, config(3, gradient_clipping=1.0), lr_scheduler=schedule)
    ended: list[str] = []
    engine.call_at_end(ended.append, "ended")
    parameters, outer, counted = list(model.parameters()), engine.optimizer, Counter()
    engine.register_stateful("counted", counted)
    data = engine.dataloader([batch(number, rank, 1) for number in range(32)], collate_fn=lambda rows: rows[0])
    loader = iter(data)
    for _ in range(3):
        engine.backward(engine(*next(loader)))
        engine.step()
    engine.gradient_clipping = 0.5
    counted.count = 3
    # What is written into the model between steps is the model's.
    with zeroengine.gathered(model.head if hasattr(model, "head") else model), torch.no_grad():
        parameters[0].add_(1.0)
    written = engine.full_state_dict()
    engine.change(zero(1))
    assert (engine.optimizer, engine.base_optimizer, engine.lr_scheduler) == (outer, optimizer, schedule)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert (engine.global_steps, engine.micro_steps, engine.gradient_clipping) == (3, 3, 0.5)
    assert zeroengine.engine_of(model) is engine and engine.config.zero_optimization.stage == 1
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, written[name]), name
    assert optimizer.param_groups[0]["lr"] == 3e-3 / 2
    engine.backward(engine(*next(loader)))
    optimizer.step()
    assert engine.global_steps == 4 and optimizer.param_groups[0]["lr"] == 3e-3 / 4
    engine.save_checkpoint(folder)
    expected = engine.full_state_dict()
    engine.change(zero(3))
    for _ in range(2):
        engine.backward(engine(*next(loader)))
        optimizer.step()
    counted.count = 9
    engine.load_checkpoint(folder)
    assert counted.count == 3 and engine.global_steps == 4
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert not ended
    engine.close()
    assert ended == ["ended"]
    # The model and the optimizer are ordinary again.
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    model(*batch(0, 0)).backward()
    optimizer.step()


def test_the_model_the_optimizer_the_schedule_and_loaders_stay(tmp_path: Path) -> None:
    run_ranks(2, keep_objects, tmp_path)


def hold_memory(rounds: int) -> list[int]:
    start()

    def held() -> int:
        if wanted() != "cpu":
            return torch.cuda.memory_allocated()
        # Without the pages of libraries, of which each process counts more when another one ends.
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    engine = make_engine(Task(factory=Large), 3)
    sizes = []
    for number in range(rounds):
        engine.change(zero(1 if number % 2 == 0 else 3))
        engine.backward(engine(torch.ones(1, 512)))
        engine.step()
        if number % 2:
            sizes.append(held())
    engine.close()
    return sizes


def test_many_changes_hold_no_more_memory_than_one() -> None:
    for sizes in run_ranks(2, hold_memory, 12):
        # The model has 16 MiB of parameters. One partitioning that stays would be 8 MiB or more.
        assert sizes[-1] - sizes[0] < 4 << 20, sizes


# -- what is refused -------------------------------------------------------------------------------


def refused(act: Callable[[], Any], kind: type[Exception] = ZeroEngineError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def refuse(folder: Path) -> tuple[dict[str, str], Trained]:
    rank = start()
    engine, messages = make_engine(Task(), 3, gradient_accumulation_steps=1), {}
    first = steps(engine, range(1))

    def keep(name: str, change: Any) -> None:
        messages[name] = refused(lambda: engine.change(change))

    keep("a key that stays", {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}})
    keep("precision", {"bf16": {"enabled": True}})
    keep("a typing error", {"zero_optimisation": {"stage": 1}})
    keep("a wrong value", {"zero_optimization": {"stage": 7}})
    keep("one rank's folder", zero(3, offload_optimizer={"device": "nvme", "nvme_path": str(folder / f"{rank}" / "x")}))
    keep("batches", {"train_batch_size": 7})
    with zeroengine.gathered(engine.module):
        keep("gathered", zero(1))
    messages["different"] = refused(lambda: engine.change(zero(1 + rank)), DivergenceError)
    hook = engine.module.blocks[0].register_forward_hook(lambda *_: keep("a forward", zero(1)))
    engine(*batch(0, 0))
    hook.remove()
    engine.backward(engine(*batch(1, rank)))
    keep("within a step", zero(1))
    engine.zero_grad()
    # Nothing has changed.
    engine.step() if engine.backwards_in_step else None
    second = both(first, steps(engine, range(1, 3)), engine)
    engine.close()
    messages["ended"] = refused(lambda: engine.change(zero(1)))
    return messages, second


def test_a_refused_change_says_what_to_write_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").write_text("no folder")
    expected = {
        "a key that stays": "a running engine keeps optimizer. What can change: zero_optimization, train_batch_size",
        "precision": "a running engine keeps bf16",
        "a typing error": "zero_optimization",
        "a wrong value": "zero_optimization.stage",
        "one rank's folder": "nvme_path",
        "batches": "train_batch_size",
        "gathered": "change() inside `with zeroengine.gathered(...)`",
        "different": "the ranks were started differently",
        "a forward": "change() inside of a forward",
        "within a step": "change() between the micro-steps of a step",
        "ended": "this engine has ended",
    }
    for messages, trained in run_ranks(2, refuse, tmp_path):
        assert messages.keys() == expected.keys()
        for name, text in expected.items():
            assert text in messages[name], (name, messages[name])
        assert len(trained.losses) == 3


def lack_room() -> tuple[str, list[float]]:
    start()
    engine = make_engine(Task(), 3)
    first = steps(engine, range(1))
    with pytest.MonkeyPatch.context() as patch:
        from zeroengine.engine import change
        from zeroengine.memory.free_memory import FreeMemory

        free = FreeMemory(device=0, host=0, disk=0, ranks_per_host=2, scarcest_rank=1)
        patch.setattr(change, "measure_free_memory", lambda *_: free)
        message = refused(lambda: engine.change(zero(0)))
        # What the change itself frees counts.
        engine.change(zero(3))
    losses = (first.losses, *(steps(engine, range(number, number + 1)).losses for number in (1, 2)))
    engine.close()
    return message, list(itertools.chain(*losses))


def test_a_change_that_does_not_fit_is_refused_with_numbers() -> None:
    for message, losses in run_ranks(2, lack_room):
        assert "the model does not fit: stage 0" in message and "are free" in message
        assert len(losses) == 3


def fail_midway(folder: Path) -> tuple[str, str, str]:
    start()
    engine = make_engine(Task(), 3)
    steps(engine, range(2))
    engine.save_checkpoint(folder)
    model, expected = engine.module, engine.full_state_dict()
    with pytest.MonkeyPatch.context() as patch:
        from zeroengine.optim.state_moves import StateMoves

        moved = StateMoves.move

        def fail(self: StateMoves, unit: Any, store: Any) -> None:
            if unit.number == 2:
                raise OSError(28, "No space left on device")
            moved(self, unit, store)

        patch.setattr(StateMoves, "move", fail)
        with pytest.raises(OSError) as caught:
            engine.change(zero(1))
    notes = "".join(caught.value.__notes__)
    uses = refused(lambda: engine.step())
    # The units before keep their values, and this is one after.
    lost = refused(lambda: model.blocks[2].up.weight.sum(), ReleasedParameterError)
    engine = make_engine(Task(), 1)
    engine.load_checkpoint(folder)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name
    engine.close()
    return notes, uses, lost


def test_a_failure_while_states_move_ends_the_engine_and_leaves_the_checkpoint(tmp_path: Path) -> None:
    for notes, uses, lost in run_ranks(2, fail_midway, tmp_path):
        assert "failed while states moved, and the engine has ended: load a checkpoint" in notes
        assert "engine.change() failed while states moved" in uses
        assert "its values are not here" in lost


def one_rank_fails() -> tuple[str, float]:
    rank = start()
    engine = make_engine(Task(), 3)
    steps(engine, range(1))
    with pytest.MonkeyPatch.context() as patch:
        from zeroengine.optim.state_moves import StateMoves

        moved = StateMoves.move

        def fail(self: StateMoves, unit: Any, store: Any) -> None:
            if rank == 1 and unit.number == 1:
                raise OSError(28, "No space left on device")
            moved(self, unit, store)

        patch.setattr(StateMoves, "move", fail)
        began = time.monotonic()
        with pytest.raises((OSError, DivergenceError)) as caught:
            engine.change(zero(1))
    seconds = time.monotonic() - began
    # The processes go on with a new engine.
    engine = make_engine(Task(), 1)
    steps(engine, range(1))
    engine.close()
    return str(caught.value), seconds


@pytest.mark.skipif(wanted() != "cpu", reason="ranks that share no memory notice that the connection ends")
def test_where_one_rank_fails_the_others_do_not_wait_for_the_timeout() -> None:
    for message, seconds in run_ranks(2, one_rank_fails):
        assert "No space left on device" in message
        assert seconds < 20


# -- the state of the moment -----------------------------------------------------------------------


class WithBuffers(TinyLM):
    """Counts in a buffer what each rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen += ids.sum()
        return super().forward(ids, labels)


def moment(kind: str) -> tuple[Any, Any]:
    """Return what a run has at the end that changes, and one that does not."""
    start()
    found = []
    for changes in (True, False):
        engine = make_engine(Task(factory=WithBuffers), 3, **({"bf16": {"enabled": True}} if kind == "frozen" else {}))
        steps(engine, range(2))
        block = engine.module.blocks[1]
        if kind == "frozen":
            block.requires_grad_(False)
            steps(engine, range(2, 3))
        if kind == "clipping":
            engine.gradient_clipping = 0.25
        with torch.inference_mode(kind == "inference mode"):
            if changes:
                engine.change({"gradient_clipping": 1.0, **zero(1)} if kind == "clipping" else zero(1))
        if kind == "frozen":
            assert not any(param.requires_grad for param in block.parameters())
            block.requires_grad_(True)
        if kind == "clipping" and not changes:
            engine.gradient_clipping = 1.0
        trained = both(steps(engine, range(3, 5)), Trained([], [], {}), engine)
        found.append((trained, engine.module.seen.clone(), engine.gradient_clipping))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["buffers", "frozen", "clipping", "inference mode"])
def test_what_a_run_has_at_the_moment_stays(kind: str) -> None:
    ranks = run_ranks(2, moment, kind)
    for (trained, seen, limit), (expected, expected_seen, expected_limit) in ranks:
        assert_same_bits(trained, expected)
        assert torch.equal(seen, expected_seen) and limit == expected_limit
    assert not torch.equal(ranks[0][0][1], ranks[1][0][1]), "each rank has a buffer of its own"


def override() -> int:
    start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROENGINE_OVERRIDES", '["zero_optimization.stage=3"]')
        engine = make_engine(Task(), 1)
        assert engine.config.zero_optimization.stage == 3
        engine.change(zero(2))
    stage = int(engine.config.zero_optimization.stage)
    engine.close()
    return stage


def test_overrides_of_the_launcher_do_not_undo_a_change() -> None:
    assert run_ranks(1, override) == [2]


def declare() -> list[int]:
    start()
    engine = make_engine(Task(), 1, gradient_accumulation_steps="manual")
    steps(engine, range(1))
    engine.set_gradient_accumulation_boundary(False)
    engine.change(zero(3))
    counts = []
    for number in range(2):
        engine.backward(engine(*batch(number, engine.rank)))
        engine.step()
        counts.append(engine.global_steps)
        engine.set_gradient_accumulation_boundary(True)
    engine.close()
    return counts


def test_a_declared_boundary_stays() -> None:
    assert run_ranks(2, declare) == [[1, 2], [1, 2]]


def use_what_is_old() -> dict[str, str]:
    start()
    engine, messages = make_engine(Task(), 3), {}
    steps(engine, range(1))
    loss = engine(*batch(1, engine.rank))
    engine.change(zero(3))
    messages["graph"] = refused(lambda: engine.backward(loss))
    engine.zero_grad()
    param = next(engine.module.parameters())
    param.grad = torch.ones(param.shape)
    messages["assigned"] = refused(lambda: engine.change(zero(1)))
    # It counts for the step that comes.
    assert engine.step()
    engine.close()
    return messages


def test_a_graph_from_before_and_an_assigned_gradient_are_refused() -> None:
    for messages in run_ranks(2, use_what_is_old):
        assert "a forward from before engine.change()" in messages["graph"]
        assert "after gradients were assigned" in messages["assigned"]


def over_hosts() -> list[str]:
    start()
    imagine_hosts(3)
    found: list[str] = []
    for before, after in ((degrees(2, 2, 2), degrees(3, 3, 3)), (degrees(2, 2, 2), zero(1)), (zero(3), zero(0))):
        engine = make_engine(Task(), 0, **before)
        steps(engine, range(2))
        expected = engine.full_state_dict()
        engine.change(after)
        present = engine.full_state_dict()
        found += [name for name, value in present.items() if not torch.equal(value, expected[name])]
        steps(engine, range(2, 3))
        engine.close()
    return found


@pytest.mark.slow  # six ranks
def test_degrees_that_straddle_hosts_move_by_the_channels_from_before() -> None:
    assert run_ranks(6, over_hosts) == [[]] * 6
