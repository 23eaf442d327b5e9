"""What has to be equal on several ranks: rows that say which sites, on which ranks; one comparer; the rules that ask.

Which parameters ought to be equal on all ranks is written nowhere. So what was equal on all of them at first, or gets
one gradient on all of them, is taken for copies; what differs from the start and has gradients that differ belongs to
its rank (a local expert). Parts of a whole are compared with copies of the same part alone, and what has no recorded
place with nothing. Equal inputs, parameters and buffers must give equal outputs. Where ranks compute parts of one
output, what all of them hold whole of its input must be equal. DDP broadcasts the first rank's buffers before the next
forward pass, unless it was told not to; where nobody does, each rank evaluates, and saves, statistics of its own
samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.health.aligned import AlignedStep, Difference, Gathered, Ledger, Ranks
from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.progress import Progress
from introspect_cli.records import SCALER, Kind, Part, Phase, Status
from introspect_cli.store.whole import misfit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.health.aligned import Rows


_LEAST = 8  # elements of a parameter whose equality on two ranks is no accident
_PLACES = {Status.OBSERVED, Status.PARTIAL}
_BY_DESIGN = 0.1
"""Outputs that always differ by more, without a draw, are meant to: a module that takes its rank's share."""
_SETTINGS = ("runtime", "hardware", "packages", "sources", "git")
_RANK_LOCAL = frozenset({"local_rank", "host", "hostname", "pid", "process_id"})
_TORCHS = "torch/nn/modules/"
_PLAIN = re.compile(r"True|False|-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+")


@dataclass
class Equal(Gathered):
    """Ledgers of all values that must be equal between ranks, one for each of `ROWS`.

    Attributes:
        stale: parameters that differ although their gradients are equal, by FQN.
        cut: of the step at hand, the parts that ranks have of modules' outputs, by FQN.
        unsound: of the step at hand, modules that hold parameters or buffers which are not equal on all ranks, or were
            not in the step before.
    """

    ledgers: dict[str, Ledger] = field(default_factory=lambda: {name: Ledger() for name, _ in ROWS})
    stale: dict[str, Difference] = field(default_factory=dict)
    cut: dict[str, dict[int, Part]] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)

    def step(self, now: AlignedStep) -> None:
        """Compare the sites of each of `ROWS` between ranks; adds to `ledgers`, replaces `cut` and `unsound`.

        A site that only one rank has is not compared. Of outputs, none is compared after the first that differs: what
        follows rests on it.
        """
        outputs = now.of(Kind.OUTPUT, Phase.FORWARD)
        self.cut = {now.sites[n].fqn: parts for n in outputs if (parts := _parts(now, n))}
        self.unsound = self._unsound_modules(now)
        for name, row in ROWS:
            for number in now.of(row.kind, *row.phases):
                site = now.sites[number]
                groups = row.held(self, now, number) if len(now.rows[number]) > 1 else []
                found = (now.difference(held, row.value) for held in groups)
                difference = next((each for each in found if each is not None), None)
                if difference is not None and name == "output":
                    difference = difference._replace(words=_why_output(now, number, difference))
                if groups:
                    path = site.path if row.kind is Kind.HYPERPARAMETER else ""
                    self._note(name, f"{site.fqn}{path}", difference)
                if difference is not None and name == "output":
                    break  # others follow it

    def _unsound_modules(self, now: AlignedStep) -> set[str]:
        """Modules that hold, directly or inside, a parameter or buffer that is not known to be equal on all ranks.

        Such a parameter or buffer differs in this step; or its last comparison, of a parameter, was unequal or there
        was none.
        """
        held = *now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER), *now.of(Kind.BUFFER, Phase.START, Phase.FORWARD)
        names = {now.sites[n].fqn for n in held if len(now.values(n, now.rows[n])) > 1}
        names |= {now.sites[n].fqn for n in now.of(Kind.PARAM)} - self.ledgers["param"].equal
        return {
            ".".join(pieces[:end]) for pieces in (name.split(".") for name in names) for end in range(1, len(pieces))
        }

    def _note(self, row: str, name: str, difference: Difference | None) -> None:
        """Note a comparison in the ledger of `row`; `difference` is None where the values are equal.

        A gradient that differs is not noted where its parameter differs. One that is equal, and never differed, makes
        its parameter stale where that differs.
        """
        ledger, params = self.ledgers[row], self.ledgers["param"]
        if row != "grad" or difference is None or name in params.equal:
            ledger.note(name, difference)
        if row == "grad" and difference is None and name in params.since and name not in ledger.first:
            self.stale.setdefault(name, params.since[name])

    @cached_property
    def peers(self) -> list[list[int]]:
        """Lists of two or more ranks with the same samples: at the same position in their data-parallel groups.

        Groups with a rank in common count as one.
        """
        sharing = {rank: {rank} for rank in self.ranks.numbers}  # each with all that share its samples
        for group in self.ranks.groups:
            together = set(group).union(*(sharing[rank] for rank in group if rank in sharing))
            sharing |= dict.fromkeys(together & sharing.keys(), together)
        places: dict[int, list[int]] = {}
        for rank, together in sharing.items():
            places.setdefault(sorted(together).index(rank), []).append(rank)
        return [peers for peers in places.values() if len(peers) > 1]


