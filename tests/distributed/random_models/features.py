"""The features of which `random_recipe` draws three to six: blocks, calls of blocks, and habits of training."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.distributed.random_models.blocks import OUTPUTS
from tests.distributed.random_models.bodies import (
    BODIES,
    FUNC_BODIES,
    ONCE_DIFFERENTIABLE,
    OPAQUE_TO_FUNC,
    PLAIN_BODIES,
)
from tests.distributed.random_models.calls import DIRECT_CALLS, NON_REENTRANT, REENTRANT
from tests.distributed.random_models.micro_steps import SEVERAL_BACKWARDS
from tests.distributed.random_models.model import HAND_TIED
from tests.distributed.random_models.recipe import BlockSpec, Op, Recipe


class Draft:
    """A recipe in the making. Features that exclude each other are told by `tags`."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.rng, self.tags = rng, set[str]()
        self.fields: dict[str, Any] = {"seed": seed}
        self.blocks = [BlockSpec(body=rng.choice(PLAIN_BODIES)) for _ in range(rng.choice((2, 2, 3)))]
        self.ops: list[Op] = []

    def add_block(self, spec: BlockSpec, how: str = "plain") -> int:
        self.blocks.append(spec)
        self.ops.append(Op("block", len(self.blocks) - 1, how))
        return len(self.blocks) - 1

    def recipe(self) -> Recipe:
        """The recipe, in which every block is called at least once and calls come in random order."""
        called = {op.block for op in self.ops if op.kind == "block"}
        self.ops += [Op("block", index) for index in range(len(self.blocks)) if index not in called]
        self.rng.shuffle(self.ops)
        if "skip" in self.tags:
            start, stop = sorted(self.rng.sample(range(len(self.ops) + 1), 2))
            self.ops[start:stop] = [Op("push"), *self.ops[start:stop], Op("join")]
        if "in place" in self.tags:
            after = [i for i, op in enumerate(self.ops) if op == Op("block", op.block) and self._plain(op.block)]
            for index in after[:1]:
                self.ops.insert(index + 1, Op("in place"))
        if self.fields.get("fault") == "recompute":
            at = next(i for i, op in enumerate(self.ops) if op.how in REENTRANT | NON_REENTRANT and op.kind == "block")
            self.fields["fault_at"] = at
        elif "fault" in self.fields:
            at = self.rng.choice([i for i, op in enumerate(self.ops) if op == Op("block", op.block)])
            self.fields["fault_at"] = at
        return Recipe(blocks=tuple(self.blocks), ops=tuple(self.ops), **self.fields)

    def _plain(self, index: int) -> bool:
        return self.blocks[index].output == "tensor" and self.blocks[index].body in PLAIN_BODIES


Feature = Callable[[Draft, random.Random], None]
FEATURES: dict[str, tuple[float, Feature, set[str], set[str]]] = {}  # name: weight, function, tags, excluded tags


def feature(weight: float, tags: str = "", without: str = "") -> Callable[[Feature], Feature]:
    """Registers a feature under its function's name.

    Args:
        tags: words that it adds to a draft.
        without: words that a draft must not have; the words of `tags` that end in "!" are excluded, too.
    """

    def register(function: Feature) -> Feature:
        own = {tag.rstrip("!") for tag in tags.split()}
        alone = {tag.rstrip("!") for tag in tags.split() if tag.endswith("!")}
        FEATURES[function.__name__] = (weight, function, own, alone | set(without.split()))
        return function

    return register


@feature(3)
def unusual_bodies(draft: Draft, rng: random.Random) -> None:
    allowed = sorted(set(BODIES) - FUNC_BODIES - ONCE_DIFFERENTIABLE)
    for _ in range(rng.choice((1, 2))):
        draft.add_block(BlockSpec(body=rng.choice(allowed)))


@feature(1, "once", "twice differentiable")
def bodies_that_are_differentiable_once(draft: Draft, rng: random.Random) -> None:
    draft.add_block(BlockSpec(body=rng.choice(sorted(ONCE_DIFFERENTIABLE))), rng.choice(("plain", "twice")))


