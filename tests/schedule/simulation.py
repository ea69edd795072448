"""One rank of a training, without torch: what autograd and the modules of a small model tell a schedule.

A model is a sequence of blocks. Each rank may call other items of lists, and its loss may leave out other heads. What a
block does in forward makes nodes; a backward runs the nodes of its loss in descending order of their numbers, as
autograd does with one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from zeroengine.schedule import events
from zeroengine.schedule.actions import Action, Complete, Fate, Gather, Prefetch, Reduce, Release, TakeWaiting
from zeroengine.schedule.lists import ItemList
from zeroengine.schedule.prefetch_order import PrefetchLimits
from zeroengine.schedule.residency import GatherState, UnitFacts
from zeroengine.schedule.schedule import Schedule
from zeroengine.schedule.visits import Visit, VisitLog

Kind = Literal["call", "lookup", "head", "use", "operation", "list", "checkpoint", "reentrant"]
ALONE = PrefetchLimits(0, 0)


@dataclass(frozen=True)
class Block:
    """A part of a model.

    Attributes:
        kind: A module that is called; a "lookup", whose backward reads no values, as of an embedding; a "head", whose
            output a rank may leave out of its loss; a "use" of parameters that no module announces; an "operation"
            without parameters; a module that holds a list of items, of which a rank calls some; or an activation
            checkpoint around other blocks.
        units: The units that the module's forward needs.
        inner: The items of a list, or the blocks inside of a checkpoint.
    """

    kind: Kind
    units: tuple[int, ...] = ()
    inner: tuple[Block, ...] = ()


def call(*units: int) -> Block:
    return Block("call", units)


class Choice(NamedTuple):
    """What the data of a rank decides in one forward.

    Attributes:
        called: For each list, in order, the items that are called.
        heads: For each head, whether the loss depends on it.
    """

    called: tuple[tuple[int, ...], ...] = ()
    heads: tuple[bool, ...] = ()


@dataclass(eq=False)
class Node:
    """A node of autograd's graph.

    Attributes:
        number: Autograd's number.
        units: The units whose parameters get gradients from it.
        reads: Whether it reads these parameters.
        outputs_of: The calls whose outputs it made, the innermost first.
        inputs_of: The calls of modules that hold lists, whose inputs it made.
        is_in_loss: Whether the loss depends on it.
        recompute: What a checkpoint runs again before it; None: nothing.
    """

    number: int
    units: tuple[int, ...] = ()
    reads: bool = True
    outputs_of: list[tuple[VisitLog, Visit]] = field(default_factory=list)
    inputs_of: list[tuple[VisitLog, Visit]] = field(default_factory=list)
    is_in_loss: bool = True
    recompute: Callable[[], None] | None = None


class Wrong(AssertionError):
    """What no schedule may do."""


class Raised(Exception):
    """An error of the user's code."""


