"""A comparison as lines and tables: the sentence, its evidence, divergences, changed statements, settings, findings."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.causes import likely_words
from introspect_cli.compare.changes.statements import Nearness
from introspect_cli.compare.measure import shapes_differ
from introspect_cli.compare.result import (
    Certainty,
    DiffResult,
    Divergence,
    Restored,
    Role,
    SettingChange,
    Size,
    Verdict,
)
from introspect_cli.compare.say import head_of, parts_words
from introspect_cli.compare.settings.differences import describe
from introspect_cli.records import Joined, Kind, Status, Summary
from introspect_cli.render.blocks import (
    Block,
    Column,
    Fold,
    Line,
    Table,
    distance,
    first_of,
    line,
    number,
    rest_of,
    section,
    shape,
    site_text,
    table_of,
    two_numbers,
)
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from introspect_cli.compare.changes.statements import CodeChanges, Ranked
    from introspect_cli.compare.elements import Elements
    from introspect_cli.compare.groups import Groups

VERDICT_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
_SHOWN_TENSORS = 8
_SHOWN_RANKS = 64


def diff_blocks(
    result: DiffResult,
    *,
    everything: bool = False,
    verbose: bool = False,
    grouped: bool = False,
    more: str = "--all lists them",
) -> list[Block]:
    """The whole answer of a comparison.

    Args:
        result: the comparison.
        everything: whether to list all settings, ranks and tensors of checkpoints; else the first few.
        verbose: whether to show what differs in each divergence that is listed.
        grouped: True to show the first divergence alone, and how many records follow it in the same step; False to list
            all that the result has.
        more: how more divergences are listed, for the last line; "" where nothing lists them.
    """
    blocks: list[Block] = [line(clean(result.head or result.sentence), VERDICT_STYLE[result.verdict])]
    blocks += why_lines(result) if result.head else [line(f"- {clean(text)}", indent=2) for text in result.evidence]
    by_rank = result.candidates if len(result.candidates) > 1 else ()
    if by_rank:
        shown = by_rank if everything else by_rank[:_SHOWN_RANKS]
        rest = rest_of(len(by_rank), len(shown), "--all lists them", what="more ranks")
        title = "First on each rank, by step and phase (no other order is known):"
        blocks += section(title, [divergence_table(shown, ranks=True), *rest])
    blocks += findings_blocks(result, everything=everything, settings=everything or not result.head)
    moments = result.subject == "checkpoints"
    if result.divergences and result.head and grouped and not moments:
        blocks += [] if by_rank else [line(), *_followers(result)]
    elif result.divergences:
        several = len({divergence.rank for divergence in result.divergences}) > 1
        key = attrgetter("rank", "step", "site")
        already = set(map(key, by_rank))
        listed = [one for one in result.divergences if key(one) not in already]
        listed = listed[:_SHOWN_TENSORS] if moments and not everything else listed
        if listed:
            blocks += [line(), divergence_table(listed, ranks=several, moments=moments)]
        if verbose:
            blocks += detail_blocks(result.divergences)
        rest = rest_of(len(result.divergences), len(listed), "--all lists them")
        blocks += rest if moments else _rest(result, len(by_rank) + len(listed), more)
    style = "" if result.verdict is Verdict.SAME else "unsure"
    notes = [line(f"Note: {clean(note)}", style) for note in result.notes]
    return [*blocks, *[line()] * bool(notes), *notes]


# --- the answer in short


_LABEL = 9
_KNOWN = ("equal", "within", "unseen")
_LIKELY = 3


def why_lines(result: DiffResult) -> list[Block]:
    """Labelled lines: what was compared that the divergence rests on, what explains it, what likely caused it.

    Then a line on changed statements where none is among the causes, or, for two or more, a command that finds which
    one it is; then the sentences of `also`.
    """
    rows = [(known, ", ".join(fact.text for fact in result.rests_on if fact.known == known), "") for known in _KNOWN]
    proved, left = (
        [one.text for one in result.explains if one.certainty is certainty]
        for certainty in (Certainty.PROVED, Certainty.LEFT)
    )
    rows += [("cause" * (not place), text, "  on record") for place, text in enumerate(proved)]
    rows.append(("left", ", ".join(left), ""))
    likely = enumerate(likely_words(result.explains, result.causes))
    rows += [("likely" * (not place), text, f"  ({sources})" * bool(sources)) for place, (text, sources) in likely]
    blocks: list[Block] = [
        Line(((f"{label:{_LABEL}}", "dim"), (clean(text, 400), ""), (tail, "dim")), 2, hang=_LABEL + 2)
        for label, text, tail in rows
        if text
    ]
    statements = sum(cause.kind == "statement" for cause in result.causes)
    if not statements and result.code is not None and result.code.ranked:
        every = len(result.code.ranked)
        places = ", ".join(one.change.place for one in result.code.ranked[:_LIKELY])
        text = f"{count(every, 'statement')} changed, none named here: {places}{', ...' * (every > _LIKELY)}"
        blocks.append(line(f"{clean(text)} (--changes)", "dim", 2))
    if statements > 1:
        finds = f"`introspect bisect --changes {result.a} {result.b}` finds which"
        blocks.append(line(clean(f"{statements} changed statements may reach this place: {finds}"), "dim", 2))
    return [*blocks, *(line(clean(text), "dim", 2) for text in result.also)]


def _followers(result: DiffResult) -> list[Block]:
    """The first divergence as a table, and how many others its step has, in the same phase and in other phases.

    They are those that the result lists.
    """
    first, *rest = result.divergences
    blocks: list[Block] = [divergence_table([first])]
    same = [each for each in rest if each.step == first.step]
    for in_phase in (True, False):
        if members := [each for each in same if (each.site.phase is first.site.phase) is in_phase]:
            largest = max(members, key=lambda each: each.rel_l2 or 0.0)
            phases = ", ".join(dict.fromkeys(each.site.phase.value for each in members))
            most = f", up to {distance(largest.rel_l2)} at {clean(largest.site.fqn)}" if largest.rel_l2 else ""
            follow = count(len(members), "more record") + " follow" + "s" * (len(members) == 1)
            blocks.append(line(f"{follow} ({phases}){most}", "dim", 2))
    return blocks


def first_blocks(result: DiffResult) -> list[Block]:
    """The answer with only the first divergence listed, for verbs without an option to list more."""
    return diff_blocks(replace(result, divergences=result.divergences[:1]), more="")


def _rest(result: DiffResult, listed: int, how: str) -> list[Block]:
    """A line: how many divergences there are, and how many are not listed.

    Args:
        result: the comparison.
        listed: how many are listed.
        how: what lists the others; "" for nothing, and then their number is not given.
    """
    more = result.counts.diverged - listed
    counts = result.counts
    text = f"{count(counts.diverged, 'divergence')} in {count(counts.steps_diverged, 'step')}"
    text += f" of {counts.steps_compared} compared"
    if counts.only_a or counts.only_b:
        text += f"; {counts.only_a} sites only in a, {counts.only_b} only in b"
    if counts.within:
        text += f"; {counts.within} more within tolerance or noise"
    tail = f"; {more:,} not listed ({how})" if more > 0 and how else ""
    return [line(text + tail + ".", "dim")]


def groups_blocks(groups: Groups) -> list[Block]:
    """A comparison of more than two runs: the sentence, and each group with its paths.

    Every group but the first has how it differs from the largest, which is the first.
    """
    blocks: list[Block] = [line(clean(groups.sentence), VERDICT_STYLE[groups.verdict])]
    for place, group in enumerate(groups.groups):
        blocks += [line(), line(f"Group {place + 1}, {count(len(group), 'run')}:", "heading")]
        blocks += [line(clean(path), indent=2) for path in group]
        if place:
            difference = groups.differences[place - 1]
            blocks.append(line(f"against {clean(difference.a)}: {clean(difference.sentence)}", indent=2))
    return blocks


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
        (Column("role"), lambda each: each.role_word * at),
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
    if shapes_differ(a, b):
        return shape(a.layout.shape), shape(b.layout.shape)
    if a.layout.dtype != b.layout.dtype:
        return _dtype(a), _dtype(b)
    sums = f"#{a.checksum:016x}"[:9], f"#{b.checksum:016x}"[:9]
    if divergence.site.kind is Kind.RNG:
        return sums
    for name, word in (("nans", "NaN"), ("infs", "Inf")):
        if a.stats.get(name, 0) != b.stats.get(name, 0):
            return f"{a.stats.get(name, 0):.0f} {word}", f"{b.stats.get(name, 0):.0f} {word}"
    return _statistic(a, b) or sums


def _one_record(summary: Summary | None) -> str:
    """One record in a few characters: its value, or shape and dtype; `(none)` where missing."""
    if summary is None:
        return "(none)"
    if summary.status is Status.VALUE:
        return clean(summary.text, 24)
    if summary.layout.numel == 1 and "mean" in summary.stats:
        return number(summary.stats["mean"])
    return f"{shape(summary.layout.shape)} {_dtype(summary)}"


def _dtype(summary: Summary) -> str:
    """The dtype, the usual ones in short."""
    return _SHORT.get(summary.layout.dtype, summary.layout.dtype)


def _shape(summary: Summary) -> str:
    """The shape in words; only the number of elements where it was gathered from ranks at unknown places."""
    is_shapeless = summary.joined is Joined.GATHERED and summary.status is Status.OBSERVED
    return f"{summary.layout.numel} elements" if is_shapeless else shape(summary.layout.shape)


def _statistic(a: Summary, b: Summary) -> tuple[str, str] | None:
    """(a, b) of the statistic that moved most relative to the spread of values; None where none moved by 1e-8.

    A statistic later in `_COMPARED` is taken only if it moved half as much again. Of one element, its value; `a` begins
    with the statistic's name, `b` has none.
    """
    if a.layout.numel == 1 and "mean" in a.stats and "mean" in b.stats:
        return two_numbers(a.stats["mean"], b.stats["mean"])
    spread = max(abs(a.stats.get("std", 0.0)), abs(b.stats.get("std", 0.0)))
    best, moved = "", 0.0
    for name in _COMPARED:
        one, two = a.stats.get(name, math.nan), b.stats.get(name, math.nan)
        scale = max(spread, abs(one), abs(two)) if name != "mean" else max(spread, 1e-30)
        change = abs(one - two) / scale if scale else 0.0
        if change > moved * 1.5:
            best, moved = name, change
    if moved < 1e-8:
        return None
    text_a, text_b = two_numbers(a.stats[best], b.stats[best])
    return f"{best} {text_a}", text_b


def detail_blocks(divergences: Sequence[Divergence]) -> list[Block]:
    """For each divergence, lines on what differs: elements if compared, layout and statistics, else checksums.

    For a record of one run alone, that record.
    """
    blocks: list[Block] = []
    for divergence in divergences:
        a, b = divergence.a, divergence.b
        title = f"{divergence.step_words}: {site_text(divergence.site)} of {module_of(divergence)}"
        blocks += [line(), line(title, "origin" if divergence.role is Role.ORIGIN else "heading")]
        if a is None or b is None:
            said = [f"only in {divergence.only}: {_one_record(a or b)}"]
        else:
            said = [elements_words(divergence.elements)] if divergence.elements is not None else []
            said += [text] if (text := statistics_words(divergence)) else []
            said = said or [f"checksum {a.checksum:016x} -> {b.checksum:016x}"]
        blocks += [line(text, indent=2) for text in said]
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
    words = f"{elements.differing:,} of {count(elements.total, 'element')} differ{share}"
    if elements.largest is not None:
        words += f", max |a-b| {number(elements.largest, 3)} at {list(elements.where)}"
    return words


HEADS = {
    Nearness.RECORDED: "Changed in a line that the records name",
    Nearness.COMPUTES: "Changed in the code that computes it",
    Nearness.BUILDS: "Changed in what builds it or gives it its values",
    Nearness.BETWEEN: "Changed in what may have run between the last record that agrees and this one",
    Nearness.ALONE: "The only statement that changed, and nothing else on record differs",
    Nearness.ELSEWHERE: "Other changes",
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

    Then files that changed in nothing that is computed, or were not read. One line where no file differs, or for None:
    no digests were recorded.
    """
    if code is None:
        return [line("Nothing is known of the source files: a run has no digests of them (--no-source).")]
    blocks: list[Block] = []
    for nearness in Nearness:
        changes = (change_lines(one) for one in code.ranked if one.nearness is nearness)
        blocks += section(f"{HEADS[nearness]}:", chain.from_iterable(changes))
    others = [(name, ", in comments, imports, names or how lines are written alone") for name in code.unchanged]
    others += [(name, f": {_WHY.get(why, why)}") for name, why in code.unread]
    blocks += [line(f"{clean(name)} changed{how}.", "dim") for name, how in others]
    blocks = blocks or [line(f"No source file on record differs ({count(code.compared, 'file')} compared).")]
    return blocks[1:] if blocks[0] == line() else blocks


