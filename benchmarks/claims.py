"""Hold what an answer of `diff` claims against the two stores, which are read without anything of `compare`.

An answer may be right by luck: the module is the right one, but what is called equal nobody recorded. So each claim is
derived here again: what is said to be the same has no record that differs, the first divergence was recorded, differs,
was selected and is first, a setting that differs does, and each thing that the divergence rests on is what the answer
says of it: what is called equal was recorded by both runs with equal checksums. Claims are codes of the JSON document;
`facts_of` is all that knows its form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from introspect_cli.records import SETTING_KINDS, Kind, Phase, Record, Site, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.store.run import Run

_CAUSES = frozenset({Kind.RNG, Kind.PRODUCT, *SETTING_KINDS})
"""Kinds that explain a divergence, and what a script writes of its values; a difference in one alone is none."""


@dataclass(frozen=True)
class Pair:
    """One site at one step, as each run has it; None where it has not."""

    step: int
    site: Site
    a: Record | None
    b: Record | None

    @property
    def seen(self) -> bool:
        """Whether both runs saw the value."""
        blind = Status.NOT_OBSERVED
        return all(side is not None and side.summary.status is not blind for side in (self.a, self.b))

    @property
    def equal(self) -> bool:
        """Whether both saw it and it is the same, bit for bit."""
        if self.a is None or self.b is None or not self.seen:
            return False
        one, two = self.a.summary, self.b.summary
        return (one.checksum, one.layout.shape, one.layout.dtype) == (two.checksum, two.layout.shape, two.layout.dtype)

    @property
    def order(self) -> float:
        """Its place in run a's order, in b's where a has it not."""
        one = self.a or self.b
        assert one is not None
        return one.sequence


@dataclass
class Books:
    """Two runs side by side, read through the store alone.

    Attributes:
        a: the first run.
        b: the second.
        offset: step k of b is compared with step k + offset of a.
        wanted: whether the comparison was asked to look at a site at a step; all where nothing was narrowed.
    """

    a: Run
    b: Run
    offset: int = 0
    wanted: Callable[[int, Site], bool] = field(default=lambda _step, _site: True)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Steps of a that both runs recorded."""
        one, two = ({entry.step for entry in run.rank(0).steps} for run in (self.a, self.b))
        return tuple(sorted(step for step in one if step - self.offset in two))

    @cached_property
    def recorded(self) -> frozenset[int]:
        """Steps that at least one run recorded."""
        return frozenset(entry.step for run in (self.a, self.b) for entry in run.rank(0).steps)

    @cached_property
    def observed(self) -> frozenset[str]:
        """Kinds that both runs were told to record."""
        return frozenset.intersection(*(frozenset(run.manifest.get("observed") or []) for run in (self.a, self.b)))

    @cached_property
    def _tables(self) -> dict[int, list[Pair]]:
        return {}

    def pairs(self, step: int) -> list[Pair]:
        """Everything both runs recorded at a step of a, selected or not, in a's order."""
        if step not in self._tables:
            one = _by_site(self.a.rank(0).records(step)) if step in self.a.rank(0) else {}
            other = step - self.offset
            two = _by_site(self.b.rank(0).records(other)) if other in self.b.rank(0) else {}
            pairs = [Pair(step, site, one.get(site), two.get(site)) for site in {**one, **two}]
            self._tables[step] = sorted(pairs, key=lambda pair: pair.order)
        return self._tables[step]

    def has(self, kind: Kind, fqn: str = "") -> bool:
        """Whether both runs have records of a kind, of one name or of any."""
        pairs = (pair for step in self.steps for pair in self.pairs(step))
        return any(pair.seen and pair.site.kind is kind and fqn in {"", pair.site.fqn} for pair in pairs)

    def differing(self) -> Iterator[Pair]:
        """Selected values that both runs saw and that differ, causes left out, the earliest first."""
        for step in self.steps:
            for pair in self.pairs(step):
                effect = pair.site.kind not in _CAUSES
                if effect and pair.seen and not pair.equal and self.wanted(step, pair.site):
                    yield pair


