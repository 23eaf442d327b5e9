"""A comparison as lines and tables: the sentence, its evidence, the settings, the divergences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.causes import likely_words
from introspect_cli.compare.result import Certainty, DiffResult, Divergence, Verdict
from introspect_cli.render.blocks import Block, Line, distance, line, rest_of, section
from introspect_cli.render.divergence_text import detail_blocks, divergence_table
from introspect_cli.render.findings import findings_blocks
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from introspect_cli.compare.groups import Groups
    from introspect_cli.records import Site


_VERDICT_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
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
    short = bool(result.head)
    blocks: list[Block] = [line(clean(result.head if short else result.sentence), _VERDICT_STYLE[result.verdict])]
    blocks += why_lines(result) if short else [line(f"- {clean(text)}", indent=2) for text in result.evidence]
    by_rank = result.candidates if len(result.candidates) > 1 else ()
    if by_rank:
        shown = by_rank if everything else by_rank[:_SHOWN_RANKS]
        rest = rest_of(len(by_rank), len(shown), "--all lists them", what="more ranks")
        title = "First on each rank, by step and phase (no other order is known):"
        blocks += section(title, [divergence_table(shown, ranks=True), *rest])
    blocks += findings_blocks(result, everything=everything, settings=everything or not short)
    if result.subject == "checkpoints":
        blocks += _tensors(result, everything=everything, verbose=verbose)
    elif result.divergences and short and grouped:
        blocks += [] if by_rank else [line(), *_followers(result)]
    elif result.divergences:
        several = len({divergence.rank for divergence in result.divergences}) > 1
        already = {_key_of(divergence) for divergence in by_rank}
        listed = [one for one in result.divergences if _key_of(one) not in already]
        if listed:
            blocks += [line(), divergence_table(listed, ranks=several)]
        if verbose:
            blocks += detail_blocks(result)
        blocks += _rest(result, len(by_rank) + len(listed), more)
    style = "" if result.verdict is Verdict.SAME else "unsure"
    return [
        *blocks,
        *([line()] * bool(result.notes)),
        *(line(f"Note: {clean(note)}", style) for note in result.notes),
    ]


# --- the answer in short


_LABEL = 9
_KNOWN = ("equal", "within", "unseen")
_LIKELY = 3


def why_lines(result: DiffResult) -> list[Block]:
    """Labelled lines: what was compared that the divergence rests on, what explains it, what likely caused it.

    Then a line on changed statements where none is among the causes, or, for two or more, a command that finds which
    one it is; then the sentences of `also`.
    """
    rows: list[tuple[str, str, str]] = []
    for known in _KNOWN:
        things = [fact.text for fact in result.rests_on if fact.known == known]
        rows += [(known, ", ".join(things), "")] if things else []
    proved = [one.text for one in result.explains if one.certainty is Certainty.PROVED]
    rows += [("cause" * (not place), text, "on record") for place, text in enumerate(proved)]
    left = [one.text for one in result.explains if one.certainty is Certainty.LEFT]
    rows += [("left", ", ".join(left), "")] if left else []
    likely = [
        (text, f"({sources})" if sources else "") for text, sources in likely_words(result.explains, result.causes)
    ]
    rows += [("likely" * (not place), *shown) for place, shown in enumerate(likely)]
    blocks: list[Block] = [
        Line(
            ((f"{label:{_LABEL}}", "dim"), (clean(text, 400), ""), (f"  {tail}" if tail else "", "dim")),
            2,
            hang=_LABEL + 2,
        )
        for label, text, tail in rows
    ]
    statements = sum(cause.kind == "statement" for cause in result.causes)
    if not statements and result.code is not None and result.code.ranked:
        every = len(result.code.ranked)
        places = ", ".join(one.change.place for one in result.code.ranked[:_LIKELY])
        text = f"{count(every, 'statement')} changed, none named here: {places}{', ...' * (every > _LIKELY)}"
        blocks.append(line(f"{clean(text)} (--changes)", "dim", 2))
    if statements > 1:
        finds = f"`introspect bisect --changes {result.a} {result.b}` finds which"
        blocks.append(line(clean(f"{statements} changed statements reach this place: {finds}"), "dim", 2))
    return [*blocks, *(line(clean(text), "dim", 2) for text in result.also)]


def _followers(result: DiffResult) -> list[Block]:
    """The first divergence as a table, and how many others its step has, in the same phase and in other phases.

    They are those that the result lists.
    """
    first, *rest = result.divergences
    blocks: list[Block] = [divergence_table([first])]
    same = [each for each in rest if each.step == first.step]
    for members in (
        [each for each in same if each.site.phase is first.site.phase],
        [each for each in same if each.site.phase is not first.site.phase],
    ):
        if members:
            largest = max(members, key=lambda each: each.rel_l2 or 0.0)
            phases = ", ".join(dict.fromkeys(each.site.phase.value for each in members))
            most = f", up to {distance(largest.rel_l2)} at {clean(largest.site.fqn)}" if largest.rel_l2 else ""
            follow = count(len(members), "more record") + " follow" + "s" * (len(members) == 1)
            blocks.append(line(f"{follow} ({phases}){most}", "dim", 2))
    return blocks


def first_blocks(result: DiffResult) -> list[Block]:
    """The answer with only the first divergence listed, for verbs without an option to list more."""
    return diff_blocks(replace(result, divergences=result.divergences[:1]), more="")


def _tensors(result: DiffResult, *, everything: bool, verbose: bool) -> list[Block]:
    """A table of differing tensors of two checkpoints: all listed with `everything`, else the first `_SHOWN_TENSORS`.

    With `verbose`, details of all listed ones follow; [] where none differs.
    """
    shown = result.divergences if everything else result.divergences[:_SHOWN_TENSORS]
    if not shown:
        return []
    blocks: list[Block] = [line(), divergence_table(shown, moments=True)]
    if verbose:
        blocks += detail_blocks(result)
    return [*blocks, *rest_of(len(result.divergences), len(shown), "--all lists them")]


def _key_of(divergence: Divergence) -> tuple[int, int, Site]:
    """Rank, step and site of a divergence, which no other one has."""
    return divergence.rank, divergence.step, divergence.site


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
    blocks: list[Block] = [line(clean(groups.sentence), _VERDICT_STYLE[groups.verdict])]
    for number, group in enumerate(groups.groups):
        blocks += [line(), line(f"Group {number + 1}, {count(len(group), 'run')}:", "heading")]
        blocks += [line(clean(path), indent=2) for path in group]
        if number:
            difference = groups.differences[number - 1]
            blocks.append(line(f"against {clean(difference.a)}: {clean(difference.sentence)}", indent=2))
    return blocks
