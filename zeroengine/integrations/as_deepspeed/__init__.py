"""The folder that ``zero-launch --as-deepspeed`` puts first on the path of the ranks.

It holds a package ``deepspeed``, whose names are those of ``zeroengine.integrations.deepspeed``, and the metadata of an
installed package. So ``import deepspeed`` and checks of its version succeed in the ranks, and nothing is patched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from zeroengine.errors import LaunchError

FOLDER = Path(__file__).parent


def python_path(choice: str, environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of ranks whose ``deepspeed`` is zeroengine.

    Args:
        choice: "absent" if the real DeepSpeed must not be installed, "force" if it may be.
        environ: The variables that the ranks would have.

    Raises:
        LaunchError: The real DeepSpeed is installed, and the choice is "absent".
    """
    folders = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != FOLDER]
    # The launcher may itself have been started by a rank of --as-deepspeed.
    folders_of_launcher = [path for path in sys.path if Path(path) != FOLDER]
    real = None if choice == "force" else PathFinder.find_spec("deepspeed", [*folders, *folders_of_launcher])
    if real is not None:
        raise LaunchError(
            f"--as-deepspeed: the real DeepSpeed is installed ({real.origin or 'a folder without __init__.py'}). "
            "Uninstall it, or write --as-deepspeed=force to use zeroengine in its place for this run"
        )
    return os.pathsep.join([str(FOLDER), *folders])
