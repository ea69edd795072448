"""What ``torch.save`` wrote, read without running anything that is in it: a pickle is a program."""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from zeroengine.errors import CheckpointError
from zeroengine.utils.progress import progress

INERT = ("deepspeed", "argparse", "numpy")  # packages whose classes are stood in for; and these classes:
INERT_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.device")
ZIP = b"PK\x03\x04"
CHUNK = 1 << 20  # bytes
MAX_VALUES = 50_000_000
MAX_DEPTH = 100


class Inert:
    """Stands for an object of a class that is not imported: it has what was pickled, and does nothing.

    Attributes:
        args: what it was made with.
        state: its attributes.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


def _tensor(*args: Any) -> torch.Tensor:
    made = torch._utils._rebuild_tensor_v2(*args)
    assert isinstance(made, torch.Tensor)
    return made


def _first(value: Any, *_: Any) -> Any:
    return value


def _of_subclass(make: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor of a subclass or with attributes, without these; ``make`` is one of the functions below."""
    return make(*args)


def _member(kind: Any, name: Any = None) -> Inert:
    """An enum's member, as some versions of Python pickle it (3.11.2 is one): of a class that is stood in for."""
    if not (isinstance(kind, type) and issubclass(kind, Inert)):
        raise CheckpointError("it holds builtins.getattr, which could run code: it is refused")
    return kind(name)


def _bytes(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _number(dtype: Any, data: Any = b"") -> Any:
    """A number of NumPy's, as learning rates often are."""
    code = _NUMBERS.get(str(dtype.args[0])) if isinstance(dtype, Inert) and dtype.args else None
    if code is None or len(data) != struct.calcsize(code):
        return Inert(dtype, data)
    return struct.unpack(code, data)[0]


_NUMBERS = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "b1": "<?"}
_ALLOWED: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _of_subclass,
    "torch.Size": torch.Size,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *_: {},
    "builtins.getattr": _member,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.bool": bool,
    "builtins.str": str,
    "builtins.complex": complex,
    "_codecs.encode": _bytes,  # how bytes are pickled
}


class _Pickle:
    """What ``torch.load`` takes for the module ``pickle``."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = module.replace("__builtin__", "builtins")
            found = _ALLOWED.get(f"{module}.{name}")
            if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                found = getattr(torch, name)
            if found is None and (module.partition(".")[0] in INERT or f"{module}.{name}" in INERT_CLASSES):
                found = type(name, (Inert,), {"__module__": module})
            if found is None:
                raise CheckpointError(f"it holds {module}.{name}, which could run code: it is refused")
            return found

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Pickle.Unpickler(file, **options).load()


def load(path: str | os.PathLike[str]) -> Any:
    """What ``torch.save`` wrote to ``path``: tensors, numbers, strings, their containers, and ``Inert`` objects.

    Tensors are mapped from the file: they take no memory until they are read, and must not be written.

    Raises:
        CheckpointError: it is damaged, or it holds anything else.
    """
    try:
        with open(path, "rb") as file:
            mapped = file.read(len(ZIP)) == ZIP  # otherwise of torch before 1.6, or as DeepSpeed's config may ask
        _check_kind(path, mapped)
        found = torch.load(path, map_location="cpu", pickle_module=_Pickle, weights_only=False, mmap=mapped)
        check_size(found)
        return found
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is cut short or damaged: {reason}") from error


def _check_kind(path: str | os.PathLike[str], zipped: bool) -> None:
    """Of what torch.load reads besides: it runs TorchScript, and unpacks archives of 2016."""
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("constants.pkl") for name in archive.namelist()):
                raise CheckpointError("it is a TorchScript program: it is refused")
            _check_archive(path, archive)
    elif tarfile.is_tarfile(path):
        raise CheckpointError("it is a tar archive: it is refused")


def _check_archive(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> None:
    """Compare the checksum of each entry, which torch does not.

    Raises:
        CheckpointError: one differs, or the archive would unpack to more than it is.
    """
    entries, size = archive.infolist(), os.path.getsize(path)
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries):
        raise CheckpointError("it is a compressed archive, which torch.save does not write: it is refused")
    if sum(info.file_size for info in entries) > size:
        raise CheckpointError("it is said to hold more bytes than it has: it is refused")
    checked = [info for info in entries if info.CRC]  # 0: torch was told to leave it out
    with progress(f"checking {os.path.basename(path)}", sum(info.file_size for info in checked)) as report:
        for info in checked:
            try:
                with archive.open(info) as entry:
                    while data := entry.read(CHUNK):
                        report(len(data))
            except zipfile.BadZipFile as error:
                raise CheckpointError(f"it has been changed: {error}") from None


def check_size(tree: Any) -> None:
    """Refuse containers that hold themselves, or that are more when written out than any checkpoint holds.

    Raises:
        CheckpointError: they are.
    """
    sizes: dict[int, int] = {}  # of what has been looked at, written out
    open_: set[int] = set()  # what contains the present one
    pending: list[tuple[Any, bool]] = [(tree, False)]
    while pending:
        value, is_done = pending.pop()
        children = _contained(value)
        if is_done:
            open_.discard(id(value))
            sizes[id(value)] = 1 + sum(sizes.get(id(child), 1) for child in children)
            if sizes[id(value)] > MAX_VALUES:
                raise CheckpointError(f"it holds more than {MAX_VALUES:,} values: it is refused")
        elif id(value) in open_:
            raise CheckpointError("it holds a container that contains itself: it is refused")
        elif children and id(value) not in sizes:
            if len(open_) > MAX_DEPTH:
                raise CheckpointError(f"it holds containers more than {MAX_DEPTH} deep: it is refused")
            open_.add(id(value))
            pending.append((value, True))
            pending += [(child, False) for child in children if isinstance(child, _CONTAINERS)]


_CONTAINERS = (dict, list, tuple, set, frozenset, Inert)


def _contained(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Inert):
        return [value.args, value.state]
    return []