def _ledger(ranks: Ranks, row: str, needs: str = "") -> Ledger:
    """The ledger of a row of `ROWS`.

    Raises:
        NotObservedError: nothing was compared, and `needs`, which is the message, is not "".
    """
    ledger = ranks.of(Equal).ledgers[row]
    require(not needs or ledger.times[1], needs)
    return ledger


def is_data_parallel(ranks: Ranks) -> bool:
    """Whether ranks are to get different samples.

    If any has a data-parallel group: whether each has one. Else: whether half of the parameters or more were equal when
    first compared, and none is sharded.
    """
    wrapped = frozenset[int]().union(*ranks.groups)
    if wrapped:
        return set(ranks.numbers) <= wrapped
    copies = _ledger(ranks, "param")
    return bool(copies.shared) and 2 * len(copies.shared) >= len(copies.times[1]) and not ranks.has_parts


def has_other_samples(ranks: Ranks, one: int, two: int) -> bool:
    """Whether two ranks divide samples between them, so that each gets others.

    If there are data-parallel groups, whether both are in one; else as `is_data_parallel` says of all.
    """
    if ranks.groups:
        return any(one in group and two in group for group in ranks.groups)
    return is_data_parallel(ranks)


# --- on which ranks a site has to be equal: rows of theirs, none where nothing is to be compared


def _all_ranks(_: Equal, now: AlignedStep, number: int) -> list[Rows]:
    """The rows of all ranks as one group; [] for a gradient scaler's settings, or where an output was not measured."""
    rows = now.rows[number]
    measured = now.sites[number].kind != Kind.OUTPUT or all(now.status(*at) in _PLACES for at in rows.items())
    return [rows] if measured and now.sites[number].fqn != SCALER else []  # a tensor, without a text


def _by_part(equal: Equal, now: AlignedStep, number: int) -> list[Rows]:
    """Rows of ranks in groups that hold the same part.

    [] (not compared) where layouts differ. An empty group, which counts as equal, where a record was not observed, or
    is incomplete and either whole or a part that is still to be summed.
    """
    if now.sites[number].fqn in equal.ledgers["layout"].since:
        return []
    by_part: dict[object, dict[int, int]] = {}
    for rank, row in now.rows[number].items():
        layout, status = now.layout(rank, row), now.status(rank, row)
        owed = layout.part is None or bool(layout.part.reduction)
        if status is Status.NOT_OBSERVED or (status is Status.PARTIAL and owed):
            return [{}]
        by_part.setdefault((layout.shape, layout.part), {})[rank] = row
    return list(by_part.values())


