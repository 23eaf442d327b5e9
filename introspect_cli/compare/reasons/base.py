"""What a reason is: when it applies, what it rests on, what may be found of it, and which settings explain it.

A record that differs is an origin where everything that went into it was seen and does not differ. Each reason knows
what goes into the records it is about, and hands that over as evidence; `judge` alone decides what follows from it, so
that no reason can take what was not recorded for equal. A reason is a row of `rows.py`; what it may find are functions
from a view of the place to findings, and what is left where none is on record is a list of alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.evidence import Cause, Evidence
from introspect_cli.compare.result import Role
from introspect_cli.compare.step import RESTS_ON, Place, rests_on
from introspect_cli.records import Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step import Step
    from introspect_cli.records import Kind

KERNEL_WEIGHTS = {"runtime": 0.75, "packages": 0.6, "hardware": 0.55}
"""How well settings explain what a kernel computes."""

Left = Callable[["View"], Iterable[str]]
"""Gives codes of the causes to name where none is found on record, for `say.left`."""
Applies = Callable[["Step", int], "Cause | None"]
"""The cause of a divergence, an index in `step.sites`; None where the reason does not apply."""


_ALL_PHASES = frozenset(Phase)


def is_fed(step: Step, position: int, upstream: frozenset[Phase] = _ALL_PHASES) -> bool:
    """Whether anything differs before a divergence: an earlier record, or a random state at the step's start.

    A parameter or buffer that differs as the step begins counts too; saved files do not.

    Args:
        step: the step.
        position: index of the divergence in `step.sites`.
        upstream: phases of the records that count.
    """
    differs = step.differs_before(step.orders[position], upstream)
    return differs or step.rng_differs() or bool(step.begins.names)


class Reason(NamedTuple):
    """One kind of cause: when it applies, its evidence, its findings and the settings that explain it.

    Attributes:
        word: its name in `--format json`.
        about: what the reference says of it.
        kinds: kinds of the records it is about; empty for all.
        upstream: phases of the records that may have gone into it.
        applies: what makes a divergence one, resting on evidence, None where something that went into it differs;
            without one, that nothing upstream has fed it.
        left: the codes of what may have made it where nothing is found on record, or a function that yields them.
        weights: how well a setting explains it, 0 to 1, by the setting's source.
        names: a pattern; settings whose names match explain it a little better.
    """

    word: str
    about: str
    kinds: frozenset[Kind] = frozenset()
    upstream: frozenset[Phase] = _ALL_PHASES
    applies: Applies | None = None
    left: Left | tuple[str, ...] = ()
    weights: Mapping[str, float] = {}
    names: str = ""

    def remaining(self, at: View) -> Iterable[str]:
        """Codes of the causes to name where none is found on record: `left`, called with `at` if it is a function."""
        return self.left(at) if callable(self.left) else self.left

    def cause_of(self, step: Step, position: int) -> Cause | None:
        """The cause of a divergence by this reason; None where the reason does not apply or an input differs.

        That is what `applies` gives, if there is one; else None where it `is_fed`, and a cause with the evidence of
        `evidence_of`.

        Args:
            step: the step.
            position: index of the divergence in `step.sites`.
        """
        if self.applies is not None:
            return self.applies(step, position)
        fed = is_fed(step, position, self.upstream)
        return None if fed else cause(self.word, *evidence_of(self.word, step, position))


def evidence_of(word: str, step: Step, position: int) -> list[Evidence]:
    """Evidence on all that a divergence rests on by `RESTS_ON[word]`; `position` is its index in `step.sites`."""
    return rests_on(step, Place(step.sites[position], step.orders[position]), RESTS_ON[word])


def cause(word: str, *evidence: Evidence, role: Role = Role.ORIGIN, **where: str) -> Cause:
    """Make a `Cause` of reason `word`: an origin, or of another `role`.

    `where` are further fields, such as `module`.
    """
    return Cause(role, word, evidence, **where)
