"""Whoever writes another library's name is told what it is called here, and what is told exists."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zeroengine
import zeroengine.comm
from tests.distributed.models import TinyLM, build, config
from tests.distributed.ranks import run_ranks
from tests.generated_docs import COMING_FROM, migration_tables
from zeroengine import ZeroEngineError
from zeroengine.config.keys import honored_paths
from zeroengine.migration.names import ARGUMENTS, ENGINE, MODULE, Counterpart

# What scripts and trainers use of DeepSpeed's engine, beside what is called the same.
USUAL = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps set_train_batch_size get_batch_info
    zero_optimization zero_optimization_stage zero_optimization_partition_weights zero_reduce_bucket_size
    zero_overlap_comm zero_offload_optimizer zero_contiguous_gradients fp16_enabled bfloat16_enabled dynamic_loss_scale
    gradient_predivide_factor prescale_gradients steps_per_print dump_state get_lr get_mom get_global_grad_norm
    was_step_applied allreduce_gradients coalesce_grad_reduction global_rank local_rank dp_world_size mp_world_size mpu
    data_parallel_group get_data_parallel_rank get_sequence_parallel_group training_dataloader deepspeed_io
    client_optimizer optimizer_name scheduler_name global_samples save_16bit_model save_fp16_model module_state_dict
    load_module_state_dict empty_partition_cache destroy compile is_compiled wall_clock_breakdown flops_profiler_enabled
    autotuning_enabled curriculum_learning_enabled random_ltd_enabled sparse_gradients_enabled monitor tput_timer
    memory_breakdown checkpoint_engine communication_data_type has_moe_layers
""".split()
OF_A_MODULE = """
    parameters named_parameters buffers state_dict load_state_dict modules children to cuda half apply training
    requires_grad_ register_forward_hook get_parameter
""".split()
OF_TORCH = "unshard reshard set_requires_gradient_sync summon_full_params register_comm_hook join".split()