def _in_groups(equal: Equal, now: AlignedStep, number: int) -> list[Rows]:
    """Rows of the ranks in each data-parallel group; all ranks are one where there is none.

    Only groups of two or more whose records were observed, are no parts, and have one layout.
    """
    groups = equal.ranks.groups or [frozenset(equal.ranks.numbers)]
    held = [{rank: row for rank, row in now.rows[number].items() if rank in group} for group in groups]
    whole = [rows for rows in held if all(now.is_whole(*at) for at in rows.items())]
    return [rows for rows in whole if len(rows) > 1 and len({now.layout(*at) for at in rows.items()}) == 1]


def _of_peers(equal: Equal, now: AlignedStep, number: int) -> list[Rows]:
    """Rows of peers (given the same samples) that hold different parts of the module's output or embedding table.

    Only where all of their records of this site (an input) are whole.
    """
    fqn = now.sites[number].fqn
    groups: list[Rows] = []
    looks_up = equal.cut and equal.ranks.whole.sites.module_class[number] == "Embedding"
    tables = now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER) if looks_up else ()
    # where no output is cut, ranks have parts of what each of them gathers for samples of its own (ZeRO)
    table = next((_parts(now, n) for n in tables if now.sites[n].fqn == f"{fqn}.weight"), {})
    for parts in (equal.cut.get(fqn, {}), table):
        for peers in equal.peers:
            held = {rank: row for rank, row in now.rows[number].items() if rank in peers and rank in parts}
            if len({parts[rank] for rank in held}) > 1 and all(now.is_whole(*at) for at in held.items()):
                groups.append(held)
    return groups


def _parts(now: AlignedStep, number: int) -> dict[int, Part]:
    """The part of each rank's record of a site, without those still to be summed; {} where any record is no part."""
    parts = {rank: now.layout(rank, row).part for rank, row in now.rows[number].items()}
    return {} if None in parts.values() else {rank: part for rank, part in parts.items() if part and not part.reduction}


def _given_alike(equal: Equal, now: AlignedStep, number: int) -> list[Rows]:
    """Rows of ranks whose call got equal inputs, in groups of two or more; what they give must be equal.

    No rows for modules whose parameters or buffers differ, without recorded inputs, for parts, and for calls that draw
    random numbers on ranks that are to draw different ones.
    """
    site = now.sites[number]
    inputs, drawn = (now.calls.get((kind, site.fqn, site.call), []) for kind in (Kind.INPUT, Kind.RNG))
    if not inputs or site.fqn in equal.unsound:
        return []
    groups: dict[object, dict[int, int]] = {}
    for rank, row in now.rows[number].items():
        complete = all(rank in now.rows[each] for each in inputs)
        given = tuple(now.values(each, [rank]) for each in inputs) if complete else rank
        groups.setdefault(given, {})[rank] = row
    # some of the ranks are to have samples, and so draws, that the others have not
    return [
        same
        for same in groups.values()
        if len(same) > 1
        and all(now.layout(*at).part is None for at in same.items())
        and not (drawn and any(len(same.keys() & ranks) > 1 for ranks in equal.ranks.groups))
    ]


# --- why they differ, looked up at once: the step is gone later


def _why_output(now: AlignedStep, number: int, found: Difference) -> str:
    """Why the output at site `number` differs, as a clause: the random states that its call draws from do; "" if not.

    Compared are the ranks of `found` alone, those that differ and their base.
    """
    site, ranks = now.sites[number], [found.base, *found.others]
    drew = any(len(now.values(each, ranks)) > 1 for each in now.calls.get((Kind.RNG, site.fqn, site.call), []))
    return "the random states it draws from differ" if drew else ""


class Row(NamedTuple):
    """A kind of site that must be equal between ranks.

    Attributes:
        held: given a site's number, the groups of ranks whose rows must be equal; [] to compare nothing.
        value: given a rank and its row, what is compared; None for checksums.
    """

    kind: Kind
    phases: tuple[Phase, ...]
    held: Callable[[Equal, AlignedStep, int], list[Rows]]
    value: Callable[[AlignedStep, int, int], object] | None = None


