"""The folders of loggers that write files. Engines of one process write different ones."""

from __future__ import annotations

import logging
from pathlib import Path
from weakref import WeakValueDictionary

log = logging.getLogger("zeroengine")

# The folders that engines of this process write, by the logger's section and the folder.
_WRITTEN: WeakValueDictionary[tuple[str, Path], LogFolder] = WeakValueDictionary()


class LogFolder:
    """A folder that one engine writes until ``release``, or until nothing refers to this object.

    The first engine writes the folder that the configuration names, the second one ``engine-2`` in it, and so on. They
    are numbered as they are initialized, so a run that resumes finds its files again.

    Args:
        section: The logger's section of the configuration.
        folder: The folder that the configuration names.

    Attributes:
        path: The folder to write.
    """

    def __init__(self, section: str, folder: Path) -> None:
        self.path, number = folder, 1
        while (key := (section, self.path.absolute())) in _WRITTEN:
            number += 1
            self.path = folder / f"engine-{number}"
        self._key = key
        _WRITTEN[key] = self
        if number > 1:
            log.warning("%s: another engine writes %s, so this one writes %s", section, folder, self.path)

    def release(self) -> None:
        """Let another engine write the folder."""
        if _WRITTEN.get(self._key) is self:
            del _WRITTEN[self._key]