def change_lines(one: Ranked) -> Iterator[Line]:
    """The place of a change, then its lines in a and in b; of a whole file, a line that says why no lines are shown.

    Of each side they are the first `_LONGEST`, cut at 160 characters, and how many more there are. Where these do not
    differ, lines before the first that does are left out.
    """
    change = one.change
    scope = f"  in {clean(change.scope)}" if change.scope else ""
    if change.a is not None and change.b is not None and change.a.first != change.b.first:
        scope += f"  ({'moved from ' * (change.unit == 'moved')}line {change.a.first} of a)"
    yield Line(((clean(change.place), "name"), (scope, "dim")), indent=2)
    if change.unit == "file":
        only = "a" if change.b is None else "b" if change.a is None else ""
        unread = "cannot be parsed" if change.file.endswith(".py") else "is not read value by value"
        yield line(f"only in {only}" if only else f"changed; it {unread}", "dim", 4)
        return
    sides = [side.text.splitlines() if side is not None else [] for side in (change.a, change.b)]
    same = next((place for place, (one, two) in enumerate(zip(*sides, strict=False)) if one != two), 0)
    for every, sign, style in zip(sides, "-+", ("bad", "good"), strict=True):
        lines = every[same:] if same >= _LONGEST else every
        if lines != every:
            yield line(f"{sign} ... {count(same, 'line')} that both have", "dim", 4)
        yield from (line(f"{sign} {clean(text, 160)}", style, 4, wrap=False) for text in lines[:_LONGEST])
        if len(lines) > _LONGEST:
            yield line(f"{sign} ... {count(len(lines) - _LONGEST, 'more line')}", "dim", 4)


