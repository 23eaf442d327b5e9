"""Which steps, kinds and ranks count, as people write it on a command line."""

from __future__ import annotations

from introspect_cli.errors import UsageError
from introspect_cli.records import Kind

Range = tuple[int, int | None, int]


def parse_steps(text: str) -> tuple[Range, ...]:
    """`0,5,10:20,100::50` into half-open ranges (start, stop, stride).

    Raises:
        UsageError: it cannot be read.
    """
    ranges: list[Range] = []
    part = ""
    try:
        for part in text.split(","):
            ranges.append(_range(part.strip()))
    except ValueError:
        raise UsageError(
            f"--steps cannot read {part.strip()!r}: write steps and ranges like 0,5,10:20,100::50."
        ) from None
    return tuple(ranges)


def _range(part: str) -> Range:
    numbers = part.split(":")
    if len(numbers) == 1:
        step = int(part)
        return _checked(step, step + 1, 1)
    if len(numbers) > 3:
        raise ValueError(part)
    start, stop, stride = [*numbers, ""][:3]
    return _checked(int(start) if start else 0, int(stop) if stop else None, int(stride) if stride else 1)


def _checked(start: int, stop: int | None, stride: int) -> Range:
    if start < 0 or stride < 1 or (stop is not None and stop <= start):
        raise ValueError((start, stop, stride))
    return start, stop, stride


def parse_kinds(text: str) -> frozenset[Kind]:
    """Kinds separated by commas.

    Raises:
        UsageError: a kind is unknown.
    """
    known = {kind.value: kind for kind in Kind}
    kinds = set()
    for name in (part.strip() for part in text.split(",")):
        if name not in known:
            import difflib

            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise UsageError(f"--kinds: there is no kind {name!r}; {hint}")
        kinds.add(known[name])
    return frozenset(kinds)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks separated by commas.

    Raises:
        UsageError: one is not a number.
    """
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--ranks takes numbers separated by commas, not {text!r}.") from None
