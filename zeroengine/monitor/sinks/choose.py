"""The choice of sinks: what a configuration asks for."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zeroengine.config.model import Config
from zeroengine.config.sinks import CSVMonitor, TensorBoard
from zeroengine.monitor.metrics import Metrics
from zeroengine.monitor.sink_threads import OpenSink
from zeroengine.monitor.sinks.comet import CometSink
from zeroengine.monitor.sinks.csv_files import CSVSink
from zeroengine.monitor.sinks.log_folder import LogFolder
from zeroengine.monitor.sinks.step_printer import StepPrinter
from zeroengine.monitor.sinks.tensorboard import TensorBoardSink
from zeroengine.monitor.sinks.wandb import WandbSink

log = logging.getLogger("zeroengine")

# The package that each section needs.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def asks_for_sinks(config: Config) -> bool:
    """Return whether a configuration has a logger or a printer on, so that steps must be recorded."""
    sections = (config.tensorboard, config.csv_monitor, config.wandb, config.comet)
    return any(section.enabled for section in sections) or StepPrinter.is_asked_for(config)


def choose_sinks(config: Config, run: Mapping[str, Any]) -> dict[str, OpenSink]:
    """Return what opens each sink that a configuration asks for, by the name of its section.

    A logger whose package is not installed is left out with one warning. Opening the others may take seconds, so
    ``SinkThreads`` does that. Each call is for one engine, and engines of one process get different folders.

    Args:
        config: The resolved configuration.
        run: What the run is: the values of ``run.json``.
    """
    loggers: dict[str, tuple[Any, Callable[..., Any]]] = {
        "tensorboard": (config.tensorboard, TensorBoardSink),
        "csv_monitor": (config.csv_monitor, CSVSink),
        "wandb": (config.wandb, partial(WandbSink, config.wandb, run=run)),
        "comet": (config.comet, partial(CometSink, config.comet, run=run)),
    }
    openers: dict[str, OpenSink] = {}
    for name, (section, open_logger) in loggers.items():
        package = PACKAGES.get(name)
        if not section.enabled:
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            log.warning(
                "%s is enabled, and its package is not installed, so nothing is logged to it: pip install %s, or write "
                '"enabled": false',
                name,
                package,
            )
            continue
        # Loggers are opened on threads of their own, in any order, so folders are chosen here.
        if isinstance(section, (TensorBoard, CSVMonitor)):
            open_logger = partial(open_logger, LogFolder(name, Path(section.output_path, section.job_name)))
        # Each logger counts samples by itself, as it may be closed before the others.
        openers[name] = partial(open_logger, Metrics(config))
    if StepPrinter.is_asked_for(config):
        openers["wall_clock_breakdown"] = partial(StepPrinter, config)
    return openers
