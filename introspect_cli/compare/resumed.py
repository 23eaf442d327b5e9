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

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.ledger import TENSORS, At, Tensor, first_sites, ledgers, tensor_of
from introspect_cli.compare.names import generator_of
from introspect_cli.compare.result import Part, Restored, Resumption
from introspect_cli.compare.say import some, tensor_name
from introspect_cli.compare.settings.beginning import DOCUMENT
from introspect_cli.compare.settings.settings import tensor_files
from introspect_cli.compare.table import KINDS, WITHIN, Alignment
from introspect_cli.compare.watched import STATE_KINDS, choosing
from introspect_cli.labels import Labels, step_words
from introspect_cli.records import DRAWN_BEFORE, EVALUATED, KIND_CODES, SCALER, Kind, Phase, Status
from introspect_cli.store.batch import StepBatch, prepend_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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

    def after(self, recorded: frozenset[str], table: Table | None = None) -> Beginning:
        """What differs as a later step begins: what no step records, and what the last one let pass.

        Args:
            recorded: FQNs of tensors that are recorded after optimizer steps.
            table: the last step, whose causes (`Table.cause`) do not count as diverging; None where it was equal.
        """
        names, within, diverged = self.names - recorded, self.within - recorded, self.diverged
        if table is not None:
            sites = table.site[(table.state == WITHIN) & table.are(*TENSORS)]
            within |= {table.alignment.fqn[site] for site in sites.tolist()}
            diverged = diverged or bool((table.diverging & ~table.cause).any())
        return Beginning(names, within=within, diverged=diverged, resumed=self.resumed)


def lacks_start(sides: Sides, pair: Table) -> bool:
    """Whether either run has no record of what this step began with.

    It has one if it has the previous step, or if this is its first step, and none before it can have been left out.
    """
    known = []
    for reader, step, manifest in zip((sides.a, sides.b), (pair.step, pair.step_b), sides.manifests, strict=True):
        left_out = step and (reader.thinned or "steps" in choosing(manifest))
        known.append(step - 1 in reader or (reader.entry(0).step == step and not left_out))
    return not all(known)


# --- the tensors of a step


def repeated_values(sides: Sides, table: Table) -> Mask:
    """Mask of the table's rows that one run alone has, and that repeat the last value of a tensor or optimizer state.

    That is the last value from earlier in the step, else from the previous step of that run, else (where that is not on
    record) of the other run's.
    """
    alignment, repeated = table.alignment, np.zeros(len(table), np.bool_)
    before = At(sides.a, alignment.a, table.step - 1), At(sides.b, alignment.b, table.step_b - 1)
    for half, mine, other in zip(table.halves, before, before[::-1], strict=True):
        known = (mine if mine.recorded else other).tensors()
        alone = dict(zip(half.only.tolist(), np.flatnonzero(table.state == half.alone), strict=True))
        rows = np.flatnonzero(alignment.are(*STATE_KINDS, sites=half.sites))
        for row in rows[np.argsort(half.batch.sequence[rows], kind="stable")].tolist():
            kind, fqn, path = tensor_of(alignment, int(half.sites[row]))
            # a model that is called compiled, and as it is, has its tensors twice
            tensor, value = (kind, fqn, path.partition("@")[0]), int(half.batch.checksum[row])
            if row in alone:
                repeated[alone[row]] = known.get(tensor) == value
            known[tensor] = value
    return repeated


