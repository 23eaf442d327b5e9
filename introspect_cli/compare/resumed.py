"""A run that goes on from where the other has been: how a step began, where, what was restored.

*What a step began with.* Parameters are recorded after each optimizer step, so what step k computes with was recorded
at the end of step k - 1, or at the start of the first captured step. Where step k - 1 was not recorded, nothing is
known, and a module whose output differs is no proven origin.

A run that rebuilds its model from a checkpoint, or whose capture left out the step before, records at the start of a
step what the other run did not need to: it is on record there as the end of the step before. Where both are equal,
nothing differs; where they are not, something other than the optimizer has changed the tensor in between.

A run that lists what was written elsewhere may have the parameters at the start of every step. What the step before
left stands for them in a capture, which would have recorded them anew had anything else changed them.

*Which run goes on, and from where.* A resumed run counts its steps from 0 again. What it begins with, the whole run had
after some step: parameters, buffers, the optimizer's state. But equal parameters alone prove nothing: a warm-up whose
first learning rate is 0 leaves them as they were. So a run is resumed only if something in it says so that a fresh one
cannot have: its framework counts on, its optimizer's state is not new, or it read a checkpoint that the other did not
read. Where a fresh run could begin like that too, the offset that explains more of what the run begins with wins.

*What it goes on with, part by part.* A checkpoint holds more than parameters: buffers, the optimizer's state, the
schedule, the scaler, random states, the place in the data, counters, averaged copies. What is lost of these shows in
the loss much later or never. So each part is held against what the other run had at that step: restored, not restored
with the values, or not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.ledger import BEGUN, At, BatchValues, States, Tensor, ledgers, tensor_of
from introspect_cli.compare.names import generator_of
from introspect_cli.compare.result import Part, Restored, Resumption
from introspect_cli.compare.say import key_of, some
from introspect_cli.compare.settings.beginning import DOCUMENT
from introspect_cli.compare.table import ONLY_A, ONLY_B, WITHIN, Alignment, kind_code
from introspect_cli.compare.watched import STATE_KINDS, observed_kinds
from introspect_cli.labels import Label, Labels, step_words
from introspect_cli.records import EVALUATED, SCALER, Kind, Phase, Status
from introspect_cli.store.batch import StepBatch, prepend_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from introspect_cli.compare.measure import Ids, Mask
    from introspect_cli.compare.steps import Sides
    from introspect_cli.compare.table import Table
    from introspect_cli.records import Site


@dataclass(frozen=True)
class Beginning:
    """What is known of what a step begins with.

    Attributes:
        names: parameters and buffers with which a resumed run began otherwise, and that no step has recorded since.
        states: such optimizer states, as (FQN, path).
        within: parameters and buffers that differ by no more than the tolerance or the noise.
        diverged: whether any value has diverged before, so that all that differs may follow from it.
        before: the step before, where both runs recorded it.
        gap: whether start values are unknown, since the previous step was not recorded.
        resumed: whether one run began later, with other values than the other had then.
    """

    names: frozenset[str] = frozenset()
    states: frozenset[tuple[str, str]] = frozenset()
    within: frozenset[str] = frozenset()
    diverged: bool = False
    before: Table | None = None
    gap: bool = False
    resumed: bool = False

    def lasting(self, recorded: frozenset[str]) -> Beginning:
        """What still differs after a step that is equal: what no step records.

        Args:
            recorded: FQNs of tensors that are recorded after optimizer steps.
        """
        names, within = self.names - recorded, self.within - recorded
        return Beginning(names, within=within, diverged=self.diverged, resumed=self.resumed)

    def after(self, table: Table, recorded: frozenset[str]) -> Beginning:
        """What differs as the step after `table` begins; causes (`Table.cause`) do not count as diverging.

        Args:
            table: the step.
            recorded: FQNs of tensors that are recorded after optimizer steps.
        """
        alignment, lasting = table.alignment, self.lasting(recorded)
        sites = table.site[(table.state == WITHIN) & table.are(*_TENSORS)]
        within = lasting.within | {alignment.fqn[site] for site in sites.tolist()}
        diverged = self.diverged or bool((table.diverging & ~table.cause).any())
        return replace(lasting, within=within, diverged=diverged)


_TENSORS = (Kind.PARAM, Kind.BUFFER)


def lacks_start(sides: Sides, pair: Table) -> bool:
    """Whether either run has no record of what this step began with.

    It has one if it has the previous step, or if this is its first step, and none before it can have been dropped.
    """
    known = []
    for reader, step, manifest in zip((sides.a, sides.b), (pair.step, pair.step_b), sides.manifests, strict=True):
        dropped = reader.thinned or "when" in str(manifest.get("options", {}).get("steps"))
        known.append(step - 1 in reader or (reader.entry(0).step == step and not dropped))
    return not all(known)


# --- the tensors of a step


def repeated_values(sides: Sides, table: Table) -> Mask:
    """Mask of the table's rows that one run alone has, and that repeat the last value of a tensor or optimizer state.

    That is the last value from earlier in the step, else from the previous step of that run, else (where that is not on
    record) of the other run's.
    """
    alignment, repeated = table.alignment, np.zeros(len(table), np.bool_)
    before = At(sides.a, alignment.a, table.step - 1), At(sides.b, alignment.b, table.step_b - 1)
    left = [at.tensors() if at.recorded else None for at in before]
    for place, (half, state) in enumerate(zip(table.halves, (ONLY_A, ONLY_B), strict=True)):
        mine = left[1 - place] if left[place] is None else left[place]
        known = dict(mine or {})
        alone = dict(zip(half.only.tolist(), np.flatnonzero(table.state == state), strict=True))
        rows = np.flatnonzero(alignment.are(*STATE_KINDS, sites=half.sites))
        for row in rows[np.argsort(half.batch.sequence[rows], kind="stable")].tolist():
            kind, fqn, path = tensor_of(alignment, int(half.sites[row]))
            # a model that is called compiled, and as it is, has its tensors twice
            tensor, value = (kind, fqn, path.partition("@")[0]), int(half.batch.checksum[row])
            if row in alone:
                repeated[alone[row]] = known.get(tensor) == value
            known[tensor] = value
    return repeated


def with_copied_starts(alignment: Alignment, side: int, before: At, batch: StepBatch, other_union: Ids) -> StepBatch:
    """A step's records, preceded by start values from the end of the previous step.

    Added are tensors that the other run has at its start and this run has not. Unchanged where there are none, or the
    previous step is not on record.

    Args:
        alignment: the runs' sites.
        side: 0 for a, 1 for b.
        before: the previous step of that run.
        batch: its records of the step.
        other_union: union numbers of the other run's records of the step.
    """
    ids, rows_of = alignment.ids[side], before.tensor_rows() if before.recorded else {}
    wanted = other_union[starts(alignment, other_union)]
    own = {union: number for number, union in enumerate(ids.tolist())} if len(wanted) else {}
    left = {
        union: rows_of[tensor_of(alignment, union)]
        for union in wanted[~np.isin(wanted, ids[batch.site])].tolist()
        if union in own and tensor_of(alignment, union) in rows_of
    }
    if not left:
        return batch
    rows, numbers = np.array([*left.values()], np.int64), np.array([own[union] for union in left])
    return prepend_rows(batch, before.batch, rows, numbers)


def starts(alignment: Alignment, unions: Ids) -> Mask:
    """Mask of union numbers that are sites of parameters, buffers or optimizer states as a step begins (call 0)."""
    return np.asarray(alignment.are(*STATE_KINDS, Phase.START, sites=unions) & (alignment.call[unions] == 0))


# --- resumed runs


def beginning_at_resume(sides: Sides) -> Beginning:
    """Tensors that differ as the run that begins later begins, from what the other run had after the step before.

    Empty where both begin at one step, or the step before is not on record.
    """
    later = _later_run(sides)
    if later is None:
        return Beginning()
    began, ended = later.begins.tensors(Phase.START), later.there.to(later.there.step - 1).tensors(Phase.OPTIMIZER)
    unequal = {tensor for tensor in began.keys() & ended.keys() if began[tensor] != ended[tensor]}
    return Beginning(
        names=frozenset(fqn for kind, fqn, _ in unequal if kind != _STATE),
        states=frozenset((fqn, path) for kind, fqn, path in unequal if kind == _STATE),
        resumed=bool(unequal),
    )


# --- which run goes on, and from where


_STATE = kind_code(Kind.OPTIMIZER_STATE)
_STEP_OPTIONS = ("steps", "first", "last")
"""Options of a capture that may leave out the steps before its first."""
MAX_STEPS = 200
"""Steps from there on of which learning rates, batches and random states are held against each other."""


@dataclass(frozen=True)
class ResumePoint:
    """A run that continues where the other has been (a resumed run), and the steps that correspond.

    Attributes:
        late: `a` or `b`, the run that goes on.
        begins: its first step.
        there: the step of the other run that this is compared with.
        sign: what says so, in words.
    """

    sides: Sides
    late: str
    begins: At
    there: At
    sign: str = ""

    def watches(self, kind: Kind) -> bool:
        """Whether both captures were told to record a kind; a manifest that does not say counts as all."""
        return all(kind.value in (observed_kinds(manifest) or {kind.value}) for manifest in self.sides.manifests)

    @property
    def firsts(self) -> tuple[At, At]:
        """(first step of the resumed run, step of the other run that it is compared with)."""
        return self.begins, self.there

    def steps(self) -> Iterator[tuple[At, At]]:
        """Pairs of corresponding steps (of the resumed run, of the other) that both recorded, from the first on.

        `MAX_STEPS` numbers are looked at.
        """
        for after in range(MAX_STEPS):
            late, whole = self.begins.to(self.begins.step + after), self.there.to(self.there.step + after)
            if late.recorded and whole.recorded:
                yield late, whole

    @cached_property
    def had(self) -> dict[Tensor, int]:
        """Checksums that the other run had when the corresponding step began; empty where none are on record.

        A tensor has its last one of the first step and the `MAX_STEPS` steps before. If the step before is not on
        record, the start values of this step are all.
        """
        reader, before = self.there.reader, self.there.step - 1
        if before not in reader:
            return self.there.tensors(Phase.START)
        every = reader.entries["step"].tolist()
        steps = [step for step in every if step == every[0] or before - MAX_STEPS < step <= before]
        *_, (_, ledger) = ledgers(reader, self.there.sites, steps)  # all are one, as it is at the end
        return {tensor: int(value) for tensor, value in zip(ledger.tensors, ledger.checksum, strict=True) if value}

    def both(self, late: object, whole: object) -> str:
        """A value of the resumed run and one of the other, `1 -> 2` from a to b, numbers to six digits."""
        values = (whole, late) if self.late == "b" else (late, whole)
        return " -> ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)

    def part(
        self,
        name: str,
        steps: Iterable[tuple[At, At]],
        read: Callable[[At], Mapping[Any, Any]],
        *,
        once: bool = False,
        matters: bool = True,
    ) -> Part:
        """A part of a checkpoint, by what both runs have of it: NO at the first step in which any of it differs.

        YES if all is equal, UNSEEN where neither run has a value that the other has.

        Args:
            name: what the part is called.
            steps: pairs of corresponding steps.
            read: gives what a step has of the part, by (..., FQN, path).
            once: whether the first step in which both have any decides.
            matters: whether anything may rest on it where it was not seen.
        """
        seen, both = 0, set[Any]()
        for sides in steps:
            late, whole = map(read, sides)
            names = late.keys() & whole.keys()
            seen, both = seen + bool(names), names or both
            if differ := sorted(of for of in names if late[of] != whole[of]):
                named = [f"{key_of(path)} of {fqn}" if path else fqn for *_, fqn, path in differ]
                text = f"{len(differ)} of {len(both)} differ, {some(named, 2)}"
                if isinstance(value := late[differ[0]], float):
                    text = f"{named[0]} {self.both(value, whole[differ[0]])}"
                since = f" from step {sides[self.late == 'b'].step} on" if sides[0].step != self.begins.step else ""
                return Part(name, Restored.NO, text + since)
            if once and seen:
                break
        text = f"{len(both)} equal{f' in {seen} steps' * (seen > 1)}" if seen else ""
        return Part(name, Restored.YES if seen else Restored.UNSEEN, text, matters or bool(seen))


def _first_steps(sides: Sides) -> tuple[At, At]:
    """(first recorded step of a, first recorded step of b)."""
    return At.first(sides.a, sides.sites[0]), At.first(sides.b, sides.sites[1])


def _later_run(sides: Sides) -> ResumePoint | None:
    """The run that begins later than the other, resumed or not; None where both begin at one step, or one is empty."""
    a, b = _first_steps(sides)
    later = b.step + sides.offset - a.step
    if not later or not len(sides.a) or not len(sides.b):
        return None
    late, begins, whole = ("b", b, a) if later > 0 else ("a", a, b)
    return ResumePoint(sides, late, begins, whole.to(whole.step + abs(later)))


def find_resume_point(sides: Sides) -> ResumePoint | None:
    """The resumed run and the first sign of it that holds; None where neither run is resumed.

    A run is resumed only if it begins later than the other and its capture was not told to skip the steps before its
    first.
    """
    later = _later_run(sides)
    asked = {} if later is None else sides.manifests["ab".index(later.late)].get("options", {})
    if later is None or (later.begins.step and any(asked.get(name) for name in _STEP_OPTIONS)):
        return None  # the capture left out what came before
    whole = At.first(later.there.reader, later.there.sites)
    signs = {
        "its framework counts on": offset_by_labels(sides.a.labels, sides.b.labels),
        "its optimizer's state is not new when it begins": _has_trained(later.begins, whole),
        "it read a checkpoint that the other run did not read": _read_more(sides, later.late),
        "--offset says so": sides.options.offset,
    }
    return next((replace(later, sign=sign) for sign, holds in signs.items() if holds), None)


def detected_offset(sides: Sides, by_labels: int) -> tuple[int, str]:
    """(offset, note) by which steps are compared: step k of b with step k + offset of a.

    By labels, else by what a run begins with, b's start looked for in a first; (0, "") for none. With 0, the note may
    suggest an offset that is not certain enough.

    Args:
        sides: both runs.
        by_labels: what `offset_by_labels` gives; 0 for none.
    """
    if by_labels:
        steps = f"step {max(by_labels, 0)} of a is compared with step {max(-by_labels, 0)} of b (--offset {by_labels})"
        return by_labels, f"Steps with the same global_step are compared: {steps}."
    if not len(sides.a) or not len(sides.b) or sides.a.entry(0).digest == sides.b.entry(0).digest:
        return 0, ""
    firsts = _first_steps(sides)
    for late, whole, (other, begins) in (("b", "a", firsts), ("a", "b", firsts[::-1])):
        step, trained = _begins_after(begins, other)
        if step in {None, begins.step}:
            continue
        offset = (step - begins.step) * (1 if late == "b" else -1)
        after = f"run {whole} has after {step_words(step - 1, other.reader.labels.get(step - 1, {}))}"
        compared = f"step {begins.step} of {late} is compared with step {step} of {whole} (--offset {offset})"
        if trained or _read_more(sides, late):
            return offset, f"Run {late} begins with what {after}: {compared}."
        alone = f"Run {late} begins with the parameters that {after}, and nothing else says that it is resumed"
        return 0, f"{alone} (--offset {offset} compares these steps)."
    return 0, ""


def _read_more(sides: Sides, late: str) -> list[str]:
    """Names of checkpoint files that run `late` (`a`, `b`) read and the other did not.

    Of files that `torch.load` read before the first step, those are the same that have one name (with its directory).
    Of other files of tensors, read at any time, those of one digest, or of one name where there is no digest.
    """
    read = []
    for run, reader, files in zip((sides.tensors.a, sides.tensors.b), (sides.a, sides.b), sides.files, strict=True):
        noted = run.settings_of(reader.rank).document(DOCUMENT).get("read")
        read.append({**files, **({str(name): str(name) for name in noted} if isinstance(noted, list) else {})})
    mine, theirs = read["ab".index(late)], read["ba".index(late)]
    return [name for key, name in mine.items() if key not in theirs]


def offset_by_labels(a: Mapping[int, Labels], b: Mapping[int, Labels]) -> int:
    """Step number of a minus that of b, for steps with an equal label `global_step`; 0 where they have no such label.

    0 too where, in either run, `global_step` minus the step number is not the same in all steps.

    Args:
        a: labels of a by step.
        b: labels of b by step.
    """
    offsets: list[int] = []
    for labels in (a, b):
        counted = {count - step for step, given in labels.items() if isinstance(count := given.get("global_step"), int)}
        if len(counted) != 1:  # nobody counts, or a training was begun anew within the run
            return 0
        offsets.append(counted.pop())
    return offsets[1] - offsets[0]


# --- by what a run begins with


def _begins_after(begins: At, whole: At) -> tuple[int | None, bool]:
    """(number of the other run's step that this run begins with, or None; whether its optimizer's state is not new).

    Where that state is not new and all together match no step, or the other's first, what was restored is looked for
    alone. None where no step matches (`_matching_step`), and where neither state nor parameters are on record.

    Args:
        begins: first step of the run.
        whole: first step of the other.
    """
    start, trained = begins.tensors(Phase.START), _has_trained(begins, whole)
    step = _matching_step(whole, start)
    if trained and step in {None, whole.step}:  # the rest was not restored
        states = {tensor: value for tensor, value in start.items() if tensor[0] == _STATE}
        step = _matching_step(whole, states) or step or _matching_step(whole, dict(start.items() - states.items()))
    recorded = trained or any(tensor[0] == kind_code(Kind.PARAM) for tensor in start)
    return step if recorded else None, trained


def _matching_step(whole: At, start: Mapping[Tensor, int]) -> int | None:
    """Number of the step that begins with most of `start`; None where none has half.

    Reads the run's steps. The first step that begins with all wins; None too where several have as many and not all.

    Args:
        whole: any step of the run that is searched.
        start: checksums of tensors.
    """
    equal: dict[int, int] = {}
    goal: NDArray[np.uint64] | None = None
    for (step, when), ledger in ledgers(whole.reader, whole.sites):
        if goal is None:
            goal = np.array([start.get(tensor, 0) for tensor in ledger.tensors], np.uint64)
        begins = step + (when == "after")
        equal[begins] = max(int(((ledger.checksum == goal) & (goal != 0)).sum()), equal.get(begins, 0))
        if equal[begins] == np.count_nonzero(goal):
            break
    best = max(equal.values(), default=0)
    steps = [step for step, number in equal.items() if number == best]
    return steps[0] if goal is not None and len(steps) == 1 and 2 * best >= np.count_nonzero(goal) > 0 else None


def steps_counted(at: At, phase: Phase) -> float | None:
    """Largest number of steps that optimizer states count in this phase of the step; None where none counts."""
    every = at.numbers(Kind.OPTIMIZER_STATE, phase)
    return max((value for (_, path), value in every if path == "['step']" and value is not None), default=None)


def _has_trained(begins: At, whole: At) -> bool:
    """Whether a run's optimizer had stepped as it began, more often than the other run's as that began.

    Args:
        begins: first step of the run.
        whole: first step of the other.
    """
    late, other = _age(begins), _age(whole)
    return late > other or late == np.inf


_MOMENTS = ("exp_avg", "momentum", "square_avg")


def _age(at: At) -> float:
    """How many steps optimizer states count as a step begins; without counts, infinity if any moment is not 0.

    Of a moment, a state with any of `_MOMENTS` in its path, that is the mean.
    """
    counted, states = steps_counted(at, Phase.START), at.numbers(Kind.OPTIMIZER_STATE, Phase.START)
    moved = any(value for (_, path), value in states if any(name in path for name in _MOMENTS))
    return counted if counted is not None else np.inf if moved else 0.0


# --- what it goes on with, part by part


RATES = "learning rates and schedulers"
PLACE = "place in the data"
_AVERAGE_CLASSES = ("AveragedModel", "EMA", "ModelEma", "ExponentialMovingAverage")
"""Classes of models that hold a moving average of another."""
_MAX_LATER_STEPS = 8
"""Steps in which a generator is looked for."""


def resumption_of(resume: ResumePoint, *, is_cut: bool) -> Resumption:
    """What the resumed run restored of each part of a checkpoint; reads the common steps of both runs.

    With `is_cut`, the place in the data is UNSEEN unless it was restored.

    Args:
        resume: which run goes on from which.
        is_cut: whether ranks or calls are put together, so that a batch of one run need not be one of the other.
    """
    where = _place(resume)
    if is_cut and where.state is not Restored.YES:
        where = Part(PLACE, Restored.UNSEEN, "a batch is cut differently")
    parts = (
        *(_tensors(resume, kind) for kind in STATE_KINDS),
        resume.part(RATES, resume.steps(), lambda at: _numbers(at, lambda of: of[1].endswith("['lr']"))),
        resume.part("scaler", [resume.firsts], lambda at: _numbers(at, lambda of: of[0] == SCALER), matters=False),
        *_random(resume),
        where,
        resume.part("counters", [resume.firsts], _counters)._replace(matters=False),
        # other copies differ once anything that they are made of does
        resume.part("averaged copies", _while_equal(resume), _copies, once=True, matters=False),
    )
    return Resumption(resume.late, resume.there.step, resume.begins.step, resume.sign, parts)


def holds_part(site: Site, part: Part) -> bool:
    """Whether a record is of this part of a checkpoint: its generator's start state, a batch, or an optimizer state."""
    if site.kind is Kind.RNG:
        return site.phase is Phase.START and part.generator == generator_of(site)
    return part.part == {Kind.BATCH: PLACE, Kind.OPTIMIZER_STATE: Kind.OPTIMIZER_STATE.several}.get(site.kind)