def unanswered(found: object, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` of which no more is said than that ``found`` has them not."""
    bare = []
    for name in names:
        assert not hasattr(found, name), name
        with pytest.raises(AttributeError) as caught:
            getattr(found, name)
        if str(caught.value).endswith(f"has no attribute '{name}'"):
            bare.append(name)
    return bare


def make_engine(model: nn.Module | None = None) -> zeroengine.Engine:
    more = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    return zeroengine.initialize(model or build(), None, config(2, **more))


class Named(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 0.5


def attributes_in_use() -> None:
    engine = make_engine(build(Named))
    assert unanswered(engine, [*USUAL, *OF_A_MODULE, *OF_TORCH]) == []
    with pytest.raises(AttributeError, match=r"which is a name of DeepSpeed. Write `engine.config.train_batch_size`\."):
        engine.train_batch_size  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'temperature'. The model has it: write engine.module.temp"):
        engine.temperature  # noqa: B018
    assert unanswered(engine, ["temprature", "_temperature"]) == ["temprature", "_temperature"]
    assert getattr(engine, "train_batch_size", None) is None
    check_that_what_is_written_exists(engine)


def test_every_usual_attribute_of_another_engine_is_answered() -> None:
    run_ranks(1, attributes_in_use)


class Broken(zeroengine.Engine):
    @property
    def train_batch_size(self) -> Any:
        return None.nothing  # type: ignore[attr-defined]


def test_a_property_that_fails_fails_with_its_own_error() -> None:
    engine = object.__new__(Broken)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
        engine.train_batch_size  # noqa: B018
    assert unanswered(object.__new__(zeroengine.Engine), ["module", "unheard_of"]) == ["module", "unheard_of"]


def test_a_mistyped_name_is_answered_with_the_nearest_one() -> None:
    engine = object.__new__(zeroengine.Engine)
    with pytest.raises(AttributeError, match=r"'save_chekpoint'. The nearest name is save_checkpoint\."):
        engine.save_chekpoint  # type: ignore[attr-defined]  # noqa: B018


# -- what is told exists ------------------------------------------------------------------------------


def every_row() -> Iterator[tuple[str, Counterpart]]:
    yield from ENGINE.items()
    yield from MODULE.items()
    for table in ARGUMENTS.values():
        yield from table.items()


def code_of(row: Counterpart) -> tuple[str, str]:
    """Return the code to write, "" where there is none, and the text behind it."""
    code, _, behind = row.text[1:].partition("`") if row.text.startswith("`") else ("", "", row.text)
    return code, behind


def check_that_what_is_written_exists(engine: zeroengine.Engine) -> None:
    there = {"engine": engine, "zeroengine": zeroengine, "torch": torch}
    for name, row in every_row():
        code, behind = code_of(row)
        if behind.startswith(" in the configuration"):
            for path in keys_of(ast.literal_eval(f"{{{code.replace('true', 'True')}}}")):
                assert path in honored_paths(), (name, path)
        elif code:
            check_code(code, there)


def keys_of(tree: Any, path: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if key is not ...:
            yield f"{path}{key}"
            yield from keys_of(value, f"{path}{key}.")


def check_code(code: str, there: dict[str, Any]) -> None:
    """Each attribute of ``there`` in the code exists, and each function takes the arguments that it is given."""
    if code.startswith("with "):
        code = f"{code} pass"
    elif "=" in code.partition("(")[0].partition("[")[0].partition(" ")[0]:
        return  # an argument: compared with the function's by the test of its table
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node, there)
        if isinstance(node, ast.Call) and node.keywords and callable(function := resolve(node.func, there)):
            parameters = inspect.signature(function).parameters
            takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
            assert takes_any or all(keyword.arg in parameters for keyword in node.keywords), code


def resolve(node: ast.AST, there: dict[str, Any]) -> Any:
    """Return what an expression of names and attributes stands for; None where it begins with a name of the user's.

    Raises:
        AttributeError: there is no such attribute.
    """
    if isinstance(node, ast.Name):
        return there.get(node.id)
    if isinstance(node, ast.Attribute):
        value = resolve(node.value, there)
        return None if value is None else getattr(value, node.attr)
    return None


FUNCTIONS = {
    "initialize": zeroengine.initialize,
    "gathered": zeroengine.gathered,
    "meta_init": zeroengine.meta_init,
} | {name: getattr(zeroengine.Engine, name) for name in ARGUMENTS if hasattr(zeroengine.Engine, name)}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_another_library_s_argument_raises_with_this_one_s(name: str) -> None:
    function, parameters = FUNCTIONS[name], inspect.signature(FUNCTIONS[name]).parameters
    if "self" in parameters:
        function = functools.partial(function, object.__new__(zeroengine.Engine))
    for argument, row in ARGUMENTS[name].items():
        assert argument not in parameters, "no row hides an argument"
        with pytest.raises(ZeroEngineError) as caught:
            function(**{argument: 1})
        assert str(caught.value).startswith(f"{name}(): {argument}= is {row.origin}'s. {row.advice}")
        written, assigned, _ = code_of(row)[0].partition("=")
        if assigned and written.isidentifier():
            assert written in parameters, row.text
    with pytest.raises(TypeError, match=f"{name}\\(\\) .*unheard_of|{name}\\(\\) missing"):
        function(unheard_of=1)


def test_several_arguments_are_answered_together() -> None:
    with pytest.raises(ZeroEngineError) as caught:
        zeroengine.initialize(args=None, model=build(), model_parameters=[], config_params={})  # type: ignore[call-arg]
    text = str(caught.value)
    assert "args= is DeepSpeed's. Write `config=args.deepspeed_config`" in text
    assert "model_parameters= is DeepSpeed's. Write `optimizer=torch.optim.AdamW(model_parameters, lr=1e-4)`" in text
    assert "config_params= is DeepSpeed's. Write `config=...`" in text


def no_row_hides_a_name(engine: zeroengine.Engine) -> None:
    assert [name for name in ENGINE if hasattr(engine, name)] == []
    assert [name for name in MODULE if hasattr(zeroengine, name)] == []


def taken_apart() -> None:
    engine = make_engine()
    no_row_hides_a_name(engine)
    with pytest.raises(TypeError, match=r"Write: engine = zeroengine.initialize\(model, optimizer, config\)"):
        _, _, _, _ = engine  # type: ignore[misc]
    with pytest.raises(TypeError, match="unpacked or indexed as DeepSpeed's"):
        engine[0]  # type: ignore[index]
    with pytest.raises(ZeroEngineError, match=r"takes the model first; found NoneType, and the model second"):
        zeroengine.initialize(None, build(), config(2))  # type: ignore[arg-type]


def test_an_engine_taken_for_deepspeed_s_four_results_is_an_error() -> None:
    run_ranks(1, taken_apart)


def test_names_of_other_packages_are_answered() -> None:
    assert unanswered(zeroengine, MODULE) == []
    assert unanswered(zeroengine.comm, ["init_distributed", "all_reduce", "get_rank", "barrier"]) == []
    with pytest.raises(AttributeError, match=r"Write torch.distributed.get_rank\."):
        zeroengine.comm.get_rank  # noqa: B018
    assert unanswered(zeroengine.comm, ["unheard_of"]) == ["unheard_of"]


def test_the_tables_in_the_docs_are_current() -> None:
    text = COMING_FROM.read_text()
    for table in migration_tables():
        assert table in text, "run: python -m tests.generated_docs"