def _by_site(records: Iterable[Record]) -> dict[Site, Record]:
    return {record.site: record for record in records}


def false_claims(answer: dict[str, Any], books: Books, *, tolerant: bool = False) -> list[str]:
    """What of an answer the records do not bear out; empty when all of it stands.

    Args:
        answer: the JSON document of `diff`.
        books: the runs it speaks of.
        tolerant: whether differences were let pass, so that a difference need not be a divergence.
    """
    problems = [*_verdict(answer, books, tolerant=tolerant), *_settings(answer, books)]
    if first := answer["first"]:
        problems += _first(answer, books, tolerant=tolerant)
        facts = list(facts_of(answer))
        # of an input, the module is spoken of in whose forward code it is made
        around = next((fact.of for fact in facts if fact.of and first["kind"] == "input"), "")
        for fact in facts:
            problems += _fact(replace(fact, of=fact.of or around), first, books)
    return list(dict.fromkeys(problems))


# --- the verdict and its place


def _verdict(answer: dict[str, Any], books: Books, *, tolerant: bool) -> list[str]:
    verdict = answer["verdict"]
    if verdict == "same":
        compared = sum(
            pair.seen and books.wanted(step, pair.site) for step in books.steps for pair in books.pairs(step)
        )
        if not compared:
            return ["same, and not one record was compared"]
        if not tolerant and (pair := next(books.differing(), None)):
            return [f"same, and {_named(pair)} differs"]
    if verdict == "diverged" and answer["first"] is None:
        return ["diverged, and nothing is first"]
    return []


def _first(answer: dict[str, Any], books: Books, *, tolerant: bool) -> list[str]:
    first = answer["first"]
    site = site_of(first)
    if first["step"] not in books.recorded:
        return [f"step {first['step']} was not recorded"]
    pairs = books.pairs(first["step"])
    here = next((pair for pair in pairs if pair.site == site), None)
    if here is None:
        return [] if first["rank"] else [f"neither run has {site} at step {first['step']}"]
    wrong = [f"{_named(here)} is equal"] if here.equal else []
    if not books.wanted(first["step"], site):
        wrong.append(f"{_named(here)} was not selected")
    if first["rel_l2"] == 0 and here.seen and not here.equal and first["a"]["dtype"] == first["b"]["dtype"]:
        wrong.append(f"distance 0 at {_named(here)}, whose checksums differ")
    if (here.a is None or here.b is None) and (side := _blind(here, books)):
        wrong.append(f"{_named(here)} is only in one run, but run {side} was not told to look")
    if (
        tolerant
        or books.offset
        or (None in (here.a, here.b) and any(origin.get("divergence") for origin in answer.get("origins") or ()))
    ):
        return wrong  # what one run alone draws as it is built comes before all that is drawn after it
    earlier = next(books.differing(), None)
    if earlier is None:
        return wrong
    if earlier.step < here.step or (earlier.step == here.step and _before(earlier, here)):
        wrong.append(f"{_named(earlier)} differs before {_named(here)}")
    return wrong


def _before(one: Pair, two: Pair) -> bool:
    """Whether every run that has both recorded `one` first."""
    sides = [(x, y) for x, y in ((one.a, two.a), (one.b, two.b)) if x is not None and y is not None]
    return bool(sides) and all(x.sequence < y.sequence for x, y in sides)


def _blind(pair: Pair, books: Books) -> str:
    """The side that could not have recorded the site, "" where it could."""
    side, run = ("a", books.a) if pair.a is None else ("b", books.b)
    step = pair.step if side == "a" else pair.step - books.offset
    return "" if pair.site.kind.value in (run.manifest.get("observed") or []) and step in run.rank(0) else side


def site_of(first: dict[str, Any]) -> Site:
    """The site of a divergence of the document."""
    return Site(Phase(first["phase"]), Kind(first["kind"]), first["fqn"], first["call"], first["path"])


