"""Seedings and draws of random numbers before the first step, compared between two runs.

A capture notes each seeding and each draw until the first step begins, with the generator's state before it. The first
event that differs is the cause: another seed, an initialiser that one run alone calls, a draw of more numbers. Events
after it follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.say import event_words, found
from introspect_cli.compare.settings.seedings import GENERATORS, seedings_change
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.watched import passes_over
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.terms.findings import Finding
    from introspect_cli.store.read.run import Run

DOCUMENT = "beginning"
"""The settings document that a capture notes it in; it is compared here alone."""

MODES = ("train", "eval")

MAY_REST_ON_THEM = frozenset({"initial", "batch", "script", "plain"})
"""Reasons of what a script may have made with numbers of a generator that it made."""
_OF_THE_SCRIPT = frozenset({"numpy.random.default_rng", "random.Random"})


@dataclass(frozen=True)
class Event:
    """One seeding of a generator, or one draw from it.

    Attributes:
        seed: what it was seeded with; "" for a draw.
        state: the generator's state before a draw.
        by: the function; of a module that drew when it was called, its mode, one of `MODES`; "" for a draw by something
            that was not seen itself.
        name: the parameter that was filled, or the module; "" for none that has a name.
        line: of the user's code; where nobody saw what drew, the line that came next; of a module, where the outermost
            one was called. "" for none.
        arguments: what the function was given beside what it fills; None where that is not on record.
        of_script: whether it drew from a generator that the script made itself.
    """

    seed: str
    state: str
    by: str
    name: str
    line: str
    arguments: str | None = None
    of_script: bool = False

    @property
    def is_unseen(self) -> bool:
        """Whether the function that drew is unknown (`by` is ""), as for `randn` or a loader."""
        return not self.by

    @property
    def what(self) -> tuple[str, str, str]:
        """Key by which two runs' events are one: seed, function and name, without line and state."""
        return self.seed, self.by, self.name

    def __str__(self) -> str:
        """The event in short: `normal_ of GPT.wte.weight (model.py:15)`."""
        return event_words(self.by, self.seed, self.name, self.line, mode=self.by in MODES)


def first_difference(runs: tuple[Run, Run], rank: int, generator: str) -> Iterator[Finding]:
    """Finding for the first seeding or draw before the first step that differs; nothing without records."""
    a, b = (_events(run, rank, generator) for run in runs)
    if a is None or b is None:
        return
    same = _agreeing(a, b)
    rest = a[same:], b[same:]
    one, two = (events[0] if events else None for events in rest)
    if one is two is None and b and b[-1].is_unseen:  # the state after the last draw is that which differs
        same, one, two = same - 1, a[-1], b[-1]
    before = sum(not event.seed for event in a[:same])
    if one is not None and two is not None and one.seed and two.seed and one.by == two.by:
        yield seedings_change(one.by, one.seed, two.seed, two.line or one.line)
    elif one is not None and two is not None and one.what == two.what:
        since = str(b[same - 1]) if same else ""
        unseen = one.is_unseen and (same or one.state == two.state)
        yield found("draw-unseen" if unseen else "other-state", draw=str(two), since=since, before=before)
    elif (places := (_place(one, rest[1]), _place(two, rest[0])))[0] != places[1] and not _may_be_one(one, two):
        side, event, place, others = (
            ("b", two, places[1], rest[0]) if places[0] < places[1] else ("a", one, places[0], rest[1])
        )
        code = "first-in-one" if place >= len(others) else "first-earlier"
        yield found(code, event=str(event), side=side, other=OTHER[side], before=before)
    elif one is not None and two is not None:
        yield found("draws-differ", a=str(one), b=str(two), before=before)


def _may_be_one(one: Event | None, two: Event | None) -> bool:
    """Whether two draws start from one state and the function of at least one is unknown."""
    return one is not None and two is not None and one.state == two.state and (one.is_unseen or two.is_unseen)


def begins_later(runs: tuple[Run, Run], steps: tuple[int, int]) -> Iterator[Finding]:
    """Finding where one run alone ran models without gradients before its step."""
    ran = [passes_over(run.manifest, step) for run, step in zip(runs, steps, strict=True)]
    if ran[0] != ran[1]:
        yield found("begins-later", side="a" if ran[0] else "b")


