"""Runs a script or module as one rank, as `python script.py` would, and leaves word of how it failed.

zero-launch starts this file by its path, so nothing of zeroengine or torch is imported before the script is.
With FAILURE_FILE set, an exception that ends the script is written there instead of to stderr: the launcher prints
the first rank's traceback last, once, and not in shreds between the other ranks' lines.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

FAILURE_FILE = "ZEROENGINE_FAILURE_FILE"
BIND = "ZEROENGINE_BIND"  # the cores of each local rank: 0,1;2,3
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Usage: worker.py script.py args..., or worker.py -m module args..."""
    atexit.register(settle)  # first, so that it runs last
    pid, failure_file = os.getpid(), os.environ.pop(FAILURE_FILE, None)
    if failure_file and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if BIND in os.environ:
        cores = os.environ[BIND].split(";")[int(os.environ["LOCAL_RANK"])]
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
    try:
        run(sys.argv[1:])
    except SystemExit as error:
        if failure_file and os.getpid() == pid and error.code not in (None, 0):
            code, text = (error.code, "") if isinstance(error.code, int) else (1, str(error.code))
            report(failure_file, code & 0xFF, f"SystemExit: {error.code}", text)
            sys.exit(code)
        raise
    except BaseException as error:
        trim(error)
        if failure_file is None or os.getpid() != pid:
            raise
        hook = sys.excepthook
        hooked = hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith("torch.")
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        summary = "".join(traceback.format_exception_only(error)).strip()
        report(failure_file, code, summary, "" if hooked else "".join(traceback.format_exception(error)))
        if hooked:
            hook(type(error), error, error.__traceback__)
        sys.exit(code)


def run(argv: list[str]) -> None:
    """Execute the script or module as `__main__`, with `sys.argv` and `sys.path` as python sets them."""
    if argv[0] == "-m":
        sys.path[0] = os.getcwd()
        spec, code = find_module(argv[1])
        path = spec.origin or argv[1]
        sys.argv = [path, *argv[2:]]
    else:
        path, spec = os.path.abspath(argv[0]), None
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        sys.argv = argv
        with open(path, "rb") as script:
            code = compile(script.read(), path, "exec", dont_inherit=True)  # this file's __future__
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = path, spec
    if spec is not None:
        module.__package__, module.__loader__ = spec.parent, spec.loader
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The module's spec and code; of a package, its `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = getattr(spec.loader, "get_code", lambda _: None)(name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no module named {name} that can be run")
    return spec, code


def report(path: str, code: int, summary: str, text: str) -> None:
    """Leave the failure for the launcher: when it was (`time.monotonic` is one clock for all ranks), and what."""
    with open(f"{path}.part", "w") as file:
        json.dump({"time": time.monotonic(), "code": code, "summary": summary, "text": text}, file)
    os.replace(f"{path}.part", path)


def settle() -> None:
    """Let Gloo's threads finish before the interpreter does.

    They drop a collective's tensors a moment after it is over, and need the interpreter for that. One that comes while
    it shuts down (before Python 3.14) ends a successful rank with "terminate called without an active exception".
    """
    if "torch.distributed" in sys.modules:
        time.sleep(0.1)


def trim(error: BaseException) -> None:
    """Drop this file's own frames, so that the traceback begins in the script."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    error.__traceback__ = frame


if __name__ == "__main__":
    main()