def with_copied_starts(
    alignment: Alignment, side: int, before: At, batch: StepBatch, other_union: Ids, kinds: Collection[Kind]
) -> StepBatch:
    """A step's records, preceded by start values from the last of the `_MOST_BEFORE` steps before that has them.

    Added are tensors that the other run has at its start and this run has not: it would have recorded them, too, if
    they had changed. Unchanged where there are none; steps before one that is not on record do not count.

    Args:
        alignment: the runs' sites.
        side: 0 for a, 1 for b.
        before: the previous step of that run; it may be none.
        batch: its records of the step.
        other_union: union numbers of the other run's records of the step.
        kinds: of the tensors that are added.
    """
    ids, own = alignment.ids[side], np.full(len(alignment), -1)
    own[ids] = np.arange(len(ids))
    own[ids[batch.site]] = -1  # which are there already
    wanted = other_union[alignment.are(*kinds, Phase.START, sites=other_union)]
    wanted = wanted[(alignment.call[wanted] == 0) & (own[wanted] >= 0)]
    for at in map(before.later, range(0, -_MOST_BEFORE, -1)):
        if not (len(wanted) and at.recorded):
            break
        rows_of = at.tensor_rows()
        rows = np.array([rows_of.get(tensor_of(alignment, union), -1) for union in wanted.tolist()], np.int64)
        found = rows >= 0
        batch = prepend_rows(batch, at.batch, rows[found], own[wanted[found]]) if found.any() else batch
        wanted = wanted[~found]
    return batch


# --- which run goes on, and from where


_STATE = KIND_CODES[Kind.OPTIMIZER_STATE]
_MOST_STEPS = 8
"""Steps from there on of which learning rates, batches and random states are held against each other."""
_MOST_BEFORE = 200
"""Steps before it in which the last value of a tensor is looked for."""


@dataclass(frozen=True)
class ResumePoint:
    """A run that continues where the other has been (a resumed run), and the steps that correspond.

    Attributes:
        late: `a` or `b`, the run that goes on.
        begins: its first step.
        there: the step of the other run that this is compared with.
    """

    late: str
    begins: At
    there: At

    @cached_property
    def steps(self) -> list[tuple[At, At]]:
        """Pairs of corresponding steps (of the resumed run, of the other): the first, and others that both recorded."""
        later = [(self.begins.later(by), self.there.later(by)) for by in range(1, _MOST_STEPS)]
        return [(self.begins, self.there), *(pair for pair in later if pair[0].recorded and pair[1].recorded)]

    @cached_property
    def had(self) -> dict[Tensor, int]:
        """Checksums that the other run had when the corresponding step began; empty where none are on record.

        A tensor has its last one of the first step and the `_MOST_BEFORE` steps before. If the step before is not on
        record, the start values of this step are all.
        """
        reader, sites, before = self.there.reader, self.there.sites, self.there.step - 1
        if before not in reader:
            return self.there.tensors(Phase.START)
        every = reader.entries["step"].tolist()
        steps = [step for step in every if step == every[0] or before - _MOST_BEFORE < step <= before]
        last = [ledger["checksum"] for _, ledger in ledgers(reader, sites, steps)][-1:]
        return {tensor: int(each[at]) for each in last for tensor, at in first_sites(sites).items() if each[at]}


def find_resume_point(sides: Sides) -> ResumePoint | None:
    """The run that begins where the other has been; None where no offset shifts the steps, or a run is empty.

    It counts from 0: a capture that begins with a later step was told to leave out what came before.
    """
    if not sides.offset or not len(sides.a) or not len(sides.b):
        return None
    a, b = _first_steps(sides)
    later = b.step + sides.offset - a.step
    late, begins, whole = ("b", b, a) if later > 0 else ("a", a, b)
    return None if begins.step or not later else ResumePoint(late, begins, whole.later(abs(later)))


def beginning_at_resume(point: ResumePoint) -> Beginning:
    """Tensors that differ as a resumed run begins, from what the other run had then (`ResumePoint.had`)."""
    began, had = point.begins.tensors(Phase.START), point.had
    unequal = {tensor for tensor in began.keys() & had.keys() if began[tensor] != had[tensor]}
    names = frozenset(fqn for kind, fqn, _ in unequal if kind != _STATE)
    states = frozenset((fqn, path) for kind, fqn, path in unequal if kind == _STATE)
    return Beginning(names, states, resumed=bool(unequal))