# --- where two runs differ over all steps

_MOST_ROWS = 40


def map_blocks(result: DiffResult) -> list[Block]:
    """The divergence map as a table: the first `_MOST_ROWS` modules that differ, by step; [] without a map.

    Of each module the first step in which its forward or backward pass differs, and the largest distance in the forward
    pass of any step. Then how many more differ, and how many are equal.
    """
    found = result.map
    if found is None:
        return []
    modules: list[tuple[int, str, float]] = []
    for name, values, behind in zip(found.modules, found.values, found.behind, strict=True):
        differs = [place for place, value in enumerate(values) if value > 0 or behind[place]]
        if differs:
            modules.append((found.steps[differs[0]], clean(name), max(values[place] for place in differs)))
    modules.sort(key=lambda row: row[0])
    columns: list[tuple[Column, Callable[[tuple[int, str, float]], str]]] = [
        (Column("module", least=18), lambda row: row[1]),
        (Column("from step", right=True), lambda row: str(row[0])),
        (
            Column("up to rel. L2", right=True),
            lambda row: "one run only" if math.isinf(row[2]) else distance(row[2] or None),
        ),
    ]
    span = f" (steps {found.steps[0]} to {found.steps[-1]})" if found.steps else ""
    table = table_of(modules[:_MOST_ROWS], columns, caption=f"Divergence map{span}")
    equal = rest_of(len(found.modules), len(modules), what="more that are equal in all of them")
    return [line(), table, *rest_of(len(modules), _MOST_ROWS), *equal]


