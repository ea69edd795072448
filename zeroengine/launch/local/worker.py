"""Run a script or module as one rank, as `python script.py` would, and write down how it failed.

zero-launch starts this file by its path, so that neither zeroengine nor torch is imported before the script is. If
FAILURE_FILE_VARIABLE is set, an exception that ends the script is written to that file instead of stderr. The launcher
then prints the first rank's traceback last and once, and not in pieces between the other ranks' lines.
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

FAILURE_FILE_VARIABLE = "ZEROENGINE_FAILURE_FILE"
# This variable holds the cores of each local rank, as in 0,1;2,3.
BIND_VARIABLE = "ZEROENGINE_BIND"
PR_SET_PDEATHSIG = 1
# A round that lasts so long counts as progress where no steps are reported.
STEADY_ROUND_S = 60.0
START = time.monotonic()


def main() -> None:
    """Run one rank. Usage: worker.py script.py args..., or worker.py -m module args..."""
    # Functions registered first run last.
    atexit.register(wait_for_gloo_threads)
    # A child that the script forks must neither write the failure file nor be mistaken for the rank.
    pid, failure_file = os.getpid(), os.environ.pop(FAILURE_FILE_VARIABLE, None)
    if failure_file and sys.platform == "linux":
        # The kernel kills this process when its launcher has ended, even by SIGKILL.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The cores are bound before the script starts any thread, because threads inherit the binding.
    if BIND_VARIABLE in os.environ:
        cores = os.environ[BIND_VARIABLE].split(";")[int(os.environ["LOCAL_RANK"])]
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
    try:
        run_target(sys.argv[1:])
    except BaseException as error:
        drop_own_frames(error, __file__)
        # A script that ends by `sys.exit(0)` has succeeded. A forked child leaves the report to the rank.
        succeeded = isinstance(error, SystemExit) and error.code in (None, 0)
        if succeeded or failure_file is None or os.getpid() != pid:
            raise
        # A hook that the script has set prints the traceback itself. torch's own hook would print it a second time.
        hook = sys.excepthook
        is_own_hook = hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith("torch.")
        prints_itself = is_own_hook and not isinstance(error, SystemExit)
        code, summary, text = describe_failure(error)
        write_failure(failure_file, code, summary, "" if prints_itself else text)
        if prints_itself:
            hook(type(error), error, error.__traceback__)
        # Python sets this before it exits with an error. Functions that run at the exit, as the monitor's do, read it.
        sys.last_value = error
        # The traceback has been written or printed, so the exit must not print it again.
        sys.exit(code)


def describe_failure(error: BaseException) -> tuple[int, str, str]:
    """Return the exit code of a script that ended by the error, the error in one line, and what to print of it."""
    if isinstance(error, SystemExit):
        # The system keeps eight bits of an exit code.
        code, text = (error.code & 0xFF, "") if isinstance(error.code, int) else (1, str(error.code))
        return code, f"SystemExit: {error.code}", text
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    summary = "".join(traceback.format_exception_only(error)).strip()
    return code, summary, "".join(traceback.format_exception(error))


def run_target(argv: list[str]) -> None:
    """Execute the script or module as `__main__`, with `sys.argv` and `sys.path` as python sets them.

    Args:
        argv: The script, or `-m` and the module, and its arguments.
    """
    if argv[0] == "-m":
        # `python -m` puts the working folder there, and `python script.py` the script's own folder.
        sys.path[0] = os.getcwd()
        spec, code = module_code(argv[1])
        path = spec.origin or argv[1]
        sys.argv = [path, *argv[2:]]
    else:
        path, spec = os.path.abspath(argv[0]), None
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        sys.argv = argv
        with open(path, "rb") as script:
            # The __future__ imports of this file must not apply to the script.
            code = compile(script.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = path, spec
    if spec is not None:
        module.__package__, module.__loader__ = spec.parent, spec.loader
    # Pickle and multiprocessing look for the script's classes in this module.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return a module's spec and code; of a package, those of its `__main__`.

    Raises:
        ImportError: There is no such module, or it has no code.
    """
    spec = importlib.util.find_spec(name)
    # A package is run through its `__main__`, as `python -m` does.
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = getattr(spec.loader, "get_code", lambda _: None)(name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no module named {name} that can be run")
    return spec, code


def write_failure(path: str, code: int, summary: str, text: str) -> None:
    """Write the failure for the launcher, with the time: all ranks of a node share the clock `time.monotonic`."""
    # Only a script that has imported zeroengine has this module.
    steps = getattr(sys.modules.get("zeroengine.utils.launcher"), "REPORTED_STEPS", {})
    # A script without an engine fails early before its first step. Later it may have taken steps of its own.
    steps = steps or ({"step": 0} if time.monotonic() < START + STEADY_ROUND_S else {})
    with open(f"{path}.part", "w") as file:
        json.dump({"time": time.monotonic(), "code": code, "summary": summary, "text": text, **steps}, file)
    # The rename makes the file appear with all of its content.
    os.replace(f"{path}.part", path)


def wait_for_gloo_threads() -> None:
    """Let Gloo's threads finish before the interpreter does.

    They drop a collective's tensors a moment after it is over, and need the interpreter for that. Before Python 3.14, a
    thread that needs it during the shutdown ends a successful rank with "terminate called without an active exception".
    """
    if "torch.distributed" in sys.modules:
        time.sleep(0.1)


def drop_own_frames(error: BaseException, *files: str) -> None:
    """Drop the frames of these files from the beginning of the traceback, so that it begins in the script."""
    frame: TracebackType | None = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in files:
        frame = frame.tb_next
    error.__traceback__ = frame


if __name__ == "__main__":
    main()
