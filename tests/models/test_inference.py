"""Models that only run forwards: logits, tokens, memory, and what there is not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
from tests.distributed.models import TinyLM, batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import start
from tests.emulated import cpu_alone
from zeroengine.config import load
from zeroengine.disk.aligned_memory import ALIGNMENT
from zeroengine.errors import OffloadError, ZeroEngineError

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH, INNER = 128, 64, 96
# The elements of a layer.
LAYER = 3 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH


def config_of_llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="bfloat16",
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of random weights in bf16, in several safetensors files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    transformers.LlamaForCausalLM(config_of_llama()).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def engine_of(weights: Path, disk: Path | None, **zero: Any) -> zeroengine.Engine:
    with zeroengine.meta_init(values=False):
        model = transformers.AutoModelForCausalLM.from_config(config_of_llama(), dtype=torch.bfloat16)
    model.requires_grad_(False).eval()
    place: dict[str, Any] = {"device": "cpu"} if disk is None else {"device": "nvme", "nvme_path": str(disk)}
    place |= {"ratio": zero.pop("ratio", 1.0), "in_place": zero.pop("in_place", False)}
    settings = {"stage": 3, "param_persistence_threshold": 1000, "offload_param": place, **zero}
    engine = zeroengine.initialize(model, {"zero_optimization": settings})
    engine.load_weights(weights)
    return engine


def answers(model: Any, call: Callable[..., Any]) -> list[torch.Tensor]:
    """Logits of a batch, and what is generated for it and for a single prompt."""
    ids = torch.arange(24).view(3, 8) % VOCAB
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        found = [call(ids).logits, model.generate(ids, **options), model.generate(ids[:1], **options)]
    with torch.no_grad():
        found.append(call(ids).logits)
    return [value.clone() for value in found]


def answers_of_engines(weights: Path, ways: list[tuple[Path | None, dict[str, Any]]]) -> list[list[torch.Tensor]]:
    start()
    found = []
    for disk, zero in ways:
        engine = engine_of(weights, disk, **zero)
        found.append(answers(engine.module, engine))
        engine.close()
    return found


@cpu_alone("the model with which it is compared computes on the CPU")
def test_logits_and_tokens_are_those_of_transformers(weights: Path, disk: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
    expected = answers(model, model)
    partly, in_place = (disk, {"ratio": 0.5}), (disk, {"in_place": True})
    for num_ranks, ways in (
        (1, [(disk, {}), partly, (disk, {"prefetch_bucket_size": 0})]),
        (2, [(None, {}), partly, in_place]),
    ):
        for of_rank in run_ranks(num_ranks, answers_of_engines, weights, ways):
            for way, found in zip(ways, of_rank, strict=True):
                assert all(map(torch.equal, found, expected)), (num_ranks, way)


def test_memory_holds_the_unit_in_use_and_what_is_read_ahead(weights: Path, disk: Path) -> None:
    # Besides it nothing is read ahead, or one layer, or two. The last units of a token are followed by its first ones.
    for layers in range(3):
        engine = engine_of(weights, disk, prefetch_bucket_size=layers * LAYER)
        held: list[int] = []

        def note(*_: object, engine: zeroengine.Engine = engine, held: list[int] = held) -> None:
            held.append(engine.memory().gathered)

        for module in engine.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note)
        with torch.inference_mode():
            engine.module.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, do_sample=False)
        assert layers * 2 * LAYER < max(held) <= (layers + 1) * 2 * LAYER + 4096, layers
        assert (engine.memory().gathered > 0) == (layers > 0), "the first units of the next token"
        held.clear()
        with torch.inference_mode():
            for _ in range(2):
                engine.module.model(torch.ones(1, 4, dtype=torch.long))
        assert layers * 2 * LAYER < max(held) <= (layers + 1) * 2 * LAYER + 4096, "a part of the model by itself"
        engine.close()


def test_a_part_of_the_weights_stays_in_memory(weights: Path, disk: Path) -> None:
    memory = {}
    for ratio in (1.0, 0.5, 0.0):
        engine = engine_of(weights, disk, ratio=ratio)
        found = engine.memory()
        memory[ratio] = found.parameters, found.nvme["parameters"]
        engine.close()
    total = sum(memory[1.0])
    assert memory[1.0][0] < 2000 and memory[0.0] == (pytest.approx(total, rel=0.01), 0)
    assert 0.3 * total < memory[0.5][1] <= 0.5 * total


def disk_bytes() -> int:
    """The bytes on disks that the nameless files of this process take."""
    found = {}
    for link in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if Path(os.readlink(f"/proc/self/fd/{link}")).name.startswith("zeroengine-"):
                status = os.stat(f"/proc/self/fd/{link}")
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


@cpu_alone("the model with which it is compared computes on the CPU")
def test_weights_are_read_where_they_are(weights: Path, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval()
    expected, nbytes = answers(model, model), sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    folder = Path(shutil.copytree(weights, Path(tempfile.mkdtemp(dir=disk)) / "weights"))
    engine = engine_of(folder, disk, in_place=True)

    def check(factor: float = 1.0) -> None:
        found = answers(engine.module, engine)
        assert torch.equal(found[0], expected[0] * factor)
        assert factor != 1 or all(map(torch.equal, found, expected))

    check()
    engine.load_weights(folder)
    check()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert disk_bytes() <= 2 * ALIGNMENT and "are copied" not in caplog.text
    # Who uses them in any other way finds them too.
    engine.save_checkpoint(folder / "saved")
    assert nbytes // 2 < disk_bytes() < 2 * nbytes
    check()
    with zeroengine.gathered(engine.module):
        engine.module.lm_head.weight.data.mul_(2)
    check(2.0)
    engine.load_weights(folder)
    check()
    engine.load_weights({name: value.double() for name, value in model.state_dict().items()})
    assert "frozen tensors are copied to nvme_path: " in caplog.text
    check()
    engine.load_weights(folder)
    engine.load_checkpoint(folder / "saved")
    check()
    engine.load_weights(folder)
    engine.change({"zero_optimization": {"stage": 3}})
    check()
    engine.close()
    assert disk_bytes() == 0


def test_a_write_without_room_on_the_disk_changes_nothing(
    weights: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(weights, Path(tempfile.mkdtemp(dir=disk)) / "weights"))
    engine = engine_of(folder, disk, in_place=True)
    before, layer = engine.full_state_dict(), engine.module.model.layers[1]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OffloadError, match="No space left"), zeroengine.gathered(layer), torch.no_grad():
            layer.mlp.up_proj.weight.mul_(2)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, before[name]), name
    with zeroengine.gathered(layer), torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, before[name] * (2 if name == "model.layers.1.mlp.up_proj.weight" else 1)), name
    engine.close()


def test_weights_that_change_where_they_are_read_are_an_error(weights: Path, disk: Path) -> None:
    folder = Path(shutil.copytree(weights, Path(tempfile.mkdtemp(dir=disk)) / "weights"))
    engine = engine_of(folder, disk, in_place=True, prefetch_bucket_size=0)
    file = next(folder.glob("*.safetensors"))
    # Another file of this name changes nothing.
    shutil.copy(file, folder / "copy")
    os.replace(folder / "copy", file)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        engine(ids)
    engine.load_weights(folder)
    os.truncate(file, file.stat().st_size)
    with torch.no_grad(), pytest.raises(OffloadError, match=r"safetensors was changed after .* start again with"):
        engine(ids)
    with pytest.raises(OffloadError, match="was changed"):
        engine.close()


def test_there_is_nothing_of_a_training(disk: Path) -> None:
    model = build(TinyLM).requires_grad_(False)
    place = {"device": "nvme", "nvme_path": str(disk)}
    engine = zeroengine.initialize(
        model, {"zero_optimization": {"stage": 3, "param_persistence_threshold": 0, "offload_param": place}}
    )
    memory = engine.memory()
    for state in ("gradients", "master", "optimizer", "buckets"):
        assert getattr(memory, state) == memory.nvme.get(state, 0) == 0, state
    for module in model.modules():
        assert not module._backward_hooks and not module._backward_pre_hooks
    ids, labels = batch(0, 0)
    with torch.inference_mode():
        expected = engine(ids, labels)
    # A forward with gradients enabled makes no graph, because nothing requires any.
    assert torch.equal(engine(ids, labels), expected) and not engine(ids, labels).requires_grad
    for call in (lambda: engine.backward(engine(ids, labels)), engine.step):
        with pytest.raises(ZeroEngineError, match=r"all parameters are frozen .* this engine runs forwards alone"):
            call()
    engine.close()
    assert torch.equal(model(ids, labels), expected)


def test_the_configuration_may_come_second() -> None:
    for config in ({"zero_optimization": {"stage": 3}}, load({"zero_optimization": {"stage": 3}})):
        engine = zeroengine.initialize(nn.Linear(2, 2).requires_grad_(False), config)
        assert engine.config.zero_optimization.stage == 3
        engine.close()
    with pytest.raises(ZeroEngineError, match=r"A model that only runs forwards needs none: freeze it"):
        zeroengine.initialize(nn.Linear(2, 2), {})
    with pytest.raises(ZeroEngineError, match=r"optimizer is a torch.optim.Optimizer, .*; found \{\}"):
        zeroengine.initialize(nn.Linear(2, 2), {}, {})  # type: ignore[arg-type]
    with pytest.raises(ZeroEngineError, match=r"nowhere\.json: cannot be read"):
        zeroengine.initialize(nn.Linear(2, 2).requires_grad_(False), "nowhere.json")


def test_weights_that_do_not_fit_are_refused(weights: Path, disk: Path) -> None:
    model = build(TinyLM).requires_grad_(False)
    engine = zeroengine.initialize(model, {"zero_optimization": {"stage": 3}})
    with pytest.raises(ZeroEngineError, match=r"is another model's: norm\.weight has shape"):
        engine.load_weights(weights)
    engine.close()


def test_the_head_does_not_copy_its_weights_for_each_sequence() -> None:
    head = nn.Linear(64, 32, bias=False).bfloat16().requires_grad_(False)
    engine = zeroengine.initialize(head, {"zero_optimization": {"stage": 3}})
    strides: list[tuple[int, ...]] = []
    head.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    # The strides count for torch even where a size is 1.
    for last in (torch.randn(4, 8, 64).bfloat16()[:, -1:], torch.randn(1, 8, 64).bfloat16()[:, -1:]):
        assert torch.equal(head(last), nn.functional.linear(last.reshape(-1, 64), head.weight).unsqueeze(1))
    assert strides == [(64, 64, 1)] * 2
    engine.close()
    head(last)
    assert strides[-1] == (512, 64, 1)