def differs_unseen(runs: tuple[Run, Run], rank: int, generator: str) -> bool:
    """Whether the first differing draw before the first step has no known function."""
    a, b = (_events(run, rank, generator) for run in runs)
    if not a or not b:
        return False
    same = _agreeing(a, b)
    if same < min(len(a), len(b)):
        return a[same].is_unseen and b[same].is_unseen
    return (a if len(a) >= len(b) else b)[-1].is_unseen


def differing_events(runs: tuple[Run, Run], rank: int, name: str = "") -> tuple[list[Event], list[Event]]:
    """First seeding or draw of each generator that differs, in a and in b.

    With `name`, also the events that last filled that parameter, where they differ.
    """
    per_run: tuple[list[Event], list[Event]] = [], []
    for a, b, same in _by_generator(runs, rank):
        # the same draw from another state: the one before it took another number
        longer = 0 < same < min(len(a), len(b)) and a[same].what == b[same].what and not a[same].seed
        for kept, events in zip(per_run, (a, b), strict=True):
            kept.extend(events[same - longer : same + 1])
    one, two = (_fillings(_events(run, rank, "") or [], name)[-1:] for run in runs) if name else ((), ())
    if [(event.by, event.arguments) for event in one] != [(event.by, event.arguments) for event in two]:
        per_run[0].extend(one)
        per_run[1].extend(two)
    return per_run


def script_generators(runs: tuple[Run, Run], rank: int, *, seeds: bool = False) -> Iterator[Finding]:
    """Finding for generators created by the script: seeds that differ, else states; with `seeds`, seeds alone."""
    one, two = ([*events, None][0] for events in seedings_that_differ(runs, rank))
    if one is not None and two is not None and one.by == two.by:
        yield seedings_change(one.by, one.seed, two.seed, two.line)
    elif one is not None and two is not None:
        yield found("draws-differ", a=str(one), b=str(two), before=0)
    elif one is not None or two is not None:
        yield found("first-in-one", event=str(one or two), side="a" if one else "b", before=0)
    else:
        for name, kept in variables_that_differ(runs, rank).items():
            (label, seed, _), (_, seed_b, _) = kept
            if seed != seed_b:
                yield found("seeded", by=label, a=seed, b=seed_b, line=name)
            elif not seeds:
                yield found("generator-state", by=label, name=name)
            return


def variables_that_differ(runs: tuple[Run, Run], rank: int) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Script generators of both runs that differ, by variable: (class, seed, state) in a and in b."""
    one, two = ({words[3]: words[:3] for words in _generators(run, rank)} for run in runs)
    return {name: (one[name], two[name]) for name in one if name in two and one[name] != two[name]}


def _generators(run: Run, rank: int) -> list[tuple[str, ...]]:
    """(class, seed, state, variable) of each script generator on record."""
    lines = run.settings_of(rank).document(DOCUMENT).get("generators")
    every = [tuple(str(line).split(" ")) for line in lines] if isinstance(lines, list) else []
    return [words for words in every if len(words) == 4]


def seedings_that_differ(runs: tuple[Run, Run], rank: int) -> tuple[list[Event], list[Event]]:
    """First seeding of a script generator that differs, in a and in b; empty lists for none."""
    a, b = ([event for event in _events(run, rank, "") or [] if event.by in _OF_THE_SCRIPT] for run in runs)
    same = begin_alike([event.what for event in a], [event.what for event in b])
    return a[same : same + 1], b[same : same + 1]


def unseen_between(runs: tuple[Run, Run], rank: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Lines before and after a differing draw by an unknown function, per generator, in a and in b."""
    per_run: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []
    for a, b, same in _by_generator(runs, rank):
        for kept, events in zip(per_run, (a, b), strict=True):
            if 0 < same < len(events) and events[same].is_unseen:
                kept.append((events[same - 1].line, events[same].line))
    return per_run


def _by_generator(runs: tuple[Run, Run], rank: int) -> Iterator[tuple[Sequence[Event], Sequence[Event], int]]:
    """Per generator: events of a, events of b, and how many agree from the start."""
    for generator in dict.fromkeys(GENERATORS.values()):
        a, b = (_events(run, rank, generator) or [] for run in runs)
        yield a, b, _agreeing(a, b)