def _named(pair: Pair) -> str:
    site = pair.site
    call = f"#{site.call}" if site.call else ""
    return f"{site.phase.value} {site.kind.value} {site.fqn}{call}{site.path} of step {pair.step}"


# --- what the divergence rests on


@dataclass(frozen=True)
class Fact:
    """One thing that the first divergence rests on.

    Attributes:
        thing: which, a key of `_THINGS`.
        known: `equal`, `within`, `different` or `not seen`.
        of: the module or tensor whose it is; "" for the diverging one.
    """

    thing: str
    known: str
    of: str = ""


_NOUNS = {
    "random_at_start": r"random state at the start of the step",
    "drawn_from": r"random state",
    "batches": r"batches",
    "inputs": r"inputs",
    "parameters": r"parameters(?! at this point)",
    "buffers": r"buffers",
    "outputs": r"every module output recorded before it",
    "forward": r"the forward pass",
    "loss": r"the loss",
    "backward": r"the backward pass",
    "gradient": r"its gradient",
    "gradients": r"the gradients before it(?! in)",
    "value_before": r"value before",
    "everything": r"everything recorded before it",
}
_KNOWN = {"unseen": "not seen", "not recorded": "not seen", "differs": "different", "within tolerance": "within"}


def facts_of(answer: dict[str, Any]) -> Iterator[Fact]:
    """What the document says that the divergence rests on: as codes, or each with the noun for it."""
    for told in answer.get("rests_on") or ():
        thing, known, of = (
            (told["thing"], told["known"], told.get("of") or "") if isinstance(told, dict) else (*told[:2], "")
        )
        if thing not in _THINGS:
            named = re.search(r" of ([\w.]*\w)$", thing)
            of = of or (named[1] if named else "")
            thing = next((code for code, noun in _NOUNS.items() if re.search(rf"\b{noun}\b", thing)), "")
        if thing in _THINGS:
            yield Fact(thing, _KNOWN.get(known, known), of)


def _fact(fact: Fact, first: dict[str, Any], books: Books) -> Iterator[str]:
    pairs = _THINGS[fact.thing](Place(fact, first, books))
    seen = [pair for pair in pairs if pair.seen]
    told = f"{fact.thing} {f'of {fact.of} ' if fact.of else ''}said to be {fact.known}"
    if fact.known == "equal":
        if not seen:
            yield f"{told}, and nothing of it was recorded in both"
        elif (other := next((pair for pair in seen if not pair.equal), None)) is not None:
            yield f"{told}, and {_named(other)} differs"
    elif fact.known == "different" and seen and all(pair.equal for pair in seen):
        yield f"{told}, and all of it is equal"
    elif fact.known == "not seen" and pairs and len(seen) == len(pairs) and fact.thing in _WHOLE:
        yield f"{told}, and both runs recorded it"


_WHOLE = frozenset({"gradient", "loss"})
"""Things of which nothing remains unseen where they were recorded."""


@dataclass(frozen=True)
class Place:
    """Where a fact is looked for."""

    fact: Fact
    first: dict[str, Any]
    books: Books

    @cached_property
    def pairs(self) -> list[Pair]:
        """All of the step."""
        return self.books.pairs(self.first["step"])

    @cached_property
    def here(self) -> Pair | None:
        """The divergence itself."""
        return next((pair for pair in self.pairs if pair.site == site_of(self.first)), None)

    @property
    def module(self) -> str:
        """The module that is spoken of."""
        if self.fact.of:
            return self.fact.of
        fqn: str = self.first["fqn"]
        return fqn if self.first["kind"] in {"output", "input", "op_output"} else fqn.rpartition(".")[0]

    def earlier(self, *kinds: Kind) -> list[Pair]:
        """Records of these kinds before the divergence in its step."""
        here = self.here
        return [pair for pair in self.pairs if pair.site.kind in kinds and (here is None or _before(pair, here))]