@feature(1.5)
def outputs_in_containers(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        output = rng.choice([name for name in OUTPUTS if not name.startswith("opaque")])
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output), rng.choice(("plain", "twice", "two streams")))


@feature(2)
def outputs_beside_objects(draft: Draft, rng: random.Random) -> None:
    output = rng.choice([name for name in OUTPUTS if name.startswith("opaque")])
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output), rng.choice(("plain", "twice", "two streams")))


@feature(2)
def losses_in_attributes(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        how = rng.choice(("plain", "twice", "non-reentrant", "no grad first"))
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), "attribute"), how)


@feature(1)
def outputs_that_are_parameters(draft: Draft, rng: random.Random) -> None:
    output = rng.choice([*OUTPUTS, "attribute"])
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), output, weight_output=True))


@feature(1)
def extras_in_the_stream(draft: Draft, rng: random.Random) -> None:
    draft.fields["extras"] = rng.choice(("stream", "stream", "nowhere"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), rng.choice([*OUTPUTS, "attribute"])))


@feature(2)
def blocks_called_twice(draft: Draft, rng: random.Random) -> None:
    index = rng.randrange(len(draft.blocks))
    if rng.random() < 0.5:
        draft.ops += [Op("block", index), Op("block", index)]
    else:
        draft.ops.append(Op("block", index, rng.choice(("twice", "two streams", "no grad first"))))


@feature(2, "reentrant", "grad no-input")
def reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        spec = BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tensor", "tuple")))
        how = rng.choice(sorted(REENTRANT))
        draft.add_block(spec, how + rng.choice(("", "", " of method", " of body")))


@feature(2)
def non_reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        spec = BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tensor", "tuple", "dict", "opaque")))
        how = rng.choice(sorted(NON_REENTRANT))
        draft.add_block(spec, how + rng.choice(("", "", " of method", " of body")))


@feature(0.7, "selective", "retain grad")
def selective_checkpoints(draft: Draft, rng: random.Random) -> None:
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tuple"))), "selective")


@feature(1)
def hooks_of_saved_tensors(draft: Draft, rng: random.Random) -> None:
    how = rng.choice(("saved on cpu", "saved by hooks"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), how + rng.choice(("", "", " of body")))


@feature(1.5)
def calls_past_the_forward(draft: Draft, rng: random.Random) -> None:
    how = rng.choice(("plain", "twice", "no grad first", "two streams", "stop gradient"))
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), f"{how} of {rng.choice(('method', 'body', 'keyword'))}")


@feature(1.5, "func", "backward-hook")
def blocks_under_torch_func(draft: Draft, rng: random.Random) -> None:
    if rng.random() < 0.5:
        draft.add_block(BlockSpec(rng.choice(sorted(FUNC_BODIES))))
    else:
        body = rng.choice(sorted(set(PLAIN_BODIES) - OPAQUE_TO_FUNC - {"convolution", "attention"}))
        draft.add_block(BlockSpec(body), rng.choice(("vmap", "func grad", "plain of functional call")))


@feature(3)
def parameters_used_directly(draft: Draft, rng: random.Random) -> None:
    safe = [how for how in DIRECT_CALLS if "reentrant" not in how and how not in ("recompute", *_ATTRIBUTES)]
    for index in range(rng.choice((1, 2, 3))):
        draft.ops.append(Op("direct", rng.randrange(index + 1), rng.choice([*safe, "non-reentrant"])))


_ATTRIBUTES = ("attribute", "attribute view")


@feature(1, "reentrant", "grad no-input")
def parameters_used_in_reentrant_checkpoints(draft: Draft, rng: random.Random) -> None:
    hows = ("reentrant", "saved in reentrant", "recompute")
    draft.ops += [Op("direct", index, rng.choice(hows)) for index in range(rng.choice((1, 2)))]


@feature(1, "once", "twice")
def parameters_in_attributes_of_functions(draft: Draft, rng: random.Random) -> None:
    draft.ops.append(Op("direct", 0, rng.choice(_ATTRIBUTES)))


