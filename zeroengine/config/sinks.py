"""The sections of the loggers that take the records of a run, and of the profiles that it prints.

Names, defaults and folders are those of DeepSpeed 0.19 (``deepspeed/monitor/config.py``), except for ``job_name``.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from zeroengine.config.fields import AUTO, Count, Folder, NonNegative, Positive, Section


class _Logger(Section):
    """What all loggers have."""

    enabled: Annotated[bool, AUTO] = False
    """Write the numbers of each step to this logger."""


class _Files(_Logger):
    """Keys of loggers that write a folder."""

    output_path: Annotated[Folder, AUTO] = ""
    """Folder that the job's folder is made in. Empty: the directory that the script was started in."""
    job_name: Annotated[Folder, AUTO] = "zeroengine"
    """Name of the job's folder."""


class TensorBoard(_Files):
    """TensorBoard's event files. Needs the package tensorboard."""


class CSVMonitor(_Files):
    """One CSV file for each metric."""


class WeightsAndBiases(_Logger):
    """Weights & Biases. Needs the package wandb. Offline if there is no API key, or WANDB_MODE says so."""

    group: str | None = None
    """Group that the run belongs to."""
    team: str | None = None
    """Team, or user, that the run belongs to. null: the default of the account."""
    project: Annotated[str, AUTO] = "deepspeed"
    """Project that the run belongs to."""


class Comet(_Logger):
    """Comet. Needs the package comet_ml. Offline if there is no API key. null: what Comet's own settings say."""

    samples_log_interval: Annotated[Positive, AUTO] = 100
    """Samples between two values of a metric."""
    project: str | None = None
    """Project that the experiment belongs to."""
    workspace: str | None = None
    """Workspace that the experiment belongs to."""
    api_key: Annotated[str | None, Field(exclude=True, repr=False)] = None
    """API key. Better in the environment, as COMET_API_KEY, than in a file."""
    experiment_name: str | None = None
    """Name of the experiment."""
    experiment_key: str | None = None
    """Key of the experiment, of 32 to 50 letters and digits. It is continued if it exists."""
    online: bool | None = None
    """true: send to the server. false: write an archive for `comet upload`. null: online if there is an API key."""


class FlopsProfile(Section):
    """A table of parameters, FLOPs and time by module, of one forward on rank 0."""

    enabled: Annotated[bool, AUTO] = False
    """Print the table."""
    profile_step: Annotated[Count, AUTO] = 1
    """Number of steps before the forward that is timed."""
    module_depth: Annotated[int, Ge(-1), AUTO] = -1
    """Deepest modules in the summary. -1: the deepest ones that there are."""
    top_modules: Annotated[Positive, AUTO] = 1
    """Number of module classes that the summary shows at each depth."""
    detailed: Annotated[bool, AUTO] = True
    """Also list every module."""
    output_file: Annotated[Folder | None, AUTO] = None
    """File that the table is written to. null: it is printed."""
    recompute_fwd_factor: Annotated[NonNegative, AUTO] = 0.0
    """Share of the forward that backward computes again: 1 if all blocks are checkpointed."""


class CommsLogger(Section):
    """A table of the collectives of rank 0, by operation and unit, printed when the engine ends."""

    enabled: Annotated[bool, AUTO] = False
    """Log collectives."""
    verbose: Annotated[bool, AUTO] = False
    """Also print a line for each collective when it has ended."""


class ThroughputTimer(Section):
    """Lines with the loss and the rate of training."""

    enabled: Annotated[bool, AUTO] = False
    """Print samples, tokens and FLOPs per second every steps_per_print or 10 steps. Unlike in DeepSpeed off by
    default."""


class Timers(Section):
    """Timers that DeepSpeed has beside wall_clock_breakdown."""

    throughput: ThroughputTimer = ThroughputTimer()
    """Lines with the rate of training."""
