"""Which of two runs goes on from where the other has been, and from which of its steps.

A resumed run counts its steps from 0 again. What it begins with, the whole run had after some step: parameters,
buffers, the optimizer's state. But equal parameters alone prove nothing: a warm-up whose first learning rate is 0
leaves them as they were. So a run is resumed only if something in it says so that a fresh one cannot have: its
framework counts on, its optimizer's state is not new, or it read a checkpoint that the other did not read. Where a
fresh run could begin like that too, the offset that explains more of what the run begins with wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.settings.beginning import DOCUMENT
from introspect_cli.compare.terms.at import At, Tensor, tensor_of
from introspect_cli.compare.terms.sites import kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.watched import STATE_KINDS, observed_kinds
from introspect_cli.labels import Labels, step_words
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from introspect_cli.compare.join.steps import Sides

_STATE = kind_code(Kind.OPTIMIZER_STATE)
_SELECTING = ("steps", "every_seconds", "epochs", "first", "last", "when", "schedule", "max_size")
"""Options of a capture that may leave out the steps before its first."""
LOOKED_AT = 200
"""Steps from there on of which learning rates, batches and random states are held against each other."""


class Sign(Enum):
    """What says that a run does not begin its training."""

    COUNTED = "its framework counts on"
    STATE = "its optimizer's state is not new when it begins"
    READ = "it read a checkpoint that the other run did not read"
    ASKED = "--offset says so"


@dataclass(frozen=True)
class Goes:
    """One run goes on where the other has been.

    Attributes:
        late: `a` or `b`, the run that goes on.
        sign: what says so.
        begins: its first step.
        there: the step of the other run that this is compared with.
    """

    sides: Sides
    late: str
    sign: Sign
    begins: At
    there: At

    @property
    def first(self) -> int:
        """The first step of the run that goes on."""
        return self.begins.step

    @property
    def at(self) -> int:
        """The step of the other run that this is compared with."""
        return self.there.step

    @property
    def whole(self) -> str:
        """The other run."""
        return OTHER[self.late]

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds that both captures watched for; all where a run does not say."""
        every = {kind.value for kind in Kind}
        one, two = (observed_kinds(manifest) or every for manifest in self.sides.manifests)
        return frozenset(one & two)

    # --- steps

    @property
    def first_steps(self) -> tuple[At, At]:
        """The first step of the later run, and the step of the whole run that it is compared with."""
        return self.begins, self.there

    def steps(self) -> Iterator[tuple[At, At]]:
        """The steps of both from there on, as far as they are looked at."""
        for after in range(LOOKED_AT):
            late, whole = self.begins.to(self.first + after), self.there.to(self.at + after)
            if late.recorded and whole.recorded:
                yield late, whole

    def since(self, late: At, whole: At) -> str:
        """From which step on, as a clause; "" for the first. Steps are those of a."""
        step = whole.step if self.late == "b" else late.step
        return "" if late.step == self.first else f"from step {step} on"

    # --- what either had when that step began

    @cached_property
    def began(self) -> dict[Tensor, int]:
        """Checksums of the tensors that the later run begins with: of each optimizer when it first steps."""
        return self.begins.begun(LOOKED_AT)

    @cached_property
    def had(self) -> Mapping[Tensor, int | None] | None:
        """Those of the whole run when that step began, None where one is not known; None where none is on record."""
        before, sites = self.there.to(self.at - 1), self.there.sites
        if not before.recorded:
            return dict(self.there.tensors(Phase.START)) or None
        again = (sites.phase == phase_code(Phase.START)) & (sites.call > 0)
        start = {} if again.any() else At.first(self.there.reader, sites).tensors(Phase.START)
        frozen = {tensor: value for tensor, value in start.items() if tensor[0] != _STATE}
        return frozen | before.left(LOOKED_AT)

    # --- words

    def ab(self, late: str, whole: str) -> tuple[str, str]:
        """Two values as those of a and of b."""
        return (whole, late) if self.late == "b" else (late, whole)

    def change(self, late: str, whole: str) -> str:
        """The values of a and b: `5 -> 1`."""
        return " -> ".join(self.ab(late, whole))


def _firsts(sides: Sides, late: str) -> tuple[At, At]:
    """The first steps of the later run and of the other, given which is the later one."""
    a, b = (At.first(reader, sites) for reader, sites in zip((sides.a, sides.b), sides.sites, strict=True))
    return (b, a) if late == "b" else (a, b)