def _form(now: AlignedStep, rank: int, row: int) -> str:
    """Dtype and shape in words: `float32 [4, 2]`."""
    return f"{now.layout(rank, row).dtype} {list(now.layout(rank, row).shape)}"


ROWS: tuple[tuple[str, Row], ...] = (
    ("peers", Row(Kind.INPUT, (Phase.FORWARD,), _of_peers)),
    ("output", Row(Kind.OUTPUT, (Phase.FORWARD,), _given_alike)),
    ("layout", Row(Kind.PARAM, (), _all_ranks, _form)),
    ("dtype", Row(Kind.OUTPUT, (Phase.FORWARD,), _all_ranks, lambda now, rank, row: now.layout(rank, row).dtype)),
    ("param", Row(Kind.PARAM, tuple(phase for phase in Phase if phase is not Phase.OPTIMIZER), _by_part)),
    ("grad", Row(Kind.GRAD, (Phase.OPTIMIZER,), _by_part)),
    ("param", Row(Kind.PARAM, (Phase.OPTIMIZER,), _by_part)),
    ("buffer", Row(Kind.BUFFER, (), _in_groups)),
    ("setting", Row(Kind.HYPERPARAMETER, (), _all_ranks, AlignedStep.text)),
)
"""In the order in which they are asked: outputs where copies were equal before the step, gradients before updates."""

_COPIES = "two ranks that recorded the same parameter"


@rule(Level.ERROR, over_ranks=True)
def copies_differ(ranks: Ranks) -> Iterator[Hit]:
    """Copies of a parameter differ between ranks.

    When: no gradient of it was seen to differ; or it differs from the first step on, although its gradients are
        equal
    Cause: a checkpoint that only some ranks loaded, a step that only some took, settings that differ, or experts
        whose gradients are averaged over the wrong group
    """
    params, grads = _ledger(ranks, "param", _COPIES), _ledger(ranks, "grad")
    for fqn, found in params.parted.items():
        if fqn in grads.first and grads.first[fqn].step <= found.step:
            continue  # the rule on reductions says so
        seen = fqn in grads.times[1]
        why = "although no gradient of it was seen to differ" if seen else "and no gradients of it were compared"
        evidence = f"from step {found.step} on the parameter {fqn} differs on {found.whose}{found.size}, {why}"
        yield Hit(found.step, f"param {fqn}", evidence, found.rank)
    for fqn, found in ranks.of(Equal).stale.items():
        if fqn not in params.parted and fqn not in ranks.of(Parts).wrong:
            evidence = f"{fqn} differs on {found.whose}{found.size} from the first step on, its gradient does not"
            yield Hit(found.step, f"param {fqn}", evidence, found.rank)


@rule(Level.ERROR, over_ranks=True)
def rank_layout(ranks: Ranks) -> Iterator[Hit]:
    """A parameter has another dtype or shape, or a module's output another dtype, on some ranks.

    When: it is so in any step that all ranks have
    Cause: a model that is built or cast differently there, or an autocast that is not entered on all ranks
    """
    for fqn, found in _ledger(ranks, "layout", _COPIES).first.items():
        yield Hit(found.step, f"param {fqn}", f"{fqn} differs in dtype or shape{found.words}", found.rank)
    for fqn, found in _ledger(ranks, "dtype").first.items():
        yield Hit(found.step, f"output {fqn}", f"the output of {fqn} differs in dtype{found.words}", found.rank)