def _agreeing(a: Sequence[Event], b: Sequence[Event]) -> int:
    """Number of leading events that are alike."""
    shorter = range(min(len(a), len(b)))
    both = {event.name for event in a} & {event.name for event in b}
    return next((place for place in shorter if not _is_alike(a, b, place, both)), len(shorter))


def _is_alike(a: Sequence[Event], b: Sequence[Event], place: int, both: AbstractSet[str]) -> bool:
    """Whether the events at `place` have equal seed, function, state and name.

    For a draw by an unknown function the next states must agree too, unless a seeding follows. Names may differ if the
    lines agree and neither name is in both runs.
    """
    one, two = a[place], b[place]
    unnamed = not (one.name and two.name) or not both & {one.name, two.name}
    named = one.name == two.name or (one.line == two.line and unnamed)
    if (one.seed, one.by, one.state, named) != (two.seed, two.by, two.state, True):
        return False
    after = [events[place + 1 : place + 2] for events in (a, b)]
    is_set = any(other.seed for events in after for other in events)
    return not one.is_unseen or is_set or [e.state for e in after[0]] == [e.state for e in after[1]]


def _place(event: Event | None, events: Sequence[Event]) -> int:
    """Index of an event (by `what`) in the other run's events; 1 << 30 where missing, their number for None."""
    if event is None:
        return len(events)
    return next((place for place, other in enumerate(events) if other.what == event.what), 1 << 30)


def filled(runs: tuple[Run, Run], rank: int, name: str) -> Iterator[Finding]:
    """Finding where a parameter was filled by another function, from another state, or with other arguments."""
    one, two = ([None, *_fillings(_events(run, rank, "") or [], name)][-1] for run in runs)
    if one is None or two is None:
        if one or two:
            yield found("filled-in-one", by=str(one or two), side="a" if one else "b")
    elif (one.by, one.of_script) != (two.by, two.of_script):
        yield found("filled-by", a=str(one), b=str(two))
    elif one.state != two.state:
        yield from (
            [found("filled-by", a=str(one), b=str(two))] if one.of_script else first_difference(runs, rank, "torch")
        )
    elif one.arguments != two.arguments and None not in (one.arguments, two.arguments):
        yield found("filled-with", by=str(two), a=one.arguments or "-", b=two.arguments or "-")
    else:
        yield found("changed-after-draw" if one.arguments is not None else "drawn-alike", by=str(two))


def drawn_alike(runs: tuple[Run, Run], rank: int, name: str) -> bool:
    """Whether the last fill of a parameter has equal state, function and arguments in both runs."""
    one, two = (_fillings(_events(run, rank, "") or [], name)[-1:] for run in runs)
    same = [(event.state, event.by, event.arguments) for event in one]
    return bool(one) and same == [(event.state, event.by, event.arguments) for event in two]


def _fillings(events: Sequence[Event], name: str) -> list[Event]:
    """Draws that filled parameter `name`; without any, those of a name that is its own but for a wrapper."""
    drawn = [event for event in events if event.by not in MODES]
    return [event for event in drawn if event.name == name] or [
        event for event in drawn if _is_inside(event.name, name) or _is_inside(name, event.name)
    ]


def _is_inside(one: str, two: str) -> bool:
    """Whether `two` is `one` with a wrapper around: equal below the root, and deeper."""
    inside = one.partition(".")[2]
    return bool(inside) and two.endswith(f".{inside}") and two.count(".") > one.count(".")


def _events(run: Run, rank: int, generator: str) -> Sequence[Event] | None:
    """Recorded events of one generator, or of all for ""; None where the document is missing."""
    document = run.settings_of(rank).document(DOCUMENT)
    if not isinstance(document.get("events"), list):
        return None
    events = []
    for words in (str(line).split(" ") for line in document["events"]):
        fields = ["" if word == "-" else word for word in words]
        if words[0] == "seed" and len(words) >= 4:
            if generator in {"", GENERATORS.get(fields[1])}:
                events.append(Event(fields[2], "", fields[1], "", " ".join(fields[3:])))
        elif words[0] == "draw" and len(words) >= 6 and generator in {"", fields[1]}:
            by, given, arguments = fields[3].partition("(")
            given_to = arguments.removesuffix(")").replace(",", ", ") if given else None
            event = Event("", fields[2], by, fields[4], " ".join(fields[5:]), given_to, fields[1] == "own")
            events.append(event)
    return events