def _first_steps(sides: Sides) -> tuple[At, At]:
    """(first recorded step of a, first recorded step of b)."""
    return At.first(sides.a, sides.sites[0]), At.first(sides.b, sides.sites[1])


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
        after = step_words(step - 1, other.reader.labels.get(step - 1, {}))
        steps = f"step {begins.step} of {late} is compared with step {step} of {whole} (--offset {offset})"
        is_resumed = trained or _read_more(sides, late)
        sure = "" if is_resumed else "nothing else says that it is resumed; if it is, "
        return offset * is_resumed, f"Run {late} begins with what run {whole} has after {after}: {sure}{steps}."
    return 0, ""


def _read_more(sides: Sides, late: str) -> bool:
    """Whether run `late` (`a`, `b`) read a checkpoint file that the other did not.

    Of files that `torch.load` read before the first step, those are the same that have one name (with its directory).
    Of other files of tensors, read at any time, those of one digest, or of one name where there is no digest.
    """
    read = []
    for run, reader in zip(sides.runs, (sides.a, sides.b), strict=True):
        noted = run.settings_of(reader.rank).document(DOCUMENT).get("read")
        read.append(tensor_files(run) | set(map(str, noted if isinstance(noted, list) else ())))
    return bool(read["ab".index(late)] - read["ba".index(late)])


def offset_by_labels(a: Mapping[int, Labels], b: Mapping[int, Labels]) -> int:
    """Step number of a minus that of b, for steps with an equal label `global_step`; 0 where they have no such label.

    0 too where, in either run, `global_step` minus the step number is not the same in all steps.

    Args:
        a: labels of a by step.
        b: labels of b by step.
    """
    counted = [
        {count - step for step, given in labels.items() if isinstance(count := given.get("global_step"), int)}
        for labels in (a, b)
    ]
    known = all(len(offsets) == 1 for offsets in counted)  # else nobody counts, or a training was begun anew within
    return counted[1].pop() - counted[0].pop() if known else 0


# --- by what a run begins with


def _begins_after(begins: At, whole: At) -> tuple[int | None, bool]:
    """(number of the other run's step that this run begins with, or None; whether its optimizer's state is not new).

    Where that state is not new and all together match no step, or the other's first, what was restored is looked for
    alone. None where no step matches (`_matching_step`), and where neither state nor parameters are on record.

    Args:
        begins: first step of the run.
        whole: first step of the other.
    """
    mine, others = (dict(at.numbers(Kind.OPTIMIZER_STATE, Phase.START)) for at in (begins, whole))
    trained = any(value and others.get(of) != value for of, value in mine.items())
    start = begins.tensors(Phase.START)
    step = _matching_step(whole, start)
    if trained and step in {None, whole.step}:  # the rest was not restored
        states = {tensor: value for tensor, value in start.items() if tensor[0] == _STATE}
        step = _matching_step(whole, states) or step or _matching_step(whole, dict(start.items() - states.items()))
    recorded = trained or any(tensor[0] == KIND_CODES[Kind.PARAM] for tensor in start)
    return step if recorded else None, trained


def _matching_step(whole: At, start: Mapping[Tensor, int]) -> int | None:
    """Number of the step that begins with most of `start`; None where none has half.

    Reads the run's steps. The first step that begins with all wins; None too where several have as many and not all.

    Args:
        whole: any step of the run that is searched.
        start: checksums of tensors.
    """
    places, equal = first_sites(whole.sites), Counter[int]()
    wanted = {places[tensor]: value for tensor, value in start.items() if tensor in places and value}
    at, goal = [*wanted], np.array([*wanted.values()], np.uint64)
    for (step, when), ledger in ledgers(whole.reader, whole.sites):
        begins = step + (when == "after")
        equal[begins] = max(equal[begins], int((ledger["checksum"][at] == goal).sum()))
        if equal[begins] == len(goal):
            break
    (best, number), *others = [*equal.most_common(2), (0, 0)]
    return best if 2 * number >= len(goal) > 0 and others[0][1] < number else None


# --- what it goes on with, part by part


