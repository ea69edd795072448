"""Values of split parameters are read and written whole: states, gradients, weights and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import distribute_tensor

import zeroengine
from tests.distributed.models import batch, build
from tests.distributed.ranks import run_ranks
from tests.distributed.training import adamw, take_steps
from tests.emulated import cpu_alone
from tests.slices.split_models import make_split_engine, untied_lm

pytestmark = cpu_alone("the ranks of a model group talk over Gloo")

SPLIT, WHOLE = "blocks.0.up.weight", "blocks.0.norm.bias"
ROWS = "blocks.0.down.weight"
UNEVEN = "head.weight"  # 61 rows over 2 ranks
WRITTEN = (SPLIT, "blocks.1.down.weight", UNEVEN, WHOLE)
Values = dict[str, torch.Tensor]


def ramp(value: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, value.numel()).view(value.shape)


def params_of(engine: zeroengine.Engine) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def read_all(engine: zeroengine.Engine, folder: Path) -> dict[str, Any]:
    """Read whole values in the middle of a step, and after it."""
    found: dict[str, Any] = {}
    params = params_of(engine)
    take_steps(engine, range(1), share=engine.sample_group)
    engine.backward(engine(*batch(1, engine.sample_group)))
    found["gradients"] = {name: zeroengine.full_gradient(param) for name, param in params.items()}
    engine.step()
    found["state dict"] = engine.full_state_dict()
    found["some"] = engine.full_state_dict(names=["blocks.0.*"])
    found["of rank 0"] = engine.full_state_dict(rank0_only=True)
    found["masters"] = {name: zeroengine.full_master(param) for name, param in params.items()}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        found[key] = {name: zeroengine.full_optimizer_state(param, key) for name, param in params.items()}
    with zeroengine.gathered(engine.module):
        found["gathered"] = {
            name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
            for name, param in params.items()
        }
    engine.save_weights(folder / "weights")
    return found


def write_all(engine: zeroengine.Engine) -> dict[str, Any]:
    """Write whole values by each public function, and return what is read then."""
    found: dict[str, Any] = {}
    params = params_of(engine)
    for name in WRITTEN:
        value = ramp(params[name])
        zeroengine.set_full_master(params[name], value)
        for key in ("exp_avg", "exp_avg_sq"):
            zeroengine.set_full_optimizer_state(params[name], key, value.square())
    found["masters"] = {name: zeroengine.full_master(params[name]) for name in WRITTEN}
    found["moments"] = {name: zeroengine.full_optimizer_state(params[name], "exp_avg") for name in WRITTEN}
    found["state dict"] = engine.full_state_dict()
    engine.backward(engine(*batch(2, engine.sample_group)))
    for name in WRITTEN:
        zeroengine.set_full_gradient(params[name], ramp(params[name]))
    found["gradients"] = {name: zeroengine.full_gradient(params[name]) for name in WRITTEN}
    engine.step()
    found["norm"] = engine.grad_norm
    found["stepped"] = engine.full_state_dict()
    return found


def write_gathered(engine: zeroengine.Engine) -> dict[str, Any]:
    """Write values of slices and of whole parameters as user code does, and those of one slice alone."""
    found: dict[str, Any] = {"before": engine.full_state_dict()}
    params = params_of(engine)
    with zeroengine.gathered(engine.module), torch.no_grad():
        for name in WRITTEN:
            params[name].mul_(2)
    found["all ranks"] = engine.full_state_dict()
    found["masters"] = {name: zeroengine.full_master(params[name]) for name in WRITTEN}
    # One rank writes what it has of a parameter: the ranks with the same slice get it, and the other slice stays.
    with zeroengine.gathered(engine.module), torch.no_grad():
        if engine.rank == 3:
            params[SPLIT].to_local().zero_()  # type: ignore[attr-defined]
            params[WHOLE].zero_()
    found["one rank"] = engine.full_state_dict()
    return found


def assign_gradients(engine: zeroengine.Engine) -> Values:
    """Assign gradients as user code does, DTensors and whole ones, and return what the step is to use."""
    params = params_of(engine)
    engine.backward(engine(*batch(3, engine.sample_group)))
    param = params[SPLIT]
    param.grad = distribute_tensor(ramp(param), param.device_mesh, param.placements)  # type: ignore[attr-defined]
    params[WHOLE].grad = ramp(params[WHOLE])
    params[ROWS].grad = ramp(params[ROWS])
    params[UNEVEN].grad = None
    found = {name: zeroengine.full_gradient(params[name]) for name in (SPLIT, WHOLE, ROWS)}
    assert zeroengine.full_gradient(params[UNEVEN]) is None
    engine.step()
    return found


def load_all(engine: zeroengine.Engine, folder: Path, values: Values) -> dict[str, Any]:
    """Load values from files that this engine has written, from those of plain PyTorch, and from a state dict."""
    found: dict[str, Any] = {}
    engine.load_weights(folder / "weights")
    found["own files"] = engine.full_state_dict()
    engine.load_weights(folder / "plain.safetensors")
    found["files"] = engine.full_state_dict()
    engine.load_weights({name: value + 1 for name, value in values.items()} if engine.rank == 0 else None)
    found["state dict"] = engine.full_state_dict()
    found["masters"] = {name: zeroengine.full_master(param) for name, param in params_of(engine).items()}
    with zeroengine.gathered(engine.module):
        engine.module.load_state_dict({name: value + 2 for name, value in values.items()})
    found["by torch"] = engine.full_state_dict()
    found["masters by torch"] = {name: zeroengine.full_master(param) for name, param in params_of(engine).items()}
    return found


def use_values(stage: int, folder: Path, values: Values) -> dict[str, dict[str, Any]]:
    """On one rank: what it reads after each kind of access."""
    engine = make_split_engine(2, stage, untied_lm)
    found = {"read": read_all(engine, folder), "written": write_all(engine), "gathered": write_gathered(engine)}
    found["assigned"] = assign_gradients(engine)
    found["loaded"] = load_all(engine, folder, values)
    assert engine.memory().gathered == 0
    engine.close()
    return found


class Plain:
    """Two steps by plain PyTorch, of what two model groups see.

    Attributes:
        gradients: Those of the second step, before clipping.
        values: Of the parameters after it.
        states: The optimizer's, by key.
        initial: Of the parameters before training.
    """

    def __init__(self) -> None:
        model = build(untied_lm)
        optimizer = adamw(model)
        self.initial = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(2):
            optimizer.zero_grad()
            torch.stack([model(*batch(step, rank)) for rank in range(2)]).mean().backward()
            params = dict(model.named_parameters())
            self.gradients = {name: param.grad.clone() for name, param in params.items() if param.grad is not None}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        self.values = {name: param.detach().clone() for name, param in params.items()}
        keys = ("exp_avg", "exp_avg_sq", "step")
        self.states = {key: {name: optimizer.state[param][key] for name, param in params.items()} for key in keys}


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request: pytest.FixtureRequest, plain: Plain, folder: Path) -> list[dict[str, dict[str, Any]]]:
    save_file(plain.initial, folder / "plain.safetensors")
    return run_ranks(4, use_values, request.param, folder, plain.initial)


def assert_near(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_every_rank_reads_whole_gradients_states_and_weights(ranks: list[Any], plain: Plain) -> None:
    for rank in ranks:
        assert_near(rank["read"]["gradients"], plain.gradients)
        assert_near(rank["read"]["masters"], plain.values)
        for key, states in plain.states.items():
            assert_near(rank["read"][key], states)
        assert_near(rank["read"]["state dict"], plain.values)
        assert_equal(rank["read"]["gathered"], rank["read"]["state dict"])


def test_a_state_dict_has_the_tensors_that_were_asked_for_and_on_rank_0_alone(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        every = rank["read"]["state dict"]
        assert_equal(rank["read"]["some"], {n: value for n, value in every.items() if n.startswith("blocks.0.")})
        assert_equal(rank["read"]["of rank 0"], every if number == 0 else {})


def test_files_of_weights_hold_whole_parameters(ranks: list[Any], folder: Path) -> None:
    files = list((folder / "weights").glob("*.safetensors"))
    assert_equal({n: v for file in files for n, v in load_file(file).items()}, ranks[0]["read"]["masters"])


def test_whole_values_that_are_set_are_read_back(ranks: list[Any], plain: Plain) -> None:
    ramps = {name: ramp(plain.values[name]) for name in WRITTEN}
    for rank in ranks:
        found = rank["written"]
        assert_equal(found["masters"], ramps)
        assert_equal(found["moments"], {name: value.square() for name, value in ramps.items()})
        assert_near(found["gradients"], ramps)
        state = found["state dict"]
        assert_equal({name: state[name] for name in WRITTEN}, ramps)
        unwritten = [name for name in state if name not in WRITTEN]
        assert_equal({n: state[n] for n in unwritten}, {n: rank["read"]["state dict"][n] for n in unwritten})


def test_a_step_uses_the_states_and_gradients_that_were_set(ranks: list[Any], plain: Plain) -> None:
    for rank in ranks:
        found = rank["written"]
        for name in WRITTEN:
            param = nn.Parameter(ramp(plain.values[name]))
            optimizer = adamw(nn.ParameterList([param]))
            squares = ramp(param.detach()).square()
            optimizer.state[param] = {"step": torch.tensor(2.0), "exp_avg": squares, "exp_avg_sq": squares.clone()}
            # The norm of all gradients clips those that were set.
            param.grad = ramp(param.detach()) * min(1.0, 1.0 / (found["norm"] + 1e-6))
            optimizer.step()
            torch.testing.assert_close(found["stepped"][name], param.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_that_user_code_assigns_are_those_of_the_step(ranks: list[Any], plain: Plain) -> None:
    for rank in ranks:
        assert_near(rank["assigned"], {name: ramp(plain.values[name]) for name in (SPLIT, WHOLE, ROWS)})


def test_writes_to_gathered_parameters_reach_the_masters(ranks: list[Any]) -> None:
    for rank in ranks:
        found = rank["gathered"]
        expected = {name: value * 2 if name in WRITTEN else value for name, value in found["before"].items()}
        assert_equal(found["all ranks"], expected)
        assert_equal(found["masters"], {name: expected[name] for name in WRITTEN})


def test_a_write_on_one_rank_reaches_those_with_the_same_slice(ranks: list[Any]) -> None:
    for rank in ranks:
        expected = dict(rank["gathered"]["all ranks"])
        expected[WHOLE] = torch.zeros_like(expected[WHOLE])
        # Ranks 1 and 3 have the second half of the rows.
        half = len(expected[SPLIT]) // 2
        expected[SPLIT] = torch.cat([expected[SPLIT][:half], torch.zeros_like(expected[SPLIT][half:])])
        assert_equal(rank["gathered"]["one rank"], expected)


def test_whole_weights_load_from_files_and_from_the_state_dict_of_rank_0(ranks: list[Any], plain: Plain) -> None:
    for rank in ranks:
        assert_equal(rank["loaded"]["own files"], rank["read"]["masters"])
        assert_equal(rank["loaded"]["files"], plain.initial)
        assert_equal(rank["loaded"]["state dict"], {name: value + 1 for name, value in plain.initial.items()})
        assert_equal(rank["loaded"]["masters"], rank["loaded"]["state dict"])


def test_whole_tensors_load_by_the_models_own_load_state_dict(ranks: list[Any], plain: Plain) -> None:
    for rank in ranks:
        assert_equal(rank["loaded"]["by torch"], {name: value + 2 for name, value in plain.initial.items()})
        assert_equal(rank["loaded"]["masters by torch"], rank["loaded"]["by torch"])
