"""Seedings and draws of random numbers before the first step, and seedings in later steps, compared between two runs.

A capture notes each seeding and each draw until the first step begins, with the generator's state before it. The first
event that differs is the cause: another seed, an initialiser that one run alone calls, a draw of more numbers. Events
after it follow from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.names import generator_of
from introspect_cli.compare.say import found, told
from introspect_cli.records import Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from introspect_cli.compare.result import Divergence, Finding
    from introspect_cli.store.run import Run

DOCUMENT = "beginning"
"""The settings document that a capture notes it in; it is compared here alone."""

SEEDINGS_DOCUMENT = "seedings"
"""The settings document that a capture notes it in; it is compared here alone."""

SCRIPT = "script"
"""Stands for generators that the script made: of their seedings, where a generator's name stands."""
_SET_BY = {
    "torch.manual_seed": "torch",
    "torch.set_rng_state": "torch",
    "random.seed": "python",
    "random.setstate": "python",
    "numpy.random.seed": "numpy",
    "numpy.random.set_state": "numpy",
    "numpy.random.default_rng": SCRIPT,
    "random.Random": SCRIPT,
}
"""Which generator a function sets; `torch.manual_seed` sets those of accelerators too."""
_DRAWN_OF_SCRIPT = "own"
"""Stands for generators that the script made, where it is about draws."""

MODES = ("train", "eval")
"""What stands as the function of a module that drew when it was called."""

MAY_REST_ON_THEM = frozenset({"initial", "batch", "script", "plain"})
"""Reasons of what a script may have made with numbers of a generator that it made."""


class Event(NamedTuple):
    """One seeding of a generator, or one draw from it.

    Attributes:
        generator: `torch`, `python`, `numpy`, or what stands for those that the script made; "" for another one.
        seed: what it was seeded with; "" for a draw.
        state: the generator's state before a draw.
        by: the function; of a module that drew when it was called, its mode, one of `MODES`; "" for a draw by something
            that was not seen itself.
        name: the parameter that was filled, or the module; "" for none that has a name.
        line: of the user's code; where nobody saw what drew, the line that came next; of a module, where the outermost
            one was called. "" for none.
        arguments: what the function was given beside what it fills; None where that is not on record.
    """

    generator: str
    seed: str
    state: str
    by: str
    name: str
    line: str
    arguments: str | None = None

    @property
    def what(self) -> tuple[str, str, str]:
        """Key by which events of two runs are the same: seed, function and name, without line and state."""
        return self.seed, self.by, self.name

    def __str__(self) -> str:
        """The event in short: `normal_ of GPT.wte.weight (model.py:15)`."""
        code = "called" if self.by in MODES else "event" if self.by else "draw"
        seed = "" if self.seed.startswith("#") else self.seed
        return told(code, by=self.by, seed=seed, name=self.name, line=self.line, last=not self.line)


class Parting(NamedTuple):
    """Where the events of two runs part.

    Attributes:
        a: all events of a.
        b: all of b.
        agreed: how many from the start are alike.
    """

    a: Sequence[Event]
    b: Sequence[Event]
    agreed: int

    @property
    def first(self) -> tuple[Event | None, Event | None]:
        """The first event of a and of b after those that are alike; None where the run has no more."""
        one, two = (next(iter(events[self.agreed :]), None) for events in (self.a, self.b))
        return one, two

    @property
    def is_unseen(self) -> bool:
        """Whether it is not known what drew in the first events that differ, in each run that has one.

        False for none.
        """
        return any(self.first) and not any(event.by for event in self.first if event is not None)

    def finding(self) -> Iterator[Finding]:
        """Finding for the first events that differ: another seed or state, or two events, one of which may be missing.

        Nothing where no event differs.
        """
        one, two = self.first
        common = self.b[: self.agreed]
        draws = sum(not event.seed for event in common)
        if one is not None and two is not None and one.seed and one.by == two.by and one.seed != two.seed != "":
            yield found("seeded", by=one.by, a=one.seed, b=two.seed, line=two.line or one.line or one.name)
        elif one is not None and two is not None and one.what == two.what:
            if one.generator == SCRIPT:
                return  # of what drew from it, nothing is on record
            yield found("other-state", draw=str(two), since=str(common[-1]) if common else "", before=draws)
        elif one is not None or two is not None:
            if one and two and one.state != two.state and common and not common[-1].seed:
                one, two, draws = self.a[self.agreed - 1], common[-1], draws - 1  # they drew another number
            before = draws and count(draws, "draw")
            yield found("draws-differ", a=one and str(one), b=two and str(two), before=before)