RATES = "learning rates and schedulers"
PLACE = "place in the data"
_COPIES = "averaged copies"
_AVERAGE_CLASSES = ("AveragedModel", "EMA", "ModelEma", "ExponentialMovingAverage")
"""Classes of models that hold a moving average of another."""

Values = dict[Any, Any]
"""What a step has of a part of a checkpoint, by (..., FQN, path)."""


def resumption_of(resume: ResumePoint, unrecorded: frozenset[Kind], *, is_cut: bool) -> Resumption:
    """What the resumed run restored of each part of a checkpoint, by the first common steps of both runs.

    With `is_cut`, the place in the data is UNSEEN unless it was restored.

    Args:
        resume: which run goes on from which.
        unrecorded: kinds that either run was told to leave out.
        is_cut: whether ranks or calls are put together, so that a batch of one run need not be one of the other.
    """
    first, steps, held = resume.steps[0], resume.steps, _held(resume)
    matter = unrecorded if resume.had else STATE_KINDS
    place = _part(PLACE, steps, _given)  # of its first step either run may read other batches to get there
    if is_cut and place.state is not Restored.YES:
        place = Part(PLACE, Restored.UNSEEN, "a batch is cut differently")
    copies = [held]
    if _part("", [first], lambda at: at.tensors(Phase.OPTIMIZER)).state is not Restored.NO:  # else they differ, too
        copies += [(late.tensors(Phase.START), whole.tensors(Phase.START)) for late, whole in steps[1:2]]
    parts = (
        *(_part(each.several, [held], partial(_only, each.several), matters=each in matter) for each in STATE_KINDS),
        _part(RATES, steps, lambda at: _numbers(at, lambda of: of[1].endswith("['lr']"))),
        _part("scaler", [first], lambda at: _numbers(at, lambda of: of[0] == SCALER), matters=False),
        *_random(steps),
        place,
        _part("counters", [first], _counters)._replace(matters=False),
        _part(_COPIES, copies, partial(_only, _COPIES), matters=False, once=True),
    )
    return Resumption(resume.late, resume.there.step, resume.begins.step, parts)


def holds_part(site: Site, part: Part) -> bool:
    """Whether a record is of this part of a checkpoint: its generator's start state, a batch, or an optimizer state."""
    if site.kind is Kind.RNG:
        return site.phase is Phase.START and part.generator == generator_of(site)
    return part.part == {Kind.BATCH: PLACE, Kind.OPTIMIZER_STATE: Kind.OPTIMIZER_STATE.several}.get(site.kind)


def _part(
    name: str, pairs: Iterable[Any], read: Callable[[Any], Values] = dict, *, matters: bool = True, once: bool = False
) -> Part:
    """A part of a checkpoint: NO if values of it that both runs have differ in any pair, YES if all are equal.

    UNSEEN where no value is in both.

    Args:
        name: what the part is called.
        pairs: corresponding steps of the resumed run and of the other, or what these have.
        read: gives what a step has.
        matters: whether anything may rest on it where it was not seen.
        once: whether the first pair with any value in both decides.
    """
    seen = 0
    for late, whole in (map(read, pair) for pair in pairs):
        both = late.keys() & whole.keys()
        seen = seen or len(both)
        if differ := sorted(of for of in both if late[of] != whole[of]):
            names = dict.fromkeys(tensor_name(fqn, path) for *_, fqn, path in differ)
            return Part(name, Restored.NO, f"{len(differ)} of {len(both)} differ, {some([*names], 2)}")
        if both and once:
            break
    return Part(name, Restored.YES, f"{seen} equal") if seen else Part(name, Restored.UNSEEN, matters=matters)


