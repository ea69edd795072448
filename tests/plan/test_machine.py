from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroengine.errors import ZeroEngineError
from zeroengine.plan.seconds.known_machines import load_machine, this_machine
from zeroengine.plan.seconds.machine import rate_at_length, read_machine, save_machine
from zeroengine.plan.seconds.machine_presets import PRESETS
from zeroengine.utils.gpu_data_sheets import DATA_SHEETS


def test_a_saved_machine_is_read_back_equal(tmp_path: Path) -> None:
    save_machine(PRESETS["h200"], tmp_path / "new" / "machine.json")
    assert load_machine(tmp_path / "new" / "machine.json") == PRESETS["h200"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    machine = PRESETS[name]
    figures = set(vars(machine.rates)) | {"device_bytes", "host_bytes", "disk_bytes", "ranks_per_node"}
    assert figures <= {figure for key in machine.sources for figure in key.split()}
    # No preset promises the peak.
    assert all(rate < DATA_SHEETS[name].tflops[dtype] * 1e12 for dtype, rate in machine.rates.matmul.items())


def test_a_misspelled_preset_names_the_nearest() -> None:
    with pytest.raises(ZeroEngineError, match="Did you mean h100-80gb"):
        load_machine("h100-80g")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("{}", "format 1"),
        (json.dumps({"format": 2}), "format: 2"),
        (json.dumps({"format": 1, "name": "x"}), "device"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_no_machine_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "machine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ZeroEngineError, match=message):
        read_machine(file)


def test_this_machine_uses_measured_rates_and_the_memory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    estimate = this_machine()
    assert "estimate" in " ".join(estimate.sources.values()) or "preset" in " ".join(estimate.sources.values())
    save_machine(PRESETS["a100-80gb"], tmp_path / "zeroengine" / "machine.json")
    measured = this_machine()
    assert measured.rates == PRESETS["a100-80gb"].rates
    assert measured.host_bytes != PRESETS["a100-80gb"].host_bytes


def test_the_rate_of_a_length_lies_between_those_that_were_measured() -> None:
    rates = {128: 10.0, 512: 30.0}
    assert [rate_at_length(rates, length) for length in (1, 128, 256, 512, 4096)] == pytest.approx([10, 10, 20, 30, 30])
