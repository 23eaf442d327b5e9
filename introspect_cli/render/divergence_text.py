"""Divergences as a table, what differs at one of them in words, and the changed statements that may have caused it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import Nearness
from introspect_cli.compare.result import DiffResult, Divergence, Role, Size
from introspect_cli.compare.table import is_shapeless, shapes_differ
from introspect_cli.records import Kind, Status, Summary
from introspect_cli.render.blocks import (
    Block,
    Column,
    Line,
    Table,
    distance,
    line,
    number,
    section,
    shape,
    site_text,
    table_of,
    two_numbers,
)
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from introspect_cli.compare.changes.statements import CodeChanges, Ranked, Side
    from introspect_cli.compare.elements import Elements

_COMPARED = ("mean", "std", "amean", "min", "max")
_TELLING = ("nans", "infs", "zeros", "mean", "std", "min", "max")
_SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


def divergence_table(divergences: Sequence[Divergence], *, ranks: bool = False, moments: bool = False) -> Table:
    """A table of divergences without empty columns.

    Args:
        divergences: a row each.
        ranks: whether there is a column for the rank.
        moments: whether they are of two checkpoints, which have no step, phase, rank or role.
    """
    noisy = any(each.floor is not None for each in divergences)
    sized = any(each.size is Size.ROUNDING for each in divergences)
    shifted = any(each.step_b != each.step for each in divergences)
    at = not moments
    columns: list[tuple[Column, Callable[[Divergence], str]]] = [
        (Column("step", right=True), lambda each: str(each.step) * at),
        (Column("of b", right=True), lambda each: str(each.step_b) * (at and shifted)),
        (Column("rank", right=True), lambda each: str(each.rank) * (at and ranks)),
        (Column("phase", drop_at=2), lambda each: each.site.phase.value * at),
        (Column("tensor" if moments else "module", least=18), module_of),
        (Column("what", least=14), lambda each: site_text(each.site)),
        (Column("a", least=7), lambda each: glance(each)[0]),
        (Column("b", least=7), lambda each: glance(each)[1]),
        (Column("rel. L2", right=True), lambda each: distance(each.rel_l2)),
        (Column("x noise", right=True), lambda each: _over_noise(each) * noisy),
        (Column("size", drop_at=1), lambda each: (each.size.name.lower() if each.size is not None else "-") * sized),
        (Column("role"), lambda each: each.role.value * at),
    ]
    return table_of(divergences, columns, lambda each: "origin" if each.role is Role.ORIGIN else "")


def _over_noise(divergence: Divergence) -> str:
    """The distance in multiples of the noise; `-` where one of them is unknown or there is no noise."""
    rel, floor = divergence.rel_l2, divergence.floor
    return f"{rel / floor:.3g}" if rel is not None and floor else "-"


def module_of(divergence: Divergence) -> str:
    """`model.head (Linear)`; the name alone where the class is unknown or equals the name."""
    name, owner = clean(divergence.site.fqn), clean(divergence.module_class)
    return f"{name} ({owner})" if owner and owner != name else name


def glance(divergence: Divergence) -> tuple[str, str]:
    """(a, b) in a few characters: plain values, else what differs first: shape, dtype, NaN or Inf count, a statistic.

    Random states by the beginning of their checksums; `(none)` for a side without a record.
    """
    a, b = divergence.a, divergence.b
    if a is None or b is None or Status.VALUE in (a.status, b.status):
        return _one_record(a), _one_record(b)
    forms = [(shape(side.layout.shape), _SHORT.get(side.layout.dtype, side.layout.dtype)) for side in (a, b)]
    if shapes_differ(a, b):
        return forms[0][0], forms[1][0]
    if a.layout.dtype != b.layout.dtype:
        return forms[0][1], forms[1][1]
    if divergence.site.kind is Kind.RNG:
        return f"#{a.checksum:016x}"[:9], f"#{b.checksum:016x}"[:9]
    for name, word in (("nans", "NaN"), ("infs", "Inf")):
        if a.stats.get(name, 0) != b.stats.get(name, 0):
            return f"{a.stats.get(name, 0):.0f} {word}", f"{b.stats.get(name, 0):.0f} {word}"
    return _statistic(a, b)


def _one_record(summary: Summary | None) -> str:
    """One record in a few characters: its value, or shape and dtype; `(none)` where missing."""
    if summary is None:
        return "(none)"
    if summary.status is Status.VALUE:
        return clean(summary.text, 24)
    if summary.layout.numel == 1 and "mean" in summary.stats:
        return number(summary.stats["mean"])
    return f"{shape(summary.layout.shape)} {_SHORT.get(summary.layout.dtype, summary.layout.dtype)}"


def _shape(summary: Summary) -> str:
    """The shape in words; only the number of elements where a record has no shape of its own."""
    return f"{summary.layout.numel} elements" if is_shapeless(summary) else shape(summary.layout.shape)


def _statistic(a: Summary, b: Summary) -> tuple[str, str]:
    """(a, b) of the statistic that moved most relative to the spread of values; checksums where none moved by 1e-8.

    A statistic later in `_COMPARED` is taken only if it moved half as much again. Of one element, its value; `a` begins
    with the statistic's name, `b` has none.
    """
    if a.layout.numel == 1 and "mean" in a.stats and "mean" in b.stats:
        return two_numbers(a.stats["mean"], b.stats["mean"])
    spread = max(abs(a.stats.get("std", 0.0)), abs(b.stats.get("std", 0.0)))
    best, moved = "", 0.0
    for name in _COMPARED:
        one, two = a.stats.get(name), b.stats.get(name)
        if one is None or two is None:
            continue
        scale = max(spread, abs(one), abs(two)) if name != "mean" else max(spread, 1e-30)
        change = abs(one - two) / scale if scale else 0.0
        if change > moved * 1.5:
            best, moved = name, change
    if not best or moved < 1e-8:
        return f"#{a.checksum:016x}"[:9], f"#{b.checksum:016x}"[:9]
    text_a, text_b = two_numbers(a.stats[best], b.stats[best])
    return f"{best} {text_a}", text_b


def detail_blocks(result: DiffResult) -> list[Block]:
    """For each listed divergence, lines on what differs: elements if compared, layout and statistics, else checksums.

    For a record of one run alone, that record.
    """
    blocks: list[Block] = []
    for divergence in result.divergences:
        a, b = divergence.a, divergence.b
        title = f"{divergence.step_words}: {site_text(divergence.site)} of {module_of(divergence)}"
        blocks += [line(), line(title, "origin" if divergence.role is Role.ORIGIN else "heading")]
        if a is None or b is None:
            blocks.append(line(f"only in {'a' if b is None else 'b'}: {_one_record(a or b)}", indent=2))
            continue
        statistics = statistics_words(divergence)
        if divergence.elements is not None:
            blocks.append(line(elements_words(divergence.elements), indent=2))
        if statistics:
            blocks.append(line(statistics, indent=2))
        elif divergence.elements is None:
            blocks.append(line(f"checksum {a.checksum:016x} -> {b.checksum:016x}", indent=2))
    return blocks


def statistics_words(divergence: Divergence) -> str:
    """What differs between the records of both runs: layout, value, statistics; "" where only one run has the site."""
    a, b = divergence.a, divergence.b
    if a is None or b is None:
        return ""
    clauses = [
        f"{name} {one or '-'} -> {two or '-'}"
        for name, one, two in (
            ("shape", *((_shape(a), _shape(b)) if shapes_differ(a, b) else ("", ""))),
            ("dtype", a.layout.dtype, b.layout.dtype),
            ("device", a.layout.device, b.layout.device),
            ("value", clean(a.text, 60), clean(b.text, 60)),
        )
        if one != two
    ]
    clauses += [
        f"{name} {' -> '.join(two_numbers(a.stats[name], b.stats[name], 5, 17))}"
        for name in _TELLING
        if name in a.stats and name in b.stats and a.stats[name] != b.stats[name]
    ]
    return ", ".join(clauses)


def elements_words(elements: Elements) -> str:
    """How two whole tensors differ, in a line: how many elements, by how much, where."""
    share = f" ({number(100 * elements.differing / elements.total, 3)} %)" if elements.total else ""
    verb = "differs" if elements.differing == 1 else "differ"
    words = f"{elements.differing:,} of {count(elements.total, 'element')} {verb}{share}"
    if elements.largest is not None:
        words += f", max |a-b| {number(elements.largest, 3)} at {list(elements.where)}"
    if elements.first != elements.where:
        words += f"; first at {list(elements.first)}"
    return words


HEADS = {
    Nearness.RECORDED: "Changed in a line that the records name",
    Nearness.COMPUTES: "Changed in the code that computes it",
    Nearness.BUILDS: "Changed in what builds it or gives it its values",
    Nearness.BETWEEN: "Changed in what ran between the last record that agrees and this one",
    Nearness.ALONE: "The only statement that changed, and nothing else on record differs",
    Nearness.ELSEWHERE: "Changed elsewhere, in nothing that reaches this place by name",
}
"""What a group of changes has in common."""
_LONGEST = 6
"""Lines of a statement that are shown."""
_WHY = {
    "text": "its text is not in both runs",
    "secret": "only in comments or in what was redacted",
}


def changes_blocks(code: CodeChanges | None) -> list[Block]:
    """All changed statements, grouped by nearness to the divergence, the nearest group first.

    Then files that changed in comments or names alone or were not read. One line where no file differs, or for None: no
    digests were recorded.
    """
    if code is None:
        return [line("Nothing is known of the source files: a run has no digests of them (--no-source).")]
    blocks: list[Block] = []
    for nearness in Nearness:
        changes = (change_lines(one) for one in code.ranked if one.nearness is nearness)
        blocks += section(f"{HEADS[nearness]}:", chain.from_iterable(changes))
    others = [(name, ", in comments alone") for name in code.in_comments]
    others += [(name, ", in the names of variables alone") for name in code.in_names]
    others += [(name, f": {_WHY.get(why, why)}") for name, why in code.unread]
    blocks += [line(f"{clean(name)} changed{how}.", "dim") for name, how in others]
    blocks = blocks or [line(f"No source file on record differs ({count(code.compared, 'file')} compared).")]
    return blocks[1:] if blocks[0] == line() else blocks


def change_lines(one: Ranked) -> Iterator[Line]:
    """The place of a change, then its lines in a and in b; of a whole file, a line that says why no lines are shown."""
    change = one.change
    scope = f"  in {clean(change.scope)}" if change.scope and change.unit != "value" else ""
    sides = change.a is not None and change.b is not None and change.a.first != change.b.first
    moved = f"  ({'moved from ' * (change.unit == 'moved')}line {change.a.first} of a)" if sides and change.a else ""
    yield Line(((clean(change.place), "name"), (f"{scope}{moved}", "dim")), indent=2)
    if change.unit == "file":
        only = "a" if change.b is None else "b" if change.a is None else ""
        whole = (
            "changed; it cannot be parsed" if change.file.endswith(".py") else "changed; it is not read value by value"
        )
        yield line(f"only in {only}" if only else whole, "dim", 4)
        return
    for side, sign, style in ((change.a, "-", "bad"), (change.b, "+", "good")):
        yield from _side_lines(side, sign, style)


def _side_lines(side: Side | None, sign: str, style: str) -> Iterator[Line]:
    """The first `_LONGEST` lines of one side, each after `sign` and cut at 160 characters, and how many more there are.

    Nothing for None.
    """
    if side is None:
        return
    lines = side.text.splitlines()
    for text in lines[:_LONGEST]:
        yield line(f"{sign} {clean(text, 160)}", style, 4, wrap=False)
    if len(lines) > _LONGEST:
        yield line(f"{sign} ... {count(len(lines) - _LONGEST, 'more line')}", "dim", 4)