def first_difference(runs: tuple[Run, Run], rank: int, generator: str, *, by_name: bool = False) -> Parting:
    """Where seedings of a generator, and draws from it, part before the first step of two runs (`_is_alike`).

    Of generators that the script made, those that one run alone keeps do not count. No events where either run has no
    record of them.

    Args:
        runs: a and b.
        rank: of both.
        generator: whose events count.
        by_name: whether draws that leave one state but fill parameters of other names differ.
    """
    a, b = (events_of(run, rank) for run in runs)
    one, two = ([event for event in events or () if event.generator == generator] for events in (a, b))
    if a is None or b is None:
        return Parting((), (), 0)
    both = {event.name for event in one} & {event.name for event in two}
    if generator == SCRIPT:
        one, two = ([event for event in side if not event.name or event.name in both] for side in (one, two))
    elif not by_name:
        both = set()
    shorter = range(min(len(one), len(two)))
    return Parting(one, two, next((at for at in shorter if not _is_alike(one, two, at, both)), len(shorter)))


def _is_alike(a: Sequence[Event], b: Sequence[Event], place: int, both: Collection[str]) -> bool:
    """Whether the events number `place` have equal seed, function, state and name.

    After a draw by an unknown function the next states must agree too, unless a seeding comes next. Names may differ
    where the lines or the next states agree, and either a name is "" or neither is in `both`.

    Args:
        a: events of a.
        b: events of b.
        place: index in both.
        both: names of events that both runs have.
    """
    one, two = a[place], b[place]
    unnamed = not (one.name and two.name) or not {one.name, two.name}.intersection(both)
    after = [events[place + 1 : place + 2] for events in (a, b)]
    is_set = any(other.seed for events in after for other in events)
    drew_alike = [e.state for e in after[0]] == [e.state for e in after[1]]
    follows_alike = drew_alike and all(after) and not is_set
    named = one.name == two.name or (unnamed and (one.line == two.line or follows_alike))
    if (one.seed, one.by, one.state, named) != (two.seed, two.by, two.state, True):
        return False
    return bool(one.by) or is_set or drew_alike


def find_first_event(runs: tuple[Run, Run], rank: int, generator: str, *, by_name: bool = False) -> Iterator[Finding]:
    """Finding for the first seeding or draw before the first step that differs, where a generator's state differs.

    Where none differs, but the function of b's last draw is unknown, it is that draw, as the state after it is what
    differs.
    """
    parted = first_difference(runs, rank, generator, by_name=by_name)
    if not any(parted.first) and parted.b and not parted.b[-1].by:
        parted = parted._replace(agreed=len(parted.b) - 1)
    yield from parted.finding()


# --- what filled a parameter


def last_fillings(runs: tuple[Run, Run], rank: int, name: str) -> tuple[Event | None, Event | None]:
    """The draw that filled a parameter last, in a and in b; None where none is on record.

    Draws by a module as it was called do not count.
    """
    sides = ([e for e in events_of(run, rank) or () if e.name == name and e.by not in MODES] for run in runs)
    one, two = (next(reversed(side), None) for side in sides)
    return one, two


