"""What a comparison finds beside divergences and settings: each kind of finding as plain data.

`render/findings.py` has the forms of each type.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Certainty(str, Enum):
    """How sure an explanation is."""

    PROVED = "on record"
    """The records of both runs show it."""
    LEFT = "what is left"
    """Nothing else remains of what could have made it, as far as was recorded."""
    LIKELY = "likely"
    """It fits, and other explanations remain."""


@dataclass(frozen=True)
class Finding:
    """Something that the records show of the first divergence, and that explains it.

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
    """Something that differs besides numbers and settings: a name, a module, a call, a random state.

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


@dataclass(frozen=True)
class StepReach:
    """The site of a step at which b is furthest from a, in what rounding makes there.

    Attributes:
        times: its distance over that.
        text: the site in words.
    """

    step: int
    times: float
    fqn: str
    text: str


@dataclass(frozen=True)
class Reach:
    """Whether b stays within what one rounding of the initial parameters does to a.

    Attributes:
        seeds: of the perturbed runs.
        measured: how many of the compared steps a perturbed run has.
        compared: how many steps were compared.
        furthest: the step in which b goes furthest beyond it, or comes nearest to that; None where b equals a.
        left: the first step in which b leaves it; None where it stays within.
    """

    seeds: tuple[int, ...]
    measured: int
    compared: int
    furthest: StepReach | None
    left: StepReach | None


class Restored(str, Enum):
    """What became of a part of a checkpoint."""

    YES = "restored"
    NO = "not restored"
    UNSEEN = "not recorded"


@dataclass(frozen=True)
class Part:
    """A part of what a resumed run goes on with.

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
    """What a resumed run goes on with.

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
        """`b` or `a`, the other run."""
        return "a" if self.run == "b" else "b"

    @property
    def unseen(self) -> tuple[Part, ...]:
        """The parts that were not recorded and on which something may rest."""
        return tuple(part for part in self.parts if part.state is Restored.UNSEEN and part.matters)

    @property
    def lost(self) -> tuple[Part, ...]:
        """The parts that were not restored and on which something may rest."""
        return tuple(part for part in self.parts if part.state is Restored.NO and part.matters)
