"""Operators: what each is, what it gives, and the mode that records them."""

from __future__ import annotations

import fnmatch
import functools
import sys
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api
from introspect_cli.capture.frames import is_introspects, line_of, outward
from introspect_cli.capture.probes.base import GuardedProbe, has_closure, tensors_in
from introspect_cli.records import Given, Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.views import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.probes.base import Args, Kwargs


# ---
# What an operator's schema says: of its results, looked up once an operator, and of what else it is given.
#
# Whether a result is a view, is memory that was just written in place, or is not yet written at all (`empty`) is in
# the schema or the name, never in the values; asking for it at every call would cost more than the call.
#
# A module's options are attributes of it; what is called as a function has none, and `gelu(x, approximate="tanh")`
# gives other numbers from equal inputs. So the plain arguments of each operator are noted when its site is new: the
# document `settings/operators`, with `--level op`.

_UNWRITTEN = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "new_empty", "new_empty_strided",
    "resize_", "resize_as_", "set_", "record_stream",
})  # fmt: skip
"""Operators whose results hold whatever the memory held before."""

_ALSO_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "detach_", "lift"})
"""Operators that give their input's own numbers without the schema saying so."""


@dataclass(frozen=True, eq=False, slots=True)
class OpFacts:
    """Static facts of an operator, from its schema and name.

    Attributes:
        name: namespace, operator and overload, as in `aten.mm.default`.
        recorded: whether its results are to be recorded.
        unwritten: whether its results are memory that nothing was written to.
        each: whether it works on lists, element by element.
        written: arguments it writes to and does not return: position (-1 for keyword only) and name.
    """

    name: str
    recorded: bool
    unwritten: bool
    each: bool
    written: tuple[tuple[int, str], ...]


def facts_of(func: Any, globs: tuple[str, ...], *, views: bool) -> OpFacts:
    """Work out an operator's facts from its schema and name.

    Results in unwritten memory (`empty`) are never recorded, whatever the globs. A higher-order operator has no schema:
    it is recorded if its name is wanted, and counts as writing to no argument.

    Args:
        func: an overload, or a higher-order operator.
        globs: of operators to record, as `_is_wanted` reads them; all where empty.
        views: whether results that share their input's memory are recorded.
    """
    if (schema := getattr(func, "_schema", None)) is None:
        name = f"higher_order.{getattr(func, '__name__', type(func).__name__)}"
        return OpFacts(name, _is_wanted(name, globs), unwritten=False, each=False, written=())
    name = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
    base = name.split(".")[1]
    unwritten = base in _UNWRITTEN
    aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
    view = base in _ALSO_VIEWS or not all(alias.is_write for alias in aliases)
    returned = set().union(*(alias.before_set for alias in aliases if alias.is_write))
    arguments = [(at, one, one.alias_info) for at, one in enumerate(schema.arguments) if one.alias_info is not None]
    written = tuple(
        (-1 if one.kwarg_only else position, one.name)
        for position, one, alias in arguments
        if alias.is_write and not alias.before_set & returned
    )
    recorded = not unwritten and (views or not view) and _is_wanted(name, globs)
    return OpFacts(name, recorded, unwritten, base.startswith("_foreach_"), written)


def _is_wanted(name: str, globs: tuple[str, ...]) -> bool:
    """Whether any glob matches any form of an operator's name (`mm`, `aten.mm`, `mm.default`, `aten.mm.default`).

    True without globs.
    """
    if not globs:
        return True
    namespace, _, rest = name.partition(".")
    operator = rest.partition(".")[0]
    names = (name, f"{namespace}.{operator}", rest, operator)
    return any(fnmatch.fnmatchcase(form, glob) for glob in globs for form in names)


_PLAIN = (bool, int, float, str)
_NAMED = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
_MOST_ITEMS = 8


