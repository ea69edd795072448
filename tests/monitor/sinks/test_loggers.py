"""Each logger, written by its real library without a network and read back."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import socket
import struct
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.monitor.records import SAMPLES, checkpoint_event, record
from zeroengine.config import load
from zeroengine.monitor.sink_threads import SinkThreads
from zeroengine.monitor.sinks.choose import asks_for_sinks, choose_sinks

RUN = {"world_size": 2, "config": {"zero_optimization": {"stage": 3}}}
LOSS = "Train/Samples/train_loss"
KEYS = ("WANDB_API_KEY", "WANDB_MODE", "COMET_API_KEY")
FOLDERS = ("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "COMET_OFFLINE_DIRECTORY")
# Each step's number of samples and its loss.
EXPECTED = [(SAMPLES * step, 4.0 / step) for step in (1, 2, 3)]


def log_steps(folder: Path, config: dict[str, Any], variables: dict[str, str], steps: tuple[int, ...]) -> list[str]:
    """Log some steps and an event where nobody is logged in anywhere. Return the warnings."""
    os.chdir(folder)
    for key in KEYS:
        os.environ.pop(key, None)
    os.environ.update(dict.fromkeys(FOLDERS, str(folder)) | variables)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: warnings.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroengine").addHandler(handler)
    sinks = SinkThreads(choose_sinks(load(config), RUN))
    for step in steps:
        sinks.step(record(step))
    sinks.event(checkpoint_event(3))
    sinks.close()
    # W&B's own process writes the file, and has written all of it when it ends.
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    return warnings


def closed_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def test_without_a_logger_nothing_is_opened() -> None:
    assert choose_sinks(load({}), RUN) == {} and not asks_for_sinks(load({}))


@dataclass(frozen=True)
class Logged:
    """What two runs of one folder have left there: one of three steps, and one that went back to the second."""

    folder: Path
    warnings: list[str]


def write(folder: Path, config: dict[str, Any], variables: dict[str, str], *steps: int) -> list[str]:
    """Write in a process of its own, since some loggers change theirs."""
    for section in config.values():
        section["enabled"] = True
    warnings: list[str] = run_ranks(1, log_steps, folder, config, variables, steps)[0]
    return warnings


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """All loggers at once, and then some of them again."""
    folder = tmp_path_factory.mktemp("logged")
    files = {"output_path": "runs", "job_name": "a"}
    config = {
        "csv_monitor": files,
        "tensorboard": files,
        "wandb": {"project": "p", "group": "g"},
        "comet": {"experiment_name": "n", "samples_log_interval": 2 * SAMPLES},
    }
    warnings = write(folder, config, {}, 1, 2, 3)
    write(folder, {"csv_monitor": files, "tensorboard": files}, {}, 2)
    return Logged(folder, warnings)


def test_csv_files_are_deepspeeds_and_a_later_run_appends(logged: Logged) -> None:
    with (logged.folder / "runs" / "a" / "Train_Samples_train_loss.csv").open() as file:
        titles, *rows = csv.reader(file)
    assert titles == ["step", "train_loss"]
    assert [(int(step), float(loss)) for step, loss in rows] == [*EXPECTED, EXPECTED[1]]
    assert "saved runs/a in 2.0 s" in (logged.folder / "runs" / "a" / "events.csv").read_text()


def test_engines_of_one_process_write_different_folders_whichever_opens_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}
    config = load({"csv_monitor": files, "tensorboard": files})

    def log_two() -> None:
        choices = [choose_sinks(config, RUN), choose_sinks(config, RUN)]
        engines = [SinkThreads(choice) for choice in reversed(choices)]
        for number, engine in enumerate(engines):
            for step in range(1, 3 + number):
                engine.step(record(step))
        for engine in engines:
            engine.close()

    # A resumed run finds the same folders.
    log_two()
    log_two()
    lines = {
        folder: len((tmp_path / "a" / folder / "zeroengine_step.csv").read_text().splitlines())
        for folder in ("", "engine-2")
    }
    assert lines == {"": 1 + 2 * 3, "engine-2": 1 + 2 * 2}
    assert sorted(path.name for path in (tmp_path / "a").iterdir() if path.is_dir()) == ["engine-2"]
    for folder in ("", "engine-2"):
        assert len(list((tmp_path / "a" / folder).glob("events.out.tfevents*"))) == 2
    texts = [entry.getMessage() for entry in caplog.records]
    for section in ("csv_monitor", "tensorboard"):
        warning = f"{section}: another engine writes {tmp_path}/a, so this one writes {tmp_path}/a/engine-2"
        assert texts.count(warning) == 2


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    config = load({"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}})
    sinks = SinkThreads(choose_sinks(config, RUN))
    sinks.step(record(1))
    sinks.close()
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert "csv_monitor failed, and training goes on" in warning


def test_tensorboard_reads_the_scalars_and_a_run_that_went_back_hides_the_rest(logged: Logged) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = logged.folder / "runs" / "a"
    first, _ = sorted(folder.glob("events.out.*"), key=lambda path: path.stat().st_mtime)
    events = EventAccumulator(str(first)).Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars(LOSS)] == [
        (step, pytest.approx(loss)) for step, loss in EXPECTED
    ]
    assert "zeroengine/checkpoint/text_summary" in events.Tags()["tensors"]
    both = EventAccumulator(str(folder)).Reload()
    assert [(scalar.step, scalar.value) for scalar in both.Scalars(LOSS)] == EXPECTED[:2]


def test_wandb_without_a_key_stores_the_run_with_one_warning(logged: Logged) -> None:
    pytest.importorskip("wandb")
    (warning,) = (text for text in logged.warnings if text.startswith("wandb"))
    assert "`wandb sync`: there is no API key" in warning
    rows, run = read_wandb(logged.folder)
    assert [(int(row["_step"]), row[LOSS]) for row in rows] == EXPECTED
    assert rows[-1]["zeroengine/event"] == "step 3: checkpoint: saved runs/a in 2.0 s"
    assert (run.project, run.run_group) == ("p", "g")


@pytest.mark.slow
def test_wandb_whose_server_is_gone_stores_the_run_with_one_warning(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    server = f"http://127.0.0.1:{closed_port()}"
    variables = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": server, "WANDB_INIT_TIMEOUT": "1"}
    (warning,) = write(tmp_path, {"wandb": {}}, variables, 1, 2, 3)
    assert "`wandb sync`" in warning and "refused" in warning
    assert [(int(row["_step"]), row[LOSS]) for row in read_wandb(tmp_path)[0]] == EXPECTED


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """The rows of the history, and the run, of the one offline run in a folder."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, run = [], None
    for data in leveldb_log(path.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        if entry.WhichOneof("record_type") == "history":
            items = entry.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif entry.WhichOneof("record_type") == "run":
            run = entry.run
    return rows, run


def leveldb_log(content: bytes) -> Iterator[bytes]:
    """The entries of a file of W&B, which is a log of LevelDB (its doc/log_format.md) behind 7 bytes of its own."""
    block_bytes, head_bytes = 1 << 15, 7
    position, entry = 7, b""
    while position + head_bytes <= len(content):
        rest = block_bytes - position % block_bytes
        if rest < head_bytes:
            position += rest
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        entry += content[position + head_bytes : position + head_bytes + length]
        position += head_bytes + length
        # A whole entry, or the last part of one.
        if kind in (1, 4):
            yield entry
            entry = b""


def test_comet_without_a_key_archives_the_experiment(logged: Logged) -> None:
    pytest.importorskip("comet_ml")
    (warning,) = (text for text in logged.warnings if text.startswith("comet"))
    assert "`comet upload`" in warning
    (archive,) = logged.folder.glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        messages = [json.loads(line) for line in files.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    losses = [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == LOSS]
    # The interval is two steps, as DeepSpeed counts it.
    assert losses == [EXPECTED[0], (EXPECTED[2][0], pytest.approx(EXPECTED[2][1]))]
    assert any(message["payload"].get("value") == "n" for message in messages)


def test_a_logger_whose_package_is_missing_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load({"comet": {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}})
    assert asks_for_sinks(config)
    assert list(choose_sinks(config, RUN)) == ["csv_monitor"]
    (warning,) = (entry.getMessage() for entry in caplog.records)
    assert "pip install comet_ml" in warning


def test_numbers_that_are_not_finite_reach_the_logger(tmp_path: Path) -> None:
    config = load({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}})
    sinks = SinkThreads(choose_sinks(config, RUN))
    sinks.step(record(1, loss=math.nan))
    sinks.close()
    assert (tmp_path / "a" / "Train_Samples_train_loss.csv").read_text().split()[-1] == f"{SAMPLES},nan"


def test_comets_key_is_not_written_into_the_run() -> None:
    config = load({"comet": {"enabled": True, "api_key": "secret"}})
    assert config.comet.api_key == "secret"
    assert "secret" not in config.describe() + json.dumps(config.to_dict()) + repr(config)
