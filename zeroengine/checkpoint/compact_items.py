"""Write small items of a checkpoint without what `torch.save` adds to each and `torch.load` does not need.

`torch.save` writes a zip archive of seven records, each aligned to 64 bytes, which is 1.5 KB for a tensor. An adapter's
checkpoint has hundreds of tensors of a few KB.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from zeroengine.checkpoint.entries import OPTIMIZER

# Larger items are written as torch.save writes them, without a copy in memory.
MAX_BYTES = 1 << 20


class CompactTransforms:
    """Gives DCP a stream for each item, which leaves records out where the item is small.

    Attributes:
        repeated: The items that are not written because they are equal to an earlier one, with that one. They are
            numbers of the optimizer, such as the step of each parameter.
    """

    def __init__(self, transforms: Any) -> None:
        self._transforms = transforms
        self.repeated: dict[MetadataIndex, MetadataIndex] = {}
        self._written: dict[bytes, MetadataIndex] = {}

    def transform_save_stream(self, write_item: WriteItem, raw_stream: io.IOBase) -> tuple[Any, list[str]]:
        """Return the stream that an item is written to."""
        stream, descriptors = self._transforms.transform_save_stream(write_item, raw_stream)
        data = write_item.tensor_data
        if data is not None and data.chunk.sizes.numel() * data.properties.dtype.itemsize > MAX_BYTES:
            return stream, descriptors
        return _CompactStream(self, write_item, stream), descriptors

    def write(self, item: WriteItem, content: bytes, stream: Any) -> None:
        """Write a small item, unless it repeats one."""
        index, data = item.index, item.tensor_data
        if data is not None and index.fqn.startswith(OPTIMIZER) and data.size.numel() == 1:
            first = self._written.setdefault(content, index)
            if first is not index:
                self.repeated[index] = first
                return
        stream.write(content)


class _CompactStream(io.BytesIO):
    """Takes what `torch.save` writes of one item, and hands on the necessary records when it is closed."""

    def __init__(self, transforms: CompactTransforms, item: WriteItem, stream: Any) -> None:
        super().__init__()
        self._transforms, self._item, self._stream = transforms, item, stream

    def close(self) -> None:
        """Write the item."""
        if not self.closed:
            self._transforms.write(self._item, compacted(self.getvalue()), self._stream)
            self._stream.close()
        super().close()


def compacted(item: bytes) -> bytes:
    """Return an archive of `torch.save` with the records alone that `torch.load` reads; other bytes as they are."""
    compact = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive, zipfile.ZipFile(compact, "w") as target:
            for name in archive.namelist():
                # The archive's own name is a folder around all records, and may be any.
                record = name.partition("/")[2]
                if record in ("data.pkl", "version") or record.startswith("data/"):
                    # Values stay as they are, because readers look them up in the file.
                    method = zipfile.ZIP_DEFLATED if record == "data.pkl" else zipfile.ZIP_STORED
                    target.writestr(zipfile.ZipInfo(f"a/{record}"), archive.read(name), method)
    except zipfile.BadZipFile:
        return item
    return compact.getvalue()