def _tensors(resume: ResumePoint, kind: Kind) -> Part:
    """Part: parameters, buffers or optimizer states, but for averaged and evaluation copies.

    Of states, one that a run lacks differs; but if the resumed run begins without any and they are equal after its
    first step, UNSEEN.

    Args:
        resume: which run goes on from which.
        kind: PARAM, BUFFER or OPTIMIZER_STATE.
    """
    if not resume.watches(kind):
        return Part(kind.several, Restored.UNSEEN)
    began, there = (_of_kind(values, kind) for values in (resume.begins.tensors(Phase.START), resume.had))
    if kind is Kind.OPTIMIZER_STATE:
        # a state that is recorded as its optimizer first steps was not seen as this step began
        both = (there.keys() | began.keys()) - (resume.begins.recorded_in(Phase.START) - began.keys())
        began, there = ({of: of_run.get(of, 0) for of in both} for of_run in (began, there))
    part = resume.part(
        kind.several, [resume.firsts], lambda at: began if at is resume.begins else there, matters=not resume.had
    )
    if kind is Kind.OPTIMIZER_STATE and part.state is Restored.NO:
        late, whole = (steps_counted(side, Phase.OPTIMIZER) for side in resume.firsts)
        if None not in {late, whole} and late != whole:
            return part._replace(text=f"step {resume.both(late, whole)}")
        left = [_of_kind(side.tensors(Phase.OPTIMIZER), kind) for side in resume.firsts]
        if not any(began.values()) and left[0] and left[0] == left[1]:  # it was there and nobody looked
            return Part(part.part, Restored.UNSEEN, f"not as {resume.late} begins, equal after its first step")
    return part


