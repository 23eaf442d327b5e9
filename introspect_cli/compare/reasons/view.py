"""The first divergence with lookups for findings, each computed once."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Known, Thing
from introspect_cli.compare.names import FORWARD, ancestors, owner_of
from introspect_cli.compare.result import Role, SettingChange, Size
from introspect_cli.compare.settings.beginning import first_difference
from introspect_cli.compare.settings.differences import Difference, unequal
from introspect_cli.compare.settings.hyperparameters import Optimizers, hyperparameter_changes
from introspect_cli.compare.step import unseen_inside
from introspect_cli.compare.table import (
    DIFFERENT,
    KINDS,
    OTHER,
    kind_code,
)
from introspect_cli.records import SCALER, SETTING_KINDS, Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.run import Settings


class View:
    """One divergence, usually the first of all ranks, with lookups for findings.

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
        """Take the outcome of one rank and those of all ranks; nothing is looked up before it is asked for.

        The one must have a first divergence, its step and its cause (AssertionError). `settings` stays () until the
        answer sets it.
        """
        self.outcome = outcome
        assert outcome.step is not None and outcome.first is not None and outcome.cause is not None  # noqa: PT018 - they are set together
        self.step, self.first, self.cause = outcome.step, outcome.first, outcome.cause
        self.table, self.site = self.step.table, self.first.site
        stored = self.step.comparison.tensors
        self.runs = stored.a, stored.b
        self.compared, self.ranks = outcome.paired.steps, len(peers)
        self.settings: tuple[SettingChange, ...] = ()
        self.narrowed, self.tolerated = self.step.comparison.options.narrowed, outcome.tolerated
        self.peers = tuple(peer.first for peer in peers if peer.first is not None)

    # --- the place

    @property
    def explained_reason(self) -> str:
        """The reason's word for an origin, `resumed` or `gap`; `propagated` for any other divergence."""
        stands = self.cause.role is Role.ORIGIN or self.cause.reason in {"resumed", "gap"}
        return self.cause.reason if stands else "propagated"

    @property
    def side_without(self) -> str:
        """The run without the record, `a` or `b`; "" where both have it."""
        return OTHER.get(self.first.only, "")

    @cached_property
    def position(self) -> int:
        """Index of this divergence in `step.sites`."""
        return self.step.sites.index(self.site)

    @cached_property
    def union(self) -> int:
        """Number of its site in the alignment of both runs."""
        return int(self.step.divergences.site[self.position])

    @cached_property
    def rounding(self) -> bool:
        """Whether its distance is of the size of rounding."""
        return self.first.size is Size.ROUNDING

    @property
    def dtypes(self) -> tuple[str, ...]:
        """(dtype in a, dtype in b) where they differ; () otherwise."""
        dtypes = tuple(summary.layout.dtype for summary in (self.first.a, self.first.b) if summary is not None)
        return dtypes if len({*dtypes}) > 1 else ()

    @property
    def reshaped(self) -> bool:
        """Whether both runs have the record, with different shapes."""
        return len({summary.layout.shape for summary in (self.first.a, self.first.b) if summary is not None}) > 1

    def known(self, *things: Thing) -> Known:
        """What is known of the first of the cause's evidence that is on any of `things`; UNSEEN where there is none."""
        facts = [fact.known for fact in self.cause.rests_on(*things)]
        return facts[0] if facts else Known.UNSEEN

    # --- what came before

    @property
    def is_first_step(self) -> bool:
        """Whether it is in the first compared step."""
        return self.first.step == int(self.compared[0])

    @cached_property
    def steps_before(self) -> int:
        """Number of compared steps before it."""
        return int((self.compared < self.first.step).sum())

    @cached_property
    def alike(self) -> tuple[int, int]:
        """How many of the step's records of this kind and phase differ or are one-sided; how many there are."""
        states = self.step.state[self.step.of(self.site.kind, frozenset({self.site.phase}))]
        return int((states == DIFFERENT).sum()), int((states > 0).sum())

    # --- what ran

    def recorded(self, side: str, sites: Iterable[int]) -> list[int]:
        """Those of `sites` (numbers in the alignment) that run `side` recorded in the step, in their order."""
        rows = self.table.rows_of(side)
        return [site for site in sites if site in rows]

    @cached_property
    def losses(self) -> tuple[int, int]:
        """Number of losses in the step, in a and in b."""
        losses = self.step.of(Kind.LOSS, frozenset(Phase))
        return len(self.recorded("a", losses)), len(self.recorded("b", losses))

    @cached_property
    def calls(self) -> tuple[str, int, int] | None:
        """(FQN, calls in a, calls in b) of a module that both runs call, a different number of times; None for none.

        The outermost, the first of several. Counted are calls in the step's forward pass, not recomputed or evaluating
        ones.
        """
        unions = [
            u for kind in (Kind.INPUT, Kind.OUTPUT) for u in self.step.of(kind, frozenset({Phase.FORWARD})).tolist()
        ]
        names, calls = self.step.alignment.fqn, self.step.alignment.call
        made = (dict.fromkeys((names[u], int(calls[u])) for u in self.recorded(side, unions)) for side in "ab")
        one, two = (Counter(name for name, _ in each) for each in made)
        changed = [(name, count, two[name]) for name, count in one.items() if 0 != two[name] != count]
        return min(changed, key=lambda item: item[0].count("."), default=None)

    # --- modules

    @property
    def module(self) -> str:
        """FQN of the module to blame: the cause's, else the record's own."""
        return self.cause.module or self.site.fqn

    @cached_property
    def unseen_inside(self) -> list[str]:
        """Submodules of the module to blame without recorded outputs.

        [] unless the reason is or would be `module`, `own_code`.
        """
        of_modules = not {self.cause.reason, self.cause.instead}.isdisjoint({"module", "own_code"})
        return unseen_inside(self.step, self.module) if of_modules else []

    @cached_property
    def blamed(self) -> tuple[ModuleInfo, ...]:
        """The blamed module and its ancestors, innermost first; () where the reason blames no module."""
        if self.cause.reason not in {"module", "own_code", "buffer", "backward", "op"}:
            return ()
        tree = self.step.modules[0] | self.step.modules[1]
        return tuple(tree[fqn] for fqn in (self.module, *ancestors(self.module)) if fqn in tree)

    def classes_of(self, name: str) -> tuple[str, ...]:
        """(class in a, class in b) of module `name` where they differ; () otherwise.

        () also for a root module, and where one run has no such module.
        """
        classes = tuple(tree[name].module_class for tree in self.step.modules if name in tree)
        return classes if len(set(classes)) > 1 and owner_of(name) else ()

    def attributes(self, name: str, *, every: bool = False) -> list[tuple[str, str | None, str | None]]:
        """(attribute, value in a, value in b) where a module's attributes differ, `training` first.

        A value is None where it is missing. [] also where a run has no such module, or none of its attributes on
        record. Unless `every`, attributes of one run alone are left out where the sources differ, except `training`.
        """
        one, two = (tree.get(name) for tree in self.step.modules)
        if one is None or two is None or not (one.attributes and two.attributes):
            return []
        sources = [settings.get("sources") for settings in self.documents]
        edited = (
            not every and all(sources) and len({*map(str, sources)}) > 1
        )  # what changed code sets says only that it changed
        differ = list(unequal(dict(one.attributes), dict(two.attributes)))
        differ.sort(key=lambda change: change[0] != "training")
        return [change for change in differ if not (edited and None in change[1:] and change[0] != "training")]

    @cached_property
    def parameter_user(self) -> str:
        """The module that uses the parameter: its owner, or the nearest ancestor with recorded outputs.

        The owner where none has, or where a capture left modules out.
        """
        owner, step = owner_of(self.site.fqn), self.step
        if step.comparison.leaves_modules_out:  # which of them ran is not on record
            return owner
        ran = (name for name in (owner, *ancestors(owner)) if step.state[step.of(Kind.OUTPUT, FORWARD, name)].any())
        return next(ran, owner)

    # --- optimizers

    @cached_property
    def documents(self) -> list[Settings]:
        """Settings documents of a and of b for the diverging rank."""
        return [run.settings_of(self.step.comparison.rank) for run in self.runs]

    @cached_property
    def setup(self) -> Optimizers:
        """Optimizers of both runs as their settings describe them, parameters by their names in b."""
        a, b = (settings.get("optimizers") for settings in self.documents)
        return Optimizers(a, b, self.step.comparison.rename or str)

    @cached_property
    def hyperparameters(self) -> list[Difference]:
        """Hyper-parameters recorded in this step that differ.

        [] where optimizers have other numbers in b, or a run was told not to record them.
        """
        compared = Kind.HYPERPARAMETER in self.step.comparison.kinds and not self.setup.renumbered
        return hyperparameter_changes(self.table, self.step.last_text) if compared else []

    @cached_property
    def optimizers(self) -> tuple[list[str], list[str]]:
        """Names of the optimizers that recorded hyper-parameters in the step: in a, in b; scalers left out."""
        alignment = self.table.alignment
        one, two = (
            [alignment.fqn[u] for u in self.table.rows_of(side) if KINDS[alignment.kind[u]] in SETTING_KINDS]
            for side in "ab"
        )
        return [name for name in dict.fromkeys(one) if name != SCALER], [n for n in dict.fromkeys(two) if n != SCALER]

    @property
    def steppers(self) -> tuple[list[str], list[str]]:
        """`optimizers`; where both lists are empty, the optimizers whose settings hold the parameter: in a, in b."""
        held = self.setup.holders("a", {self.site.fqn}), self.setup.holders("b", {self.site.fqn})
        return self.optimizers if any(self.optimizers) else held

    @property
    def no_rates(self) -> bool:
        """Whether neither run recorded any hyper-parameter, in any step."""
        return kind_code(Kind.HYPERPARAMETER) not in self.step.alignment.kind

    @property
    def may_have_stepped(self) -> bool:
        """Whether an optimizer may have stepped before, also in a process that was not recorded.

        False only in the first compared step, if that is step 0, for the first call of a record that is a gradient or
        of a phase other than start, optimizer and evaluation.
        """
        site = self.site
        after = site.phase in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} and site.kind is not Kind.GRAD
        return after or site.call > 0 or not self.is_first_step or self.first.step > 0

    # --- data

    @cached_property
    def fed(self) -> str | None:
        """Name of the loader whose batch differs, with ` (evaluation)` after it for one of an evaluation.

        "" where data may differ and was not recorded; None where data is not the cause.
        """
        if self.site.kind is Kind.BATCH:
            return f"{self.site.fqn} (evaluation)" if self.site.phase is Phase.EVAL else self.site.fqn
        if self.site.kind is Kind.RNG and self.is_first_step and self.site.phase is Phase.START:
            # in the main process, loaders and data sets draw from its generators
            parted = first_difference(self.runs, self.first.rank, self.site.fqn)
            return "" if parted.a and parted.b and parted.is_unseen else None
        known = {fact.known for fact in self.cause.rests_on(Thing.BATCHES)}
        return "" if self.cause.reason == "plain" or Known.UNSEEN in known else None