_SHOWN_SETTINGS = 3
_SHOWN_STRUCTURE = 12
_MOST = 100


def findings_blocks(result: DiffResult, *, everything: bool, settings: bool = False) -> list[Block]:
    """Lines of each finding: parts of a checkpoint, independent divergences, structure, settings.

    Args:
        result: the comparison.
        everything: whether lists are shown whole.
        settings: whether settings that differ are among the findings; without `everything` only of UNDECIDED runs of
            unequal lengths.
    """
    blocks: list[Block] = []
    resumed, sentence = result.resumed, result.sentence
    if resumed is not None:  # what it restored: a line for what was not, for what was, and for what cannot be told
        styles = {Restored.NO: "bad", Restored.YES: "", Restored.UNSEEN: ""}
        states = {state: parts_words([part for part in resumed.parts if part.state is state]) for state in styles}
        parts = [line(clean(f"{at.value}: {'; '.join(said)}"), styles[at], 2) for at, said in states.items() if said]
        title = f"What run {resumed.run} begins with, against step {resumed.at} of {resumed.whole}:"
        blocks += section(title, parts)
    several = any(origin.divergence != result.first for origin in result.origins)
    if several and (everything or not all(origin.part for origin in result.origins)):
        origins = (line(clean(origin.sentence), indent=2) for origin in result.origins)
        blocks += section("Independent divergences (nothing they depend on differs):", origins)
    changes = [line(clean(change.text), indent=2) for change in result.structure if change.text not in sentence]
    most = None if everything else _SHOWN_STRUCTURE
    blocks += section("What differs besides numbers:", first_of(changes, most, "--all lists them"))
    counts = result.counts
    if settings and (everything or (result.verdict is Verdict.UNDECIDED and counts.steps_a != counts.steps_b)):
        # The changed statements of a source file say more than that it changed.
        told = {one.change.file for one in result.code.ranked} if result.code is not None else ()
        differing = [_setting(one) for one in result.settings if one.source != "sources" or one.name not in told]
        most = None if everything else _SHOWN_SETTINGS
        blocks += section("Settings that differ:", first_of(differing, most, "--settings lists them"))
    return blocks