@rule(Level.ERROR, over_ranks=True)
def reduction(ranks: Ranks) -> Iterator[Hit]:
    """Gradients of one parameter differ between ranks when the optimizer takes them.

    When: the parameter was equal on them before
    Cause: an all-reduce that is missing, over the wrong group, or skipped on some ranks; of multiples, clipping or
        unscaling by what each rank has of its own
    """
    _ledger(ranks, "param", _COPIES)
    grads = _ledger(ranks, "grad").first
    alone = {fqn for fqn, found in grads.items() if not found.is_multiple and not found.single}
    begun = {grads[fqn].step for fqn in alone}
    # Where one gradient differs, all others are multiples that step, as clipping by a norm makes them.
    followers = {fqn for fqn, found in grads.items() if fqn not in alone and found.step in begun}
    diverged = [found.step for row in ("peers", "output") for found in _ledger(ranks, row).first.values()]
    diverged += [hit.step for hit in ranks.of(Progress).hits.values()]
    for fqn, found in grads.items():
        if fqn in followers:
            continue
        why = "it was not reduced, or not over these ranks, or changed on one after that"
        if any(step <= found.step for step in diverged):
            why = "the ranks had diverged before it, as another finding says"
        elif found.is_multiple:
            why = "it is a multiple there: divided by another number, clipped by a norm of its own or unscaled alone"
        evidence = f"from step {found.step} on the gradient of {fqn} differs on {found.whose}{found.size}: {why}"
        yield Hit(found.step, f"grad {fqn}", evidence, found.rank)


@rule(Level.WARNING, over_ranks=True)
def buffers_differ(ranks: Ranks) -> Iterator[Hit]:
    """Buffers of data-parallel ranks differ, and nothing makes them equal.

    When: they differ at the end of the last step that has them, and no wrapper broadcasts them before a forward
        pass
    Cause: BatchNorm statistics of each rank's samples, so that what is evaluated and saved depends on the rank:
        SyncBatchNorm, or DDP with broadcast_buffers
    """
    buffers = _ledger(ranks, "buffer")
    require(buffers.times[1] and is_data_parallel(ranks), "data-parallel ranks and their buffers")
    said = [manifest.get("broadcasts_buffers", "") for manifest in ranks.run.manifests.values()]
    require("" not in said, "whether buffers are broadcast")
    who = "its wrapper broadcasts none" if False in said else "nobody broadcasts it"
    for fqn, found in buffers.since.items() if True not in said else ():
        evidence = f"{fqn} differs on {found.whose}{found.size} from step {found.step} to the last, and {who}"
        yield Hit(found.step, f"buffer {fqn}", evidence, found.rank)


@rule(Level.ERROR, over_ranks=True)
def peers_differ(ranks: Ranks) -> Iterator[Hit]:
    """Ranks that compute parts of one output are given different inputs.

    When: an output or the table of an embedding is cut over ranks, and an input of its module that each of them
        has whole differs
    Cause: a sampler that takes the rank of a process for that of a data-parallel group, or a parameter outside of
        the mesh that each rank drew from another seed
    """
    first = _ledger(ranks, "peers", "inputs of modules whose output is cut over ranks").first
    for fqn, found in list(first.items())[:1]:
        evidence = f"rank {found.rank}'s input of {fqn}, of which it gives a part, is not that of rank {found.base}"
        yield Hit(found.step, f"input {fqn}", evidence, found.rank)


@rule(Level.ERROR, over_ranks=True)
def rank_outputs(ranks: Ranks) -> Iterator[Hit]:
    """A module's output differs between ranks although inputs and parameters are equal.

    When: any bit differs in a call; what always differs, without a draw, by more than a relative L2 of
        {_BY_DESIGN:g} is meant to
    Cause: random states that differ where ranks must draw alike, other flags or kernels, or a faulty device
    """
    outputs = _ledger(ranks, "output")
    for fqn, found in sorted(outputs.first.items(), key=lambda item: item[1].step):
        times, chances = (counted[fqn] for counted in outputs.times)
        if times < chances or found.words or not found.distance > _BY_DESIGN:
            why = found.words or "nothing it was given explains why"
            evidence = f"the output of {fqn} differs on {found.whose}{found.size}, {times} of {chances} times: {why}"
            yield Hit(found.step, f"output {fqn}", evidence, found.rank)


