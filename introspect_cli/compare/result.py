"""Options of a comparison and its answer, with all that it finds, as plain frozen data.

Tests, scripts and several renderers use it, so it knows nothing of terminals, stores or arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.labels import both_words
from introspect_cli.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.elements import Elements
    from introspect_cli.labels import Label
    from introspect_cli.records import Site, Summary


class Certainty(str, Enum):
    """How certain an explanation is."""

    PROVED = "on record"
    """The records of both runs show it."""
    LEFT = "what is left"
    """Nothing else remains of what could have made it, as far as was recorded."""
    LIKELY = "likely"
    """It fits, and other explanations remain."""


class Finding(NamedTuple):
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


class StructureChange(NamedTuple):
    """A difference besides numbers and settings: a name, module, call or random state.

    Attributes:
        change: `renamed`, `only` (one run has it), `calls` (both have it, one has more of it) or `random`.
        a: its name in run a, numbers of layers as stars; None where only b has it.
        b: its name in run b; None where only a has it.
        text: what differs, as a clause.
    """

    change: str
    a: str | None
    b: str | None
    text: str


class Restored(str, Enum):
    """Whether a part of a checkpoint was restored."""

    YES = "restored"
    NO = "not restored"
    UNSEEN = "not recorded"


class Part(NamedTuple):
    """One part of a checkpoint, and whether the resumed run restored it.

    Attributes:
        part: its name: `parameters`, `random state of torch`.
        state: whether it was restored.
        text: more of it, with values; "" where there is no more to say.
        matters: whether anything may rest on it: False where nothing drew from a generator, of what only counts, and of
            what neither run has.
        generator: of a random state, whose it is; "" of all else.
    """

    part: str
    state: Restored
    text: str = ""
    matters: bool = True
    generator: str = ""


class Resumption(NamedTuple):
    """A resumed run, and which parts of the checkpoint it restored.

    Attributes:
        run: `a` or `b`, the resumed run.
        at: the step of the other run that its first step is compared with.
        first: that first step.
        parts: each part.
    """

    run: str
    at: int
    first: int
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


RESOLUTION = 1e-7
"""Relative distances below this drown in a sketch's own float32 rounding."""


class Verdict(str, Enum):
    """The verdict of a comparison."""

    SAME = "same"
    DIVERGED = "diverged"
    UNDECIDED = "undecided"


class Role(str, Enum):
    """Whether a divergence is an origin or follows from another."""

    ORIGIN = "origin"
    PROPAGATED = "propagated"


class Size(str, Enum):
    """Size class of a divergence; `step.py` has the rule."""

    ROUNDING = "rounding"
    MORE = "more than rounding"
    STRUCTURAL = "structural"


class Divergence(NamedTuple):
    """One site at one step whose records differ, or that only one run has.

    Attributes:
        step: step of run a (of run b where only b has the site).
        step_b: the step of run b it was compared with; another than `step` under an offset.
        rank: process.
        sequence: place in the rank's own order, as run a recorded it.
        site: what was compared; names are those of run b after `--rename`.
        module_class: class of the module, optimizer or loader.
        role: origin or propagated.
        reason: what made it: the word of a reason in `reasons/`, or `gap` or `propagated`.
        a: what run a recorded; None where only b has the site.
        b: what run b recorded; None where only a has the site.
        rel_l2: L2 distance over the larger of the two L2 norms; None where it cannot be told.
        exact: whether `rel_l2` comes from the stored tensors and not from the sketches.
        size: its class; None where what was recorded does not tell, and of random states.
        scale: c where b is c times a to within the sketch's precision; None otherwise.
        floor: relative distance that the noise runs show at this site; None without noise runs.
        source: for an operator or collective, `file:line` of the user's code that ran it (a's where both do).
        elements: how the whole tensors differ; None where they are not both stored.
        labels: what a's training framework calls the step.
        labels_b: what b's calls its step.
    """

    step: int
    step_b: int
    rank: int
    sequence: float
    site: Site
    module_class: str
    role: Role
    reason: str
    a: Summary | None
    b: Summary | None
    rel_l2: float | None = None
    exact: bool = False
    size: Size | None = None
    scale: float | None = None
    floor: float | None = None
    source: str = ""
    elements: Elements | None = None
    labels: Mapping[str, Label] = {}
    labels_b: Mapping[str, Label] = {}

    @property
    def only(self) -> str:
        """`a` or `b`, the one run that has the site; "" where both have it."""
        return "a" if self.b is None else "b" if self.a is None else ""

    @property
    def role_word(self) -> str:
        """The role, as tables show it: `unclear` where not everything that went in was recorded."""
        return "unclear" if self.reason == "gap" else self.role.value

    @property
    def step_words(self) -> str:
        """The step with labels of the training framework, `step 3 (epoch 1)`.

        That of b too, where number or labels differ.
        """
        return both_words(self.step, self.labels, self.step_b, self.labels_b)