def page_blocks(result: DiffResult) -> list[Block]:
    """The findings for a page, the first `_MOST` changed statements in a fold.

    Changes and what a resumed run lost only where there is a first divergence.
    """
    blocks: list[Block] = []
    code, resumed = result.code, result.resumed
    if code is not None and result.first is not None and code.ranked:
        folded = changes_blocks(code._replace(ranked=code.ranked[:_MOST]))
        blocks.append(Fold(count(len(code.ranked), "changed statement"), tuple(folded)))
    if resumed is not None and result.first is not None:
        blocks.append(line(head_of(resumed)))
    return [*blocks, *findings_blocks(result, everything=True)]


# --- settings: their values stand in JSON and on a page in places of their own


def settings_blocks(result: DiffResult) -> list[Block]:
    """All differing settings, those that can explain the divergence first; a line where none differs."""
    blocks: list[Block] = []
    for title, chosen in (("These can explain the divergence:", True), ("Other settings that differ:", False)):
        blocks += section(title, [_setting(change) for change in result.settings if change.explains is chosen])
    return blocks[1:] or [line("No setting that both runs kept differs.")]


def _setting(change: SettingChange) -> Line:
    """A line: how a setting differs, and the document it is in."""
    return Line(((clean(describe(change), 240), "name"), (f"  ({clean(change.source)})", "dim")), indent=2)