@rule(Level.WARNING, over_ranks=True)
def rank_settings(ranks: Ranks) -> Iterator[Hit]:
    """Versions, flags, hardware, sources, hyper-parameters or modules' attributes differ between ranks.

    When: any value of runtime, hardware, packages, sources or git differs, or a hyper-parameter in any step; of
        data-parallel ranks a flag or a fraction that a module of torch's begins with, or any module's mode
    Cause: machines that are not set up alike, or a setting that depends on the rank
    """
    hyperparameters = _ledger(ranks, "setting").first
    hits = [Hit(d.step, name, f"{name} differs{d.words}", d.rank) for name, d in hyperparameters.items()]
    hits += _attribute_hits(ranks)
    require(hits or ranks.run.manifests, "settings of each rank")
    yield from hits
    every = {rank: ranks.run.settings_of(rank) for rank in ranks.numbers if ranks.run.manifests}
    flat = {rank: dict(_flat("", {name: held.get(name) for name in _SETTINGS})) for rank, held in every.items()}
    settings = {rank: values for rank, values in flat.items() if values}  # others were cut off before they wrote any
    base = min(settings, default=0)
    for rank, held in settings.items():
        for name in sorted(settings[base].keys() | held.keys()):
            one, two = settings[base].get(name), held.get(name)
            if one != two:
                evidence = f"{name} is {two!r} on rank {rank} and {one!r} on rank {base}"
                yield Hit(ranks.steps[0] if ranks.steps else 0, name, evidence, rank)