def _held(resume: ResumePoint) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """Checksums of the tensors that the resumed run begins with, and of what the other run had then.

    A state of an optimizer that is not on record as it begins is one without a value, if the run records any state; but
    one that is equal after the first step was not seen, nor one on record as its optimizer steps for the first time.
    """
    began, had = resume.begins.tensors(Phase.START), resume.had
    late, whole = (at.tensors(Phase.OPTIMIZER) for at in resume.steps[0])
    sites = resume.begins.sites
    if sites.are(Kind.OPTIMIZER_STATE).any():
        later = {tensor_of(sites, number) for number in np.flatnonzero(sites.are(*STATE_KINDS, Phase.START)).tolist()}
        lost = (of for of in had.keys() - began.keys() - later if of[0] == _STATE)
        began |= {of: 0 for of in lost if of not in late or late[of] != whole.get(of)}
    return began, had


def _part_of(tensor: Tensor) -> str:
    """The part that a tensor belongs to: averaged and evaluation copies of models are one, others are by kind."""
    root = tensor[1].partition(".")[0]
    is_copy = EVALUATED in root or root.startswith(_AVERAGE_CLASSES)
    return _COPIES if is_copy else KINDS[tensor[0]].several


def _only(part: str, values: Mapping[Tensor, int]) -> Values:
    """Those of some tensors that belong to a part."""
    return {tensor: value for tensor, value in values.items() if _part_of(tensor) == part}


def _numbers(at: At, wanted: Callable[[tuple[str, str]], bool]) -> Values:
    """Numbers among the settings of optimizers and scalers in a step, by those (name, path) that are wanted."""
    every = at.numbers(Kind.HYPERPARAMETER, Phase.OPTIMIZER)
    return {of: value for of, value in every if value is not None and wanted(of)}


def _counters(at: At) -> Values:
    """The labels `global_step` and `epoch` of a step; nothing rests on them."""
    labels = at.reader.labels.get(at.step, {})
    return {(name, ""): labels[name] for name in ("global_step", "epoch") if name in labels}


def _given(at: At) -> Values:
    """Checksums of the last batch of each loader; without any on record, of what root modules are given last."""
    sites, values = at.sites, Values()
    for kind, phase in ((Kind.BATCH, Phase.DATA), (Kind.INPUT, Phase.FORWARD)):
        values = values or {
            (sites.path[number], f"{kind.value} of {sites.fqn[number]}", ""): int(at.batch.checksum[row])
            for row, number in at.rows([kind], phase)
            if at.batch.status[row] == Status.OBSERVED and (kind is Kind.BATCH or "." not in sites.fqn[number])
        }
    return values


def _random_states(at: At) -> defaultdict[tuple[str, bool], Values]:
    """Checksums of each generator's states, by its name and whether they are of draws within the step.

    States recorded before draws that happen between modules are left out.
    """
    states = defaultdict[tuple[str, bool], Values](dict)
    for row, number in at.rows([Kind.RNG]):
        site = at.sites.site(number)
        if not site.path.endswith(DRAWN_BEFORE):  # the later run may have some to get to where it goes on
            of_draws = states[site.path or site.fqn, site.phase is not Phase.START]
            of_draws[site.phase, site.call, site.path and site.fqn, ""] = int(at.batch.checksum[row])
    return states


def _random(steps: Sequence[tuple[At, At]]) -> list[Part]:
    """A part for each generator of which both runs have the state as their first common step begins; UNSEEN for none.

    Of states that differ, the first later ones that both have decide: draws in that step, else as the next ones begin.
    One that differs does not matter where neither run drew from it in the first step and the last, and both still have
    theirs.
    """
    every, parts = [(_random_states(late), _random_states(whole)) for late, whole in steps], list[Part]()
    for name in sorted(set.intersection(*({name for name, _ in states} for states in every[0]))):
        begun, drawn = ([(late[name, drew], whole[name, drew]) for late, whole in every] for drew in (False, True))
        equal, later = begun[0][0] == begun[0][1], [drawn[0], *begun[1:]]
        state = Restored.YES if equal else _part(name, later, once=True).state
        stays = len(steps) > 1 and begun[0] == begun[-1] and not any((*drawn[0], *drawn[-1]))
        parts.append(Part(f"random state of {name}", state, "", state is Restored.UNSEEN or not stays, name))
    return parts or [Part("random states", Restored.UNSEEN)]