def _of_kind(values: Mapping[Tensor, int], kind: Kind) -> dict[Tensor, int]:
    """Those of a kind that are of no copy of a model."""
    return {tensor: value for tensor, value in values.items() if tensor[0] == kind_code(kind) and not _is_copy(tensor)}


def _numbers(at: At, wanted: Callable[[tuple[str, str]], bool]) -> dict[tuple[str, str], float]:
    """Numbers among the settings of optimizers and scalers in a step, by those (name, path) that are wanted."""
    every = at.numbers(Kind.HYPERPARAMETER, Phase.OPTIMIZER)
    return {of: value for of, value in every if value is not None and wanted(of)}


def _counters(at: At) -> dict[tuple[str, str], Label]:
    """The labels `global_step` and `epoch` of a step; nothing rests on them."""
    labels = at.reader.labels.get(at.step, {})
    return {(name, ""): labels[name] for name in ("global_step", "epoch") if name in labels}


def _while_equal(resume: ResumePoint) -> Iterator[tuple[At, At]]:
    """Pairs of corresponding steps up to the first that leaves something else than a copy different."""
    for sides in resume.steps():
        yield sides
        ends = [{of: v for of, v in at.tensors(Phase.OPTIMIZER).items() if not _is_copy(of)} for at in sides]
        if ends[0] != ends[1]:
            return


