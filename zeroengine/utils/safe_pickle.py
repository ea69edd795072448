"""Read pickles without running anything in them. Needs no torch.

A pickle is a program: it can call anything that Python can import. So each reader of pickles has an `AllowList` of the
classes and functions that its files name, with a harmless object to use for each, and `SafeUnpickler` refuses the rest.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import IO, Any

from zeroengine.errors import CheckpointError


@dataclass(frozen=True)
class AllowList:
    """The classes and functions that the pickles of one kind may name.

    Attributes:
        objects: The object to use for each class or function, by its "module.name".
        find_other: Returns the object to use for a module and name that `objects` lacks, or None to refuse it.
        enums: The base class of the objects that stand for enumerations. () allows no enumerations.
        subject: The name of the file in the refusal.
    """

    objects: Mapping[str, Any]
    find_other: Callable[[str, str], Any] = lambda module, name: None
    enums: type | tuple[()] = ()
    subject: str = "it"


class SafeUnpickler(pickle.Unpickler):
    """Build the objects that an allow-list names, and nothing else."""

    def __init__(self, file: IO[bytes], allow_list: AllowList, **options: Any) -> None:
        super().__init__(file, **options)
        self._allow_list = allow_list

    def find_class(self, module: str, name: str) -> Any:
        """Return the allow-list's object for a class or function.

        Raises:
            CheckpointError: The allow-list does not have it.
        """
        # Python 2 called the module __builtin__, and old protocols still write that name.
        module = module.replace("__builtin__", "builtins")
        # Python pickles a member of an enumeration as a call of getattr. A general getattr could reach any function.
        if (module, name) == ("builtins", "getattr"):
            return self._read_enum_member
        full_name = f"{module}.{name}"
        stand_in = self._allow_list.objects.get(full_name) or self._allow_list.find_other(module, name)
        if stand_in is None:
            raise self._refusal(full_name)
        return stand_in

    def _read_enum_member(self, kind: Any, name: Any = None) -> Any:
        """Return a member of an enumeration, which Python up to 3.11.3 pickles as a call of `getattr`."""
        if not (isinstance(kind, type) and issubclass(kind, self._allow_list.enums)):
            raise self._refusal("builtins.getattr")
        enum: Any = kind
        return enum(name)

    def _refusal(self, full_name: str) -> CheckpointError:
        return CheckpointError(f"{self._allow_list.subject} holds {full_name}, which could run code: it is refused")


def pickle_module(allow_list: AllowList) -> ModuleType:
    """Return a module that `torch.load` takes in the place of `pickle`."""

    class Unpickler(SafeUnpickler):
        def __init__(self, file: IO[bytes], **options: Any) -> None:
            super().__init__(file, allow_list, **options)

    module = ModuleType("safe_pickle_module")
    # torch.load uses the class for zip archives, and the function for the files of torch before 1.6.
    module.__dict__.update(Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load())
    return module