def find_filling(runs: tuple[Run, Run], rank: int, name: str) -> Iterator[Finding]:
    """Finding on how the runs last filled a parameter: the first of these in which they differ.

    One run alone filled it; the function (or the state, with a generator of the script); the state of torch's
    generator, which gives the first event that differs; the arguments. Where all are equal, that the script changed the
    parameter after it. Nothing where neither run has it on record, or arguments are not.
    """
    one, two = last_fillings(runs, rank, name)
    by_script = any(event is not None and event.generator == _DRAWN_OF_SCRIPT for event in (one, two))
    if one is None or two is None or one.by != two.by or (by_script and one[:3] != two[:3]):
        if one or two:
            yield found("filled", a=one and str(one), b=two and str(two))
    elif one.state != two.state:
        yield from find_first_event(runs, rank, "torch", by_name=True)
    elif one.arguments != two.arguments and None not in (one.arguments, two.arguments):
        yield found("filled-with", by=str(two), a=one.arguments or "-", b=two.arguments or "-")
    elif one.arguments is not None:
        yield found("changed-after-draw", by=str(two))


def _noted(run: Run, rank: int, document: str, key: str) -> list[list[str]] | None:
    """The words of each line that a rank's settings document has under `key`; None where there is no list."""
    lines = run.settings_of(rank).document(document).get(key)
    return [str(line).split(" ") for line in lines] if isinstance(lines, list) else None


def events_of(run: Run, rank: int) -> Sequence[Event] | None:
    """Seedings and draws before the first step, in their order; then the generators that the script keeps in variables.

    Lines that are neither are passed over. None where the rank's beginning was not recorded, [] where it was and
    nothing happened.
    """
    noted = _noted(run, rank, DOCUMENT, "events")
    if noted is None:
        return None
    events = []
    for words in noted:
        fields = ["" if word == "-" else word for word in words]
        if words[0] == "seed" and len(words) >= 4:
            events.append(Event(_SET_BY.get(fields[1], ""), fields[2], "", fields[1], "", " ".join(fields[3:])))
        elif words[0] == "draw" and len(words) >= 6:
            by, given, arguments = fields[3].partition("(")
            given_to = arguments.removesuffix(")").replace(",", ", ") if given else None
            events.append(Event(fields[1], "", fields[2], by, fields[4], " ".join(fields[5:]), given_to))
    kept = (words for words in _noted(run, rank, DOCUMENT, "generators") or () if len(words) == 4)
    return [*events, *(Event(SCRIPT, seed, state, label, variable, "") for label, seed, state, variable in kept)]


# --- calls that set a random state, in or just before a step, in one run alone or with another seed


def differing_calls(runs: tuple[Run, Run], first: Divergence) -> Parting:
    """Calls of each run that set the divergence's generator with a function and seed that the other run's lack.

    Those within the divergence's step; for a state at its start, those since the step recorded before it began. What a
    state is set to counts as a seed: `#` and a digest of it.
    """
    generator = generator_of(first.site)
    sides: list[list[Event]] = []
    for run, step in zip(runs, (first.step, first.step_b), strict=True):
        recorded = run.rank(first.rank).entries["step"]
        before = recorded[recorded < step]
        since = int(before[-1]) if len(before) else step - 1
        begins = {"before": (since + 1, step), "in": (since, step - 1)}
        spans = begins if first.site.phase is Phase.START else {"in": (step, step)}
        sides.append([])
        for words in _noted(run, first.rank, SEEDINGS_DOCUMENT, "set") or ():
            if len(words) < 7 or not all(word.isdecimal() and len(word) < 19 for word in words[1:4]):
                continue
            by, low, high = words[4], *spans.get(words[0], (1, 0))
            of_device = ":" in generator and by.startswith(("torch.cuda.", "torch.manual_seed"))
            if (of_device or _SET_BY.get(by) == generator) and int(words[1]) <= high and int(words[2]) >= low:
                sides[-1].append(Event(generator, words[5], "", by, "", " ".join(words[6:]).removeprefix("-")))
    of_a, of_b = ({event.what for event in side} for side in sides)
    one, two = ([event for event in side if event.what not in of_a & of_b] for side in sides)
    return Parting(one, two, 0)