def _plain_value(value: Any) -> Any:
    """A value as plain data: a boolean, number or text as it is, a dtype, device, layout or memory format as its text.

    A list or tuple of 1 to 8 booleans, numbers and texts becomes text too. None for anything else, and for an integer
    of 64 bits or more.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or value.bit_length() < 64 else None
    if kind in _NAMED:
        return str(value)
    if kind in (list, tuple) and 0 < len(value) <= _MOST_ITEMS and all(type(item) in _PLAIN for item in value):
        return str(list(value))
    return None


# ---
# The tensors that go into an operator and come out, and which operator wrote each.

FLOATS = frozenset({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}) - {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


class Run(NamedTuple):
    """An operator that has run.

    Attributes:
        func: an overload, or a higher-order operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.
    """

    func: Any
    args: Args
    kwargs: Kwargs
    result: Any

    def outputs(self, facts: OpFacts) -> Iterator[tuple[str, torch.Tensor]]:
        """Path and tensor of each result, then of each argument that the operator writes to and does not return.

        A result's path is where it sits in `result` (""; `[0]`), an argument's its name (`['out']`).
        """
        yield from tensors_in(self.result)
        for position, name in facts.written:
            value = self.args[position] if 0 <= position < len(self.args) else self.kwargs.get(name)
            yield from ((f"[{name!r}]{path}", tensor) for path, tensor in tensors_in(value))

    def plain_arguments(self) -> dict[str, Any]:
        """Arguments by name, as `_plain_value` gives them, with defaults of those that were not given.

        Arguments for which that is None are left out. Of a higher-order operator, those by keyword alone.
        """
        schema = getattr(self.func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        # what is left at its default is not handed on
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= zip((argument.name for argument in arguments), self.args, strict=False)
        plain = {name: _plain_value(value) for name, value in (given | self.kwargs).items()}
        return {name: value for name, value in plain.items() if value is not None}


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter; `isinstance` alone would run torch's python for every tensor that is none."""
    return type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter)


# ---
# Every operator's results, under the module that ran it, forward and backward.
#
# A bug is often inside a module, where no hook reaches, and the backward pass runs operators that no line of the
# script names. A dispatch mode sees each operator after autograd has done its part and before its kernel runs, in the
# thread that runs it (autograd hands the mode on to its own threads). It calls the operator with what it was given
# and returns what it got. A backward operator is named by the forward one whose autograd node is running: nodes carry
# the sequence number that was current when the forward operator was seen.
#
# The mode lies at the bottom of the stack of modes for as long as steps are captured, so that modes of the script's
# own are pushed and popped above it as ever.

MAX_ARGUMENTS = 10_000
MAX_INPUTS = 64
"""Inputs that are named of one operator, at most."""
SCRIPT = "script"
"""FQN of operators that run outside every module."""

_NO_OPERATOR = OpFacts("", recorded=False, unwritten=False, each=False, written=())
"""Forward operator of nodes that have none, which accumulate into parameters."""

_LAST = 2**64 - 1
"""Sequence number of the nodes that accumulate into parameters."""


@dataclass(slots=True, eq=False)
class OpCall:
    """One call of an operator in a module, by module, phase, operator and number; the same object in every step.

    Attributes:
        phase: in which it runs.
        fqn: of the module that runs it, or `SCRIPT`.
        module_class: class of that module.
        facts: the operator.
        number: how many calls of the operator came before it there in the step.
        source: `file:line` of the user's that called it; "" where unknown.
        sites: of its results, by path; the probe adds them as results come.
        given: what it was given last. Kept, as new objects of every step would call Python's garbage collector.
    """

    phase: Phase
    fqn: str
    module_class: str
    facts: OpFacts
    number: int = 0
    source: str = ""
    sites: dict[str, int] = field(default_factory=dict)
    given: Given | None = None


