"""Findings of a comparison besides divergences and settings, as plain data.

`render/findings.py` renders each type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Certainty(str, Enum):
    """How certain an explanation is."""

    PROVED = "on record"
    """The records of both runs show it."""
    LEFT = "what is left"
    """Nothing else remains of what could have made it, as far as was recorded."""
    LIKELY = "likely"
    """It fits, and other explanations remain."""


@dataclass(frozen=True)
class Finding:
    """An explanation of the first divergence, from the records.

    Attributes:
        code: what it is; `say.py` has the words of each.
        certainty: whether it is on record, or likely.
        fields: names, sides and numbers that fill the words.
        text: the words, as a clause.
    """

    code: str
    certainty: Certainty
    fields: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class StructureChange:
    """A difference besides numbers and settings: a name, module, call or random state.

    Attributes:
        change: `renamed`, `only` (one run has it), `merged`, `split`, `calls` or `random`.
        a: its name in run a, numbers of layers as stars; None where only b has it.
        b: its name in run b; None where only a has it.
        text: what differs, as a clause.
        note: what else is known of it, as a clause.
        evidence: what it rests on; "" where the text says it.
    """

    change: str
    a: str | None
    b: str | None
    text: str
    note: str = ""
    evidence: str = ""


class Restored(str, Enum):
    """Whether a part of a checkpoint was restored."""

    YES = "restored"
    NO = "not restored"
    UNSEEN = "not recorded"


@dataclass(frozen=True)
class Part:
    """One part of a checkpoint, and whether the resumed run restored it.

    Attributes:
        part: its name: `parameters`, `random state of torch`.
        state: whether it was restored.
        text: more of it, with values; "" where there is no more to say.
        a: its value in run a, where it is a number; None otherwise.
        b: its value in run b.
        matters: whether anything may rest on it: False where nothing drew from a generator, of what only counts, and of
            what neither run has.
        generator: of a random state, whose it is; "" of all else.
    """

    part: str
    state: Restored
    text: str = ""
    a: str | None = None
    b: str | None = None
    matters: bool = True
    generator: str = ""


@dataclass(frozen=True)
class Resumption:
    """A resumed run, and which parts of the checkpoint it restored.

    Attributes:
        run: `a` or `b`, the resumed run.
        at: the step of the other run that its first step is compared with.
        first: that first step.
        sign: what says that it is resumed.
        parts: each part.
    """

    run: str
    at: int
    first: int
    sign: str
    parts: tuple[Part, ...]

    @property
    def whole(self) -> str:
        """`a` or `b`: the run that was not resumed."""
        return "a" if self.run == "b" else "b"

    @property
    def unseen(self) -> tuple[Part, ...]:
        """Parts of the checkpoint that were not recorded and matter."""
        return tuple(part for part in self.parts if part.state is Restored.UNSEEN and part.matters)

    @property
    def lost(self) -> tuple[Part, ...]:
        """Parts of the checkpoint that were not restored and matter."""
        return tuple(part for part in self.parts if part.state is Restored.NO and part.matters)
