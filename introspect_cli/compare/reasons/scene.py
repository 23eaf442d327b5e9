"""The first divergence with all that a sentence about it may look up."""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from introspect_cli.compare.settings.beginning import differs_unseen
from introspect_cli.compare.settings.differences import Difference, describe
from introspect_cli.compare.settings.hyperparameters import Optimizers, hyperparameter_changes
from introspect_cli.compare.settings.settings import rounds_differently
from introspect_cli.compare.step.tensor_at import unseen_inside
from introspect_cli.compare.terms.evidence import RANDOM, Evidence, Known, Thing
from introspect_cli.compare.terms.names import ancestors
from introspect_cli.compare.terms.result import Role, SettingChange, Size
from introspect_cli.compare.terms.sites import KINDS, PHASES, kind_code, of_kinds
from introspect_cli.compare.terms.table import DEAD, DIFFERENT, EQUAL, NOT_SEEN, OTHER, WITHIN
from introspect_cli.compare.terms.words import although, both_values, how_far, what
from introspect_cli.records import SCALER, SETTING_KINDS, Kind, ModuleInfo, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.store.read.manifests import Settings


class Scene:
    """The first divergence with all that a sentence about it may look up.

    Attributes:
        outcome: what came out of comparing the rank that diverges first.
        compared: the compared steps of its rank, in a's numbering.
        ranks: how many ranks were compared.
        narrowed: whether only some records were selected.
        tolerated: the first difference that tolerance or noise let pass, in words; "" for none.
        peers: the first divergence of each rank.
        settings: settings that differ, the strongest explanation first.
    """

    def __init__(self, outcome: RankOutcome, peers: Sequence[RankOutcome]) -> None:
        """Take the rank that diverges first, and what came out of all."""
        self.outcome = outcome
        assert outcome.step is not None and outcome.first is not None and outcome.cause is not None  # noqa: PT018 - they are set together
        self.step, self.first, self.cause = outcome.step, outcome.first, outcome.cause
        self.table = self.step.table
        stored = self.step.comparison.tensors
        self.runs = stored.a, stored.b
        self.compared, self.ranks = outcome.paired.steps, len(peers)
        self.settings: tuple[SettingChange, ...] = ()
        self.narrowed, self.tolerated = self.step.comparison.options.narrowed, outcome.tolerated
        self.peers = tuple(peer.first for peer in peers if peer.first is not None)

    @property
    def tells(self) -> str:
        """The word of the reason whose sentence is true: of what merely follows, that it does."""
        stands = self.cause.role is Role.ORIGIN or self.cause.reason in {"resumed", "gap"}
        return self.cause.reason if stands else "propagated"

    @property
    def the_cause_is(self) -> str:
        """How a sentence says what the cause is, as certain as that is."""
        return "the cause is" if self.cause.certain else "the cause may be"

    @property
    def site(self) -> Site:
        """Where it is."""
        return self.first.site

    @property
    def lacks(self) -> str:
        """The run that has no such record; "" where both have one."""
        return OTHER.get(self.first.only, "")

    @property
    def only_has(self) -> str:
        """That one run alone has it: `only b has the gradient of GPT.head.weight`."""
        return f"only {self.first.only} has {what(self.site)}"

    @property
    def computed_from(self) -> list[Evidence]:
        """What it rests on beside random states."""
        return [fact for fact in self.cause.evidence if fact.thing not in RANDOM]

    def differs(self, evidence: Sequence[Evidence] = (), *, values: bool = False, named: bool = True) -> str:
        """That it differs, by how much, although what: `the input of GPT differs (relative L2 0.1)`.

        Args:
            evidence: what it rests on, as far as the sentence takes it up.
            values: whether to show both values of a scalar instead of their distance.
            named: whether to name the module's class.
        """
        first = self.first
        far = (both_values(first) if values else "") or how_far(first)
        return f"{what(first.site, first.module_class if named else '')} differs{far}{although(evidence)}"

    @property
    def scaled(self) -> str:
        """That b is a multiple of a, where it is, for the end of a clause."""
        return "" if self.first.scale is None else f"; b is {self.first.scale:.6g} times a"

    @property
    def documents(self) -> list[Settings]:
        """The settings documents of either run, of the rank that diverges first."""
        return [run.settings_of(self.step.comparison.rank) for run in self.runs]

    @property
    def by_samples(self) -> bool:
        """Whether the runs cut their batches differently, and are compared over the samples."""
        gathered = self.step.comparison.gathered
        return gathered is not None and gathered.by_samples

    @cached_property
    def position(self) -> int:
        """Which of the step's divergences it is."""
        return self.step.sites.index(self.site)

    @cached_property
    def union(self) -> int:
        """Its site's union number."""
        return int(self.step.divergences.site[self.position])

    @property
    def dropped(self) -> bool:
        """Whether either run recorded steps that it does not hold any more."""
        return bool(self.step.comparison.a.thinned or self.step.comparison.b.thinned)

    @property
    def absent(self) -> str:
        """What became of the steps that are not in both runs, in words."""
        return "are not kept in both runs" if self.dropped else "were not recorded"

    @property
    def is_first_step(self) -> bool:
        """Whether no compared step came before."""
        return self.first.step == int(self.compared[0])

    def exchanged_with(self, unions: Iterable[int]) -> int | None:
        """Which of some sites has in each run the value that this one has in the other; None for none."""
        checksum, union = self.table.checksum, self.union
        here = checksum(union, "a"), checksum(union, "b")
        return next(
            (other for other in unions if other != union and (checksum(other, "b"), checksum(other, "a")) == here), None
        )

    @cached_property
    def steps_before(self) -> int:
        """Compared steps before this one; all of them agree."""
        return int((self.compared < self.first.step).sum())

    @property
    def all_before(self) -> str:
        """That everything recorded before agrees, as far as it was compared: `everything recorded before agrees`."""
        what = "everything selected" if self.narrowed else "everything recorded"
        return f"{what} before agrees{' within tolerance' if self.tolerated else ''}"

    @cached_property
    def agreeing_before(self) -> dict[int, int]:
        """How many of this step's records that come before it are in which state; settings are left out."""
        step = self.step
        settings = of_kinds(step.alignment.kind, SETTING_KINDS)
        earlier = step.state[(step.table.order_of < self.first.sequence) & ~settings]
        return {state: int((earlier == state).sum()) for state in (EQUAL, WITHIN, NOT_SEEN, DEAD, DIFFERENT)}

    @cached_property
    def setup(self) -> Optimizers:
        """The optimizers of both runs, by their settings."""
        a, b = (settings.get("optimizers") for settings in self.documents)
        return Optimizers(a, b, self.step.comparison.rename or str)

    @cached_property
    def hyperparameters(self) -> list[Difference]:
        """Hyper-parameters that differ at this step; those of another optimizer with that name are not compared."""
        step = self.step
        return [] if self.setup.renumbered else hyperparameter_changes(step.table, step.standing)

    @cached_property
    def optimizers(self) -> tuple[list[str], list[str]]:
        """Names of the optimizers that step in a and in b."""
        alignment = self.table.alignment
        one, two = (
            [alignment.fqn[u] for u in self.table.rows_of(side) if KINDS[alignment.kind[u]] in SETTING_KINDS]
            for side in "ab"
        )
        return [name for name in dict.fromkeys(one) if name != SCALER], [
            name for name in dict.fromkeys(two) if name != SCALER
        ]

    @property
    def steppers(self) -> tuple[list[str], list[str]]:
        """Those optimizers; where no step of any is on record, those that hold the parameter by the settings."""
        held = self.setup.holders("a", {self.site.fqn}), self.setup.holders("b", {self.site.fqn})
        return self.optimizers if any(self.optimizers) else held

    @cached_property
    def calls(self) -> tuple[str, int, int] | None:
        """(name, calls in a, calls in b) of the outermost module that both call, but a different number of times."""
        alignment = self.table.alignment
        called: dict[str, tuple[set[int], set[int]]] = {}
        for place, side in enumerate("ab"):
            for union in self.table.rows_of(side):
                of_call = KINDS[alignment.kind[union]] in (Kind.OUTPUT, Kind.INPUT)
                if of_call and PHASES[alignment.phase[union]] is Phase.FORWARD:
                    called.setdefault(alignment.fqn[union], (set(), set()))[place].add(int(alignment.call[union]))
        changed = [(name, len(a), len(b)) for name, (a, b) in called.items() if a and b and len(a) != len(b)]
        return min(changed, key=lambda item: item[0].count("."), default=None)

    def recorded(self, side: str, sites: Iterable[int]) -> list[int]:
        """Those of the sites that a run recorded in the step."""
        rows = self.table.rows_of(side)
        return [site for site in sites if site in rows]

    @cached_property
    def losses(self) -> tuple[int, int]:
        """How many losses the step has in a and in b."""
        losses = self.step.of(Kind.LOSS, frozenset(Phase))
        return len(self.recorded("a", losses)), len(self.recorded("b", losses))

    @cached_property
    def rounding(self) -> bool:
        """Whether the distance is a few roundings of the dtype."""
        return self.first.size is Size.ROUNDING

    def rounding_words(self) -> str:
        """A sentence on a distance that rounding alone can make; "" where it cannot."""
        text, changes = " Rounding alone can make such a difference", filter(rounds_differently, self.settings)
        words = "; ".join(describe(change) for change in islice(changes, 3))
        return (
            "" if not self.rounding else f"{text}, and these settings can change it: {words}." if words else f"{text}."
        )

    @cached_property
    def unseen_inside(self) -> list[str]:
        """Modules inside the one that computes something else, where their outputs are not on record."""
        of_modules = not {self.cause.reason, self.cause.instead}.isdisjoint({"module", "own_code"})
        return unseen_inside(self.step, self.cause.module or self.site.fqn) if of_modules else []

    @property
    def no_rates(self) -> bool:
        """Whether no hyper-parameter was recorded in either run."""
        return kind_code(Kind.HYPERPARAMETER) not in self.step.alignment.kind

    @property
    def fed(self) -> str | None:
        """The loader whose batch differs; "" where data may and was not recorded, None where data is not the cause."""
        if self.site.kind is Kind.BATCH:
            return f"{self.site.fqn} (evaluation)" if self.site.phase is Phase.EVAL else self.site.fqn
        if self.site.kind is Kind.RNG and self.is_first_step and self.site.phase is Phase.START:
            drew = differs_unseen(self.runs, self.first.rank, self.site.fqn)
            return "" if drew else None  # in the main process, loaders and data sets draw from its generators
        if self.cause.reason == "script" and (loader := self.step.loader_around(self.site.fqn, self.first.sequence)):
            return loader
        known = {fact.known for fact in self.cause.rests_on(Thing.BATCHES)}
        return "" if self.cause.reason == "plain" or Known.UNSEEN in known else None

    @cached_property
    def blamed(self) -> tuple[ModuleInfo, ...]:
        """The module whose code is meant and those around it, the innermost first; none where no module is blamed."""
        if self.cause.reason not in {"module", "own_code", "buffer", "backward", "op"}:
            return ()
        name = self.cause.module or self.site.fqn
        tree = self.step.modules[0] | self.step.modules[1]
        return tuple(tree[fqn] for fqn in (name, *ancestors(name)) if fqn in tree)
