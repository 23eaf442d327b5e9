"""Clues of a divergence for ranking code changes, the nearness of each change, and all code changes of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from introspect_cli.compare.changes.statements import Change
    from introspect_cli.records import Kind


SourceLine: TypeAlias = tuple[str, int]
"""File and line of the user's code."""
Bounds: TypeAlias = "tuple[SourceLine | None, SourceLine | None]"
"""Lines that ran the last record that agreed and the first that did not; None where not on record."""


class Nearness(str, Enum):
    """How near a changed statement is to the divergence, the nearest first."""

    RECORDED = "recorded"
    """The records name its line."""
    COMPUTES = "computes"
    """It is in the code that computes the first value that differs."""
    BUILDS = "builds"
    """It builds that code's objects, or gives them their values."""
    BETWEEN = "between"
    """It ran between the last record that agreed and the first that did not."""
    ALONE = "alone"
    """Nothing in it reaches the place by name, and it is the only statement that changed: nothing else differs."""
    ELSEWHERE = "elsewhere"


ORDER = list(Nearness)


@dataclass(frozen=True)
class Clues:
    """Names and lines on record at a divergence, with which changed statements are matched.

    Attributes:
        reason: the word of its reason; of a gap, that which would apply if all had been recorded.
        gap: whether evidence is missing.
        classes: of the module it is about and of those around it, the innermost first.
        attributes: what these are called in the module around each.
        inside: classes of the modules inside it whose outputs are not on record.
        models: what the script calls its models.
        optimizers: classes of the optimizers that step.
        words: names that differ or are known to matter: hyper-parameters, attributes, what one run only has.
        lines: file and line of the user's code that the records of a and of b themselves name.
        bounds: of a and of b, the lines that ran the last record that agreed and the first that did not, where known.
        kind: kind of the record; None without one.
        tensor: what the tensor is called in its module.
        roots: classes of the modules that no other holds.
        batch_is_equal: whether the batches of the step are on record and equal.
        ran: classes of all modules that either run has.
        scripts: file names of both runs' scripts.
    """

    reason: str
    gap: bool = False
    classes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()
    optimizers: tuple[str, ...] = ()
    words: frozenset[str] = frozenset()
    lines: tuple[tuple[SourceLine, ...], tuple[SourceLine, ...]] = ((), ())
    bounds: tuple[Bounds, Bounds] = ((None, None), (None, None))
    kind: Kind | None = None
    tensor: str = ""
    roots: tuple[str, ...] = ()
    batch_is_equal: bool = False
    ran: frozenset[str] = frozenset()
    scripts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ranked:
    """A changed statement and how near to the divergence it is.

    Attributes:
        nearness: how near.
        depth: number of calls or values between it and the code that computes the diverging value.
        hits: how many of the names that the records point to are in what changed.
        can_matter: whether it may change a number: it does not only tell, is no import, and calls take what it gives.
    """

    change: Change
    nearness: Nearness
    depth: int = 0
    hits: int = 0
    can_matter: bool = True

    @property
    def likely(self) -> bool:
        """Whether its nearness is not `Nearness.ELSEWHERE`."""
        return self.nearness is not Nearness.ELSEWHERE


@dataclass(frozen=True)
class CodeChanges:
    """Changed statements and files between two runs.

    Attributes:
        ranked: changed statements, the most likely cause first.
        in_comments: files that differ in comments, formatting or the order of definitions alone.
        in_names: files that differ in the names of variables, and in comments, alone.
        unread: files that differ and of which a text is not there, with why: `text` (a run did not keep it), `secret`
            (only what was redacted can differ, or comments), `binary`.
        compared: how many files both runs have digests of.
    """

    ranked: tuple[Ranked, ...] = ()
    in_comments: tuple[str, ...] = ()
    in_names: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    compared: int = 0

    @property
    def likely(self) -> tuple[Ranked, ...]:
        """The ranked changes that are not `Nearness.ELSEWHERE`."""
        return tuple(one for one in self.ranked if one.likely)

    @property
    def files(self) -> int:
        """Number of files with changed statements."""
        return len({one.change.file for one in self.ranked})
