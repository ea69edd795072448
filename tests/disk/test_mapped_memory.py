"""Mapped tensors: they see what transfers do, and their pages can be evicted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zeroengine.disk.aligned_memory import aligned_zeros
from zeroengine.disk.mapped_memory import release_mapped
from zeroengine.disk.queue import DiskQueue
from zeroengine.disk.swap_files import SwapFolder
from zeroengine.errors import OffloadError


def memory_of_files() -> int:
    """This process's resident pages of files, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    raise AssertionError


@pytest.mark.parametrize("offset", [0, 4096, 4, 12_300])
def test_a_mapped_tensor_is_that_part_of_the_file(folder: SwapFolder, offset: int) -> None:
    file, values = folder.file("part", 1 << 16), torch.arange((1 << 16) // 4, dtype=torch.int32)
    with DiskQueue() as queue:
        queue.write(file, 0, values).wait_host()
        mapped = file.mapped(offset, 1000, torch.int32)
        assert torch.equal(mapped, values[offset // 4 :][:1000])
        mapped += 7
        into = torch.empty_like(values)
        queue.read(file, 0, into).wait_host()
    values[offset // 4 :][:1000] += 7
    assert torch.equal(into, values)


def test_mappings_and_transfers_see_each_other(folder: SwapFolder, backend: str) -> None:
    pages, page = 64, 1024  # of float32
    file, model = folder.file("both", pages * page * 4), torch.zeros(pages * page)
    mapped, chance = file.mapped(0, pages * page, torch.float32), random.Random(1)
    with DiskQueue(4, 8192, backend) as queue:
        for number in range(300):
            first, last = sorted(chance.sample(range(pages + 1), 2))
            part = slice(first * page, last * page)
            values = aligned_zeros((last - first) * page, torch.float32).fill_(number)
            match chance.randrange(5):
                case 0:
                    mapped[part] = values
                    model[part] = values
                case 1:
                    queue.write(file, part.start * 4, values).wait_host()
                    model[part] = values
                case 2:
                    queue.read(file, part.start * 4, values).wait_host()
                    assert torch.equal(values, model[part])
                case 3:
                    assert torch.equal(mapped[part], model[part])
                case 4:
                    release_mapped(mapped[part])
    assert torch.equal(mapped, model)


def test_released_pages_take_no_memory_and_keep_their_data(folder: SwapFolder) -> None:
    nbytes = 64 << 20
    file = folder.file("pages", nbytes)
    before = memory_of_files()
    mapped = file.mapped(0, nbytes // 4, torch.float32).fill_(2.5)
    assert memory_of_files() > before + nbytes // 2
    release_mapped(mapped[: mapped.numel() // 2])
    assert memory_of_files() < before + nbytes * 3 // 4
    release_mapped(mapped)
    assert memory_of_files() < before + nbytes // 8
    assert (mapped[::4096] == 2.5).all()


def test_wrong_offsets_and_foreign_tensors_are_refused(folder: SwapFolder) -> None:
    file = folder.file("wrong", 8192)
    for offset, numel in ((2, 10), (4, 2048)):
        with pytest.raises(AssertionError):
            file.mapped(offset, numel, torch.float32)
    assert file.mapped(8192, 0, torch.float32).numel() == 0
    for tensor in (torch.ones(5000), aligned_zeros(5000, torch.float32).fill_(1)):
        with pytest.raises(KeyError):
            release_mapped(tensor)
        assert tensor.sum() == 5000, "its pages are gone"
    file.close()
    with pytest.raises(OffloadError, match="is closed"):
        file.mapped(0, 10, torch.float32)