def _copies(at: At) -> dict[Tensor, int]:
    """Checksums of averaged copies: of models as the step begins, of tensors that scripts keep outside of any model."""
    kept = {
        tensor_of(at.sites, site): int(at.batch.checksum[row]) for row, site in at.rows([Kind.PRODUCT], Phase.OPTIMIZER)
    }
    return {tensor: value for tensor, value in at.tensors(Phase.START).items() if _is_copy(tensor)} | kept


def _is_copy(tensor: Tensor) -> bool:
    """Whether the root of a tensor's name is an averaged or evaluation copy of a model."""
    root = tensor[1].partition(".")[0]
    return EVALUATED in root or root.startswith(_AVERAGE_CLASSES)


def _random(resume: ResumePoint) -> list[Part]:
    """Parts: the random state of each generator that either run has on record at the start of its first common step.

    One part, UNSEEN, where either capture did not record random states.
    """
    if not resume.watches(Kind.RNG):
        return [Part("random states", Restored.UNSEEN)]
    *_, lasts = resume.firsts, *resume.steps()
    begun = {of for at in resume.firsts for of, states in at.random_states().items() if BEGUN in states}
    return [
        _random_state(resume, name, lasts)._replace(part=f"random state of {name}", generator=name)
        for name in sorted(begun)
    ]