@feature(2, "head!")
def heads_tied_by_hand(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = rng.choice(sorted(HAND_TIED))


@feature(1.5, "head!")
def unusual_heads(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = rng.choice(("tied", "fused", "linear of the weight"))


@feature(1, "head! once", "twice")
def chunked_losses(draft: Draft, rng: random.Random) -> None:
    draft.fields["head"] = "chunked"


@feature(1)
def tied_blocks(draft: Draft, rng: random.Random) -> None:
    body = rng.choice(("mlp", "in place", "partly detached"))
    draft.fields["tied"] = tuple(draft.add_block(BlockSpec(body)) for _ in range(rng.choice((2, 3))))


@feature(1.5)
def learned_positions(draft: Draft, rng: random.Random) -> None:
    draft.fields["positions"] = rng.choice(("view", "view", "whole"))


@feature(1.5, "query")
def parameters_as_arguments(draft: Draft, rng: random.Random) -> None:
    draft.fields["query"] = rng.choice(("parameter", "leaf"))


@feature(1)
def skip_connections(draft: Draft, rng: random.Random) -> None:
    draft.tags.add("skip")


@feature(1, "in-place", "backward-hook")
def in_place_operations(draft: Draft, rng: random.Random) -> None:
    draft.tags.add("in place")
    draft.add_block(BlockSpec("in place"))


@feature(1)
def scalar_parameters(draft: Draft, rng: random.Random) -> None:
    draft.ops += [Op("gain")] * rng.choice((1, 2))


@feature(1)
def frozen_blocks(draft: Draft, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2))):
        draft.add_block(
            BlockSpec(rng.choice(PLAIN_BODIES), rng.choice(("tensor", "tuple")), frozen=rng.choice(("part", "all")))
        )


@feature(0.7, "no-input", "reentrant")
def frozen_embeddings(draft: Draft, rng: random.Random) -> None:
    draft.fields["frozen"] = rng.choice((("tok",), ("tok", "norm"), ("norm",)))


@feature(1)
def unused_parameters(draft: Draft, rng: random.Random) -> None:
    draft.fields["unused"] = rng.random() < 0.5
    draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES), unused=True))


@feature(1.5, "skipped")
def blocks_left_out_in_some_steps(draft: Draft, rng: random.Random) -> None:
    index = draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)))
    draft.ops[-1] = Op("block", index, "plain", rng.choice(((0,), (1,), (0, 2), (1, 2))))


# -- features of training ------------------------------------------------------------------------------------


@feature(3)
def accumulation(draft: Draft, rng: random.Random) -> None:
    draft.fields["micro_steps"] = rng.choice((2, 2, 3))
    draft.fields["no_sync"] = rng.random() < 0.25
    draft.fields["steps"] = 2


