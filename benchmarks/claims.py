"""Read an answer of `diff` as a stranger would, and hold every claim against the two stores.

An answer may be right by luck: the module is the right one, but the sentence calls equal what nobody recorded. Tests
that look for a word do not see that. So the records are read here by means of their own, without anything of
`compare`: a clause that speaks of equality must speak of records that both runs have and whose checksums agree, a
step that is named must have been recorded, a setting that is said to differ must differ, and the first divergence
must be first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.records import SETTING_KINDS, Kind, Phase, Record, Site, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.store.read.run import Run

_CAUSES = frozenset({Kind.RNG, *SETTING_KINDS})
"""Kinds that explain a divergence; a difference in one alone is none."""

_ENDS = re.compile(
    r"[.;:](?:\s|$)|\((?!relative)|\b(?:while|though|although|but|whereas)\b|,\s+(?:and|it|so)\s+(?=\w+ (?:is|are)\b)"
)
_EQUAL = re.compile(
    r"\b(?:equal(?:ly)?(?! where recorded)|agrees?|identical|unchanged|match(?:es)?|bit for bit)\b", re.IGNORECASE
)
_UNSEEN = re.compile(
    r"\b(?:not|nor|never|nothing|no one|none|neither|cannot|unless|if|within tolerance|only|differs?)\b|n't\b",
    re.IGNORECASE,
)
_STEP = re.compile(r"\bsteps? (\d+)(?: of [ab])?\b")
_LEFT_OUT = re.compile(
    r"not (?:\w+ )?recorded|cannot be compared|between|left out|not captured|no record", re.IGNORECASE
)


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
    if answer["first"]:
        problems += _first(answer, books, tolerant=tolerant)
    for text in (answer["sentence"], *answer["evidence"]):
        problems += _steps(text, books)
        problems += _seen(text, books)
        if answer["first"]:
            problems += _equalities(text, answer["first"], books)
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
        or (None in (here.a, here.b) and "which differs too, follows from it" in answer["sentence"])
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


# --- words


def _steps(text: str, books: Books) -> Iterator[str]:
    for clause in _clauses(text):
        for number in map(int, _STEP.findall(clause)):
            if number not in books.recorded and not _LEFT_OUT.search(text):
                yield f"names step {number}, which was not recorded: {clause.strip()!r}"


def _seen(text: str, books: Books) -> Iterator[str]:
    """What is said not to be there, or not to have been recorded."""
    lowered = text.lower()
    if "no data loader was seen" in lowered and "batch" not in books.observed:
        yield "no data loader was seen, where none was looked for"
    if re.search(r"before (?:any|all) training|\binitial\b", lowered) and books.steps and books.steps[0] > 0:
        yield f"speaks of what the runs began with, and recording began at step {books.steps[0]}"
    updates = any(run.settings.get("optimizers") for run in (books.a, books.b))
    if re.search(r"no optimizer (?:steps?|is|was)\b", lowered) and updates:
        yield "no optimizer steps, where one does"
    for clause in _clauses(text):
        words = clause.replace("what was not recorded", "the unknown")  # names nothing, so it claims nothing
        said = re.search(r"^(.*?)(?:was|were|is|are) not recorded", words.strip(), re.IGNORECASE)
        if said is None or _STEP.search(clause):
            continue
        for word, kind in _KIND_WORDS:
            named = re.search(rf"(?<!\bits )(?<!\bsome ){word}(?: of ([\w.#]+\w))?", said[1], re.IGNORECASE)
            if named is not None and books.has(kind, named[1] or ""):
                yield f"said not to be recorded, and it was: {clause.strip()!r}"


_KIND_WORDS = (
    (r"\bbatch(?:es)?\b", Kind.BATCH),
    (r"\binputs?\b", Kind.INPUT),
    (r"\boutputs?\b(?! of the modules inside)", Kind.OUTPUT),
    (r"\bloss\b", Kind.LOSS),
    (r"\brandom states?\b", Kind.RNG),
    (r"\bparameters?\b", Kind.PARAM),
    (r"\bbuffers?\b", Kind.BUFFER),
    (r"\boptimizer state\b", Kind.OPTIMIZER_STATE),
)


def _clauses(text: str) -> list[str]:
    return [clause for clause in _ENDS.split(text) if clause and clause.strip()]


@dataclass(frozen=True)
class Claim:
    """A clause that calls something equal, in an answer whose first divergence is `first`."""

    clause: str
    first: dict[str, Any]
    books: Books

    def earlier(self, *kinds: Kind) -> list[Pair]:
        """Records of these kinds before the divergence in its step."""
        pairs = self.books.pairs(self.first["step"])
        here = next((pair for pair in pairs if pair.site == site_of(self.first)), None)
        return [pair for pair in pairs if pair.site.kind in kinds and (here is None or _before(pair, here))]


Look: TypeAlias = "Callable[[Claim], list[Pair]]"
"""The records that a claim speaks of."""


_RESULTS = {
    "losses": Kind.LOSS,
    "gradients of the parameters": Kind.GRAD,
    "parameters": Kind.PARAM,
    "buffers": Kind.BUFFER,
    "optimizer states": Kind.OPTIMIZER_STATE,
}
_RESULTS_AGREE = re.compile(r"^The (.+) of (?:the step|all [\d,]+ steps) compared agree$")


def _results(names: str, clause: str, books: Books) -> Iterator[str]:
    """What is said of all results of a kind, in all steps that both recorded."""
    for name in re.split(r", | and ", names):
        pairs = [pair for step in books.steps for pair in books.pairs(step) if pair.site.kind is _RESULTS[name]]
        if not any(pair.seen for pair in pairs):
            yield f"said to agree, and nothing of it was recorded in both ({name}): {clause!r}"
        elif (other := next((pair for pair in pairs if not pair.equal), None)) is not None:
            yield f"said to agree, and {_named(other)} does not: {clause!r}"


def _equalities(text: str, first: dict[str, Any], books: Books) -> Iterator[str]:
    for clause in _clauses(text):
        if agreeing := _RESULTS_AGREE.match(clause.strip()):
            yield from _results(agreeing[1], clause.strip(), books)
            continue
        if not _EQUAL.search(clause) or _UNSEEN.search(clause):
            continue
        for word, look in _SUBJECTS:
            if re.search(word, clause, re.IGNORECASE):
                pairs = look(Claim(clause, first, books))
                if not any(pair.seen for pair in pairs):
                    yield f"called equal, and nothing of it was recorded in both ({word}): {clause.strip()!r}"
                elif (other := next((pair for pair in pairs if pair.seen and not pair.equal), None)) is not None:
                    yield f"called equal, and {_named(other)} differs: {clause.strip()!r}"


def _inputs(claim: Claim) -> list[Pair]:
    first = claim.first
    if first["kind"] not in {"output", "buffer"}:
        return claim.earlier(Kind.INPUT)
    fqn = first["fqn"] if first["kind"] == "output" else first["fqn"].rpartition(".")[0]
    call = first["call"] if first["kind"] == "output" else 0
    pairs = claim.books.pairs(first["step"])
    return [p for p in pairs if p.site.kind is Kind.INPUT and p.site.fqn == fqn and p.site.call == call]


def _state(kind: Kind) -> Look:
    """The latest records of a module's parameters (buffers) that are no later than the divergence."""

    def look(claim: Claim) -> list[Pair]:
        first, books = claim.first, claim.books
        module = _module_said(claim)
        latest: dict[str, Pair] = {}
        for step in (first["step"] - 1, first["step"]):
            pairs = books.pairs(step) if step in books.steps else []
            at_once = [pair for pair in pairs if step == first["step"] and pair.site == site_of(first)]
            for pair in pairs:
                inside = pair.site.kind is kind and pair.site.fqn.startswith(f"{module}.")
                if inside and all(_before(pair, here) for here in at_once):
                    latest[pair.site.fqn] = pair
        return list(latest.values())

    return look


