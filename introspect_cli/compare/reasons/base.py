"""What a reason is: when it applies, what it rests on, its sentence, and which settings explain it.

A record that differs is an origin where everything that went into it was seen and does not differ. Each reason knows
what goes into the records it is about, and hands that over as evidence; `judge` alone decides what follows from it, so
that no reason can take what was not recorded for equal. A reason is a class in a file of this folder, named in that
file's `REASONS`; a new file is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare import reasons as folder
from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.join.rows import StepPair, match
from introspect_cli.compare.join.sites import kind_code
from introspect_cli.compare.reasons.draws import Draw, lone_draws
from introspect_cli.compare.reasons.evidence import Evidence, Known, lines, of, of_module
from introspect_cli.compare.reasons.facts import BLIND, DIFFERS, EQUAL, WITHIN, ancestors
from introspect_cli.compare.reasons.hyperparameters import Told, hyperparameter_changes
from introspect_cli.compare.reasons.settings import describe, rounds_differently
from introspect_cli.compare.reasons.step_view import StepRecords, call_change, losses_of, optimizers_of
from introspect_cli.compare.reasons.words import often
from introspect_cli.compare.result import Divergence, Role, SettingChange
from introspect_cli.records import SETTING_KINDS, count

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.join.merged import Merge
    from introspect_cli.compare.join.sites import Ids
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.records import Kind, ModuleInfo, Site
    from introspect_cli.store.reader import Run

_SMALL = 64  # roundings; more is not summation order any more


@dataclass(frozen=True)
class Cause:
    """What made a divergence.

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


class Reason:
    """A reason that a record can differ for.

    Attributes:
        word: its name in `--format json`, documented in docs/diff.md.
        place: where the cause lies, in words: `the loss code`.
        kinds: kinds of the records it is about; empty for all.
        priority: of several that could apply, the smallest is asked first.
        weights: how well a setting explains it, 0 to 1, by the setting's source.
        names: settings whose names match explain it a little better.
    """

    word: str = ""
    place: str = ""
    kinds: frozenset[Kind] = frozenset()
    priority: int = 50
    weights: ClassVar[Mapping[str, float]] = {}
    names: re.Pattern[str] | None = None

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """What makes a divergence one, resting on evidence; None where something that went into it differs."""
        raise NotImplementedError

    def sentence(self, scene: Scene) -> str:
        """What follows `First divergence at step 3: `."""
        raise NotImplementedError

    def evidence(self, scene: Scene) -> list[str]:
        """Lines under the sentence beside those of the cause's evidence."""
        del scene
        return []

    def cause(self, *evidence: Evidence, role: Role = Role.ORIGIN, **where: str) -> Cause:
        """This reason as a cause."""
        return Cause(role, self.word, evidence, **where)


@cache
def reasons() -> tuple[Reason, ...]:
    """All reasons there are, in the order in which they are asked."""
    found: list[Reason] = []
    for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
        found += getattr(importlib.import_module(module.name), "REASONS", ())
    return tuple(sorted(found, key=lambda reason: (reason.priority, reason.word)))


@cache
def _about(kind: Kind) -> tuple[Reason, ...]:
    return tuple(reason for reason in reasons() if not reason.kinds or kind in reason.kinds)


@cache
def reason_named(word: str) -> Reason:
    """The reason of a cause."""
    return next(reason for reason in reasons() if reason.word == word)


def judge(facts: Facts, position: int) -> Cause:
    """Role and reason of one divergence of a step."""
    gap: Cause | None = None
    for reason in _about(facts.sites[position].kind):
        if gap is not None and reason.priority < 90:
            continue
        cause = reason.applies(facts, position)
        if cause is None or of(cause.evidence, Known.DIFFERS):
            continue
        if cause.role is Role.ORIGIN and any(found.needed for found in of(cause.evidence, Known.UNSEEN)):
            gap = replace(cause, role=Role.PROPAGATED, reason="gap", instead=reason.word)
            if gap.module not in {"", facts.sites[position].fqn}:
                gap = replace(gap, evidence=of_module(gap.evidence, gap.module))
            continue
        if gap is None or reason.word == "resumed":
            return cause
        return gap
    raise AssertionError(facts.sites[position])  # `propagated` always applies


def rounds(divergence: Divergence) -> bool:
    """Whether two values are a few roundings of their dtype apart."""
    a, b, rel = divergence.a, divergence.b, divergence.rel_l2
    if a is None or b is None or rel is None or a.layout.dtype != b.layout.dtype:
        return False
    unit = ROUNDING.get(a.layout.dtype)
    return unit is not None and rel <= _SMALL * unit and _alike(a.stats, b.stats, _SMALL * unit)


