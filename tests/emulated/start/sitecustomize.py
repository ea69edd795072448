"""With this folder and the repository on ``PYTHONPATH`` every Python that starts has the emulated GPU."""

from tests.emulated import emulate_gpu, load

load()
emulate_gpu()