def goes_on(sides: Sides, offset: int, *, asked: bool) -> Goes | None:
    """Which run goes on from the other, where it is so."""
    if not len(sides.a) or not len(sides.b):
        return None
    first_a, first_b = sides.a.entry(0).step, sides.b.entry(0).step
    if first_a == first_b + offset:
        return None
    late = "b" if first_b + offset > first_a else "a"
    at = first_b + offset if late == "b" else first_a - offset
    manifest = sides.manifests["ab".index(late)]
    begins, whole = _firsts(sides, late)
    if begins.step and any(manifest.get("options", {}).get(name) for name in _SELECTING):
        return None  # the capture left out what came before
    for sign, holds in (
        (Sign.COUNTED, bool(offset_by_labels(sides.a.labels, sides.b.labels))),
        (Sign.STATE, _not_new(begins, whole)),
        (Sign.READ, bool(_read_more(sides, late))),
        (Sign.ASKED, asked and bool(offset)),
    ):
        if holds:
            return Goes(sides, late, sign, begins, whole.to(at))
    return None


def detected_offset(sides: Sides, by_labels: int) -> tuple[int, str]:
    """By how much a step's number is larger in a than in b, and what is said of it."""
    a, b = sides.a, sides.b
    if by_labels:
        return by_labels, (
            f"Steps with the same global_step are compared, step {max(by_labels, 0)} of a with step "
            f"{max(-by_labels, 0)} of b (--offset {by_labels}): one of the runs counts on from a checkpoint."
        )
    if not len(a) or not len(b) or a.entry(0).digest == b.entry(0).digest:
        return 0, ""
    for late, whole in (("b", "a"), ("a", "b")):
        begins, other = _firsts(sides, late)
        start = _begins_after(begins, other, read=bool(_read_more(sides, late)))
        if start is None:
            continue
        step, decided = start
        first = begins.step
        offset = (step - first) * (1 if late == "b" else -1)
        after = step_words(step - 1, other.reader.labels.get(step - 1, {}))
        if offset and not decided:
            return 0, (
                f"Run {late} begins with the parameters that run {whole} has after {after}, and nothing else says that "
                f"it is resumed (--offset {offset} compares step {first} of {late} with step {step} of {whole})."
            )
        if offset:
            return offset, (
                f"Run {late} begins with what run {whole} has after {after}: "
                f"step {first} of {late} is compared with step {step} of {whole} (--offset {offset})."
            )
    return 0, _may_go_on(sides)


def _may_go_on(sides: Sides) -> str:
    """That one run alone reads a checkpoint, and where it goes on is not seen; "" where some of the start agrees."""
    more = {late: _read_more(sides, late) for late in "ab"}
    late, whole = ("a", "b") if more["a"] else ("b", "a")
    begun, begun_whole = (at.tensors(Phase.START).items() for at in _firsts(sides, late))
    if bool(more["a"]) is bool(more["b"]) or begun & begun_whole:
        return ""
    return (
        f"Run {late} alone reads {more[late][-1]}. If it continues run {whole}, say after which step: --offset "
        f"{'-' if late == 'a' else ''}K compares step 0 of {late} with step K of {whole}."
    )


def _read_more(sides: Sides, late: str) -> list[str]:
    """The checkpoints that the later run read before its first step and the other one did not."""
    read = []
    for run, reader, files in zip((sides.tensors.a, sides.tensors.b), (sides.a, sides.b), sides.files, strict=True):
        noted = run.settings_of(reader.rank).document(DOCUMENT).get("read")
        read.append({**files, **({str(name): str(name) for name in noted} if isinstance(noted, list) else {})})
    mine, theirs = read["ab".index(late)], read["ba".index(late)]
    return [name for key, name in mine.items() if key not in theirs]


def offset_by_labels(a: Mapping[int, Labels], b: Mapping[int, Labels]) -> int:
    """By how much a's number of a step is larger than b's of the step with the same `global_step`; 0 where unknown."""
    offsets: list[int] = []
    for labels in (a, b):
        counted = {count - step for step, given in labels.items() if isinstance(count := given.get("global_step"), int)}
        if len(counted) != 1:  # nobody counts, or a training was begun anew within the run
            return 0
        offsets.append(counted.pop())
    return offsets[1] - offsets[0]


# --- by what a run begins with


