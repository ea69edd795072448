"""Read the files that DeepSpeed wrote with `torch.save` without running anything that is in them."""

from __future__ import annotations

import os
import struct
import tarfile
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from zeroengine.checkpoint.failures import as_checkpoint_errors
from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import progress
from zeroengine.utils.safe_pickle import AllowList, pickle_module
from zeroengine.utils.torch_internals import rebuild_tensor

# Objects of these packages and classes are replaced by an `InertObject`.
INERT_PACKAGES = ("deepspeed", "argparse", "numpy")
INERT_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.device")
ZIP_SIGNATURE = b"PK\x03\x04"
READ_BYTES = 1 << 20


class InertObject:
    """Stand for an object of a class that is not imported: it holds what was pickled and does nothing.

    Attributes:
        args: The arguments of the object's constructor.
        state: The object's attributes.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        """Make the object, with no attributes yet."""
        new = super().__new__(cls)
        new.args, new.state = args, {}
        return new

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes as they were pickled."""
        self.state = state

    def append(self, item: Any) -> None:
        """Ignore an item that the pickle adds to a list's subclass."""

    def extend(self, items: Any) -> None:
        """Ignore items that the pickle adds to a list's subclass."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item that the pickle adds to a dict's subclass."""


def _rebuild_plain_tensor(function: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor of a subclass, or one with attributes, as a plain tensor.

    `function` came through the allow-list too, so that it is safe to call.
    """
    return function(*args)


def _encode(text: str, encoding: str) -> bytes:
    # Pickle's protocol 2 calls this with "latin1" only. Another encoding would change the bytes.
    return text.encode("latin1")


_NUMPY_FORMATS = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "b1": "<?"}


def _read_numpy_number(dtype: Any, data: Any = b"") -> Any:
    """Return a number of NumPy's, as learning rates often are, as a plain number."""
    code = _NUMPY_FORMATS.get(str(dtype.args[0])) if isinstance(dtype, InertObject) and dtype.args else None
    if code is None or len(data) != struct.calcsize(code):
        # A number of an unknown kind is kept inert rather than guessed.
        return InertObject(dtype, data)
    return struct.unpack(code, data)[0]


def _find_dtype_or_inert_class(module: str, name: str) -> Any:
    # A class may have the name of a dtype's module, so the object itself is checked.
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if module.partition(".")[0] in INERT_PACKAGES or f"{module}.{name}" in INERT_CLASSES:
        # A class is made for each name, so that the pickle can build objects of it and nothing of the package runs.
        return type(name, (InertObject,), {"__module__": module})
    return None


DEEPSPEED_ALLOW_LIST = AllowList(
    {
        "torch._utils._rebuild_tensor_v2": rebuild_tensor,
        "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
        "torch._tensor._rebuild_from_type_v2": _rebuild_plain_tensor,
        "torch.Size": torch.Size,
        "numpy.core.multiarray.scalar": _read_numpy_number,
        "numpy._core.multiarray.scalar": _read_numpy_number,
        "collections.OrderedDict": OrderedDict,
        "collections.defaultdict": lambda *_: {},
        # Pickle protocol 2 writes bytes as a call of this function.
        "_codecs.encode": _encode,
    }
    | {f"builtins.{kind.__name__}": kind for kind in (set, frozenset, list, dict, int, float, bool, str, complex)},
    find_other=_find_dtype_or_inert_class,
    enums=InertObject,
)


def load_pickled_file(path: str | os.PathLike[str]) -> Any:
    """Return what `torch.save` wrote: tensors, numbers, strings, their containers, and `InertObject`s.

    Tensors are mapped from the file: they take no memory until they are read, and must not be written.

    Raises:
        CheckpointError: The file is damaged, or it holds anything else.
    """
    with as_checkpoint_errors(f"{path} cannot be read, or is damaged", prefix=f"{path}: "):
        with open(path, "rb") as file:
            # Files without this signature are of torch before 1.6, or of a DeepSpeed configuration that asks for the
            # old format.
            is_zip = file.read(len(ZIP_SIGNATURE)) == ZIP_SIGNATURE
        if is_zip:
            _check_archive(path)
        # torch.load unpacks the tar archives of 2016, too.
        elif tarfile.is_tarfile(path):
            raise CheckpointError("it is a tar archive: it is refused")
        return torch.load(
            path, map_location="cpu", pickle_module=pickle_module(DEEPSPEED_ALLOW_LIST), weights_only=False, mmap=is_zip
        )


def _check_archive(path: str | os.PathLike[str]) -> None:
    """Compare the checksum of each entry, which torch does not do.

    Raises:
        CheckpointError: A checksum differs, the archive is compressed, or it is a program.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # torch.load would run a TorchScript program instead of reading values.
        if any(info.filename.endswith("constants.pkl") for info in entries):
            raise CheckpointError("it is a TorchScript program: it is refused")
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries):
            raise CheckpointError("it is a compressed archive, which torch.save does not write: it is refused")
        # A checksum of 0 means that torch was configured to write none.
        checked = [info for info in entries if info.CRC]
        with progress(f"checking {os.path.basename(path)}", sum(info.file_size for info in checked)) as report:
            for info in checked:
                try:
                    with archive.open(info) as entry:
                        # zipfile compares the checksum at the end of an entry, so all of it is read and dropped.
                        while data := entry.read(READ_BYTES):
                            report(len(data))
                except zipfile.BadZipFile as error:
                    raise CheckpointError(f"it has been changed: {error}") from None