def _value_before(claim: Claim) -> list[Pair]:
    """The last record of the tensor before the divergence, however many steps back: not each step changes it."""
    first, books = claim.first, claim.books
    for step in reversed([step for step in books.steps if step <= first["step"]]):
        same = [p for p in books.pairs(step) if p.site.kind.value == first["kind"] and p.site.fqn == first["fqn"]]
        draws = [p for p in same if step < first["step"] or p.site.phase is Phase.START]
        if draws:
            return draws[-1:]
    return []


def _gradients(claim: Claim) -> list[Pair]:
    first = claim.first
    if first["kind"] in {"param", "optimizer_state"}:
        pairs = claim.books.pairs(first["step"])
        gradients = [p for p in pairs if p.site.kind is Kind.GRAD and p.site.fqn == first["fqn"]]
        return [p for p in gradients if p in claim.earlier(Kind.GRAD)] if first["call"] else gradients
    return claim.earlier(Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.GRAD)


def _kinds(*kinds: Kind) -> Look:
    return lambda claim: claim.earlier(*kinds)


def _random(claim: Claim) -> list[Pair]:
    """The states at the start of the step; of a module, those that it or a module inside it drew from."""
    pairs = claim.earlier(Kind.RNG)
    if re.search(r"start of the step|differs when the step begins", claim.clause):
        return [p for p in pairs if p.site.phase is Phase.START]
    module = _module_said(claim)
    return [p for p in pairs if p.site.phase is not Phase.START and _drew(p.site, module) and p.a and p.b]