class Rank:
    """A rank that executes its schedule without memory, and checks what it is told to do.

    Args:
        blocks: The model.
        units: Its units.
        limits: How far to gather ahead.
        bucket_numel: Elements of units that are reduced together.

    Attributes:
        collectives: What was launched, such as "gather 2" or "reduce 0", in order.
        transcript: The events, each with the actions that followed, if it is a list.
        reduced: The units that were reduced since it was cleared.
        reduces: Whether backwards reduce gradients over the ranks.
        is_last: Whether the next backward is the last one before a step.
        num_gradients: The number of gradients that came.
        num_late: The number of those that came after their units were reduced.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        units: Sequence[UnitFacts],
        limits: PrefetchLimits = ALONE,
        bucket_numel: int = 0,
    ) -> None:
        self._blocks, self._units, self._limits = blocks, units, limits
        self._modules: dict[int, int] = {}
        self._module_names: list[str] = []
        units_of: list[tuple[int, ...]] = []
        self._lists: dict[int, ItemList] = {}
        self._lookups: set[int] = set()
        self._number_modules(blocks, units_of)
        self.schedule = Schedule(
            [*units], [1] * len(units), units_of, self._lists, limits, bucket_numel, lookups=self._lookups
        )
        self._is_gathered = [not unit.is_releasable for unit in units]
        self._is_started = [False] * len(units)
        self.collectives: list[str] = []
        self.transcript: list[str] | None = None
        self.reduced: list[int] = []
        self.reduces = self.is_last = True
        self.num_gradients = self.num_late = 0
        # Autograd's numbers of nodes and of backwards.
        self._next_nodes, self._task, self._last_task = {0: 0}, -1, 0
        # The thread that a forward runs in. Each numbers its nodes for itself.
        self._thread = 0
        self._tape: list[Node] = []
        self._heads: list[Node] = []
        self._checkpoint_node: int | None = None
        self._has_grad, self._is_tracked, self._is_recomputing, self._may_be_late = True, True, False, False
        # The node that a backward runs.
        self._node: int | None = None
        self._log: VisitLog | None = None
        self._choice, self._num_lists = Choice(), 0
        # The module whose forward raises, and the number of gathers after which one fails; -1: none.
        self.raises_at = self.fails_at = -1
        self._num_done = 0

    def _number_modules(self, blocks: Sequence[Block], units_of: list[tuple[int, ...]]) -> None:
        for block in blocks:
            if block.kind not in ("checkpoint", "reentrant", "use", "operation"):
                number = self._modules[id(block)] = len(units_of)
                name = self._names(block.units)
                self._module_names.append(f"list of {name}" if block.kind == "list" else name)
                units_of.append(block.units)
                if block.kind == "lookup":
                    self._lookups.add(number)
                if block.kind == "list":
                    items = [[unit for unit in item.units if self._units[unit].is_releasable] for item in block.inner]
                    if any(items):
                        self._lists[number] = ItemList(items, set(), is_inside_block=bool(block.units))
            self._number_modules(block.inner, units_of)

    # -- executing --------------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        actions = self.schedule.handle(event)
        # Events own logs, which would otherwise end with their graph.
        if self.transcript is not None:
            self.transcript += [self.describe(event), *(f"    {self.describe(action)}" for action in actions)]
        for index, action in enumerate(actions):
            if self.fails_at == self._num_done:
                self.fails_at = -1
                self.schedule.note_failure(actions[index:], self._states())
                raise Raised
            self._num_done += isinstance(action, Gather)
            self._do(action)

    def _states(self) -> list[GatherState]:
        return [
            GatherState.GATHERED if there else GatherState.GATHERING if started else GatherState.RELEASED
            for there, started in zip(self._is_gathered, self._is_started, strict=True)
        ]

    def _do(self, action: Action) -> None:
        unit = action.unit
        if isinstance(action, Gather | Prefetch):
            if self._is_gathered[unit] and isinstance(action, Prefetch):
                raise Wrong(f"unit {unit} is gathered ahead although it is there")
            if not (self._is_gathered[unit] or self._is_started[unit]):
                self.collectives.append(f"gather {unit}")
            self._is_started[unit] = isinstance(action, Prefetch)
            self._is_gathered[unit] = isinstance(action, Gather)
        elif isinstance(action, Release):
            if not self._is_gathered[unit]:
                raise Wrong(f"unit {unit} is released twice")
            self._is_gathered[unit] = False
        elif isinstance(action, Reduce):
            self.collectives.append(f"reduce {unit}")
            self.reduced.append(unit)
        elif not isinstance(action, Complete | TakeWaiting):
            raise Wrong(f"{action} concerns no such model")

    def _use(self, units: Sequence[int], what: str) -> None:
        for unit in units:
            if not self._is_gathered[unit]:
                raise Wrong(f"unit {unit} is used by {what} while it is released")

    # -- forward ----------------------------------------------------------------------------------

    def _moment(self) -> events.Moment:
        recomputes = self._has_grad and self._task >= 0 and not self._is_recomputing
        node = self._node if self._is_recomputing else None
        next_node, checkpoint = self._next_nodes[self._thread], self._checkpoint_node
        return events.Moment(self._has_grad, next_node, self._thread, self._task, checkpoint, recomputes, node)

    def _make_node(self, units: Sequence[int] = (), *, reads: bool = True) -> Node:
        node = Node(self._next_nodes[self._thread], tuple(units), reads)
        self._next_nodes[self._thread] += 1
        self._tape.append(node)
        return node

    def forward(
        self,
        choice: Choice,
        *,
        has_grad: bool = True,
        is_tracked: bool = True,
        in_threads: bool = False,
        probes: bool = False,
    ) -> None:
        """Run a forward of the whole model.

        Args:
            choice: What the data decides.
            has_grad: Whether gradients are enabled.
            is_tracked: Whether backwards come to modules. They do not in a transform of functorch.
            in_threads: Whether every other block runs in another thread.
            probes: Whether the forward ends with a call of ``torch.autograd.grad``.
        """
        self._is_tracked = is_tracked
        self._choice, self._num_lists, self._has_grad = choice, 0, has_grad
        self._tape, self._heads, self._checkpoint_node = [], [], None
        self.tell(events.ForwardBegan(has_grad))
        self._log = self.schedule.logs.latest
        if has_grad:
            self._make_node()  # of an embedding, say
        try:
            for index, block in enumerate(self._blocks):
                self._thread = index % 2 if in_threads else 0
                self._next_nodes.setdefault(self._thread, 0)
                self._run(block)
            self._thread = 0
            if probes:
                self._grad(self._begin(None, accumulates=False))
        except Raised:
            for opened in reversed(list(self.schedule.forwards.calls)):
                self.tell(events.Left(opened.module, self._moment(), None, has_tensors=False))
        for head, is_in_loss in zip(self._heads, choice.heads, strict=False):
            head.is_in_loss = is_in_loss
        self.tell(events.ForwardEnded())
        self._has_grad = self._is_tracked = True

    def _run(self, block: Block) -> None:
        if block.kind == "reentrant" and self._has_grad:
            # The node of the Function is made before its forward runs, without gradients.
            node, outer = self._make_node(), self._checkpoint_node
            self._has_grad, self._checkpoint_node = False, node.number if outer is None else outer
            first_list = self._num_lists
            self._run_all(block.inner)
            self._has_grad, self._checkpoint_node = True, outer
            node.recompute = lambda: self._recompute_reentrant(block.inner, first_list)
            return
        if block.kind == "checkpoint" and self._has_grad and self._task < 0:
            first, first_list = len(self._tape), self._num_lists
            self._run_all(block.inner)
            if inside := self._tape[first:]:
                # The first node that the backward comes to reads a saved tensor.
                inside[-1].recompute = lambda: self._recompute(block.inner, first_list)
            return
        if block.kind in ("checkpoint", "reentrant"):
            self._run_all(block.inner)
        elif block.kind == "operation":
            if self._has_grad:
                self._make_node()
        elif block.kind == "use":
            self._use_unannounced(block.units)
            if self._has_grad:
                self._make_node(block.units)
        else:
            self._call(block)

    def _use_unannounced(self, units: Sequence[int], node: int | None = None) -> None:
        for unit in units:
            if not self._is_gathered[unit]:
                self.tell(events.Used(unit, self._moment(), node, is_saved=node is not None))

    def _run_all(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._run(block)

    def _call(self, block: Block) -> None:
        module = self._modules[id(block)]
        before = self._tape[-1] if self._tape and self._has_grad else None
        known = len(self.schedule.forwards.calls)
        self.tell(events.Entered(module, self._moment(), self._has_grad and self._is_tracked))
        calls = self.schedule.forwards.calls
        opened = calls[-1] if len(calls) > known else None
        self._use(block.units, "a forward")
        if module == self.raises_at:
            raise Raised
        is_list = module in self._lists
        if is_list and opened is not None and opened.walk is not None and before is not None:
            before.inputs_of.append((opened.log, opened.visit))
        last = self._make_node(block.units, reads=block.kind != "lookup") if self._has_grad else None
        if block.kind == "list":
            called = self._choice.called[self._num_lists]
            self._num_lists += 1
            for item in called:
                self._call(block.inner[item])
            if is_list and opened is not None:
                self.tell(events.ListEnded(module, self._moment()))
            # What the items returned is added up.
            last = self._make_node() if self._has_grad else None
        if opened is None:
            return
        node = last.number if last is not None and self._is_tracked else None
        self.tell(events.Left(module, self._moment(), node, in_checkpoint=self._is_recomputing))
        if last is not None and self._is_tracked:
            last.outputs_of.append((opened.log, opened.visit))
            if block.kind == "head":
                self._heads.append(last)

    # -- backward ---------------------------------------------------------------------------------

    def backward(self, *, by_engine: bool = True, raises: bool = False) -> None:
        """Run a backward of the latest forward. ``raises``: the first node of the forward raises, which comes last."""
        if by_engine:
            self.tell(events.GradientsBegan(True, self.reduces, self.is_last))
            self.tell(events.CallBegan())
        assert self._log is not None
        task = self._begin(self._log)
        if not by_engine:
            self.tell(events.GradientsBegan(False, self.reduces, self.is_last))
        self.tell(events.CallBegan())
        nodes = [node for node in self._tape if node.is_in_loss]
        try:
            self._run_nodes(nodes, raises=raises)
        except Raised:
            self._task = -1
            self.tell(events.BackwardsAbandoned())
            self.tell(events.GradientsDropped())
            self.tell(events.StepEnded())
            return
        self._end(task)
        if not by_engine:
            self.tell(events.CallEnded())
        self.tell(events.GradientsEnded())

    def _grad(self, task: int) -> None:
        """Run ``torch.autograd.grad`` of all that the forward has made, with the graph retained."""
        self._run_nodes(self._tape, arrives=False, keeps_graph=True)
        self._end(task)

    def differentiate_twice(self) -> None:
        """Run ``torch.autograd.grad`` with ``create_graph``, and then the backward of what that returned."""
        assert self._log is not None
        task = self._begin(self._log, accumulates=False)
        self._run_nodes(self._tape, arrives=False, keeps_graph=True, extends_graph=True)
        self._end(task)
        self.tell(events.GradientsBegan(True, self.reduces, self.is_last))
        self.tell(events.CallBegan())
        task = self._begin(self._log)
        self.tell(events.CallBegan())
        # What the first backward has added comes first, from the gradient of the input on.
        for node in self._tape:
            self._node = self._next_nodes[0] + len(self._tape) - node.number
            if node.reads:
                self._use_unannounced(node.units, self._node)
                self._use(node.units, "a second derivative")
        self._run_nodes(self._tape)
        self._end(task)
        self.tell(events.GradientsEnded())

    def two_backwards(self) -> None:
        """Run two plain backwards of one graph, as of two losses."""
        assert self._log is not None
        nodes = [node for node in self._tape if node.is_in_loss]
        self._may_be_late = True
        for number in range(2):
            self.num_gradients = self.num_late = 0
            task = self._begin(self._log)
            if not number:
                self.tell(events.GradientsBegan(False, self.reduces, self.is_last))
            self.tell(events.CallBegan())
            self._run_nodes(nodes)
            self._end(task)
            self.tell(events.CallEnded())
        self.tell(events.GradientsEnded())
        self._may_be_late = False

    def gathered(self) -> None:
        """Gather every unit for a while, with a forward inside, and release them."""
        units = [unit for unit, facts in enumerate(self._units) if facts.is_releasable]
        for unit in units:
            self.tell(events.Pinned(unit))
        self.forward(self._choice, has_grad=False)
        self._use(units, "code inside of gathered()")
        for unit in units:
            self.tell(events.Unpinned(unit))
        self.check_rest()

    def _begin(self, log: VisitLog | None, *, is_outermost: bool = True, accumulates: bool = True) -> int:
        self._last_task += 1
        self._task = self._last_task
        logs = () if log is None else (log,)
        self.tell(events.BackwardBegan(self._task, is_outermost, accumulates, contained=logs))
        return self._task

    def _end(self, task: int, outer: int = -1) -> None:
        self.tell(events.BackwardEnded(task))
        self._task = outer

    def _run_nodes(
        self,
        nodes: Sequence[Node],
        *,
        raises: bool = False,
        arrives: bool = True,
        keeps_graph: bool = False,
        extends_graph: bool = False,
    ) -> None:
        # A parameter has its gradient after the first of its uses in forward.
        first_use: dict[int, Node] = {}
        for node in reversed(nodes):
            first_use.update(dict.fromkeys(node.units, node))
        for node in reversed(nodes):
            for log, visit in reversed(node.outputs_of):
                self.tell(events.Reached(self._task, log, visit, keeps_graph, extends_graph))
            for log, visit in node.inputs_of:
                self.tell(events.ReachedInputs(self._task, log, visit))
            if raises and node is nodes[0]:
                raise Raised
            self._node = node.number
            if node.recompute is not None:
                node.recompute()
            # Numbers of two threads tell no order, so a unit may be released too early. Then its use gathers it again.
            if node.reads and (not node.outputs_of or len(self._next_nodes) > 1):
                self._use_unannounced(node.units, node.number)
            if node.reads:
                self._use(node.units, "a backward")
            for unit in node.units:
                if arrives and first_use[unit] is node and self._units[unit].is_trained:
                    self.num_gradients += 1
                    if self.schedule.reduce_order.fate(unit) is Fate.LATE:
                        self.num_late += 1
                        if not self._may_be_late:
                            raise Wrong(f"unit {unit} was reduced before its gradient came")
                    self.tell(events.GradientsArrived(unit, (0,)))

    def _recompute(self, blocks: Sequence[Block], first_list: int) -> None:
        tape, self._tape, self._num_lists, self._is_recomputing = self._tape, [], first_list, True
        self._run_all(blocks)
        self._tape, self._is_recomputing = tape, False

    def _recompute_reentrant(self, blocks: Sequence[Block], first_list: int) -> None:
        tape, self._tape, self._num_lists = self._tape, [], first_list
        self._run_all(blocks)
        nodes, outer = self._tape, self._task
        task = self._begin(None, is_outermost=False)
        self._run_nodes(nodes)
        self._end(task, outer)
        self._tape = tape

    # -- step -------------------------------------------------------------------------------------

    def step(self) -> None:
        """End a step, and check that nothing is left over."""
        self.tell(events.StepBegan())
        for unit in range(len(self._units)):
            self.tell(events.Settled(unit))
            self.tell(events.ValuesChange(unit))
        self.tell(events.StepEnded())
        self.check_rest()

    def check_rest(self) -> None:
        """Check that every unit is released, and that nothing runs."""
        its = self.schedule
        left = [unit for unit, facts in enumerate(self._units) if facts.is_releasable and self._is_gathered[unit]]
        if left or its.residency.live_numel or its.residency.unhooked or its.forwards.calls or its.backwards.cursors:
            raise Wrong(f"after a step units {left} are gathered, or something is still in progress")

    # -- for people -------------------------------------------------------------------------------

    def describe(self, value: events.Event | Action) -> str:
        """What matters of an event or an action."""
        words = [type(value).__name__]
        for name, part in value._asdict().items():
            if name == "visit":
                words.append(self._names(part.units))
            elif name == "unit":
                words.append(self._units[part].name)
            elif name == "module":
                words.append(self._module_names[part])
            elif isinstance(part, Fate):
                words.append(part.value)
            elif isinstance(part, bool) and name not in ("is_tracked", "has_tensors"):
                words += [name] if part else []
        return " ".join(words)

    def _names(self, units: Sequence[int]) -> str:
        return "+".join(self._units[unit].name for unit in units) or "(no unit)"