@feature(1, "mode! retain", "selective")
def several_losses(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("two losses", "one loss twice", "partial backward"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1, "mode!")
def several_forwards(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("two forwards", "two forwards, first first", "cached gradients"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1.5, "mode! grad", "reentrant selective")
def gradients_before_the_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("grad first", "grad of some first", "grad alone first", "backward of some"))


@feature(1, "mode! grad twice", "reentrant once selective")
def gradient_penalties(draft: Draft, rng: random.Random) -> None:
    draft.fields["mode"] = rng.choice(("penalty on parameters", "penalty on hidden"))
    draft.fields["output"] = rng.choice(("tuple", "dict"))


@feature(1.5)
def evaluation_in_between(draft: Draft, rng: random.Random) -> None:
    draft.fields["evaluate"] = rng.choice(("no_grad", "inference"))
    draft.fields["evaluate_when"] = rng.choice(("after step", "before backward", "before forward"))


@feature(1)
def forwards_inside_gathered(draft: Draft, rng: random.Random) -> None:
    draft.fields["gathered_forward"] = True


@feature(0.7)
def forwards_without_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["dropped_forward"] = True


@feature(1.5, "fault!")
def exceptions_in_the_forward(draft: Draft, rng: random.Random) -> None:
    draft.fields["fault"] = rng.choice(("forward", "forward", "hook", "hook after"))
    draft.fields["fault_error"] = rng.choice(("RuntimeError", "KeyboardInterrupt"))
    draft.fields["fault_step"] = rng.randrange(2)


@feature(1.5, "fault!")
def exceptions_in_the_backward(draft: Draft, rng: random.Random) -> None:
    draft.fields["fault"] = rng.choice(("backward", "backward", "recompute"))
    if draft.fields["fault"] == "recompute":
        draft.add_block(BlockSpec(rng.choice(PLAIN_BODIES)), "non-reentrant")
    draft.fields["fault_error"] = rng.choice(("RuntimeError", "KeyboardInterrupt"))
    draft.fields["fault_step"] = rng.randrange(2)


@feature(1, "backward-hook", "in-place func")
def hooks_of_the_user(draft: Draft, rng: random.Random) -> None:
    draft.fields["hooks"] = rng.choice(("parameter", "backward", "forward", "forward before"))


@feature(0.7)
def blocks_frozen_for_a_step(draft: Draft, rng: random.Random) -> None:
    draft.fields["toggled"] = rng.randrange(len(draft.blocks))


@feature(1.5, "loop!")
def loops_that_keep_their_lines(draft: Draft, rng: random.Random) -> None:
    draft.fields["loop"] = "optimizer"


@feature(1.5, "loop!")
def manual_accumulation(draft: Draft, rng: random.Random) -> None:
    draft.fields["loop"] = rng.choice(("manual", "manual, announced"))
    draft.fields["micro_steps"] = rng.choice((1, 2, 3))
    draft.fields["steps"] = 2


@feature(1)
def offload(draft: Draft, rng: random.Random) -> None:
    draft.fields["offload"] = rng.choice(("optimizer to cpu", "optimizer to disk", "parameters to disk"))
    draft.tags.add("fused adam")


def draw_features(seed: int) -> list[str]:
    """The names of a seed's features, in the order in which they were drawn."""
    return _draw(Draft(seed, random.Random(seed)))


def _draw(draft: Draft) -> list[str]:
    left, drawn = dict(FEATURES), []
    for _ in range(draft.rng.randint(3, 6)):
        weights = {name: weight for name, (weight, _, _, without) in left.items() if not without & draft.tags}
        (name,) = draft.rng.choices(list(weights), list(weights.values()))
        _, function, tags, _ = left.pop(name)
        draft.tags |= tags
        function(draft, draft.rng)
        drawn.append(name)
    return drawn


def random_recipe(seed: int) -> Recipe:
    """The recipe of a seed: the same on every machine and in every process."""
    rng = random.Random(seed)
    draft = Draft(seed, rng)
    _draw(draft)
    fields = draft.fields
    fields["width"] = rng.choice((5, 6, 8))
    fields["dtype"] = rng.choice(("float64",) * 4 + ("float32",))
    fields["optimizer"] = rng.choice(("sgd", "momentum", "adamw", "adamw in groups", "muon", "by norms"))
    if "fused adam" in draft.tags:  # the only update of what is offloaded
        fields["dtype"], fields["optimizer"] = "float32", rng.choice(("adamw", "adamw in groups"))
    fields["clip"] = rng.choice((0.0, 0.3))
    fields["backward"] = rng.choice(("engine", "plain"))
    fields["zero_grad"] = rng.random() < 0.2
    fields.setdefault("output", rng.choice(("loss", "tuple", "dict")))
    if fields.get("mode") in SEVERAL_BACKWARDS:  # which of them is the last one of a step is then for `step` to say
        several = fields.get("micro_steps", 1) > 1
        other = {"manual, announced": "manual", "optimizer": "engine" if several else "optimizer"}
        fields["loop"] = other.get(fields.get("loop", "engine"), fields.get("loop", "engine"))
    fields["ranks"] = rng.choice((2,) * 9 + (3,))
    fields["transport"] = ("shm", "gloo")[seed % 2]
    fields["units"] = rng.choice(((),) * 5 + (("blocks.*", "tok", "norm"), ("blocks.*.body",), ("blocks", "tok")))
    fields["zero"] = rng.choice(
        (
            (),
            (),
            (("prefetch_bucket_size", 0),),
            (("overlap_comm", False),),
            (("reduce_bucket_size", 50),),
            (("param_persistence_threshold", 100),),
            (("max_live_parameters", 200),),
        )
    )
    return draft.recipe()
