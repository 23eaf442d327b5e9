"""The first divergence with lookups for findings, each computed once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Known, Thing
from introspect_cli.compare.names import FORWARD, ancestors, owner_of
from introspect_cli.compare.result import Role, SettingChange, Size
from introspect_cli.compare.settings.beginning import first_difference
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.hyperparameters import Optimizers, hyperparameter_changes, recorded_names
from introspect_cli.compare.step import unseen_inside
from introspect_cli.compare.table import KINDS, OTHER
from introspect_cli.records import SCALER, SETTING_KINDS, Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.run import Settings


class View:
    """One divergence, usually the first of all ranks, with lookups for findings.

    Attributes:
        outcome: what came out of comparing the rank that diverges first.
        compared: the compared steps of its rank, in a's numbering.
        ranks: how many ranks were compared.
        tolerated: the first difference that tolerance or noise let pass, in words; "" for none.
        peers: the first divergence of each rank.
        side_without: the run without the record, `a` or `b`; "" where both have it.
        rounding: whether its distance is of the size of rounding.
        is_first_step: whether it is in the first compared step.
        settings: settings that differ, the strongest explanation first.
        renamed: names of classes in a and in b that are one class of the code.
    """

    def __init__(self, outcome: RankOutcome, peers: Sequence[RankOutcome], renamed: frozenset[tuple[str, str]]) -> None:
        """Take the outcome of one rank and those of all ranks; nothing is looked up before it is asked for.

        The one must have a first divergence, its step and its cause (AssertionError). `settings` stays () until the
        answer sets it.
        """
        self.outcome = outcome
        assert outcome.step is not None and outcome.first is not None and outcome.cause is not None  # noqa: PT018 - they are set together
        self.step, self.first, self.cause = outcome.step, outcome.first, outcome.cause
        self.table, self.site = self.step.table, self.first.site
        self.runs = self.step.comparison.runs
        self.compared, self.ranks = outcome.paired.steps, len(peers)
        self.settings: tuple[SettingChange, ...] = ()
        self.tolerated, self.renamed = outcome.tolerated, renamed
        self.peers = tuple(peer.first for peer in peers if peer.first is not None)
        self.side_without = OTHER.get(self.first.only, "")
        self.rounding = self.first.size is Size.ROUNDING
        self.is_first_step = self.first.step == int(self.compared[0])

    # --- the place

    @property
    def explained_reason(self) -> str:
        """The reason's word for an origin, `resumed` or `gap`; `propagated` for any other divergence."""
        stands = self.cause.role is Role.ORIGIN or self.cause.reason in {"resumed", "gap"}
        return self.cause.reason if stands else "propagated"

    @cached_property
    def position(self) -> int:
        """Index of this divergence in `step.sites`."""
        return self.step.sites.index(self.site)

    @cached_property
    def union(self) -> int:
        """Number of its site in the alignment of both runs."""
        return int(self.step.divergences.site[self.position])

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

    # --- what ran

    def recorded(self, side: str, sites: Iterable[int]) -> list[int]:
        """Those of `sites` (numbers in the alignment) that run `side` recorded in the step, in their order."""
        rows = self.table.rows_of[side]
        return [site for site in sites if site in rows]

    @cached_property
    def losses(self) -> tuple[int, int]:
        """Number of losses in the step, in a and in b."""
        losses = self.step.of(Kind.LOSS)
        return len(self.recorded("a", losses)), len(self.recorded("b", losses))

    # --- modules

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """The modules of either run by name; of one that both have, what b says of it."""
        return self.step.modules[0] | self.step.modules[1]

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

    def classes_of(self, name: str) -> tuple[str, ...]:
        """(class in a, class in b) of module `name` where they differ; () otherwise.

        () also for a root module, where one run has no such module, and where the class was only renamed.
        """
        classes = tuple(tree[name].module_class for tree in self.step.modules if name in tree)
        return classes if len(set(classes)) > 1 and owner_of(name) and classes not in self.renamed else ()

    def attributes(self, name: str) -> list[tuple[str, str | None, str | None]]:
        """(attribute, value in a, value in b) where a module's attributes differ, `training` first.

        A value is None where it is missing. [] also where a run has no such module, or none of its attributes on
        record. Attributes of one run alone are left out where the sources differ, except `training`.
        """
        one, two = (tree.get(name) for tree in self.step.modules)
        if one is None or two is None or not (one.attributes and two.attributes):
            return []
        sources = [settings.get("sources") for settings in self.documents]
        # what changed code sets says only that it changed
        edited = all(sources) and len({*map(str, sources)}) > 1
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
        around = (owner, *ancestors(owner))
        return next((name for name in around if step.state[step.of(Kind.OUTPUT, *FORWARD, fqn=name)].any()), owner)

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
    def tuned(self) -> list[SettingChange]:
        """Hyper-parameters that differ, those of the parameter first: as recorded for its group, then from settings.

        For other reasons than `optimizer`, those recorded in the step. Of these none where optimizers have other
        numbers in b, or a run was told not to record them.

        Settings describe the first step, so they count only for names that were not recorded in this one; under an
        offset only if the learning rate was recorded.
        """
        recorded, offset = recorded_names(self.table), self.step.comparison.offset
        compared = Kind.HYPERPARAMETER in self.step.comparison.kinds and not self.setup.renumbered
        every = hyperparameter_changes(self.table, self.step.last_text) if compared else []
        if self.cause.reason != "optimizer":
            return every
        held = self.setup.groups_of(self.site.fqn) if compared else None
        changes = hyperparameter_changes(self.table, self.step.last_text, held) if held is not None else []
        if not offset or "lr" in recorded:
            later = {change.name for change in changes} | (recorded if offset or held else set())
            changes += [change for change in self.setup.changes_for(self.site.fqn) if change.name not in later]
        names, told = {change.about for change in changes}, bool(changes)
        others = (change for change in every if change.about not in names)
        return [*changes, *(change for change in others if not (told and None in (change.a, change.b)))]

    @cached_property
    def optimizers(self) -> tuple[list[str], list[str]]:
        """Names of the optimizers that recorded hyper-parameters in the step: in a, in b; scalers left out."""
        names, kinds = self.table.alignment.fqn, self.table.alignment.kind
        every = ([(names[union], KINDS[kinds[union]]) for union in self.table.rows_of[side]] for side in "ab")
        one, two = ([*dict.fromkeys(n for n, kind in each if kind in SETTING_KINDS and n != SCALER)] for each in every)
        return one, two

    @property
    def steppers(self) -> tuple[list[str], list[str]]:
        """`optimizers`; where both lists are empty, the optimizers whose settings hold the parameter: in a, in b."""
        held = self.setup.holders("a", {self.site.fqn}), self.setup.holders("b", {self.site.fqn})
        return self.optimizers if any(self.optimizers) else held

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