def _begins_after(begins: At, whole: At, *, read: bool) -> tuple[int, bool] | None:
    """The step of the whole run that the later one begins with, and whether that is decided; None for none."""
    start = begins.tensors(Phase.START)
    start_whole = {tensor: value for tensor, value in whole.tensors(Phase.START).items() if tensor[0] != _STATE}
    tensors = {tensor: value for tensor, value in start.items() if tensor[0] != _STATE}
    if (
        tensors
        and all(start_whole.get(tensor) == value for tensor, value in tensors.items())
        and len(start) == len(tensors)
    ):
        return None  # it begins as the other one does
    new = not _not_new(begins, whole)
    best = _step_with(whole, start)
    if not new and (best is None or best[0] == whole.step):  # the rest was not restored
        states = {tensor: value for tensor, value in start.items() if tensor[0] == _STATE}
        best = _step_with(whole, states) or best or _step_with(whole, tensors)
    if best is None:
        counted = None if new else _step_counted(begins, whole)
        return None if counted is None else (counted, True)
    step, explained = best
    fresh = sum(start_whole.get(tensor) == value for tensor, value in start.items())
    if new and (explained <= fresh or not any(tensor[0] == kind_code(Kind.PARAM) for tensor in start)):
        return None
    return step, not new or read


def _step_with(whole: At, start: dict[Tensor, int]) -> tuple[int, int] | None:
    """The step of the whole run that begins with most of `start`, and with how much; None where none stands out.

    What a step begins with, the step before left; where that was not captured, its own start tells.
    """
    for phase, after in ((Phase.OPTIMIZER, 1), (Phase.START, 0)):
        place = _row_with(whole, start, phase)
        if place is not None:
            return int(whole.reader.entries["step"][place[0]]) + after, place[1]
    return None


def _row_with(whole: At, start: dict[Tensor, int], phase: Phase) -> tuple[int, int] | None:
    """The row of the step that has most of `start` in a phase, and how much; None where none stands out."""
    sites, reader = whole.sites, whole.reader
    wanted = (sites.phase == phase_code(phase)) & (sites.call == 0)  # later calls are within the step
    wanted &= of_kinds(sites.kind, STATE_KINDS)
    last = {tensor_of(sites, n): n for n in np.flatnonzero(wanted).tolist()}
    shared = [tensor for tensor in start if tensor in last]
    if not shared:
        return None
    goal = np.array([start[tensor] for tensor in shared], dtype=np.uint64)
    numbers = np.array([last[tensor] for tensor in shared])
    equal = np.zeros((len(reader), 2), dtype=np.int64)
    kept = np.zeros(len(sites), dtype=np.uint64)  # each of several optimizers leaves its parameters alone
    for row in range(len(reader)):
        batch = reader.read_row(row)
        values = np.zeros(len(sites), dtype=np.uint64)
        values[batch.site] = kept[batch.site] = batch.checksum
        equal[row] = [int((which[numbers] == goal).sum()) for which in (kept, values)]
        if equal[row, 0] == len(goal):
            break
    best = max(equal.tolist(), default=[0, 0])
    if (equal == best).all(axis=1).sum() != 1 or 2 * best[0] < len(goal):
        return None
    return equal.tolist().index(best), best[0]


def _step_counted(begins: At, whole: At) -> int | None:
    """The step of the whole run at whose start its optimizer has counted as far as that of the later run has."""
    goal = steps_counted(begins, Phase.START)
    steps = whole.reader.entries["step"].tolist() if goal is not None else ()
    return next((step + 1 for step in steps if steps_counted(whole.to(step), Phase.OPTIMIZER) == goal), None)


def steps_counted(at: At, phase: Phase) -> float | None:
    """How many steps an optimizer has counted, the most of all parameters; None where it does not count."""
    counts = [number.value for number in at.numbers(Kind.OPTIMIZER_STATE, phase) if number.path == "['step']"]
    return max((count for count in counts if count is not None), default=None)


def _not_new(begins: At, whole: At) -> bool:
    """Whether the later run's optimizer has stepped before its first step, and more often than the whole run's."""
    if not _stepped(begins):
        return False
    if not _stepped(whole):
        return True
    late, other = steps_counted(begins, Phase.START), steps_counted(whole, Phase.START)
    return late is None or other is None or late > other


def _stepped(at: At) -> bool:
    """Whether an optimizer's state says, when a run begins, that it has stepped: it has counted, or has moments."""
    states = at.numbers(Kind.OPTIMIZER_STATE, Phase.START)
    counts = [number.value for number in states if number.path == "['step']"]
    if counts:
        return any(value is not None and value > 0 for value in counts)
    moments = ("exp_avg", "momentum", "square_avg")
    return any(number.moves for number in states if any(name in number.path for name in moments))
