"""Which call of which operator one is: its module, its phase, and how often that operator has run there.

Python runs for every operator of a step, so everything here is looked up and nothing is built once a call has been met:
the records of one call are the same site in every step. Frames are walked for the user's line only of calls that were
not met before, and each code object is judged once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.ops.schema import OpFacts
from introspect_cli.records import Given, Phase

if TYPE_CHECKING:
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.frames import Places


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
        known: what `given` is made of.
        given: its inputs in the last step.
    """

    phase: Phase
    fqn: str
    module_class: str
    facts: OpFacts
    number: int = 0
    source: str = ""
    sites: dict[str, int] = field(default_factory=dict)
    known: Any = None
    given: Given = field(default_factory=Given)


@dataclass(slots=True, eq=False)
class _Repeated:
    """Calls of one operator in one module and phase: the count in this step, and call objects by number.

    `step` is the one that `count` is of, -1 for none.
    """

    step: int = -1
    count: int = 0
    calls: dict[int, OpCall] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Scope:
    """One module in one phase, and its operators; `watched` says whether what the module runs is recorded."""

    phase: Phase
    fqn: str
    module_class: str
    watched: bool
    operators: dict[OpFacts, _Repeated] = field(default_factory=dict)


class Calls:
    """Finds the call object of an operator, and the forward operator of an autograd node."""

    def __init__(self, context: Context, places: Places, *, into_compiled: bool) -> None:
        """Count nothing yet.

        Args:
            context: the recorder and the names.
            places: judges frames.
            into_compiled: whether compiled regions run as python, so that what they run is recorded too.
        """
        self.between = Phase.DATA
        """The phase of what runs outside every module."""
        self._recorder = context.recorder
        self._names = context.names
        self._stack = context.stack
        self._places = places
        self._into_compiled = into_compiled
        self.scopes: dict[tuple[str, Phase], Scope] = {}
        self._latest = Scope(Phase.DATA, "", "", watched=False)
        self.by_node: dict[int, OpCall | None] = {}

    def clear(self) -> None:
        """Forget which operator each autograd node was made for, as a step ends; call objects stay."""
        self.by_node.clear()

    def find_call(self, facts: OpFacts, node: Any, frame: FrameType | None) -> OpCall | None:
        """Count a call of an operator, and find its object; the autograd node that it made is noted.

        In a backward pass it also sets `between` to the optimizer phase.

        Args:
            facts: the operator.
            node: the autograd node that is running; None outside a backward pass.
            frame: the innermost python frame that called it; None in a thread of autograd's own.

        Returns:
            None where it is not recorded: in an unwatched module, an optimizer step, a compiled region or a compiler's
            tracing; outside of modules in the data phase without gradients; for a node of what is not recorded.
        """
        stack = self._stack
        origin: OpCall | None = None
        if stack.calls:
            state = stack.calls[-1]
            if state is None or not state.watched or private_api.tracing_state() is not None:
                self._hide_node()
                return None
            scope = self._latest
            if scope.fqn is not state.fqn or scope.phase is not stack.phase:
                scope = self._latest = self.scope_of(state.fqn, stack.phase, state.module_class, watched=True)
        elif node is not None:
            self.between = Phase.OPTIMIZER
            origin = self._forward_call(node)
            if origin is None:
                return None
            scope = self._latest
            if scope.fqn is not origin.fqn or scope.phase is not Phase.BACKWARD:
                scope = self._latest = self.scope_of(origin.fqn, Phase.BACKWARD, origin.module_class, watched=True)
        else:
            if stack.optimizers:
                return None
            scope = self.scope_of(SCRIPT, self.between, "", watched=None)
            if not scope.watched or (self.between is Phase.DATA and not torch.is_grad_enabled()):
                self._hide_node()
                return None
        if (
            not self._into_compiled
            and (entries := private_api.compiled_entries())
            and is_in_compiled_call(frame, entries)
        ):
            self._hide_node()
            return None
        repeated = self._repeated(scope, facts)
        number = repeated.count
        repeated.count = number + 1
        call = repeated.calls.get(number)
        if call is None:
            source = self._places.line(frame) or (origin.source if origin is not None else "")
            call = OpCall(scope.phase, scope.fqn, scope.module_class, facts, number, source)
            repeated.calls[number] = call
        # The first operator seen since a node was made is the one it was made for; inside an autograd function of the
        # script's, the first that its forward runs. A backward pass that makes no graph makes none.
        if node is None or torch.is_grad_enabled():
            self.by_node.setdefault(private_api.next_node() - 1, call)
        return call

    def _repeated(self, scope: Scope, facts: OpFacts) -> _Repeated:
        """Counter of one operator in a scope, made at the first call; set to 0 at the first call in a step."""
        repeated = scope.operators.get(facts)
        if repeated is None:
            repeated = scope.operators[facts] = _Repeated()
        step = self._recorder.step
        if repeated.step != step:
            repeated.step, repeated.count = step, 0
        return repeated

    def _hide_node(self) -> None:
        """Note, if nothing is noted yet, that the last autograd node is of no recorded operator, nor its backward."""
        self.by_node.setdefault(private_api.next_node() - 1, None)

    def known_forward_call(self, node: Any) -> OpCall | None:
        """The recorded forward call that an autograd node was made for; None where none was seen."""
        return self.by_node.get(node._sequence_nr())  # noqa: SLF001 - documented in torch's own notes on autograd

    def _forward_call(self, node: Any) -> OpCall | None:
        """The forward call of an autograd node.

        Returns:
            None where that was not recorded, or is a compiled region; a new call without operator, of the script, where
            it is not known.
        """
        number = node._sequence_nr()  # noqa: SLF001 - as above
        if number == _LAST:
            return self._accumulating_call(node)
        try:
            return self.by_node[number]
        except KeyError:
            return None if "Compiled" in node.name() else OpCall(Phase.FORWARD, SCRIPT, "", _NO_OPERATOR)

    def _accumulating_call(self, node: Any) -> OpCall | None:
        """For a node that accumulates a parameter's gradient: a new call, without operator, of the parameter's module.

        Returns:
            None where the parameter is not known or not watched.
        """
        name = self._names.parameters.name_of(node.variable) if hasattr(node, "variable") else None
        if name is None or not name.watched:
            return None
        return OpCall(Phase.FORWARD, name.fqn.rpartition(".")[0], name.module_class, _NO_OPERATOR)

    def scope_of(self, fqn: str, phase: Phase, module_class: str, *, watched: bool | None) -> Scope:
        """The scope of a module in a phase, made at the first call.

        Args:
            fqn: of the module, or `SCRIPT`.
            phase: the phase.
            module_class: class of the module.
            watched: whether what it runs is recorded; None to ask `Names.wanted`. What the first call said stays.
        """
        scope = self.scopes.get((fqn, phase))
        if scope is None:
            wanted = self._names.wanted(fqn) if watched is None else watched
            scope = self.scopes[fqn, phase] = Scope(phase, fqn, module_class, watched=wanted)
        return scope


_DEEPEST = 200


def is_in_compiled_call(frame: FrameType | None, entries: frozenset[int]) -> bool:
    """Whether a frame was called by a region that `torch.compile` made; 200 frames upwards are looked at, itself first.

    Args:
        frame: the frame; None is in no such call.
        entries: ids of the code objects that `torch.compile` made.
    """
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if id(frame.f_code) in entries:
            return True
        frame = frame.f_back
    return False
