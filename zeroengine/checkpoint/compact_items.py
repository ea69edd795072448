"""Write the items of a checkpoint's file: archives with the records alone that `torch.load` reads.

`torch.save` writes seven records, each aligned to 64 bytes, which is 1.5 KB for a tensor; an adapter's checkpoint has
hundreds of tensors of a few KB. It also reads a tensor for its checksum before it reads it again to write it. Here a
tensor is read once, in blocks that stay in the processor's cache while they are hashed and written, and each call on a
block releases the interpreter's lock, which the training thread needs.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from zeroengine.checkpoint.dcp_metadata import ByteRange, DigestOfItems
from zeroengine.checkpoint.entries import OPTIMIZER
from zeroengine.utils.tensors import with_own_storage
from zeroengine.utils.torch_internals import storage_dtypes

BLOCK_BYTES = 4 << 20
# Smaller pieces are joined before they are written.
SMALL_BYTES = 1 << 16

Records = dict[str, bytes | memoryview]


class ItemWriter:
    """Writes items into a file, one behind the other.

    Args:
        file: A file with `write` and `tell`.

    Attributes:
        digest: As `digest_of_items` computes it from the file.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._numbers: dict[tuple[torch.dtype, bytes], ByteRange] = {}
        self.digest = DigestOfItems()

    def write(self, name: str, value: torch.Tensor | io.BytesIO) -> ByteRange:
        """Write an item, and return where it is.

        Args:
            name: The name of the tensor or object.
            value: A contiguous tensor in CPU memory, or an object as `torch.save` writes it.
        """
        if isinstance(value, io.BytesIO):
            return self._write(_records_of_object(value))
        records = _records_of_tensor(value)
        if not name.startswith(OPTIMIZER) or value.numel() != 1:
            return self._write(records)
        # Numbers of the optimizer, such as the step of each parameter, mostly repeat one another.
        key = value.dtype, b"".join(records.values())
        if key not in self._numbers:
            self._numbers[key] = self._write(records)
        return self._numbers[key]

    def _write(self, records: Records) -> ByteRange:
        start = self._file.tell()
        # Of an archive in memory the checksums are written into place, rather than behind each record.
        is_small = sum(map(len, records.values())) < SMALL_BYTES
        stream = io.BytesIO() if is_small else _JoinedWrites(self._file)
        with zipfile.ZipFile(stream, "w") as archive:  # type: ignore[call-overload]
            for name, content in records.items():
                info = zipfile.ZipInfo(f"a/{name}")
                # Values stay as they are, because readers look them up in the file.
                info.compress_type = zipfile.ZIP_DEFLATED if name == "data.pkl" else zipfile.ZIP_STORED
                info.file_size = len(content)
                with archive.open(info, "w") as record:
                    for block in range(0, len(content), BLOCK_BYTES):
                        record.write(content[block : block + BLOCK_BYTES])
        if isinstance(stream, io.BytesIO):
            self._file.write(stream.getbuffer())
        else:
            stream.end()
        item = ByteRange(start, self._file.tell() - start)
        self.digest.add(item, archive)
        return item


class _JoinedWrites:
    """Hands on the bytes of an archive, small pieces as one.

    It has no position: an archive counts from the beginning of its item, and must not see that of the file.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._pending = file, bytearray()

    def write(self, data: Any) -> int:
        """Write ``data``, now or with what follows."""
        if len(data) < SMALL_BYTES:
            self._pending += data
        else:
            self.end()
            self._file.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: an archive flushes after each record."""

    def end(self) -> None:
        """Write what is left."""
        if self._pending:
            self._file.write(self._pending)
            self._pending = bytearray()


def _records_of_object(saved: io.BytesIO) -> Records:
    records: Records = {}
    with zipfile.ZipFile(saved) as archive:
        for info in archive.infolist():
            # The archive's own name is a folder around all records, and may be any.
            name = info.filename.partition("/")[2]
            if name in ("data.pkl", "version") or name.startswith("data/"):
                # torch can be told to leave checksums unset, and these bytes have never left the memory.
                info.CRC = None  # type: ignore[assignment]
                records[name] = archive.read(info)
    return records


def _records_of_tensor(tensor: torch.Tensor) -> Records:
    # A pickled view tells of all of its storage.
    tensor = with_own_storage(tensor.detach()) if tensor.numel() else torch.empty_like(tensor)
    pickled = io.BytesIO()
    _TensorPickler(pickled, tensor).dump(tensor)
    content = tensor.view(-1).view(torch.uint8).numpy().data
    return {"data.pkl": pickled.getvalue(), "version": b"3\n", "data/0": content}


class _TensorPickler(pickle.Pickler):
    """Pickles a tensor as `torch.save` does: its storage is a record of its own."""

    def __init__(self, file: io.BytesIO, tensor: torch.Tensor) -> None:
        super().__init__(file, protocol=2)
        self._tensor = tensor

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for the storage; None for other objects."""
        # Of dtypes that have no class of storages the bytes are counted.
        if isinstance(value, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, "0", "cpu", self._tensor.nbytes
        if isinstance(value, torch.storage.TypedStorage):
            name = next(name for name, dtype in storage_dtypes().items() if dtype == self._tensor.dtype)
            return "storage", getattr(torch, name), "0", "cpu", self._tensor.numel()
        return None