def _flat(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """(dotted name, value) of the leaves of nested dicts, without None and keys that may differ between ranks.

    A list is one leaf. `name` is what the names begin with, "" at the top.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if str(key) not in _RANK_LOCAL:
                yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif value is not None:
        yield name, value


def _attribute_hits(ranks: Ranks) -> Iterator[Hit]:
    """Hits for plain attributes of torch's own modules, and modes of all, that differ between data-parallel ranks.

    One for each attribute and rank, at the first step; ranks are compared with the lowest. Other attributes of a
    script's modules may depend on the rank, such as one that says who prints.
    """
    base = ranks.numbers[0]
    sharing = [rank for rank in ranks.numbers if is_data_parallel(ranks) and has_other_samples(ranks, base, rank)]
    held: dict[int, dict[tuple[str, str, str], dict[int, str]]] = {rank: {} for rank in [base, *sharing]}
    for rank, attributes in held.items() if sharing else ():
        for module in ranks.run.rank(rank).module_rows:
            for name, value in module.attributes:
                if _PLAIN.fullmatch(value) and (name == "training" or module.source.startswith(_TORCHS)):
                    attributes.setdefault((module.fqn, module.module_class, name), {})[module.step] = value
    for rank, attributes in held.items():
        for place, one in held[base].items():
            two = attributes.get(place, one)
            for step in sorted({*one, *two}):
                a, b = (side[max((at for at in side if at <= step), default=min(side))] for side in (one, two))
                if a != b:
                    name = f"{place[0]}.{place[2]}"
                    yield Hit(step, name, f"{name} is {b} on rank {rank} and {a} on rank {base}", rank)
                    break


# --- parts that have to be one whole, and tied weights on two ranks, which have to stay equal


@dataclass
class Parts(Gathered):
    """Parts of parameters at the first step, and ties between parameters of different ranks.

    Attributes:
        wrong: what is wrong with the parts of a parameter, by FQN.
        ties: parameters that begin equal on two ranks under two names that neither has both of, by rank and name of
            both: the step after which they first differ, None while they are equal.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    ties: dict[tuple[tuple[int, str], tuple[int, str]], int | None] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Check parts and find ties in the first step; in every step, note the ties that end in it.

        Sets `wrong`, only where every rank of the launch was recorded, and adds to `ties` the pairs that begin equal. A
        tie's value is None while it holds, else the step after which its two parameters differ for the first time.
        """
        if now.step == self.ranks.steps[0]:
            self._find_ties(now)
            for number in now.of(Kind.PARAM, Phase.START):
                if len(self.ranks.numbers) >= self.ranks.run.world_size and (wrong := self._fault(now, number)):
                    self.wrong[now.sites[number].fqn] = wrong
        if None in self.ties.values():
            numbers = now.of(Kind.PARAM, Phase.OPTIMIZER)
            at = ((now.sites[n].fqn, rank, row) for n in numbers for rank, row in now.rows[n].items())
            after = {(rank, fqn): now.checksum(rank, row) for fqn, rank, row in at}
            for (one, two), step in self.ties.items():
                if step is None and one in after and two in after and after[one] != after[two]:
                    self.ties[one, two] = now.step

    def _fault(self, now: AlignedStep, number: int) -> str:
        """What is wrong with the parts of a site, as a clause; "" where nothing is known to be.

        It is wrong if the parts do not hold each element once, or two different parts have equal moments. Moments are
        compared only up to the first part of less than `_LEAST` elements, of equal elements, or without statistics.
        """
        holders = [(rank, now.layout(rank, row).part) for rank, row in now.rows[number].items()]
        held = [(rank, part) for rank, part in holders if part is not None and not part.reduction]
        parts: dict[Part, int] = {}
        for rank, part in held:
            if part.numel:
                parts.setdefault(part, rank)
        shape = now.layout(*next(iter(now.rows[number].items()))).shape
        if parts and len(holders) == self.ranks.run.world_size and (wrong := misfit(held, shape)):
            return wrong
        seen: dict[object, int] = {}
        for part, rank in parts.items():
            moments = now.stats(rank, now.rows[number][rank], "var", "min", "max", "mean")
            if part.numel < _LEAST or np.isnan(moments).any() or not moments[0] > 0:
                return ""
            other = seen.setdefault((part.numel, *moments), rank)
            if other != rank:
                same = "(extrema, mean and variance are equal to the last bit), at another place of the whole"
                return f"rank {rank} holds the same values as rank {other} {same}"
        return ""

    def _find_ties(self, now: AlignedStep) -> None:
        """Add to `ties` parameters of different names that start equal on two ranks, of which none has both names.

        Only whole parameters of `_LEAST` elements or more that are not all equal.
        """
        holders: dict[object, list[tuple[int, str]]] = {}
        for number in now.of(Kind.PARAM, Phase.START):
            for rank, row in now.rows[number].items():
                layout = now.layout(rank, row)
                if layout.part is None and layout.numel >= _LEAST and now.stats(rank, row, "var")[0] > 0:
                    value = layout.shape, layout.dtype, now.checksum(rank, row)
                    holders.setdefault(value, []).append((rank, now.sites[number].fqn))
        names = {(rank, now.sites[n].fqn) for n in now.of(Kind.PARAM, Phase.START) for rank in now.rows[n]}
        for one, *others in holders.values():
            for two in others:
                if one[0] != two[0] and (two[0], one[1]) not in names and (one[0], two[1]) not in names:
                    self.ties[one, two] = None


@rule(Level.ERROR, over_ranks=True)
def shards(ranks: Ranks) -> Iterator[Hit]:
    """Parts of a parameter overlap, leave some of it out, or hold the same values.

    When: at the start, the ranges of indices that ranks hold do not have each element once, or two parts have the
        same extrema and moments, to the last bit
    Cause: a checkpoint that was cut with another rank's offset, or ranks that each drew their part from one seed
    """
    require(ranks.has_parts, "parameters that are cut over ranks")
    for fqn, wrong in ranks.of(Parts).wrong.items():
        yield Hit(ranks.steps[0], f"param {fqn}", f"of {fqn}, {wrong}", ranks.numbers[0])


@rule(Level.ERROR, over_ranks=True)
def tied_weights(ranks: Ranks) -> Iterator[Hit]:
    """Tied weights on two ranks differ.

    When: parameters that begin equal on two ranks, under two names, differ after a step
    Cause: an embedding and a head on two stages whose gradients are not all-reduced
    """
    ties = require(ranks.of(Parts).ties, "parameters that begin equal under different names on two ranks")
    for ((rank, one), (other, two)), step in ties.items():
        if step is not None:
            evidence = f"{one} of rank {rank} and {two} of rank {other} begin equal and differ after step {step}"
            yield Hit(step, f"param {two}", evidence, other)
