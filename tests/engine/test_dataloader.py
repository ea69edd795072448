"""The data loader: every sample once an epoch, and a position that survives a checkpoint on any number of ranks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import zeroengine
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine
from zeroengine.engine.dataloader import ResumableLoader


class Numbers(Dataset[int]):
    def __init__(self, numel: int) -> None:
        self.numel = numel

    def __len__(self) -> int:
        return self.numel

    def __getitem__(self, index: int) -> int:
        return index


def loaders(numel: int, world_size: int, batch_size: int, **more: Any) -> list[ResumableLoader]:
    defaults = {"shuffle": True, "drop_last": True, "repeat_samples": None}
    chosen = {name: more.pop(name, default) for name, default in defaults.items()}
    settings = {**chosen, "seed": 3, "options": more}
    return [ResumableLoader(Numbers(numel), rank, world_size, batch_size, **settings) for rank in range(world_size)]


def taken(loader: Any, batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(loader):
        found += batch.tolist()
        if number + 1 == batches:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_every_sample_once_in_another_order_each_time(workers: int) -> None:
    ranks = loaders(50, 2, 5, num_workers=workers)
    epochs = [sorted(x for loader in ranks for x in taken(loader)) for _ in range(2)]
    assert epochs == [list(range(50))] * 2
    again = loaders(50, 2, 5)
    first, second = taken(again[0]), taken(again[0])
    assert sorted(first) != first and first != second
    assert first == taken(loaders(50, 2, 5)[0]), "the same seed, the same order"
    assert taken(loaders(50, 2, 5, shuffle=False)[1])[:3] == [1, 3, 5]
    assert [len(loader) for loader in loaders(57, 2, 5)] == [5, 5], "as many batches on every rank"


@pytest.mark.parametrize(("numel", "sizes"), [(57, [5] * 5 + [4]), (51, [5] * 5 + [1]), (50, [5] * 5), (1, [1])])
def test_the_last_small_batch_is_kept_where_asked_and_has_one_size_on_all_ranks(numel: int, sizes: list[int]) -> None:
    ranks = loaders(numel, 2, 5, drop_last=False)
    epochs = [[[batch.tolist() for batch in loader] for loader in ranks] for _ in range(2)]
    assert all([len(batch) for batch in own] == sizes for epoch in epochs for own in epoch)
    assert [len(loader) for loader in ranks] == [len(sizes)] * 2
    seen = sorted(x for own in epochs[1] for batch in own for x in batch)
    assert set(seen) == set(range(numel)) and len(seen) == numel + numel % 2
    # A run that goes on with another number of ranks takes the rest.
    first = [taken(loader, 1) for loader in ranks]
    (alone,) = loaders(numel, 1, 5, drop_last=False)
    alone.load_state_dict(ranks[0].state_dict())
    assert set(taken(alone)) == set(range(numel)).difference(*first)


@pytest.mark.parametrize("numel", [7, 8, 15, 23, 24])
@pytest.mark.parametrize("drop_last", [True, False])
def test_samples_that_are_repeated_make_the_batches_of_torchs_sampler(numel: int, drop_last: bool) -> None:
    ranks = loaders(numel, 2, 4, shuffle=False, drop_last=drop_last, repeat_samples=True)
    for rank, loader in enumerate(ranks):
        sampler = DistributedSampler(Numbers(numel), 2, rank, shuffle=False)
        batches = [own.tolist() for own in DataLoader(Numbers(numel), 4, sampler=sampler, drop_last=drop_last)]
        assert [own.tolist() for own in loader] == batches and len(loader) == len(batches)


def test_set_epoch_begins_another_epoch_and_leaves_the_present_one_where_it_is() -> None:
    loader, other = loaders(50, 2, 5)[0], loaders(50, 2, 5)[0]
    epochs = [taken(other), taken(other)]
    loader.sampler.set_epoch(1)
    assert taken(loader, 2) == epochs[1][:10]
    resumed = loaders(50, 2, 5)[0]
    resumed.load_state_dict(loader.state_dict())
    resumed.sampler.set_epoch(1)
    assert taken(resumed) == epochs[1][10:]
    resumed.sampler.set_epoch(0)
    assert taken(resumed) == epochs[0] and (resumed.dataset.numel, resumed.batch_size) == (50, 5)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_no_sample_is_lost_or_repeated_by_a_resume_on_another_number_of_ranks(before: int, after: int) -> None:
    numel, batch = 120, 2
    seen: list[int] = []
    for loader in (ranks := loaders(numel, before, batch)):
        assert len(taken(loader)) == numel // before  # an epoch goes by
        seen += taken(loader, 5)
    state = ranks[0].state_dict()
    assert all(loader.state_dict() == state for loader in ranks)
    for loader in loaders(numel, after, batch):
        loader.load_state_dict(state)
        assert loader.epoch == 1
        seen += taken(loader)
        assert loader.epoch == 2
    left = (numel - 5 * batch * before) // (batch * after) * batch * after
    assert len(seen) == len(set(seen)) == 5 * batch * before + left
    assert left + 5 * batch * before > numel - batch * after, "but for what fills no batch"


def test_an_epoch_in_progress_keeps_the_samples_of_one_rank_only() -> None:
    loader = ResumableLoader(Numbers(200_000), 0, 100, 4, shuffle=True, seed=0, options={})
    tracemalloc.start()
    try:
        batches = iter(loader)
        next(batches)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 8 * 200_000, "less than a list of all samples"


class PerRank:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def save(folder: Path) -> list[int]:
    engine = make_engine(Task(), 2)
    loader, own = engine.dataloader(Numbers(40)), PerRank()
    engine.register_stateful("own", own)
    own.at = 10 + engine.rank
    seen = taken(loader, 3)
    engine.save_checkpoint(folder)
    return seen


def resume(folder: Path, registered_first: bool) -> tuple[list[int], int]:
    engine = make_engine(Task(), 1)
    own = PerRank()
    if registered_first:
        loader = engine.dataloader(Numbers(40))
        engine.register_stateful("own", own)
    engine.load_checkpoint(folder)
    if not registered_first:
        loader = engine.dataloader(Numbers(40))
        engine.register_stateful("own", own)
    return taken(loader), own.at


@pytest.mark.parametrize("registered_first", [True, False])
def test_the_position_is_part_of_a_checkpoint(registered_first: bool, tmp_path: Path) -> None:
    seen = [x for found in run_ranks(2, save, tmp_path) for x in found]
    same = run_ranks(2, resume, tmp_path, registered_first)
    assert sorted(seen + [x for found, _ in same for x in found]) == list(range(40))
    assert [at for _, at in same] == [10, 11]
    (other,) = run_ranks(1, resume, tmp_path, registered_first)
    assert sorted(seen + other[0]) == list(range(40))
    assert other[1] == 0, "what each rank has of its own says nothing to another number of ranks"
    for later, _ in run_ranks(3, resume, tmp_path, registered_first):
        assert later and not set(later) & set(seen), "a rank that there was not before goes on with the others"


def through_torchdata(folder: Path, resumes: bool) -> list[int]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    engine = make_engine(Task(), 2)
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(40), engine.world_size, engine.rank, seed=3)
    loader = StatefulDataLoader(Numbers(40), batch_size=2, sampler=sampler)
    engine.register_stateful("data", loader)
    if resumes:
        engine.load_checkpoint(folder)
        return taken(loader)
    seen = taken(loader, 3)
    engine.save_checkpoint(folder)
    return seen


def test_torchdata_s_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    before = run_ranks(2, through_torchdata, tmp_path, False)
    after = run_ranks(2, through_torchdata, tmp_path, True)
    assert all(len(seen) == 6 for seen in before), "in the middle of an epoch"
    assert sorted(x for seen in before + after for x in seen) == list(range(40))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def wrong() -> None:
    engine = make_engine(Task(), 0)
    with pytest.raises(zeroengine.ZeroEngineError, match=r"Stream has none\. For a stream use torchdata"):
        engine.dataloader(Stream())
    with pytest.raises(zeroengine.ZeroEngineError, match="3 samples cannot fill one micro-batch of 2 on 2 ranks"):
        engine.dataloader(Numbers(3))
    with pytest.raises(zeroengine.ZeroEngineError, match="chooses sampler itself: write shuffle"):
        engine.dataloader(Numbers(30), sampler=range(30))
    with pytest.raises(zeroengine.ZeroEngineError, match=r"an object with state_dict\(\) and load_state_dict"):
        engine.register_stateful("y", 3)  # type: ignore[arg-type]
    engine.register_stateful("x", PerRank())
    with pytest.raises(zeroengine.ZeroEngineError, match="'x' is taken"):
        engine.register_stateful("x", PerRank())


def test_wrong_dataloader_arguments_are_refused() -> None:
    run_ranks(2, wrong)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layers(numbers.float()[:, None]).square().mean()


def losses_with_dropout(folder: Path, resumes: bool) -> list[float]:
    """Save after the third of ten batches and go on, or resume from there, and return the losses since then."""
    engine = make_engine(Task(factory=WithDropout), 2)
    loader = engine.dataloader(Numbers(40))
    if resumes:
        engine.load_checkpoint(folder)
    losses = []
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        if engine.global_steps > 3:
            losses.append(loss.item())
        elif engine.global_steps == 3:
            engine.save_checkpoint(folder)
    return losses


def test_dropout_goes_on_in_the_middle_of_an_epoch_as_without_the_interruption(tmp_path: Path) -> None:
    whole = run_ranks(2, losses_with_dropout, tmp_path, False)
    assert len(whole[0]) == 7
    assert run_ranks(2, losses_with_dropout, tmp_path, True) == whole


class Random(Numbers):
    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, ()).item())


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch() -> None:
    torch.manual_seed(0)
    ranks = [
        ResumableLoader(Random(8), rank, 2, 2, shuffle=True, seed=3, options={"num_workers": 1}) for rank in (0, 1)
    ]
    drawn = [number for loader in ranks for _ in range(2) for number in taken(loader)]
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("asked", [{}, {"pin_memory": False}, {"pin_memory": True}])
def test_batches_of_workers_for_a_gpu_are_page_locked_unless_the_loop_says_otherwise(
    device: str, workers: int, asked: dict[str, bool]
) -> None:
    engine = zeroengine.initialize(nn.Linear(2, 1), None, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    engine.device = torch.device(device)
    loader = engine.dataloader(Numbers(8), num_workers=workers, **asked)
    assert loader._loader.pin_memory == asked.get("pin_memory", device == "cuda" and workers > 0)