class OpMode(TorchDispatchMode):
    """Dispatch mode that reports every operator to the probe."""

    supports_higher_order_operators = True

    def __init__(self, probe: OpProbe) -> None:
        """Set the probe that operators are reported to; the mode is on no stack before `enter_stack`."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.probe = probe

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap every call of `__torch_dispatch__`, which costs as much as the call."""
        return False  # the wrapper that would be put around every call costs as much as the call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiler need not mind this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Run the operator, report it to the probe if that is `live`, and return its result.

        An error of the operator is raised again with its traceback cleared, and nothing is reported.
        """
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            # Bare, there are no frames of the dispatcher; this one is left out as other frames of the tool are.
            raise error.with_traceback(None)  # noqa: B904 - the same error, not a new one
        probe = self.probe
        if probe.live:
            probe.record_results(Run(func, args, kwargs or {}, result), sys._getframe().f_back)  # noqa: SLF001 - as python documents it
        return result

    def enter_stack(self) -> None:
        """Push the mode onto this thread's stack of dispatch modes; nothing if any mode, even this one, is on it."""
        if private_api.modes_pushed() == 0:
            private_api.push_mode(self)

    def leave_stack(self) -> None:
        """Pop the mode if it is on top of this thread's stack; below a mode of the script's it stays."""
        if private_api.top_mode() is self:
            private_api.pop_mode()


