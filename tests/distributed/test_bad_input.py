"""Wrong input is a clear error on every rank, and the ranks are still together after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroengine
from tests.distributed.models import Block, TinyLM, batch, build, config
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Task, make_engine, ordinary_loop, start
from tests.optim.test_elementwise import Written, normalize_all
from zeroengine import Muon, ZeroEngineError
from zeroengine.engine.model_checks import check_one_device


def adamw(params: Any, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **({"lr": 1e-3} | more))


def initialize(model: Any, optimizer: Any = None, stage: int = 1, **more: Any) -> zeroengine.Engine:
    return zeroengine.initialize(model, optimizer, config(stage, **more))


# As these libraries are not installed here.
BnbAdamW8bit = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
TorchaoAdam4bit = type("Adam4bit", (torch.optim.Adam,), {"__module__": "torchao.optim.adam"})

# -- wrong without another rank ------------------------------------------------------------------------


def test_a_model_on_several_devices_is_refused() -> None:
    with FakeTensorMode():  # there need not be a GPU
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        model[0].bias = nn.Parameter(torch.empty(2, device="cuda:0"))
    with pytest.raises(ZeroEngineError, match=r"several devices: 0.weight on cpu, 0.bias on cuda:0. A rank"):
        check_one_device(model)
    check_one_device(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


# -- wrong on every rank ------------------------------------------------------------------------------


def frozen_block() -> nn.Module:
    model = TinyLM()
    model.blocks[1].requires_grad_(False)
    return model


def with_buffer(values: torch.Tensor) -> nn.Module:
    model = build()
    model.register_buffer("extra", values)
    return model


def with_parameter(values: torch.Tensor) -> nn.Module:
    model = build()
    model.extra = nn.Parameter(values, requires_grad=False)
    return model


def by_import_path(kind: str, params: dict[str, Any]) -> None:
    zeroengine.initialize(build(), None, config(1, optimizer={"type": kind, "params": params}))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() > 1]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 1]


def several(make: Callable[[nn.Module], Any]) -> None:
    model = build()
    initialize(model, make(model))


def second_initialize() -> None:
    model = build()
    engine = initialize(model)
    initialize(model, stage=3)
    assert engine


def over_frozen_part() -> Any:
    model = build()
    model.head.requires_grad_(False)
    return initialize(model, torch.optim.AdamW(model.head.parameters()))


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = adamw(model.parameters())
    model(*batch(0, 0)).backward()
    optimizer.step()
    return model, optimizer


def over_others() -> None:
    model, other = build(), build()
    initialize(model, adamw([*model.parameters(), *other.norm.parameters()]))


def used(act: Callable[[zeroengine.Engine], Any]) -> None:
    act(initialize(build(), stage=3))


def used_frozen(act: Callable[[zeroengine.Engine], Any]) -> None:
    act(zeroengine.initialize(build().requires_grad_(False), config=config(3, optimizer=None)))


def loss_of(engine: zeroengine.Engine) -> torch.Tensor:
    return engine(*batch(0, engine.rank))


def replaced(change: Callable[[nn.Module], Any], stage: int) -> None:
    model = build(frozen_block)
    engine = initialize(model, stage=stage)
    engine.backward(loss_of(engine))
    engine.step()
    change(model)
    engine.backward(loss_of(engine))
    engine.step()


def backward_in_no_grad(engine: zeroengine.Engine) -> None:
    with torch.no_grad():
        engine.backward(loss_of(engine))


def step_twice(engine: zeroengine.Engine) -> None:
    engine.backward(loss_of(engine))
    engine.step()
    engine.step()


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def used_in_fp16(act: Callable[[zeroengine.Engine], Any], **more: Any) -> None:
    """After the error it trains on."""
    engine = initialize(build(), stage=3, **{**FP16, **more})
    try:
        act(engine)
    finally:
        before = engine.micro_steps
        engine.backward(loss_of(engine))
        while not engine.step():
            engine.backward(loss_of(engine))
        assert engine.global_steps == 1 and engine.micro_steps - before <= 2


def set_scale(engine: zeroengine.Engine, scale: Any) -> None:
    engine.loss_scale = scale


def set_scale_between_micro_steps(engine: zeroengine.Engine) -> None:
    engine.backward(loss_of(engine))
    engine.step()
    engine.loss_scale = 2


def step_in_no_sync(engine: zeroengine.Engine) -> None:
    with engine.no_sync():
        engine.backward(loss_of(engine))
        engine.step()


def named(kind: str, **params: Any) -> None:
    zeroengine.initialize(build(), config=config(1, optimizer={"type": kind, "params": params}))


STEP = r"step\(\) without backward\(\): call engine.backward\(loss\) \(or loss.backward\(\)\) first"
DETACHED = r"the loss is detached from the parameters. Compute it from engine\(...\), outside torch.no_grad\(\)"
NO_OPTIMIZER = r'no optimizer: pass one to initialize\(model, optimizer, config\), or .* "AdamW", .* freeze it by model'

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "model without parameters": (
        lambda: initialize(nn.Sequential(nn.ReLU())),
        r"the model \(Sequential\) has no parameters: .* Pass the module that holds the weights",
    ),
    "a parameter without a shape": (
        lambda: initialize(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))),
        r"parameter 1.weight has no shape yet: .* lazy .* Run one on a batch before initialize\(\), such as `with",
    ),
    "a buffer without a shape": (
        lambda: initialize(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))),
        "buffer 1.running_mean has no shape yet",
    ),
    "a sparse buffer": (
        lambda: initialize(with_buffer(torch.eye(3).to_sparse())),
        r"buffer extra has the layout torch.sparse_coo: .* Keep it dense \(.to_dense\(\)\), keep its indices",
    ),
    "a quantized buffer": (
        lambda: initialize(with_buffer(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))),
        r"buffer extra is a quantized tensor \(torch.qint8\), .* Keep its integers \(.int_repr\(\)\) and its scale",
    ),
    "a buffer of nested tensors": (
        lambda: initialize(with_buffer(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged))),
        "buffer extra is a NestedTensor, which wraps other tensors .* Keep the tensors that it wraps",
    ),
    "a frozen weight of four bits": (
        lambda: initialize(with_parameter(torch.ones(3, dtype=torch.uint8).view(torch.uint4))),
        r"parameter extra has the dtype torch.uint4, which .* cannot copy. Keep its bytes as torch.uint8",
    ),
    "a trainable weight of eight bits": (
        lambda: initialize(with_parameter(torch.ones(3).to(torch.float8_e5m2)).requires_grad_()),
        r"parameter extra is torch.float8_e5m2 and trainable, .* Freeze it, cast it .* write \"bf16\": \{\"enabled\"",
    ),
    "no model": (lambda: initialize(TinyLM), r"initialize\(\) takes a torch.nn.Module, found type"),
    "parameters as model": (lambda: initialize(build().parameters()), r"takes a torch.nn.Module, found generator"),
    "second initialize": (
        second_initialize,
        r"parameter tok.weight already belongs to an engine: .* takes a model once",
    ),
    "optimizer over others": (
        over_others,
        r"AdamW: param_groups\[0\]\['params'\]\[\d+\], of shape \(24,\), is not a parameter of the model. Build the",
    ),
    "optimizer over a frozen part": (
        over_frozen_part,
        r"AdamW has none of the trainable parameters \(.*norm.weight, .*\), so nothing would be trained",
    ),
    "optimizer that has stepped": (
        lambda: initialize(*stepped()),
        r"AdamW passed to initialize\(\) has already taken steps",
    ),
    "no optimizer": (lambda: zeroengine.initialize(build(), None, {"zero_optimization": {"stage": 1}}), NO_OPTIMIZER),
    "optimizer is a name": (
        lambda: initialize(build(), "AdamW"),
        r"optimizer is a torch.optim.Optimizer, .*; found 'AdamW'",
    ),
    "callable that makes none": (
        lambda: initialize(build(), lambda params: list(params) and None),
        "the optimizer callable returned None, not a torch.optim.Optimizer",
    ),
    "SparseAdam": (
        lambda: (lambda model: initialize(model, torch.optim.SparseAdam(model.parameters()), stage=0))(build()),
        r"SparseAdam takes sparse gradients alone, .* Use an optimizer such as AdamW",
    ),
    "a flag for a rate": (
        lambda: zeroengine.initialize(
            build(), None, config(1, optimizer={"type": "torch.optim.RAdam", "params": {"lr": True}})
        ),
        r"optimizer.params.lr of torch.optim.RAdam: found True; write a number",
    ),
    "a word for a flag": (
        lambda: zeroengine.initialize(
            build(), None, config(1, optimizer={"type": "torch.optim.AdamW", "params": {"fused": "yes"}})
        ),
        r"optimizer.params.fused of torch.optim.AdamW: found 'yes'; write true or false",
    ),
    "a number for a pair": (
        lambda: zeroengine.initialize(
            build(), None, config(1, optimizer={"type": "torch.optim.RAdam", "params": {"betas": 0.9}})
        ),
        r"optimizer.params.betas of torch.optim.RAdam: found 0.9; write a list of 2 values",
    ),
    "LBFGS": (
        lambda: (lambda model: initialize(model, torch.optim.LBFGS(model.parameters()), stage=0))(build()),
        r"LBFGS calls the model in a step, through a closure",
    ),
    "8 bits of bitsandbytes": (
        lambda: (lambda model: initialize(model, BnbAdamW8bit(model.parameters())))(build()),
        r'AdamW8bit quantizes .* Write "optimizer": {"type": "AdamW"} and "optimizer_state_dtype": "int8"',
    ),
    "4 bits of torchao": (
        lambda: (lambda model: initialize(model, TorchaoAdam4bit(model.parameters())))(build()),
        r'Adam4bit quantizes .*"type": "Adam", "params": {"adam_w_mode": false}.*"optimizer_state_dtype": "int8"',
    ),
    "an optimizer that couples parameters": (
        lambda: several(lambda model: Written(matrices(model), normalize_all)),
        r"Written looks at several parameters to update one, .* Use zero_optimization.stage 0, or an optimizer that",
    ),
    "one of several that couples parameters": (
        lambda: several(lambda model: [Muon(matrices(model)), Written(vectors(model), normalize_all)]),
        r"Written looks at several parameters to update one",
    ),
    "one of several that needs a closure": (
        lambda: several(lambda model: [Muon(matrices(model)), torch.optim.LBFGS(vectors(model))]),
        r"LBFGS calls the model in a step, through a closure",
    ),
    "a list with a class": (
        lambda: several(lambda model: [Muon(matrices(model)), torch.optim.AdamW]),
        r"several optimizers are a list of torch.optim.Optimizer, found one of \['Muon', 'type'\]",
    ),
    "an empty list": (lambda: initialize(build(), []), "several optimizers are a list of .*, found one of none"),
    "a parameter in two optimizers": (
        lambda: several(lambda model: [Muon(matrices(model)), adamw(model.parameters())]),
        r"several of Muon, AdamW have the same parameters, of shapes \(61, 24\), .*; each parameter belongs to one",
    ),
    "a parameter twice in a group": (
        lambda: several(lambda model: adamw([*model.parameters(), *vectors(model)])),
        r"AdamW: blocks.0.norm.weight is again in param_groups\[0\]; name it once",
    ),
    "Muon over vectors": (
        lambda: several(lambda model: Muon(model.parameters())),
        r"Muon: found a parameter of shape \(24,\), which is no matrix. Give vectors, .* zeroengine.MixedOpt",
    ),
    "Muon in two dtypes": (
        lambda: several(
            lambda model: Muon(
                [{"params": [p], "ns_dtype": d} for p, d in zip(matrices(model), ("fp32", "bf16"), strict=False)]
            )
        ),
        r"Muon: found groups of different ns_dtype; write one for all of them",
    ),
    "Muon without a matrix": (
        lambda: zeroengine.initialize(nn.LayerNorm(8), None, config(1, optimizer={"type": "Muon"})),
        r'Muon finds no hidden matrix in the model, .* here are weight, bias. Write "type": "AdamW", or name matrices',
    ),
    "a pattern for Muon that matches nothing": (
        lambda: named("muon", muon_params=["layers.*"]),
        r"muon_params: the pattern 'layers.\*' matches no trainable parameter of two .* are tok.weight, blocks.0",
    ),
    "a pattern for matrices that matches nothing": (
        lambda: named("Muon", matrices={"*.q.weight": 4}),
        r"matrices: the pattern '\*.q.weight' matches no parameter that Muon updates; these are blocks.0.up.weight",
    ),
    "rows that do not divide": (
        lambda: named("Muon", matrices={"*.up.weight": 7}),
        r"num_matrices is 7 for a parameter of shape \(72, 24\), whose 72 rows do not divide into so many blocks",
    ),
    "heads that are not known": (
        lambda: named("Muon", per_head_muon=True),
        r'per_head_muon: model.config .* do not say which are heads; write .* "matrices": \{"\*.q_proj.weight": 32\}',
    ),
    "Muon with moments in bf16": (
        lambda: zeroengine.initialize(
            build(), None, config(1, optimizer={"type": "Muon"}, optimizer_state_dtype="bf16")
        ),
        r"optimizer_state_dtype: Adam, .* keep moments in bf16 and int8, not Muon; leave the key out",
    ),
    "units that match nothing": (
        lambda: initialize(build(), units=["layers.*"]),
        r"the pattern 'layers.\*' matches no module with parameters. Modules are named like: tok, blocks, blocks.0",
    ),
    "a file that is not there": (lambda: zeroengine.initialize(build(), config="nowhere/ds.json"), r"nowhere/ds\.json"),
    "an unknown key": (
        lambda: initialize(build(), zero_optimization={"stage": 1, "reduce_bucket_sizes": 3}),
        "reduce_bucket_sizes.*reduce_bucket_size",
    ),
    "batch sizes": (lambda: initialize(build(), train_batch_size=7), "train_batch_size"),
    "step without backward": (lambda: used(lambda engine: engine.step()), STEP),
    "step without a new backward": (lambda: used(step_twice), STEP),
    "loss is a number": (lambda: used(lambda e: e.backward(loss_of(e).item())), r"takes the loss tensor, found float"),
    "loss is a tuple": (lambda: used(lambda e: e.backward((loss_of(e),))), r"takes the loss tensor, found tuple"),
    "loss is a vector": (
        lambda: used(lambda e: e.backward(loss_of(e) * torch.ones(3))),
        r"takes a scalar loss, found shape \(3,\): reduce it first, such as loss.mean\(\)",
    ),
    "loss is detached": (lambda: used(lambda e: e.backward(loss_of(e).detach())), DETACHED),
    "a backward where everything is frozen": (
        lambda: used_frozen(lambda e: e.backward(loss_of(e))),
        r"backward\(\): all parameters are frozen \(requires_grad=False\), as they are without an optimizer, so this",
    ),
    "a step where everything is frozen": (
        lambda: used_frozen(lambda e: e.step()),
        r"step\(\): all parameters are frozen \(requires_grad=False\), as they are without an optimizer, so this",
    ),
    "a model that is cast afterwards": (
        lambda: replaced(lambda model: model.double(), 0),
        r"parameter tok.weight was given another shape, dtype or device after initialize\(\), by .to\(\), .half\(\)",
    ),
    "a parameter unfrozen afterwards": (
        lambda: replaced(lambda model: model.requires_grad_(True), 2),
        r"parameter blocks.1.norm.weight was frozen at initialize\(\) and requires a gradient now",
    ),
    "a released parameter unfrozen": (
        lambda: replaced(lambda model: model.requires_grad_(True), 3),
        r"parameter blocks.1.norm.weight was frozen at initialize\(\) and requires a gradient now",
    ),
    "two precisions": (
        lambda: initialize(build(), bf16={"enabled": True}, **FP16),
        r'bf16 and fp16 are enabled, and one of bf16, .* can be; write "fp16": \{"enabled": false\}',
    ),
    "a precision and autocast": (
        lambda: initialize(build(), torch_autocast={"enabled": True}, **FP16),
        r'fp16 and torch_autocast are enabled, .* write "torch_autocast": \{"enabled": false\}',
    ),
    "a negative clip": (
        lambda: initialize(build(), gradient_clipping=-1.0),
        r"gradient_clipping: found -1.0 \(a number\); it should be greater than or equal to 0",
    ),
    "a scheduler without its parameters": (
        lambda: initialize(build(), scheduler={"type": "WarmupDecayLR", "params": {}}),
        "scheduler.params.total_num_steps: missing; write the number of steps",
    ),
    "an optimizer's name that is unknown": (
        lambda: named("Lamb"),
        r'found "Lamb" .* It is not available: torch has no LAMB; a class of another package runs at every stage',
    ),
    "a module that is not there": (
        lambda: named("nowhere.Adam"),
        r'"nowhere.Adam" cannot be imported: No module named .* Write the import path of an optimizer class, such as',
    ),
    "a class that is not there": (
        lambda: named("torch.optim.Adem"),
        r'"torch.optim.Adem" cannot be imported: .* has no attribute .* such as "torch.optim.RAdam"',
    ),
    "a class that is no optimizer": (
        lambda: named("torch.nn.Linear"),
        r'"torch.nn.Linear" is .* not a subclass of torch.optim.Optimizer',
    ),
    "parameters that the class does not have": (
        lambda: named("torch.optim.RAdam", momentum=0.9),
        r"torch.optim.RAdam cannot be made with .*'momentum': 0.9.* It takes \(params.* betas",
    ),
    "parameters that the class refuses": (
        lambda: named("torch.optim.RAdam", lr=-1),
        r"optimizer.params: torch.optim.RAdam cannot be made with .* Invalid learning rate: -1",
    ),
    "modules that keep fp32 and are not there": (
        lambda: initialize(build(), keep_fp32_modules=["LayerNorm", "RMS*"], bf16={"enabled": True}),
        r"the pattern 'RMS\*' matches no module, .* Names are like tok, .*; classes are Embedding, .* LayerNorm",
    ),
    "a smallest loss scale of 0": (
        lambda: initialize(build(), fp16={"enabled": True, "min_loss_scale": 0}),
        "fp16.min_loss_scale: found 0 .* it should be greater than 0",
    ),
    "a loss scale of 0": (
        lambda: used_in_fp16(lambda e: set_scale(e, 0)),
        r'loss_scale is a positive number, found 0. For dynamic scaling write "fp16": \{"loss_scale": 0\}',
    ),
    "a loss scale below the smallest": (
        lambda: used_in_fp16(lambda e: set_scale(e, 0.5)),
        "loss_scale is at least fp16.min_loss_scale, 1, found 0.5",
    ),
    "a loss scale in fp32": (
        lambda: used(lambda e: set_scale(e, 2)),
        r'only fp16 scales the loss; enable it with "fp16": \{"enabled": true\}',
    ),
    "a loss scale that changes within a step": (
        lambda: used_in_fp16(set_scale_between_micro_steps, gradient_accumulation_steps=3),
        r"loss_scale: the gradients of this step so far have another scale. Assign to it after the step\(\) that ends",
    ),
    "a plain backward in fp16": (
        lambda: used_in_fp16(lambda e: loss_of(e).backward()),
        r"Loss scaling is required in fp16, and .* call engine.backward\(loss\), or engine.scale\(loss\).backward\(\)",
    ),
    "a plain backward under fp16 autocast": (
        lambda: used_in_fp16(
            lambda e: loss_of(e).backward(), torch_autocast={"enabled": True, "dtype": "fp16"}, fp16={}
        ),
        "Loss scaling is required in fp16",
    ),
    "a step inside no_sync": (
        lambda: used(step_in_no_sync),
        r"step\(\) inside `with engine.no_sync\(\)`: at the accumulation boundary .* Leave the `with` before the last",
    ),
    "loss under no_grad": (lambda: used(backward_in_no_grad), DETACHED),
}


def all_cases() -> dict[str, tuple[str, str]]:
    start()
    found = {}
    for name, (make, _) in CASES.items():
        try:
            make()
            found[name] = ("no error", "")
        except Exception as error:
            found[name] = (
                type(error).__name__ if not isinstance(error, ZeroEngineError) else "ZeroEngineError",
                str(error),
            )
    model = build()  # which a failed attempt leaves as it was
    for stage, optimizer in ((3, lambda params: Written(params, normalize_all)), (3, lambda params: None)):
        with pytest.raises(ZeroEngineError):
            initialize(model, optimizer, stage)
    task = Task(steps=2)
    losses, _ = ordinary_loop(task, zeroengine.initialize(model, task.optimizer(model), config(3)))
    assert losses == ordinary_loop(task, make_engine(task, 3))[0]
    return found


def test_wrong_input_is_an_error_on_every_rank_that_says_what_to_write() -> None:
    for found in run_ranks(2, all_cases):
        for name, (_, message) in CASES.items():
            kind, text = found[name]
            assert kind == "ZeroEngineError", (name, kind, text)
            assert re.search(message, text, re.DOTALL), (name, text)


# -- wrong on one rank, or different ------------------------------------------------------------------


def on_rank_1(rank: int, usual: Any, other: Any) -> Any:
    return other if rank == 1 else usual


class Ordered(TinyLM):
    """The same names and shapes, registered in one order or another, as a loop over a set would."""

    def __init__(self, odd: bool) -> None:
        super().__init__(tied=False)
        if odd:
            self.norm = self._modules.pop("norm")


class Masked(TinyLM):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(length))


def no_decay(model: nn.Module, odd: bool) -> torch.optim.Optimizer:
    params = list(model.parameters())
    first = params[odd::2]
    rest = [p for p in params if not any(p is other for other in first)]
    return adamw([{"params": first[:6], "weight_decay": 0.0}, {"params": [*first[6:], *rest]}])


DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "configuration": (
        lambda rank: initialize(build(), gradient_clipping=on_rank_1(rank, 1.0, 0.5)),
        ["rank 1: configuration gradient_clipping is 0.5, on rank 0 1.0"],
    ),
    "stage": (
        lambda rank: initialize(build(), stage=on_rank_1(rank, 2, 3)),
        ["rank 1: configuration zero_optimization.stage is 3, on rank 0 2"],
    ),
    "width": (
        lambda rank: initialize(build(lambda: nn.Sequential(Block(8), Block(on_rank_1(rank, 8, 16))))),
        ["parameter 1.down.bias is (16,) float32", "on rank 0 (8,) float32"],
    ),
    "depth": (
        lambda rank: initialize(build(lambda: TinyLM(blocks=on_rank_1(rank, 2, 3)))),
        ["parameter blocks.2.down.bias is (24,) float32", "on rank 0 absent"],
    ),
    "order of registration": (
        lambda rank: initialize(build(lambda: Ordered(odd=rank == 1))),
        ["rank 1: parameter ", "number 1", "in unit"],
    ),
    "frozen": (
        lambda rank: initialize(build(on_rank_1(rank, TinyLM, frozen_block))),
        ["parameter blocks.1.down.bias is (24,) float32", "frozen, on rank 0 (24,) float32"],
    ),
    "dtype": (
        lambda rank: initialize(on_rank_1(rank, build(), build().double())),
        ["parameter blocks.0.down.bias is (24,) float64", "on rank 0 (24,) float32"],
    ),
    "buffer": (
        lambda rank: initialize(build(lambda: Masked(on_rank_1(rank, 3, 4)))),
        ["rank 1: buffer mask is (4,) float32, on rank 0 (3,) float32"],
    ),
    "learning rate": (
        lambda rank: initialize(build(), lambda params: adamw(params, lr=on_rank_1(rank, 1e-3, 1e-2))),
        ["rank 1: optimizer AdamW param_groups[0].lr is 0.01, on rank 0 0.001"],
    ),
    "class of optimizer": (
        lambda rank: initialize(build(), on_rank_1(rank, torch.optim.AdamW, torch.optim.Adam)),
        ["optimizer Adam param_groups[0].", "on rank 0 absent"],
    ),
    "groups": (
        lambda rank: (lambda model: initialize(model, no_decay(model, rank == 1)))(build()),
        ["rank 1: parameter blocks.", "in param_groups[0], on rank 0 ", "in param_groups[1]"],
    ),
}


def all_differences() -> dict[str, tuple[str, str]]:
    rank = start()
    found = {}
    for name, (make, _) in DIFFERENT.items():
        try:
            make(rank)
            found[name] = ("no error", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found


def test_ranks_that_start_differently_are_told_what_differs() -> None:
    ranks = run_ranks(2, all_differences)
    for name, (_, parts) in DIFFERENT.items():
        kind, message = ranks[0][name]
        assert kind == "DivergenceError", (name, kind, message)
        assert ranks[1][name] == (kind, message), "the same on every rank"
        assert message.startswith("the ranks were started differently; rank 0 is the reference:")
        for part in parts:
            assert part in message, (name, message)


def raising(params: Any) -> torch.optim.Optimizer:
    raise RuntimeError("somebody's own error")


ALONE: dict[str, tuple[Callable[[int], Any], str]] = {
    "configuration absent": (
        lambda rank: zeroengine.initialize(build(), config=on_rank_1(rank, config(1), None)),
        "no configuration was given",
    ),
    "no model": (lambda rank: initialize(on_rank_1(rank, build(), None)), "takes a torch.nn.Module, found NoneType"),
    "optimizer over others": (
        lambda rank: (lambda model: initialize(model, adamw(on_rank_1(rank, model, TinyLM()).parameters())))(build()),
        "is not a parameter of the model",
    ),
    "callable that raises": (lambda rank: initialize(build(), on_rank_1(rank, adamw, raising)), "somebody's own error"),
    "scheduler that raises": (
        lambda rank: (
            zeroengine.initialize(
                build(), None, config(1), lr_scheduler=on_rank_1(rank, torch.optim.lr_scheduler.ConstantLR, raising)
            )
            if rank
            else zeroengine.initialize(build(), None, config(1))
        ),
        "somebody's own error",
    ),
}


def all_alone() -> dict[str, str]:
    rank = start()
    found = {}
    for name, (make, _) in ALONE.items():
        with pytest.raises(Exception) as error:
            make(rank)
        found[name] = f"{error.type.__name__}: {error.value}"
    task = Task(steps=1)
    ordinary_loop(task, make_engine(task, 3))  # the ranks are still together
    return found


def test_an_error_on_one_rank_is_an_error_on_all_of_them() -> None:
    others, own = run_ranks(2, all_alone)
    for name, (_, message) in ALONE.items():
        assert message in own[name], own[name]
        assert "rank 1 failed to initialize: " in others[name] and message in others[name], others[name]
    assert own["callable that raises"].startswith("RuntimeError: ")
    assert others["callable that raises"].startswith("ZeroEngineError: ")
