"""Numbers as people write them: single ones and python slices, ends exclusive."""

from __future__ import annotations

import math
from typing import NamedTuple

from introspect_cli.errors import UsageError

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


def span_of(part: str, text: str | None) -> Span:
    """One step or slice of a schedule."""
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


def multiples(span: Span, every: int) -> Span | None:
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
