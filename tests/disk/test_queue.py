"""What is written is what is read, in any sizes and any order; what fails says so and harms nothing else."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import ROOT
from tests.disk.faults import set_fault
from zeroengine.disk.aligned_memory import ALIGNMENT, aligned_zeros, round_up_to_block
from zeroengine.disk.queue import Descriptors, DiskQueue, Transfer
from zeroengine.disk.swap_files import SwapFile, SwapFolder
from zeroengine.errors import OffloadError
from zeroengine.ops import _aio_library as _aio

FILE_BYTES = 1 << 20

per_backend = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=25, deadline=None
)


def aligned(nbytes: int) -> Tensor:
    return aligned_zeros(nbytes, torch.uint8)


def skewed(nbytes: int) -> Tensor:
    """At an address that direct I/O does not take."""
    return torch.zeros(nbytes + 64, dtype=torch.uint8)[3 : 3 + nbytes]


def inside(nbytes: int) -> Tensor:
    """At an aligned address, with another's data right behind."""
    return aligned(nbytes + ALIGNMENT)[:nbytes]


BUFFERS = [aligned, skewed, inside]


def random_bytes(nbytes: int, seed: int, buffer: Callable[[int], Tensor] = aligned) -> Tensor:
    return buffer(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def contents(file: SwapFile) -> bytes:
    return os.pread(file.descriptors.buffered, file.nbytes, 0)


@dataclass(eq=False)
class Move:
    """A transfer under way."""

    begin: int  # in the file, bytes
    end: int
    writes: bool
    tensor: Tensor
    transfer: Transfer


@per_backend
@given(data=st.data(), block=st.sampled_from([1, 2, 7, 64]), depth=st.sampled_from([1, 2, 16]))
def test_a_file_is_what_was_written_to_it(
    backend: str, folder: SwapFolder, data: st.DataObject, block: int, depth: int
) -> None:
    file, model = folder.file("model", FILE_BYTES), bytearray(FILE_BYTES)
    under_way: list[Move] = []

    def finish(move: Move) -> None:
        under_way.remove(move)
        move.transfer.wait_host()
        if not move.writes:
            assert move.tensor.numpy().tobytes() == model[move.begin : move.begin + move.tensor.nbytes]

    with DiskQueue(depth, block * ALIGNMENT, backend) as queue:
        for number in range(data.draw(st.integers(1, 12))):
            nbytes = data.draw(st.integers(0, 40 * ALIGNMENT) | st.integers(0, 40).map(lambda n: n * ALIGNMENT))
            begin = data.draw(st.integers(0, (FILE_BYTES - nbytes) // ALIGNMENT)) * ALIGNMENT
            writes, buffer = data.draw(st.booleans()), data.draw(st.sampled_from(BUFFERS))
            if not writes:
                begin += data.draw(st.integers(0, min(FILE_BYTES - nbytes - begin, ALIGNMENT)))
            end = begin + round_up_to_block(nbytes)
            for move in list(under_way):
                if move.begin < end and begin < move.end and (writes or move.writes):
                    finish(move)
            if writes:
                x = random_bytes(nbytes, number, buffer)
                transfer = queue.write(file, begin, x)
                model[begin : begin + nbytes] = x.numpy().tobytes()
                if buffer is aligned:  # to the end of its last page, which is zero
                    model[begin + nbytes : end] = bytes(end - begin - nbytes)
            else:
                x = buffer(nbytes)
                transfer = queue.read(file, begin, x)
            under_way.append(Move(begin, end, writes, x, transfer))
            if data.draw(st.booleans()):
                finish(data.draw(st.sampled_from(under_way)))
        while under_way:
            finish(under_way[-1])
    assert contents(file) == model
    file.close()


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("nbytes", [1, 4095, 4097, 100_001])
def test_a_read_touches_nothing_but_its_tensor(
    backend: str, folder: SwapFolder, nbytes: int, buffer: Callable[[int], Tensor]
) -> None:
    file = folder.file("read", 1 << 18)
    around = buffer(nbytes + 64).fill_(7)
    with DiskQueue(4, 1 << 14, backend) as queue:
        queue.write(file, 0, random_bytes(1 << 18, 1)).wait_host()
        for begin in (ALIGNMENT, ALIGNMENT + 8, (1 << 18) - nbytes):
            around.fill_(7)
            queue.read(file, begin, around[8 : nbytes + 8]).wait_host()
            assert around[8 : nbytes + 8].numpy().tobytes() == contents(file)[begin : begin + nbytes]
            assert (around[:8] == 7).all() and (around[nbytes + 8 :] == 7).all()
        assert (queue.unaligned_bytes > 0) == folder.direct


@pytest.mark.parametrize("start", [8, 2048])
def test_an_unaligned_read_ends_with_its_memory(
    backend: str, folder: SwapFolder, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an aligned one may go on to the end of the last page."""
    file, x = folder.file("end", 1 << 16), aligned(8192)[start:]
    with DiskQueue(backend=backend) as queue:
        moved = []
        submit = queue._library.ze_aio_submit

        def note(*arguments: Any) -> Any:
            moved.append(arguments[5])
            return submit(*arguments)

        monkeypatch.setattr(queue, "_library", SimpleNamespace(ze_aio_submit=note))
        for offset in (0, 8):
            queue.read(file, offset, x).wait_host()
    assert moved == [x.nbytes] * 2


def test_tensors_of_any_shape_and_dtype_survive_a_round_trip(backend: str, folder: SwapFolder) -> None:
    file = folder.file("dtypes", 1 << 20)
    with DiskQueue(backend=backend) as queue:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
            x = torch.randn(3, 5, 7).to(dtype)
            y = torch.empty_like(x)
            queue.write(file, 8192, x).wait_host()
            queue.read(file, 8192, y).wait_host()
            assert torch.equal(x, y)


def test_many_threads_share_a_queue(backend: str, folder: SwapFolder) -> None:
    file, piece, each = folder.file("threads", 64 << 14), 1 << 14, 16
    failures = []

    def work(number: int) -> None:
        try:
            slots = range(number * each, (number + 1) * each)
            written = {slot: random_bytes(piece, slot) for slot in slots}
            for transfer in [queue.write(file, slot * piece, x) for slot, x in written.items()]:
                transfer.wait_host()
            read = {slot: aligned(piece) for slot in slots}
            for transfer in [queue.read(file, slot * piece, x) for slot, x in read.items()]:
                transfer.wait_host()
            assert all(torch.equal(read[slot], written[slot]) for slot in slots)
        except BaseException as error:
            failures.append(error)

    with DiskQueue(8, ALIGNMENT, backend) as queue:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert queue.bytes_read == queue.bytes_written == 64 * piece


def test_a_transfer_proceeds_while_nobody_waits(backend: str, folder: SwapFolder) -> None:
    file, nbytes = folder.file("alone", 1 << 21), 1 << 21
    with DiskQueue(2, ALIGNMENT, backend) as queue:
        x = random_bytes(nbytes, 1)
        transfer = queue.write(file, 0, x)
        deadline = time.monotonic() + 60
        while contents(file) != x.numpy().tobytes():  # nobody looks at the queue or at the transfer
            assert time.monotonic() < deadline
        transfer.wait_host()


class TestFaults:
    """Blocks that go wrong at the system's side."""

    NBYTES, BLOCK = 20 * ALIGNMENT, 4 * ALIGNMENT

    def move(
        self, queue: DiskQueue, file: SwapFile, write: bool, buffer: Callable[[int], Tensor], offset: int = ALIGNMENT
    ) -> None:
        """One transfer, checked against the file."""
        x = random_bytes(self.NBYTES - 5, 3, buffer)
        if not write:
            os.pwrite(file.descriptors.buffered, x.numpy().tobytes(), offset)
            x.zero_()
        (queue.write if write else queue.read)(file, offset, x).wait_host()
        assert x.numpy().tobytes() == contents(file)[offset : offset + x.nbytes]

    @pytest.mark.parametrize("buffer", BUFFERS)
    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize("what", ["short", errno.EINTR, errno.EAGAIN])
    def test_short_and_interrupted_blocks_are_continued(
        self, backend: str, folder: SwapFolder, write: bool, what: str | int, buffer: Callable[[int], Tensor]
    ) -> None:
        file = folder.file("short", 1 << 18)
        for block in (ALIGNMENT, self.BLOCK):
            with DiskQueue(3, block, backend) as queue:
                for first, count in ((1, 1), (3, 2), (1, 100)):
                    set_fault(what, first, count)
                    self.move(queue, file, write, buffer)

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize("what", [errno.EIO, errno.ENOSPC, "empty"])
    def test_failed_blocks_raise_an_error_with_file_and_offset(
        self, backend: str, folder: SwapFolder, write: bool, what: str | int
    ) -> None:
        file, x = folder.file("broken", 1 << 18), aligned(self.NBYTES)
        with DiskQueue(1, self.BLOCK, backend) as queue:
            set_fault(what, 3)
            transfer = (queue.write if write else queue.read)(file, ALIGNMENT, x)
            for _ in range(2):  # as often as it is asked
                with pytest.raises(OffloadError) as caught:
                    transfer.wait_host()
            assert transfer.done()
            message = str(caught.value)
            assert message.startswith("writing" if write else "reading")
            assert file.path in message and f"{self.NBYTES:,} bytes" in message and f"offset {ALIGNMENT:,} " in message
            assert f"failed at offset {ALIGNMENT + 2 * self.BLOCK:,}: " in message
            if isinstance(what, int):
                assert os.strerror(what) in message and errno.errorcode[what] in message
            else:
                assert ("nothing more was taken" if write else "the file ends there") in message
            self.move(queue, file, write, aligned)  # the queue is as good as before

    def test_a_failed_block_harms_no_other_transfer(self, backend: str, folder: SwapFolder) -> None:
        file = folder.file("others", 1 << 20)
        with DiskQueue(4, ALIGNMENT, backend) as queue:
            set_fault(errno.EIO, 5)
            xs = [random_bytes(1 << 15, seed) for seed in range(32)]
            transfers = [queue.write(file, i << 15, x) for i, x in enumerate(xs)]
            failed = []
            for i, transfer in enumerate(transfers):
                try:
                    transfer.wait_host()
                    assert contents(file)[i << 15 : (i + 1) << 15] == xs[i].numpy().tobytes()
                except OffloadError:
                    failed.append(i)
            assert len(failed) == 1

    def test_blocks_that_direct_io_refuses_go_through_the_page_cache(self, backend: str, disk: Path) -> None:
        folder = SwapFolder(disk)
        if not folder.direct:
            pytest.skip("this disk has no direct I/O")
        file = folder.file("refused", 1 << 18)
        with DiskQueue(2, self.BLOCK, backend) as queue:
            for write in (False, True):
                set_fault(errno.EINVAL, 1, 100)
                self.move(queue, file, write, aligned)

    def test_errors_of_the_system_are_reported(self, backend: str, folder: SwapFolder) -> None:
        """Not injected: the file cannot be written."""
        file = folder.file("read only", 1 << 18)
        file._descriptors = Descriptors(os.open(f"/proc/self/fd/{file.descriptors.buffered}", os.O_RDONLY))
        with DiskQueue(2, self.BLOCK, backend) as queue:
            with pytest.raises(OffloadError, match=r"failed at offset 0: Bad file descriptor \(EBADF\)"):
                queue.write(file, 0, aligned(self.NBYTES)).wait_host()
            queue.read(file, 0, aligned(self.NBYTES)).wait_host()

    def test_a_failure_that_nobody_waited_for_is_logged(
        self, folder: SwapFolder, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = folder.file("unseen", 1 << 18)
        with DiskQueue() as queue:
            set_fault(errno.EIO)
            queue.write(file, 0, aligned(ALIGNMENT))
        assert "Input/output error" in caplog.text and "nobody waited for it" in caplog.text

    def test_the_environment_variable_sets_a_fault(self, disk: Path) -> None:
        code = """
            import sys, torch
            from zeroengine.disk.aligned_memory import aligned_zeros
            from zeroengine.disk.queue import DiskQueue
            from zeroengine.disk.swap_files import SwapFolder
            file = SwapFolder(sys.argv[1]).file("x", 8192)
            with DiskQueue() as queue:
                queue.write(file, 0, aligned_zeros(4096, torch.uint8)).wait_host()
                queue.write(file, 4096, aligned_zeros(4096, torch.uint8)).wait_host()
        """
        done = python(code, disk, ZEROENGINE_AIO_FAULT=f"{errno.ENOSPC}:2")
        assert done.returncode == 1 and "at offset 4,096: No space left on device (ENOSPC): make room" in done.stderr


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


class Named:
    """A file with a name, to be looked at when its writer is gone."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = str(path), nbytes
        path.write_bytes(bytes(nbytes))
        self.descriptors = Descriptors(os.open(path, os.O_RDWR))


def test_a_file_that_ends_early_is_an_error(backend: str, disk: Path) -> None:
    file = Named(disk / "short", 3 * ALIGNMENT)
    file.nbytes = 8 * ALIGNMENT
    with (
        DiskQueue(2, ALIGNMENT, backend) as queue,
        pytest.raises(OffloadError, match=r"at offset 12,288: the file ends"),
    ):
        queue.read(file, 0, aligned(8 * ALIGNMENT)).wait_host()


@pytest.mark.parametrize("order", ["queue", "transfer", "tensor", "file"])
def test_queue_transfer_tensor_and_file_may_be_deleted_in_any_order(backend: str, disk: Path, order: str) -> None:
    things = {}
    for seed in range(3):
        file = things["file"] = Named(disk / "order", 1 << 18)
        queue = things["queue"] = DiskQueue(2, ALIGNMENT, backend)
        tensor = things["tensor"] = random_bytes(1 << 18, seed)
        things["transfer"] = queue.write(file, 0, tensor)
        expected = tensor.numpy().tobytes()
        del file, queue, tensor
        del things[order]
        gc.collect()
        things.clear()
        gc.collect()
        assert (disk / "order").read_bytes() == expected


def test_closing_a_queue_waits_for_its_transfers(backend: str, folder: SwapFolder) -> None:
    file, x = folder.file("close", 1 << 20), random_bytes(1 << 20, 1)
    queue = DiskQueue(1, ALIGNMENT, backend)
    transfer = queue.write(file, 0, x)
    queue.close()
    assert transfer.done() and contents(file) == x.numpy().tobytes()
    transfer.wait_host()
    queue.close()
    with pytest.raises(OffloadError, match="is closed"):
        queue.read(file, 0, x)


def test_a_closed_file_serves_the_transfers_under_way(backend: str, disk: Path) -> None:
    file, x = Named(disk / "closed", 1 << 20), random_bytes(1 << 20, 1)
    with DiskQueue(1, ALIGNMENT, backend) as queue:
        transfer = queue.write(file, 0, x)
        del file
        others = [os.open(disk / "other", os.O_CREAT | os.O_RDWR) for _ in range(4)]  # would take the numbers
        transfer.wait_host()
    for other in others:
        os.close(other)
    assert (disk / "closed").read_bytes() == x.numpy().tobytes() and (disk / "other").stat().st_size == 0


def test_a_forked_child_cannot_use_a_queue_and_the_interpreter_may_exit_during_transfers(disk: Path) -> None:
    code = """
        import os, sys, torch
        from zeroengine.disk.aligned_memory import aligned_zeros
        from zeroengine.disk.queue import Descriptors, DiskQueue
        from zeroengine.disk.swap_files import SwapFolder
        file, x = SwapFolder(sys.argv[1]).file("x", 1 << 20), aligned_zeros(1 << 18, torch.float32)
        queues = [DiskQueue(1, 4096, backend) for backend in sys.argv[2:]]
        transfers = [queue.write(file, 0, x) for queue in queues]
        child = os.fork()
        if child == 0:
            x.fill_(7)  # its own copy
            for queue, transfer in zip(queues, transfers):
                for use in (lambda: queue.read(file, 0, x), transfer.wait_host, transfer.done):
                    try:
                        use()
                    except Exception as error:
                        print(type(error).__name__, error)
            del transfer, transfers, queue, queues
            sys.exit()  # as usual, with what is run at exit
        assert os.waitpid(child, 0)[1] == 0 and not x.any()
        for queue, transfer in zip(queues, transfers):
            transfer.wait_host()
            queue.read(file, 0, x).wait_host()

        class File:
            def __init__(self, path):
                self.path, self.nbytes = path, 1 << 21
                self.descriptors = Descriptors(os.open(path, os.O_CREAT | os.O_RDWR))
        kept = []
        for backend in sys.argv[2:]:
            file, queue = File(f"{sys.argv[1]}/exit-{backend}"), DiskQueue(2, 4096, backend)
            buffers = [aligned_zeros(1 << 18, torch.uint8).fill_(i + 1) for i in range(8)]
            kept += queue, [queue.write(file, i << 18, buffer) for i, buffer in enumerate(buffers)]
        sys.stdout.write("begun")
    """
    done = python(code, disk, *_aio.available())
    assert done.stderr == "" and done.returncode == 0
    *lines, last = done.stdout.splitlines()
    assert last == "begun" and len(lines) == 3 * len(_aio.available())
    assert all(line.startswith("OffloadError a disk queue of process") for line in lines)
    for backend in _aio.available():
        assert (disk / f"exit-{backend}").read_bytes() == b"".join(bytes([i + 1]) * (1 << 18) for i in range(8))


@pytest.mark.skipif(_aio.PATH.exists() and "io_uring" not in _aio.available(), reason="this machine has no io_uring")
def test_auto_takes_the_first_backend_that_works(disk: Path) -> None:
    code = """
        import os, resource, sys, torch
        from zeroengine.disk.aligned_memory import aligned_zeros
        from zeroengine.disk.queue import DiskQueue
        from zeroengine.disk.swap_files import SwapFolder
        file = SwapFolder(sys.argv[1]).file("x", 8192)
        best = DiskQueue().backend
        resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0), 4096))  # io_uring wants a descriptor
        with DiskQueue() as queue:
            queue.write(file, 0, aligned_zeros(4096, torch.uint8)).wait_host()
            print(best, queue.backend)
        DiskQueue(backend="io_uring")
    """
    done = python(code, disk)
    assert done.stdout.split() == ["io_uring", "threads"]
    assert "backend 'io_uring' does not work on this machine (Too many open files)" in done.stderr
    assert 'write "auto", or one of threads' in done.stderr


def test_wrong_transfers_are_refused(folder: SwapFolder) -> None:
    file, x = folder.file("wrong", 8192), aligned(8192)
    with DiskQueue() as queue:
        for offset in (-4096, 100, 4096):
            with pytest.raises(AssertionError):
                queue.read(file, offset, x)
        with pytest.raises(AssertionError):
            queue.write(file, 100, x[:4096])
        for tensor in (x[::2], torch.empty(4096, device="meta")):
            with pytest.raises(AssertionError):
                queue.write(file, 0, tensor)
        file.close()
        with pytest.raises(OffloadError, match="is closed"):
            queue.read(file, 0, x)
        assert queue.bytes_read == queue.bytes_written == 0


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aio, "PATH", Path("/nowhere/_aio.so"))
    with pytest.raises(OffloadError, match=r'was not built. Install a C\+\+17 compiler .* write "device": "cpu"'):
        _aio.library.__wrapped__()