def _drew(site: Site, module: str) -> bool:
    return (site.fqn == module and not site.path.endswith(" before")) or site.fqn.startswith(f"{module}.")


def _module_said(claim: Claim) -> str:
    """The module that a clause names, of those around the divergence; the divergence's own where it names none."""
    fqn = claim.first["fqn"]
    around = [fqn[: match.start()] for match in re.finditer(r"\.", fqn)]
    said = re.findall(r"[\w.#]+\w", claim.clause)
    return next((name for name in (fqn, *reversed(around)) if name in said), fqn)


def _steps_before(claim: Claim) -> list[Pair]:
    books = claim.books
    before = [p for step in books.steps if step < claim.first["step"] for p in books.pairs(step)]
    return [p for p in before if p.site.kind not in SETTING_KINDS and books.wanted(p.step, p.site)]


def _records_before(claim: Claim) -> list[Pair]:
    pairs = claim.earlier(*Kind) + _steps_before(claim)
    counted = re.search(r"\b(\d[\d,]*)(?: of \d[\d,]*)? records?\b", claim.clause)
    if counted is None:
        return [pair for pair in pairs if claim.books.wanted(claim.first["step"], pair.site)]
    agreeing = [pair for pair in pairs if pair.equal]
    return agreeing if len(agreeing) + _renamed(claim) >= int(counted[1].replace(",", "")) else pairs


def _renamed(claim: Claim) -> int:
    """How many tensors that the step begins with have one name in a and another in b."""
    pairs = [pair for pair in claim.books.pairs(claim.first["step"]) if pair.site.phase is Phase.START]
    one, two = (
        {side.summary.checksum for side in sides if side is not None}
        for sides in ([p.a for p in pairs if p.b is None], [p.b for p in pairs if p.a is None])
    )
    return len(one & two)


def _batches(claim: Claim) -> list[Pair]:
    first = claim.first
    here = [p for p in claim.books.pairs(first["step"]) if p.site.kind is Kind.BATCH]
    if re.search(r"\brest of\b", claim.clause, re.IGNORECASE):
        return [p for p in here if p.site.call == first["call"] and p.site != site_of(first)]
    if not re.search(r"\b(?:earlier batch|batch(?:es)? (?:of \S+ )?before)", claim.clause, re.IGNORECASE):
        return claim.earlier(Kind.BATCH)
    steps = [step for step in claim.books.steps if step < first["step"]]
    earlier = [p for step in steps for p in claim.books.pairs(step) if p.site.kind is Kind.BATCH]
    return [*earlier, *(p for p in here if p.site.call < first["call"])]


_SUBJECTS: tuple[tuple[str, Look], ...] = (
    (r"\binputs?\b(?! of the optimizer)", _inputs),
    (r"(?<![-\w])parameters\b", _state(Kind.PARAM)),
    (r"\bbuffers\b", _state(Kind.BUFFER)),
    (r"\brandom states?\b", _random),
    (r"\bgradients?\b", _gradients),
    (r"\bvalue before\b", _value_before),
    (r"\bloss\b(?! code)", _kinds(Kind.LOSS)),
    (r"\bforward\b(?! code)|\bmodule outputs?\b", _kinds(Kind.INPUT, Kind.OUTPUT)),
    (r"\bbackward\b", _kinds(Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)),
    (r"\bbatch(?:es)?\b", _batches),
    (r"\bsteps? before\b|\bearlier steps\b", _steps_before),
    (r"\brecords? before\b|\brecorded before\b|\beverything before\b", _records_before),
)
"""What a clause may call equal, and the records that it then speaks of."""


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