class SettingChange(NamedTuple):
    """A setting that differs, and how well it explains the first divergence.

    Attributes:
        source: where it was found: `hyperparameter`, `command`, `environment`, `packages`, `sources`, ...
        name: the setting's name within its source.
        a: its value in run a, as text; None where only b has it.
        b: its value in run b, as text; None where only a has it.
        about: what it is about, where `name` says more: `lr` of `lr (group 1)`, the value in a configuration file.
        weight: how strongly it explains the first divergence, 0 to 1; the list is sorted by it.
    """

    source: str
    name: str
    a: str | None
    b: str | None
    about: str = ""
    weight: float = 0.0

    @property
    def explains(self) -> bool:
        """Whether it can explain the first divergence."""
        return self.weight >= 0.5


class Fact(NamedTuple):
    """One thing the first divergence rests on, and what is known of it.

    Attributes:
        thing: what it is: `inputs`, `parameters`, `random_at_start`, ...
        known: `equal`, `within`, `unseen` or `form`.
        of: the module whose it is, where that is not the diverging one.
        inside: the module inside which it was looked for.
        text: the thing in words.
    """

    thing: str
    known: str
    of: str
    inside: str
    text: str


class Candidate(NamedTuple):
    """A possible cause of the first divergence: a changed statement or setting.

    Attributes:
        kind: `statement` or `setting`.
        name: the statement's scope, or the setting.
        a: its value in run a, or its text there; None where only b has it.
        b: the same of b.
        certainty: on record, where the records show that it is this setting; else likely.
        line: `file:line` of a statement; of a setting, the sources that have it.
        before: how many characters of a's and of b's statement stand before what changed, on one line.
    """

    kind: str
    name: str
    a: str | None
    b: str | None
    certainty: Certainty
    line: str
    before: tuple[int, int] = (0, 0)


class Counts(NamedTuple):
    """Number of steps and records compared, by outcome.

    Attributes:
        steps_a: steps in run a, all ranks' largest.
        steps_b: steps in run b.
        steps_compared: steps both have, summed over ranks.
        steps_diverged: those with a divergence.
        records: records both runs have at a compared step; equal-digest steps count whole.
        equal: of them, those that agree; random states and modules that are told as structure are not among them.
        diverged: sites and steps that diverge, one-sided ones included.
        only_a: divergences that only run a has.
        only_b: divergences that only run b has.
        within: differing records that tolerance or noise explains.
        not_observed: records that one side at least could not see.
    """

    steps_a: int = 0
    steps_b: int = 0
    steps_compared: int = 0
    steps_diverged: int = 0
    records: int = 0
    equal: int = 0
    diverged: int = 0
    only_a: int = 0
    only_b: int = 0
    within: int = 0
    not_observed: int = 0


class DivergenceMap(NamedTuple):
    """Largest relative distances by module and step.

    Attributes:
        modules: FQNs in execution order.
        steps: steps of run a, in order; neighbouring steps may be folded into one.
        values: one row a module, one value a step: the largest relative distance; 0.0 where all agree, inf
            where one run only has it, NaN where nothing was compared.
        behind: where the value is 0 because the forward pass of the module agrees, although a tensor or a gradient of
            it differs.
        unmeasured: where something differs by an amount that is not known (NaN, other shapes, no sketch); the value
            is then 1.0, unless something else is further apart.
    """

    modules: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    behind: tuple[tuple[bool, ...], ...]
    unmeasured: tuple[tuple[bool, ...], ...]


class StripCell(NamedTuple):
    """One record of the first diverging step, as its checksums compare.

    Attributes:
        site: what was recorded.
        state: `equal`, `within` tolerance, `differs`, `only a`, `only b` or `not seen`.
        rel_l2: relative L2 distance; None where it is not known, or there is none.
    """

    site: Site
    state: str
    rel_l2: float | None = None


class Separate(NamedTuple):
    """The answer for training alone, or for evaluation alone.

    Attributes:
        verdict: same, diverged or undecided.
        sentence: the answer in plain words.
        first: its first divergence; None unless diverged.
    """

    verdict: Verdict
    sentence: str
    first: Divergence | None = None


class Origin(NamedTuple):
    """A divergence that rests on nothing that differs.

    Attributes:
        sentence: what differs and why, as a clause.
        divergence: the record; None where it is a part of a checkpoint, without a record that differs.
        part: the part of a checkpoint that was not restored; "" where it is none.
    """

    sentence: str
    divergence: Divergence | None
    part: str = ""