def _random_state(resume: ResumePoint, name: str, lasts: tuple[At, At]) -> Part:
    """Part: a generator's state. Of states that differ at the start, the first later ones that both have decide.

    These are draws in the first common step, else the start states of the `_MAX_LATER_STEPS` steps after. A state that
    differs does not matter where neither run drew from it in the first step and in `lasts`, and both still have theirs.
    """

    def begun(at: At) -> States:
        """The state as the step begins."""
        return {of: state for of, state in at.random_states().get(name, {}).items() if of == BEGUN}

    def drawn(at: At) -> dict[tuple[str, str], Any]:
        """The states of draws in the step."""
        every = at.random_states().get(name, {})
        return {(of[1], str(of)): state for of, state in every.items() if of != BEGUN}

    one, two = map(begun, resume.firsts)
    if one == two:
        return Part(name, Restored.YES)
    if not one or not two or one[BEGUN][1] is not two[BEGUN][1]:
        return Part(name, Restored.UNSEEN, "only one run has it, or had drawn from it")
    part = resume.part(name, [resume.firsts], drawn)
    if part.state is Restored.UNSEEN:
        part = resume.part(name, islice(resume.steps(), 1, _MAX_LATER_STEPS + 1), begun, once=True)
    unused = lasts[0].step != resume.begins.step and not any(map(drawn, (*resume.firsts, *lasts)))
    if part.state is Restored.NO and unused and [one, two] == [*map(begun, lasts)]:
        return part._replace(text="nothing drew from it in the steps compared", matters=False)
    return part._replace(text="")


def _place(resume: ResumePoint) -> Part:
    """Part: place in the data, by the batches of all common steps.

    In its first step either run may read others before, to get there: the last counts. Where batches are not on record,
    by the inputs of root modules in that step.
    """
    begin = {(side.reader, side.step) for side in resume.firsts}

    def batches(at: At) -> dict[tuple[str, str], list[BatchValues]]:
        """Batches by loader."""
        last = slice(-1 if (at.reader, at.step) in begin else 0, None)
        return {(f"batch of {loader}", ""): each[last] for loader, each in at.batches().items()}

    def inputs(at: At) -> dict[tuple[int, str, str], int]:
        """Checksums of the observed inputs of root modules."""
        sites, batch = at.sites, at.batch
        return {
            (int(sites.call[number]), sites.fqn[number], sites.path[number]): int(batch.checksum[row])
            for row, number in at.rows([Kind.INPUT], Phase.FORWARD)
            if "." not in sites.fqn[number] and batch.status[row] == Status.OBSERVED
        }

    part = resume.part(PLACE, resume.steps() if resume.watches(Kind.BATCH) else (), batches)
    return part if part.state is not Restored.UNSEEN else resume.part(PLACE, [resume.firsts], inputs)
