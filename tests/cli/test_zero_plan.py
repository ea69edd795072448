"""The command zero-plan: its inputs, its outputs, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroengine.cli.zero_plan import main
from zeroengine.config import load

NUMBERS = ["--params", "5e6", "--layers", "2", "--width", "256", "--vocab", "2K", "--seq", "128"]
# Few candidates are soon compared.
FEW = [*NUMBERS, "--checkpointing", "off", "--micro-batch", "1"]
GPUS = ["--machine", "a100-40gb", "--nodes", "2", "--memory", "1.7GiB", "--disk", "0"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_the_table_names_the_model_the_machine_and_the_best_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (80, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = run(capsys, *NUMBERS, *GPUS, "--batch", "256", "--checkpointing", "off")
        assert (code, err) == (0, "") and "8 GPUs on each of 2 nodes, 1.7 GiB each" in out
        assert max(map(len, out.splitlines())) <= columns
        head, first = next(pair for pair in zip(out.splitlines(), out.splitlines()[1:], strict=False) if "#" in pair[0])
        assert "tokens/s" in head and first.split()[0] == "1"
        assert ("optim" in head) == (columns == 140)


def test_the_configuration_that_is_written_is_the_chosen_candidate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = tmp_path / "ds.json"
    optimizer = {"type": "Adam", "params": {"lr": 0.01}}
    given.write_text(json.dumps({"bf16": {"enabled": True}, "optimizer": optimizer, "gradient_clipping": 0.5}))
    common = [*NUMBERS, *GPUS, "--config", str(given), "--batch", "256", "--checkpointing", "off"]
    _, out, _ = run(capsys, *common, "--json")
    data = json.loads(out)
    for number in (1, data["shown"]):
        target = tmp_path / f"{number}.json"
        run(capsys, *common, "--write", str(target), "--choose", str(number))
        config = load(target).resolve(world_size=16)
        candidate = data["candidates"][number - 1]
        assert json.loads(target.read_text())["optimizer"] == optimizer and config.gradient_clipping == 0.5
        zero = config.zero_optimization
        assert (zero.stage, zero.offload_optimizer.device, zero.offload_param.device) == (
            candidate["stage"],
            candidate["offload_optimizer"],
            candidate["offload_param"],
        )
        assert config.train_micro_batch_size_per_gpu == candidate["micro_batch"] and config.train_batch_size == 256


def test_options_fix_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--stage", "3", "--offload-optimizer", "nvme", "--micro-batch", "2", "--checkpointing", "on"]
    _, out, _ = run(capsys, *NUMBERS, "--machine", "a100-40gb", *options, "--json")
    keys = ("stage", "offload_optimizer", "micro_batch", "checkpointing")
    assert {tuple(c[key] for key in keys) for c in json.loads(out)["candidates"]} == {(3, "nvme", 2, True)}
    _, out, _ = run(capsys, *FEW, *GPUS, "--stage", "1", "--tensor-parallel", "1", "2", "--json")
    assert {c["tensor_parallel"] for c in json.loads(out)["candidates"]} == {1, 2}


def test_a_slow_network_favors_degrees_within_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    best = {}
    for network in ("80Gbit", "10GB/s", "100Mbit"):
        _, out, _ = run(capsys, *FEW, *GPUS, "--stage", "3", "--network", network, "--json")
        data = json.loads(out)
        best[network] = data["candidates"][0]
        assert data["machine"]["sources"]["node_link"] == "--network"
    assert best["80Gbit"] == best["10GB/s"]
    assert best["100Mbit"]["seconds"]["total"] > 10 * best["80Gbit"]["seconds"]["total"]
    assert best["100Mbit"]["degrees"] in ("node", "node/all/all", "hpZ")
    written = best["100Mbit"]["configuration"]["zero_optimization"]["degrees"]
    assert "node" in written.values()


@pytest.mark.parametrize("kind", ["function", pytest.param("hugging face", marks=pytest.mark.slow)])
def test_a_function_and_a_configuration_of_hugging_face_are_models(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_planned_model.py").write_text(
        "import torch\n\n\ndef build():\n    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])\n"
        "    return model, lambda n: (torch.zeros(n, 8),)\n"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128, **sizes}))
    monkeypatch.chdir(tmp_path)
    model = "my_planned_model:build" if kind == "function" else "config.json"
    code, out, _ = run(capsys, model, "--machine", "h200", "--seq", "16", "--json", "--checkpointing", "off")
    data = json.loads(out)
    assert code == 0 and data["candidates"][0]["seconds"] is not None
    assert kind != "function" or data["model"]["parameters"] == 3 * (8 * 8 + 8)


def test_a_run_that_fits_nowhere_exits_with_3_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = [*FEW, "--memory", "1GiB", "--host-memory", "1GiB", "--disk", "0"]
    code, out, _ = run(capsys, *small)
    assert code == 3 and "Nothing fits" in out
    code, _, err = run(capsys, *small, "--write", str(tmp_path / "x.json"))
    assert code == 2 and "does not fit" in err and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "80", *NUMBERS], "--memory 80: a size has a unit; write --memory 80GB"),
        (["--memory", "much", *NUMBERS], "write a size such as 5GB"),
        (["--network", "25Gb", *NUMBERS], "--network 25Gb: write bits or bytes a second, such as --network 25Gbit"),
        (["--network", "0Gbit", *NUMBERS], "--network 0Gbit: write bits or bytes a second"),
        (["--machine", "h100-80", *NUMBERS], "Did you mean h100-80gb"),
        ([], "no model is given"),
        (["--params", "7e9"], "plain numbers also need --layers N --width N --vocab N --seq N"),
        (["train:build", "--params", "7e9"], "leave one of the two out"),
        (["no_such_module:build"], "cannot import it"),
        ([*NUMBERS, "--layers", "2.5"], "no whole number"),
        ([*NUMBERS, *GPUS, "--batch", "100"], "Change train_batch_size to 96 or 112"),
        ([*FEW, *GPUS, "--tensor-parallel", "4"], "2 heads of keys and values, which cannot be split over 4 ranks"),
        ([*FEW, *GPUS, "--expert-parallel", "2"], "has no plan of expert parallelism (base_model_ep_plan)"),
        ([*FEW, *GPUS, "--choose", "0"], "argument --choose: 0 is no whole number of at least 1"),
        ([*FEW, *GPUS, "--choose", "9999"], "--choose 9999: write a number of the table"),
        ([*NUMBERS, *GPUS, "--set", "zero_optimization.stgae=1"], "stage"),
        ([*FEW, *GPUS, "--write", "/no/such/folder/x.json"], "--write /no/such/folder/x.json: it cannot be written"),
        ([*FEW, "--html", "x.html"], "Write --all for a table of all candidates, or --json"),
    ],
)
def test_a_wrong_request_says_what_to_write(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and message in err