@dataclass(frozen=True)
class DiffResult:
    """The complete answer of a comparison.

    Attributes:
        a: path of run a, as given.
        b: path of run b.
        verdict: same, diverged or undecided.
        sentence: the answer in plain words.
        head: the place with what differs there and by how much, in one line; "" where nothing diverges.
        also: sentences that belong to the answer and to none of what follows: training or evaluation alone, roundings.
        rests_on: what the first divergence rests on, each with what is known of it: equal, not recorded, ...
        explains: what explains the first divergence: on record, what is left where nothing is, and what is likely.
        causes: statements and settings that may have caused it, in one list, the likeliest first.
        evidence: what was equal and what was not, that makes the first divergence what it is.
        first: the first divergence; None unless diverged.
        candidates: the first divergence of each rank, by step and phase; no other order between ranks is meant.
        divergences: what was asked to be listed, in order; the counts cover all of them.
        settings: settings that differ, the strongest explanation first.
        notes: what was not compared, and what else a reader must know.
        counts: how much was compared.
        map: modules by steps, when asked for.
        defined_in: `file:line` of the class of the first divergence's module; "" where unknown.
        strip: the first diverging step in the order it ran.
        structure: structural changes: names, modules, calls and random states.
        origins: all origins of the first diverging step, the first divergence first.
        code: changes of source files; None where that was not compared, as if either run has no digests of them.
        resumed: what a resumed run restored; None where neither run is resumed.
        training: the answer for training alone.
        evaluation: the answer for evaluation alone; None where the runs have none on record in one step.
        subject: what was compared: `runs` or `checkpoints`.
    """

    a: str
    b: str
    verdict: Verdict
    sentence: str
    head: str = ""
    also: tuple[str, ...] = ()
    rests_on: tuple[Fact, ...] = ()
    explains: tuple[Finding, ...] = ()
    causes: tuple[Candidate, ...] = ()
    evidence: tuple[str, ...] = ()
    first: Divergence | None = None
    candidates: tuple[Divergence, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    settings: tuple[SettingChange, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)
    map: DivergenceMap | None = None
    defined_in: str = ""
    strip: tuple[StripCell, ...] = ()
    structure: tuple[StructureChange, ...] = ()
    origins: tuple[Origin, ...] = ()
    code: CodeChanges | None = None
    resumed: Resumption | None = None
    training: Separate | None = None
    evaluation: Separate | None = None
    subject: str = "runs"


@dataclass(frozen=True)
class DiffOptions(Selection):
    """Options of a comparison, beside what of the runs counts (steps in a's numbering, FQNs as b has them).

    Attributes:
        rename: pairs (pattern, replacement), regular expressions put to the FQNs of run a in turn.
        offset: step k of b is compared with step k + offset of a; None to detect it.
        rtol: tolerated root-mean-square difference, relative to the larger root-mean-square value.
        rtol_fine: the same, of what was computed before anything in bfloat16 or float16 was; 0 for no difference.
        atol: tolerated root-mean-square difference, in the values' own unit.
        limit: divergences to list; None for all.
        whole_step: list all divergences of the first diverging step, whatever the limit.
        want_map: whether to compute the divergence map.
        later: records of steps after the first divergence that are opened to be counted, at most, unless a map or all
            divergences are wanted.
        least: as how many records a step counts there at least, since opening one takes its time.
        strict: whether structure and random states that changed no number count as divergences.
        by_value: whether modules under other names are recognised by what they hold.
    """

    rename: tuple[tuple[str, str], ...] = ()
    offset: int | None = None
    rtol: float = 0.0
    rtol_fine: float = 0.0
    atol: float = 0.0
    limit: int | None = 12
    whole_step: bool = False
    want_map: bool = False
    later: int = 20_000_000
    least: int = 0
    strict: bool = False
    by_value: bool = True

    def between_layouts(self, *, coarse: bool, throughout: bool = False) -> DiffOptions:
        """These options with a default tolerance for runs split differently over ranks.

        Unchanged if a tolerance is set.

        rtol is 1e-4, or 3e-2 with `coarse` or `throughout`; atol 1e-8. With `coarse` alone, rtol_fine is 1e-4.

        Args:
            coarse: whether both runs hold values in bfloat16 or float16.
            throughout: whether both compute in such a precision from the beginning.
        """
        if self.tolerant:
            return self
        fine = 1e-4 if coarse and not throughout else 0.0
        return replace(self, rtol=3e-2 if coarse or throughout else 1e-4, rtol_fine=fine, atol=1e-8)

    @property
    def tolerant(self) -> bool:
        """Whether rtol or atol is above 0."""
        return self.rtol > 0 or self.atol > 0