def _alike(a: Mapping[str, float], b: Mapping[str, float], tolerance: float) -> bool:
    """Whether extrema and mean agree to within rounding too; a sketch does not see small values beside huge ones."""
    if not a or not b or any(stats.get(name, 0) for stats in (a, b) for name in ("nans", "posinfs", "neginfs")):
        return False
    spread = max(abs(a.get("amean", 0.0)), abs(b.get("amean", 0.0)))
    for name in ("min", "max", "mean"):
        one, two = a.get(name), b.get(name)
        if one is None or two is None:
            return False
        if abs(one - two) > tolerance * (spread if name == "mean" else max(abs(one), abs(two))):
            return False
    return True


class Scene:
    """The first divergence with all that a sentence about it may look up.

    Attributes:
        facts: its step.
        first: the divergence.
        cause: why it is one.
        run_a: run a.
        run_b: run b.
        compared: the compared steps of its rank, in a's numbering.
        ranks: how many ranks were compared.
        narrowed: whether only some records were selected.
        tolerated: the first difference that tolerance or noise let pass, in words; "" for none.
        peers: the first divergence of each rank.
        merges: parameters that are one in one run and several in the other.
        shared: where one run alone has the first, the first that both have; None where there is none.
        settings: settings that differ, the strongest explanation first.
    """

    def __init__(
        self,
        facts: Facts,
        first: Divergence,
        cause: Cause,
        runs: tuple[Run, Run],
        compared: Ids,
        ranks: int = 1,
        *,
        narrowed: bool = False,
        tolerated: str = "",
        peers: Sequence[Divergence] = (),
        merges: Sequence[Merge] = (),
        shared: Divergence | None = None,
    ) -> None:
        self.facts, self.first, self.cause = facts, first, cause
        self.run_a, self.run_b = runs
        self.compared, self.ranks = compared, ranks
        self.settings: tuple[SettingChange, ...] = ()
        self.narrowed, self.tolerated = narrowed, tolerated
        self.peers = tuple(peers)
        self.merges, self.shared = tuple(merges), shared
        self.step = StepRecords(facts.alignment, facts.pair)

    @property
    def tells(self) -> str:
        """The word of the reason whose sentence is true: what merely follows is told as that."""
        known = self.cause.role is Role.ORIGIN or self.cause.reason in {"resumed", "gap"}
        return self.cause.reason if known else "propagated"

    @property
    def site(self) -> Site:
        """Where it is."""
        return self.first.site

    @cached_property
    def position(self) -> int:
        """Which of the step's divergences it is."""
        return self.facts.sites.index(self.site)

    @cached_property
    def union(self) -> int:
        """Its site's union number."""
        return int(self.facts.items.union[self.position])

    @cached_property
    def before(self) -> StepRecords | None:
        """The step before, where both runs recorded it."""
        pair = self.facts.before_pair
        return None if pair is None else StepRecords(self.facts.alignment, pair)

    @cached_property
    def after(self) -> StepPair | None:
        """The step after, where both runs recorded it."""
        facts, pair = self.facts, self.facts.pair
        one, two = facts.sides.a, facts.sides.b
        steps = pair.step + 1, pair.step_b + 1
        if steps[0] not in one or steps[1] not in two:
            return None
        every = facts.alignment.mask(frozenset(), ())
        return match(facts.alignment, every, *steps, one.read(steps[0]), two.read(steps[1]))

    @property
    def dropped(self) -> bool:
        """Whether either run recorded steps that it does not hold any more."""
        return bool(self.facts.sides.a.thinned or self.facts.sides.b.thinned)

    @property
    def absent(self) -> str:
        """What became of the steps that are not in both runs, in words."""
        return "are not kept in both runs" if self.dropped else "were not recorded"

    @property
    def is_first_step(self) -> bool:
        """Whether no compared step came before."""
        return self.first.step == int(self.compared[0])

    @cached_property
    def steps_before(self) -> int:
        """Compared steps before this one; all of them agree."""
        return int((self.compared < self.first.step).sum())

    @cached_property
    def last_before(self) -> int | None:
        """The last compared step before this one."""
        earlier = self.compared[self.compared < self.first.step]
        return int(earlier[-1]) if len(earlier) else None

    @property
    def all_before(self) -> str:
        """That everything recorded before agrees, as far as it was compared: `everything recorded before agrees`."""
        what = "everything selected" if self.narrowed else "everything recorded"
        return f"{what} before agrees{' within tolerance' if self.tolerated else ''}"

    @cached_property
    def agreeing_before(self) -> dict[int, int]:
        """How many of this step's records that come before it are in which state; settings are told as settings."""
        facts = self.facts
        settings = np.isin(facts.alignment.kind, [kind_code(kind) for kind in SETTING_KINDS])
        earlier = facts.state[(facts.order < self.first.sequence) & ~settings]
        return {state: int((earlier == state).sum()) for state in (EQUAL, WITHIN, BLIND, DIFFERS)}

    @cached_property
    def hyperparameters(self) -> Told:
        """Hyper-parameters that differ at this step."""
        return hyperparameter_changes(self.facts.alignment, self.step)

    @cached_property
    def optimizers(self) -> tuple[list[str], list[str]]:
        """Names of the optimizers that step in a and in b."""
        return optimizers_of(self.step, "a"), optimizers_of(self.step, "b")

    @cached_property
    def calls(self) -> tuple[str, int, int] | None:
        """(name, calls in a, calls in b) of the outermost module that runs a different number of times."""
        return call_change(self.step)

    @cached_property
    def losses(self) -> tuple[int, int]:
        """How many losses the step has in a and in b."""
        return losses_of(self.step, "a"), losses_of(self.step, "b")

    @cached_property
    def modules(self) -> tuple[list[ModuleInfo], list[ModuleInfo]]:
        """Both module trees."""
        return list(self.facts.modules[0].values()), list(self.facts.modules[1].values())

    @cached_property
    def draws(self) -> list[Draw]:
        """Random draws that one run only made in this step, before the divergence."""
        return [
            draw
            for draw in lone_draws(self.facts, self.facts.pair)
            if draw.sequence < (self.step.sequence(self.union, draw.side) or 0)
        ]

    @cached_property
    def rounding(self) -> bool:
        """Whether the distance is a few roundings of the dtype."""
        return rounds(self.first)

    @cached_property
    def numerics(self) -> tuple[SettingChange, ...]:
        """Settings that differ and change how a computer rounds: hardware, threads, libraries, flags."""
        return tuple(change for change in self.settings if rounds_differently(change))

    def rounding_words(self) -> str:
        """A sentence on a distance that rounding alone can make; "" where it cannot."""
        if not self.rounding:
            return ""
        if not self.numerics:
            return " Rounding alone can make such a difference."
        told = "; ".join(describe(change) for change in self.numerics[:3])
        return f" Rounding alone can make such a difference, and these settings can change it: {told}."

    @cached_property
    def blamed(self) -> tuple[ModuleInfo, ...]:
        """The module whose code is meant and those around it, the innermost first; none where no module is blamed."""
        if self.cause.reason not in {"module", "own_code", "buffer", "backward", "op"}:
            return ()
        name = self.cause.module or self.site.fqn
        tree = self.facts.modules[0] | self.facts.modules[1]
        return tuple(tree[fqn] for fqn in (name, *ancestors(name)) if fqn in tree)

    def lines(self) -> tuple[str, ...]:
        """What the conclusion rests on, one sentence each: a reader can check it instead of believing it."""
        found = []
        if self.steps_before:
            last = "all steps before agree" if self.steps_before > 1 else "the step before agrees"
            how = " within tolerance" if self.tolerated else " in what was selected" if self.narrowed else " entirely"
            found.append(f"{self.steps_before} compared step{'s' * (self.steps_before > 1)}: {last}{how}.")
        equal, within, unseen, other = self.agreeing_before.values()
        if equal or within:
            every = equal + within + unseen + other
            verb = "is" if equal == 1 else "are"
            much = count(equal, "record") if equal == every else f"{equal:,} of {count(every, 'record')}"
            rest = [f"{within:,} within tolerance"] if within else []
            rest += [f"{unseen:,} not observed in both runs"] if unseen else []
            rest += [f"{other:,} different"] if other else []
            also = f"; {', '.join(rest)}" if rest else ""
            found.append(f"{much} before it in step {self.first.step} {verb} equal{also}.")
        if self.tolerated:
            found.append(f"The first difference that was let pass is {self.tolerated}.")
        found += lines(self.cause.evidence)
        if self.calls and self.cause.reason != "structure":
            name, one, two = self.calls
            found.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
        if self.cause.reason != "rng":
            found += [f"{one[0].upper()}{one[1:]}." for one in map(str, self.draws[:1])]
        return tuple(found + reason_named(self.tells).evidence(self))