def _inputs(place: Place) -> list[Pair]:
    call = place.first["call"] if place.first["kind"] == "output" and not place.fact.of else None
    return [
        pair
        for pair in place.pairs
        if pair.site.kind is Kind.INPUT and pair.site.fqn == place.module and call in {None, pair.site.call}
    ]


def _state(kind: Kind) -> Callable[[Place], list[Pair]]:
    """The latest records of a module's parameters (buffers) that are no later than the divergence."""

    def look(place: Place) -> list[Pair]:
        latest: dict[str, Pair] = {}
        for step in (place.first["step"] - 1, place.first["step"]):
            for pair in place.books.pairs(step) if step in place.books.steps else ():
                inside = pair.site.kind is kind and pair.site.fqn.startswith(f"{place.module}.")
                if inside and (step != place.first["step"] or place.here is None or _before(pair, place.here)):
                    latest[pair.site.fqn] = pair
        return list(latest.values())

    return look


def _value_before(place: Place) -> list[Pair]:
    """The last record of the tensor before the divergence, however many steps back: not each step changes it."""
    first = place.first
    for step in reversed([step for step in place.books.steps if step <= first["step"]]):
        same = [p for p in place.books.pairs(step) if p.site.kind.value == first["kind"] and p.site.fqn == first["fqn"]]
        draws = [p for p in same if step < first["step"] or p.site.phase is Phase.START]
        if draws:
            return draws[-1:]
    return []


def _gradient(place: Place) -> list[Pair]:
    found = [pair for pair in place.pairs if pair.site.kind is Kind.GRAD and pair.site.fqn == place.first["fqn"]]
    return [pair for pair in found if pair in place.earlier(Kind.GRAD)] if place.first["call"] else found


def _at_start(place: Place) -> list[Pair]:
    return [pair for pair in place.pairs if pair.site.kind is Kind.RNG and pair.site.phase is Phase.START]


def _drawn_from(place: Place) -> list[Pair]:
    """The states that a module or a module inside it drew from."""
    return [
        pair
        for pair in place.earlier(Kind.RNG)
        if pair.site.phase is not Phase.START
        and pair.a
        and pair.b
        and ((pair.site.fqn == place.module and not pair.site.path.endswith(" before")) or _inside(pair, place))
    ]


def _inside(pair: Pair, place: Place) -> bool:
    return pair.site.fqn.startswith(f"{place.module}.")


def _kinds(*kinds: Kind) -> Callable[[Place], list[Pair]]:
    return lambda place: place.earlier(*kinds)


_THINGS: dict[str, Callable[[Place], list[Pair]]] = {
    "random_at_start": _at_start,
    "drawn_from": lambda place: _drawn_from(place) or _at_start(place),
    "batches": _kinds(Kind.BATCH),
    "inputs": _inputs,
    "parameters": _state(Kind.PARAM),
    "buffers": _state(Kind.BUFFER),
    "outputs": _kinds(Kind.OUTPUT),
    "forward": _kinds(Kind.INPUT, Kind.OUTPUT),
    "loss": _kinds(Kind.LOSS),
    "backward": _kinds(Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
    "gradient": _gradient,
    "gradients": _kinds(Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRAD),
    "value_before": _value_before,
}
"""What a divergence can rest on, by the codes of the document, and the records that it then speaks of."""


# --- settings


def _settings(answer: dict[str, Any], books: Books) -> Iterator[str]:
    for change in answer["settings"]:
        if change["a"] == change["b"]:
            yield f"the setting {change['name']} is said to differ and is {change['a']!r} in both"
        if change["source"] != "command":
            continue
        for side, run in (("a", books.a), ("b", books.b)):
            words = [str(word) for word in run.manifest.get("argv") or []]
            said = change[side]
            if change["name"].startswith("--") and (change["name"] in words) != (said is not None):
                verb = "is" if change["name"] in words else "is not"
                yield f"{change['name']} {verb} on the command line of {side}"
