"""What is known of the things a divergence rests on.

"Although its inputs are equal" is true only where both runs recorded them with equal checksums: unrecorded values, and
values within tolerance, are not equal.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.table import DIFFERENT, EQUAL, NOT_SEEN, UNUSED, WITHIN, Codes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from introspect_cli.compare.result import Role


class Known(Enum):
    """State of a thing in both runs, the best first."""

    EQUAL = "equal"
    WITHIN = "within tolerance"
    FORM = "the same or in another form"
    UNSEEN = "not recorded"
    DIFFERS = "different"


_STATES = (EQUAL, WITHIN, UNUSED, NOT_SEEN, DIFFERENT)
"""The state code of a record for each `Known`, in order."""


class Thing(Enum):
    """What a divergence can rest on, in words: a template of `say.py`, of what a module or tensor owns with `its`."""

    RANDOM_AT_START = "the random state at the start of the step"
    DRAWN_FROM = "the random state[ inside {inside}]"
    BATCHES = "the batches"
    SHARED_BATCHES = "the batches that both runs have"
    INPUTS = "{its} inputs[ of {of}]"
    INSIDE = "the outputs of the modules before it[ inside {inside}]"
    PARAMETERS = "{its} parameters[ of {of}]"
    REWRITTEN = "{its} parameters[ of {of}] at this point of a forward pass that changes them"
    BUFFERS = "{its} buffers[ of {of}]"
    BUFFERS_AT_START = "{its} buffers[ of {of}] when the step began"
    OUTPUTS = "the module outputs before it"
    RAN_UNSEEN = "what {of} computes"
    PASSED_OVER = "what models computed without gradients"
    FORWARD = "the forward pass"
    LEFT_OUT = "the modules that a capture was told to leave out"
    LOSS = "the loss"
    BACKWARD = "the backward pass"
    GRADIENT = "{its} gradient[ of {of}]"
    GRADIENT_SUM = "the sum of its gradient over the ranks"
    GRADIENTS_IN_STEP = "the gradients before it in the optimizer step"
    VALUE_BEFORE = "{its} value before[ of {of}]"
    STATE_BEFORE = "the optimizer state before"
    TRAINED = "every tensor that requires gradients"
    EVERYTHING = "everything recorded before it"


RANDOM = frozenset({Thing.RANDOM_AT_START, Thing.DRAWN_FROM})
"""Random states, of the step and of a module's call."""


class Evidence(NamedTuple):
    """One thing that a divergence rests on, and what is known of it.

    Attributes:
        needed: whether nothing can be concluded where it was not seen.
        of: FQN of the module whose it is, where that is not the diverging one.
        inside: FQN of the module inside which it is looked for, where "its" would be read as another's.
    """

    thing: Thing
    known: Known
    needed: bool = False
    of: str = ""
    inside: str = ""


def with_state(evidence: Iterable[Evidence], known: Known) -> list[Evidence]:
    """The facts whose `known` is exactly `known`, in order."""
    return [fact for fact in evidence if fact.known is known]


def joint_known(states: Codes, *, every: bool = False) -> Known:
    """What is known of several sites together: the worst of their states; UNSEEN if no site has a row, as for none.

    Args:
        states: state code of each site, as `Table.state_of` gives them.
        every: whether a single site that was not seen makes the answer UNSEEN; else such sites are left out.
    """
    there = {known for known, state in zip(Known, _STATES, strict=True) if (states == state).any()}
    there -= set() if every else {Known.UNSEEN}
    return worst_of(there) if there else Known.UNSEEN


def worst_of(answers: Collection[Known]) -> Known:
    """The last of `Known` that is among the states; EQUAL for none."""
    return max(answers, key=list(Known).index, default=Known.EQUAL)


class Cause(NamedTuple):
    """Role and reason of a divergence, with its evidence.

    Attributes:
        role: origin or propagated.
        reason: the word of the reason.
        evidence: what it rests on.
        module: the module whose code is meant, where that is not the record's own.
        after: the last module inside `module` that agreed.
        before: the first module inside `module` that did not.
        subject: for structure, the module or name that only one run has.
        instead: for a gap, the word of the reason that would apply if all had been recorded.
    """

    role: Role
    reason: str
    evidence: tuple[Evidence, ...] = ()
    module: str = ""
    after: str = ""
    before: str = ""
    subject: str = ""
    instead: str = ""

    def rests_on(self, *things: Thing) -> list[Evidence]:
        """The facts about any of these things, in order."""
        return [fact for fact in self.evidence if fact.thing in things]
