"""What of a run counts, as people write it: one grammar for every verb.

`capture` narrows what is recorded; `diff`, `show`, `export`, `check` and `report` narrow what is looked at. The same
words must mean the same in all of them, and a word that matches nothing must not pass for an answer: a filter with a
typo would find two runs equal for ever. So every verb reads its steps, kinds, module names and ranks here, and asks
here whether each part of a selection has something in the runs to select.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import UsageError
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.store.reader import Run

_STEPS_HELP = "give steps and python slices from 0 on, such as 0,5,10:20,100::50"
_RANKS_HELP = "give numbers with commas between, such as 0,3"


# What people mistype.


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean x?` where a known name is close to `name`, else nothing."""
    import difflib  # only for who mistypes

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def words(texts: Iterable[str]) -> tuple[str, ...]:
    """The words of an option that may be repeated and takes several with commas between."""
    return tuple(word for text in texts for part in text.split(",") if (word := part.strip()))


def choose(
    texts: Iterable[str], known: Sequence[str], what: str, *, default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Names out of a list, in the order of the list.

    Args:
        texts: names, also with commas between; `all` is every one of them.
        known: the names that there are.
        what: what they are called in an error, such as `kind`.
        default: what the name `default` stands for; None where it, and `none`, are not taken.

    Raises:
        UsageError: a name is unknown, or `none` stands beside another.
    """
    groups = {"all": tuple(known)} | ({} if default is None else {"default": tuple(default), "none": ()})
    texts = tuple(texts)
    asked = words(texts)
    if texts and not asked:
        raise UsageError(f"no {what} is named: known are {', '.join((*known, *groups))}")
    if "none" in asked and "none" in groups and len(set(asked)) > 1:
        raise UsageError(f"'none' cannot stand beside another {what}: give it alone or leave it out")
    for name in asked:
        if name not in known and name not in groups:
            hint = did_you_mean(name, (*known, *groups))
            raise UsageError(f"no {what} is called {name!r}{hint or ':'} known are {', '.join((*known, *groups))}")
    chosen = {one for name in asked for one in groups.get(name, (name,))}
    return tuple(name for name in known if name in chosen)


def parse_kinds(texts: Iterable[str]) -> frozenset[Kind]:
    """Kinds by name, those of operators and settings included.

    Raises:
        UsageError: a kind is unknown.
    """
    return frozenset(Kind(name) for name in choose(texts, [kind.value for kind in Kind], "kind"))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks separated by commas, ascending.

    Raises:
        UsageError: one is not a number.
    """
    ranks = set()
    for word in text.split(","):
        number = _number(word)
        if number is None:
            raise UsageError(f"{word.strip()!r} is not a rank: {_RANKS_HELP}")
        ranks.add(number)
    return tuple(sorted(ranks))


def _number(text: str) -> int | None:
    """A whole number from 0 on in ASCII digits alone: int() takes `1_0`, `+3` and the digits of other scripts too."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


# Modules.


def matches(fqn: str, glob: str) -> bool:
    """Whether a name or glob means this very name, the root's class said or left out."""
    short = fqn.partition(".")[2]
    return fqn == glob or fnmatchcase(fqn, glob) or (bool(short) and fnmatchcase(short, glob))


def selects(fqn: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs means this name or a module that it is inside of.

    `blocks.0`, `GPT.blocks.0` and `*.0` all select `GPT.blocks.0`, its parameters, and every module in it.
    """
    head = fqn if globs else ""
    while head:
        if any(matches(head, glob) for glob in globs):
            return True
        head = head.rpartition(".")[0]
    return False


def near_module(glob: str, names: Iterable[str]) -> str:
    """A hint at the module that was meant: whole names, names without the root, and `*.` before a last word."""
    known = set()
    for name in names:
        _, dot, short = name.partition(".")
        known |= {name, short} if dot else {name}
        if glob.startswith("*."):
            known.add(f"*.{name.rpartition('.')[2]}")
    found = did_you_mean(glob, sorted(known))
    return found if found or "." not in glob else did_you_mean(glob.partition(".")[2], sorted(known))


# Steps.


class Span(NamedTuple):
    """The steps `start, start + stride, ...` below `stop`, or without end where `stop` is None."""

    start: int
    stop: int | None
    stride: int

    def wants(self, step: int) -> bool:
        """Whether `step` is one of them."""
        return step >= self.start and (self.stop is None or step < self.stop) and (step - self.start) % self.stride == 0

    @property
    def last(self) -> int | None:
        """The last of them, None where there is none."""
        if self.stop is None:
            return None
        return self.start + (self.stop - 1 - self.start) // self.stride * self.stride

    def __str__(self) -> str:
        if self.stop == self.start + 1:
            return str(self.start)
        start = str(self.start) if self.start else ""
        stop = "" if self.stop is None else str(self.stop)
        stride = f":{self.stride}" if self.stride != 1 else ""
        return f"{start}:{stop}{stride}"


@dataclass(frozen=True)
class Schedule:
    """Steps and python slices (`0,5,10:20,100::50`, ends exclusive); without arguments, all steps.

    Folded into a list of progressions, so that asking for a step is arithmetic and the text of a schedule means it
    again.

    Attributes:
        spans: the progressions whose union it is; never empty.
    """

    spans: tuple[Span, ...] = (Span(0, None, 1),)

    @classmethod
    def parse(cls, text: str | None = None, every: int | None = None) -> Schedule:
        """A schedule from the command line.

        Args:
            text: comma-separated steps and slices; None for all steps.
            every: keep only the multiples of this many steps; None for no such limit.

        Returns:
            The schedule that both ask for.

        Raises:
            UsageError: the text is no schedule, or no step is left.
        """
        if every is not None and every < 1:
            raise UsageError(f"--every {every} records nothing: give a number of steps from 1 on")
        spans = [_span(part, text) for part in text.split(",")] if text is not None else [Span(0, None, 1)]
        if every is not None:
            spans = [narrowed for span in spans if (narrowed := _multiples(span, every)) is not None]
            if not spans:
                raise UsageError(f"no step of the schedule {text!r} is a multiple of --every {every}: drop one of them")
        return cls(tuple(dict.fromkeys(spans)))

    @classmethod
    def only(cls, step: int) -> Schedule:
        """The schedule of a single step."""
        return cls((Span(step, step + 1, 1),))

    def wants(self, step: int) -> bool:
        """Whether `step` is one of its steps."""
        return any(span.wants(step) for span in self.spans)

    @property
    def last(self) -> int | None:
        """The last step it can want, None where it goes on for ever."""
        ends = [span.last for span in self.spans]
        return None if None in ends else max(end for end in ends if end is not None)

    def __str__(self) -> str:
        return ",".join(map(str, self.spans))


def _span(part: str, text: str | None) -> Span:
    fields = part.split(":")
    numbers = [_field(field, text) for field in fields]
    if len(fields) == 1:
        if numbers[0] is None:
            raise UsageError(f"the schedule {text!r} has an empty entry: {_STEPS_HELP}")
        return Span(numbers[0], numbers[0] + 1, 1)
    if len(fields) > 3:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has too many colons: {_STEPS_HELP}")
    start, stop, stride = (*numbers, None)[:3]
    span = Span(start or 0, stop, 1 if stride is None else stride)
    if span.stride < 1:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has a stride of 0: {_STEPS_HELP}")
    if span.stop is not None and span.stop <= span.start:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} selects no step: its end is exclusive")
    return _single(span)


def _field(text: str, schedule: str | None) -> int | None:
    number = _number(text)
    if number is None and text.strip():
        raise UsageError(f"{text.strip()!r} in the schedule {schedule!r} is not a step: {_STEPS_HELP}")
    return number


def _multiples(span: Span, every: int) -> Span | None:
    """The steps of `span` that are multiples of `every`, themselves a progression (Chinese remainders)."""
    shared = math.gcd(span.stride, every)
    if span.start % shared:
        return None
    period = every // shared
    ahead = (-span.start // shared) * pow(span.stride // shared, -1, period) % period if period > 1 else 0
    start = span.start + ahead * span.stride
    if span.stop is not None and start >= span.stop:
        return None
    return _single(Span(start, span.stop, span.stride * period))


def _single(span: Span) -> Span:
    """The span itself, or its one step as a step."""
    return Span(span.start, span.start + 1, 1) if span.last == span.start else span


# All of it together.


@dataclass(frozen=True)
class Selection:
    """A part of a run.

    Attributes:
        steps: steps that count, as run a numbers them; None for all.
        kinds: kinds that count; empty for all.
        modules: globs of FQNs that count, each with all that is inside; empty for all.
        ranks: ranks that count; empty for all.
    """

    steps: Schedule | None = None
    kinds: frozenset[Kind] = field(default_factory=frozenset)
    modules: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def narrowed(self) -> bool:
        """Whether only a part counts."""
        return bool(self.steps or self.kinds or self.modules or self.ranks)

    def wants_step(self, step: int) -> bool:
        """Whether a step counts."""
        return self.steps is None or self.steps.wants(step)

    def wants_rank(self, rank: int) -> bool:
        """Whether a rank counts."""
        return not self.ranks or rank in self.ranks

    def wants(self, kind: Kind, fqn: str) -> bool:
        """Whether a site counts, given its kind and FQN."""
        return (not self.kinds or kind in self.kinds) and (not self.modules or selects(fqn, self.modules))


def read_selection(
    steps: str | None = None, kinds: Iterable[str] = (), modules: Iterable[str] = (), ranks: str | None = None
) -> Selection:
    """A selection as the options of a verb say it.

    Raises:
        UsageError: an option cannot be read.
    """
    return Selection(
        steps=None if steps is None else Schedule.parse(steps),
        kinds=parse_kinds(kinds),
        modules=words(modules),
        ranks=() if ranks is None else parse_ranks(ranks),
    )


def check_selection(selection: Selection, runs: Sequence[Run], rename: Callable[[str], str] | None = None) -> None:
    """Make sure that every part of a selection has something to select in one of the runs at least.

    Args:
        selection: what was asked for.
        runs: the opened runs that it is asked of.
        rename: how names of the first run are read where another run is compared with it.

    Raises:
        UsageError: a glob matches no module, a kind was not recorded, a step or rank is in none of the runs.
    """
    if not selection.narrowed:
        return
    where, has = (f"{runs[0].path}", "it has") if len(runs) == 1 else ("either run", "they have")
    ranks = sorted({rank for run in runs for rank in run.ranks})
    for rank in selection.ranks:
        if rank not in ranks:
            raise UsageError(f"no rank {rank} is in {where}: {_counted(ranks, 'rank')}")
    readers = [(run, run.rank(rank)) for run in runs for rank in run.ranks if selection.wants_rank(rank)]
    steps = sorted({int(step) for _, reader in readers for step in reader.entries["step"]})
    if not steps:
        return  # an empty run has nothing to select whatever is asked; the verb says that better
    for span in selection.steps.spans if selection.steps is not None else ():
        if not any(span.wants(step) for step in steps):
            raise UsageError(f"no step of {span} is in {where}: {has} {_counted(steps, 'step')}")
    if selection.kinds:
        found = {kind for _, reader in readers for kind in reader.sites.kind}
        for kind in Kind:
            if kind in selection.kinds and kind.value not in found:
                raise UsageError(f"no {kind.value} was recorded in {where}{_how(kind, sorted(found))}")
    if selection.modules:
        names = set()
        for run, reader in readers:
            own = {*reader.sites.fqn, *(module.fqn for module in reader.modules)}
            names |= {rename(name) for name in own} if rename is not None and run is runs[0] else own
        for glob in selection.modules:
            if not any(selects(name, (glob,)) for name in names):
                hint = near_module(glob, names) or ": `introspect show --tree` lists the modules of a run"
                raise UsageError(f"no module matches {glob}{hint}")


def _counted(numbers: Sequence[int], what: str) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{len(numbers)} {what}s from {numbers[0]} to {numbers[-1]}"


def _how(kind: Kind, found: Sequence[str]) -> str:
    if kind is Kind.OP_OUTPUT:
        return ": capture with --level op"
    return f": capture with --record {kind.value}, or ask for {', '.join(found)}"
