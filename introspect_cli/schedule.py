"""Steps as people write them: `0,5,10:20,100::50`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS_HELP = "give steps and python slices from 0 on, such as 0,5,10:20,100::50"


def whole_number(text: str) -> int | None:
    """A whole number from 0 on in ASCII digits alone: int() takes `1_0`, `+3` and the digits of other scripts too."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


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
        spans = [span_of(part, text) for part in text.split(",")] if text is not None else [Span(0, None, 1)]
        if every is not None:
            spans = [narrowed for span in spans if (narrowed := _multiples(span, every)) is not None]
            if not spans:
                raise UsageError(f"no step of the schedule {text!r} is a multiple of --every {every}: drop one of them")
        return cls(tuple(dict.fromkeys(spans)))

    @classmethod
    def only(cls, step: int) -> Schedule:
        """The schedule of a single step."""
        return cls((Span(step, step + 1, 1),))

    @classmethod
    def of(cls, steps: Sequence[int]) -> Schedule:
        """The schedule of some steps, rising and at least one."""
        spans: list[Span] = []
        for step in steps:
            if spans and step == spans[-1].stop:
                spans[-1] = spans[-1]._replace(stop=step + 1)
            else:
                spans.append(Span(step, step + 1, 1))
        return cls(tuple(spans))

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


def span_of(part: str, text: str | None) -> Span:
    """One step or slice of a schedule.

    Args:
        part: the text.
        text: the whole, for errors.

    Raises:
        UsageError: it is none, or selects no step.
    """
    fields = part.split(":")
    numbers = [_field(field, text) for field in fields]
    if len(fields) == 1:
        if numbers[0] is None:
            raise UsageError(f"the schedule {text!r} has an empty entry: {STEPS_HELP}")
        return Span(numbers[0], numbers[0] + 1, 1)
    if len(fields) > 3:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has too many colons: {STEPS_HELP}")
    start, stop, stride = (*numbers, None)[:3]
    span = Span(start or 0, stop, 1 if stride is None else stride)
    if span.stride < 1:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has a stride of 0: {STEPS_HELP}")
    if span.stop is not None and span.stop <= span.start:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} selects no step: its end is exclusive")
    return _single(span)


def _field(text: str, schedule: str | None) -> int | None:
    number = whole_number(text)
    if number is None and text.strip():
        raise UsageError(f"{text.strip()!r} in the schedule {schedule!r} is not a step: {STEPS_HELP}")
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