class OpProbe(GuardedProbe):
    """Records results of operators."""

    name = "operators"
    lost = "operators are"

    def __init__(self, context: Context) -> None:
        """Watch nothing yet."""
        self.live = False
        super().__init__(context, then=self.on_tick)
        options = context.options
        self._facts_of = functools.cache(functools.partial(facts_of, globs=options.ops, views=options.views))
        self._between = Phase.DATA  # the phase of what runs outside every module
        self._calls: dict[tuple[OpFacts, str, Phase, int], OpCall] = {}
        self._by_node: dict[int, OpCall | None] = {}
        self._is_wanted = functools.cache(context.names.wanted)
        self._written_by: dict[int, int] = {}
        """Last site that wrote each piece of memory in this step, by address."""
        self._arguments: dict[str, dict[str, Any]] = {}
        self._mode = OpMode(self)
        self._patches.undo_by(self._mode.leave_stack, functools.partial(setattr, self, "live", False))

    def on_begin(self) -> None:
        """Start to record as a step begins, with phase data for operators outside of modules.

        The mode is pushed unless a mode of the script's is on the stack already; then operators are not seen.
        """
        self._between = Phase.DATA
        self.live = True
        self._mode.enter_stack()

    def _leave_for_optimizer(self, _optimizer: Any, args: Args, kwargs: Kwargs) -> None:
        """Pop the mode before an optimizer step without a closure: it would cost more than the step's operators."""
        if not has_closure(args, kwargs):
            self._mode.leave_stack()

    def _return_after_optimizer(self, _optimizer: Any, _args: Args, _kwargs: Kwargs) -> None:
        """Push the mode again after an optimizer step, while the step of the capture goes on."""
        if self.live:
            self._mode.enter_stack()

    def on_root(self, _module: object) -> None:
        """Record operators outside of modules in the loss phase from now on, since a root has been called."""
        self._between = Phase.LOSS

    def on_tick(self) -> None:
        """Stop recording until the next step begins, or after a failure, and forget the step's nodes and writers.

        Pops the mode too if the recorder does not want what comes next.
        """
        self._by_node.clear()
        self._written_by.clear()  # memory may be used for something else then
        self.live = False  # until the next step begins
        if not self._recorder.wanted:
            self._mode.leave_stack()

    def _find_call(self, facts: OpFacts, node: Any, frame: FrameType | None) -> OpCall | None:
        """Count a call of an operator, and return its `OpCall`, which is made at the first such call.

        The autograd node that the operator made is noted as that of this call, or as hidden where None is returned.
        Outside of modules in a backward pass, `_between` becomes the optimizer phase.

        Args:
            facts: the operator.
            node: the autograd node that is running; None outside a backward pass.
            frame: the innermost python frame that called it; None in a thread of autograd's own.

        Returns:
            None where it is not recorded: in an unwatched module, an optimizer step, a compiled region (unless those
            run as python) or a compiler's tracing; outside of modules in the data phase without gradients, or where the
            options leave `SCRIPT` out; in the backward pass of an operator that is not recorded.
        """
        place = self._place_of(node)
        entries = private_api.compiled_entries() if self._context.options.compile != "eager" else None
        if place is None or (entries and is_in_compiled_call(frame, entries)):
            if node is None or self._context.stack.calls:  # the last node is of no recorded operator, nor its backward
                self._by_node.setdefault(private_api.next_node() - 1, None)
            return None
        fqn, phase, module_class, line = place
        key = facts, fqn, phase, self._context.count(facts, fqn, phase)
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = OpCall(phase, fqn, module_class, facts, key[3], line_of(frame) or line)
        # The first operator seen since a node was made is the one it was made for; inside an autograd function of the
        # script's, the first that its forward runs. A backward pass that makes no graph makes none.
        if node is None or torch.is_grad_enabled():
            self._by_node.setdefault(private_api.next_node() - 1, call)
        return call

    def _place_of(self, node: Any) -> tuple[str, Phase, str, str] | None:
        """FQN, phase, class of the module and line of an operator that runs now; None where it is not recorded.

        The line is that of the forward operator of a backward one, "" for any other.
        """
        stack = self._context.stack
        if stack.calls:
            state = stack.calls[-1]
            if state is None or not state.watched or private_api.tracing_state() is not None:
                return None
            return state.fqn, stack.phase, state.module_class, ""
        if node is not None:
            self._between = Phase.OPTIMIZER
            origin = self._forward_call(node)
            return None if origin is None else (origin.fqn, Phase.BACKWARD, origin.module_class, origin.source)
        in_data = self._between is Phase.DATA and not torch.is_grad_enabled()
        if stack.optimizers or in_data or not self._is_wanted(SCRIPT):
            return None
        return SCRIPT, self._between, "", ""

    def _forward_call(self, node: Any) -> OpCall | None:
        """The forward call of an autograd node.

        Returns:
            None where that call was not recorded, or the node is a compiled region's; for a node that accumulates a
            gradient, a new call without operator of the parameter's module, None where that is not watched; for a node
            whose forward was not seen in this step, one under `SCRIPT`.
        """
        number = node._sequence_nr()  # noqa: SLF001 - as above
        if number == _LAST:
            name = self._context.names.parameters.name_of(node.variable) if hasattr(node, "variable") else None
            if name is None or not name.watched:
                return None
            return OpCall(Phase.FORWARD, name.fqn.rpartition(".")[0], name.module_class, _NO_OPERATOR)
        if number in self._by_node or "Compiled" in node.name():
            return self._by_node.get(number)
        return OpCall(Phase.FORWARD, SCRIPT, "", _NO_OPERATOR)

    def record_results(self, run: Run, frame: FrameType | None) -> None:
        """Record the results of an operator that has run, if it is recorded and `_find_call` returns its call.

        Of one that leaves memory unwritten (`empty`), its results' writers are forgotten; of a view of a parameter that
        is not recorded, the parameter is noted as the memory's writer. Operators that introspect itself runs, and all
        in an unrecorded step, are ignored.

        Args:
            run: the operator.
            frame: the innermost python frame that called it; None in a thread of autograd's own.
        """
        with self._guarded:
            if not self._recorder.wanted or (frame is not None and is_introspects(frame)):
                return
            facts, node = self._facts_of(run.func), private_api.running_node()
            if node is not None and not (facts.recorded or facts.unwritten or torch.is_grad_enabled()):
                if not self._context.stack.calls:
                    self._between = Phase.OPTIMIZER
                return  # most of a backward pass: a view, of which no node of the graph can come
            if (call := self._find_call(facts, node, frame)) is None:
                return
            if facts.recorded:
                self._write_results(run, call, node)
            elif facts.unwritten:
                for _, value in tensors_in(run.result):
                    self._written_by.pop(memory_of(value), None)
            elif run.args and is_parameter(run.args[0]):
                self._writer_of(run.args[0])  # a view of a parameter is known by its memory from here on

    def _write_results(self, run: Run, call: OpCall, node: Any) -> None:
        """Emit a record for each result whose dtype is in `FLOATS`, with the sites that wrote the inputs.

        Each record's site becomes the last writer of the result's memory; for a result of another dtype the writer is
        forgotten. The operator's plain arguments are kept where a site is new. At a fake tensor, which a compiler
        traces with, it stops.

        Args:
            run: the operator.
            call: its call.
            node: the autograd node that is running; None outside a backward pass.
        """
        facts = call.facts
        is_one = type(run.result) is torch.Tensor and not facts.written
        found: Iterable[tuple[str, torch.Tensor]] = (("", run.result),) if is_one else run.outputs(facts)
        given: Given | None = None
        for path, value in found:
            if type(value) is not torch.Tensor and isinstance(value, private_api.FAKE_TENSOR):
                return
            if value.dtype not in FLOATS:
                self._written_by.pop(memory_of(value), None)
                continue
            if (site := call.sites.get(path)) is None:
                place = Site(call.phase, Kind.OP_OUTPUT, call.fqn, call.number, facts.name + path)
                info = SiteInfo(call.module_class, facts.name, call.source)
                site = call.sites[path] = self._recorder.site(place, info)
                self._note_arguments(run, call)
            if given is None and (given := self._given_of(node, run, each=facts.each)) != call.given:
                call.given = given
            given = call.given
            self._recorder.emit(site, value, given)
            if memory := memory_of(value):
                self._written_by[memory] = site

    def _note_arguments(self, run: Run, call: OpCall) -> None:
        """Keep an operator's plain arguments for `settings/operators`, by phase, FQN, call number and operator.

        Nothing where it has none, where the place has an entry already, and once there are 10,000 entries.
        """
        key = f"{call.phase.value} {call.fqn} {call.number} {call.facts.name}"
        if len(self._arguments) < MAX_ARGUMENTS and key not in self._arguments and (noted := run.plain_arguments()):
            self._arguments[key] = noted
            self._context.facts["operators"] = lambda: self._arguments

    def _writer_of(self, value: torch.Tensor) -> int:
        """Number of the last site that wrote a tensor's memory in this step; -1 where none is noted.

        For a parameter that nothing has written, the site of its value at the start, which is noted as the writer.
        """
        memory = memory_of(value)
        site = self._written_by.get(memory, -1)
        if site < 0 and is_parameter(value):
            name = self._context.names.parameters.name_of(value)
            if name is not None:
                site = self._written_by[memory] = self._context.site(name, Phase.START, Kind.PARAM)
        return site

    def _writers_of(self, values: tuple[Any, ...] | list[Any], found: list[int] | None = None) -> list[int]:
        """Sites that wrote the inputs of a dtype in `FLOATS`, each once, in order; -1 if not known.

        A list or tuple is left once there are 64.

        Args:
            values: the inputs; lists and tuples among them are looked into.
            found: those of inputs before these; more are appended.
        """
        found = [] if found is None else found
        for value in values:
            if isinstance(value, (tuple, list)):
                self._writers_of(value, found)
            elif isinstance(value, torch.Tensor) and value.dtype in FLOATS:
                site = self._writer_of(value)
                if site not in found:
                    found.append(site)
                    if len(found) >= MAX_INPUTS:
                        break
        return found

    def _given_of(self, node: Any, run: Run, *, each: bool) -> Given:
        """Sites that wrote an operator's inputs, and the forward operator of a backward one.

        Args:
            node: the autograd node that is running; None outside a backward pass.
            run: the operator.
            each: whether it works on lists, element by element: then what went into one is not known.
        """
        sites = [-1] if each else self._writers_of((*run.args, *run.kwargs.values()))
        origin = None if node is None else self._by_node.get(node._sequence_nr()) or node.name()  # noqa: SLF001 - documented in torch's notes on autograd
        if origin is None or isinstance(origin, str):
            return Given(tuple(sites), -1, origin or "")
        site = next(iter(origin.sites.values()), -1)
        return Given(tuple(sites), site, "" if site >= 0 else origin.facts.name)


_DEEPEST = 200


def is_in_compiled_call(frame: FrameType | None, entries: frozenset[int]) -> bool:
    """Whether a frame was called by a region that `torch.compile` made; 200 frames upwards are looked at, itself first.

    Args:
        frame: the frame; None is in no such call.
        entries: ids of the code objects that `torch.compile` made.
    """
    return any(id(below.f_code) in entries for below in islice(outward(frame), _DEEPEST))
