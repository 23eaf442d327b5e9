"""A comparison as lines and tables: the sentence, its evidence, the settings, the divergences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.terms.result import DiffResult, Divergence, Verdict
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.render.blocks import Block, Column, Table, distance, line, rest_of
from introspect_cli.render.divergence_text import detail_blocks, divergence_table
from introspect_cli.render.findings import findings_blocks
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from introspect_cli.compare.groups import Groups


_VERDICT_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
_SHOWN_TENSORS = 8
_SHOWN_RANKS = 64
_PHASES = {Phase.START: "at the start", Phase.RECOMPUTE: "computed again", Phase.EVAL: "in evaluation"}


def diff_blocks(
    result: DiffResult, *, everything: bool = False, verbose: bool = False, grouped: bool = False
) -> list[Block]:
    """The whole answer.

    Args:
        result: the comparison.
        everything: whether to list all settings.
        verbose: whether to show what differs in each divergence that is listed.
        grouped: whether the first divergence stands alone, and what follows from it in its step is counted by kind.
    """
    blocks: list[Block] = [line(clean(result.sentence), _VERDICT_STYLE[result.verdict])]
    blocks += [line(f"- {clean(text)}", indent=2) for text in result.evidence]
    by_rank = result.candidates if len(result.candidates) > 1 else ()
    if by_rank:
        blocks += [line(), line("First on each rank, by step and phase (no other order is known):", "heading")]
        shown = by_rank if everything else by_rank[:_SHOWN_RANKS]
        blocks.append(divergence_table(shown, ranks=True))
        blocks += rest_of(len(by_rank), len(shown), "--all lists them", what="more ranks")
    blocks += findings_blocks(result, everything=everything)
    if result.subject == "checkpoints":
        blocks += _tensors(result, everything=everything, verbose=verbose)
    elif result.divergences:
        several = len({divergence.rank for divergence in result.divergences}) > 1
        already = {_place(divergence) for divergence in by_rank}
        listed = [one for one in result.divergences[: 1 if grouped else None] if _place(one) not in already]
        if listed:
            blocks += [line(), divergence_table(listed, ranks=several)]
        if grouped:
            blocks += _by_kind(
                result.divergences, f" on rank {result.divergences[0].rank}" if by_rank and not several else ""
            )
        if verbose:
            blocks += detail_blocks(result)
        blocks += _rest(result, len(by_rank) + len(listed))
    if result.notes:
        blocks.append(line())
        blocks += [
            line(f"Note: {clean(note)}", "unsure" if result.verdict is not Verdict.SAME else "")
            for note in result.notes
        ]
    if result.suggestions:
        blocks += [line(), line("Modules that look alike under different names; to compare them:", "heading")]
        blocks += [line(clean(text), indent=2, wrap=False) for text in result.suggestions]
    return blocks


def _tensors(result: DiffResult, *, everything: bool, verbose: bool) -> list[Block]:
    """The tensors that differ between two checkpoints: those that one lacks, then those farthest off."""
    shown = result.divergences if everything else result.divergences[:_SHOWN_TENSORS]
    if not shown:
        return []
    blocks: list[Block] = [line(), divergence_table(shown, moments=True)]
    if verbose:
        blocks += detail_blocks(result)
    return [*blocks, *rest_of(len(result.divergences), len(shown), "--all lists them")]


def _place(divergence: Divergence) -> tuple[int, int, Site]:
    return divergence.rank, divergence.step, divergence.site


def _by_kind(divergences: tuple[Divergence, ...], where: str) -> list[Block]:
    """What else diverges in the step of the first divergence, a line for each kind, in the order they began.

    Args:
        divergences: all that are listed.
        where: the rank, where they are of one of several.
    """
    first = divergences[0]
    groups: dict[str, list[Divergence]] = {}
    for divergence in divergences[1:]:
        if divergence.step == first.step:
            groups.setdefault(_group(divergence), []).append(divergence)
    if not groups:
        return []
    rows = []
    for name, members in groups.items():
        measured = [divergence for divergence in members if divergence.rel_l2 is not None]
        low, high = (distance(pick((d.rel_l2 or 0.0 for d in measured), default=0.0)) for pick in (min, max))
        reach = low if low == high else f"{low} to {high}"
        largest = max(measured, key=lambda divergence: divergence.rel_l2 or 0.0, default=members[0])
        sides = [sum(getattr(divergence, side) is None for divergence in members) for side in ("b", "a")]
        one_sided = ", ".join(f"{number} only in {side}" for number, side in zip(sides, "ab", strict=True) if number)
        records = f"{len(members):,}{f' ({one_sided})' if one_sided else ''}"
        rows.append((name, records, reach if measured else "-", clean(largest.site.fqn)))
    columns = (
        Column(f"also at {step_words(first.step, first.labels)}{where}", least=16),
        Column("records", right=True, least=7),
        Column("rel. L2", right=True),
        Column("largest at" if any(row[2] != "-" for row in rows) else "first at", least=14),
    )
    return [line(), Table(columns, tuple(rows))]


def _group(divergence: Divergence) -> str:
    """What a divergence is one of: a kind, with the phase where that is not told by the kind."""
    site = divergence.site
    name = site.kind.several
    if site.kind in (Kind.PARAM, Kind.BUFFER) and site.phase is Phase.OPTIMIZER:
        return f"{name} after the step"
    return f"{name} ({_PHASES[site.phase]})" if site.phase in _PHASES else name


def _rest(result: DiffResult, listed: int) -> list[Block]:
    """How much is not listed."""
    more = result.counts.diverged - listed
    counts = result.counts
    text = f"{count(counts.diverged, 'divergence')} in {count(counts.steps_diverged, 'step')}"
    text += f" of {counts.steps_compared} compared"
    if counts.only_a or counts.only_b:
        text += f"; {counts.only_a} sites only in a, {counts.only_b} only in b"
    if counts.within:
        text += f"; {counts.within} more within tolerance or noise"
    tail = f"; {more:,} not listed (--all lists them)" if more > 0 else ""
    return [line(text + tail + ".", "dim")]


def groups_blocks(groups: Groups) -> list[Block]:
    """A comparison of more than two runs: the sentence, and each group with how it differs from the largest."""
    blocks: list[Block] = [line(clean(groups.sentence), _VERDICT_STYLE[groups.verdict])]
    for number, group in enumerate(groups.groups):
        blocks += [line(), line(f"Group {number + 1}, {count(len(group), 'run')}:", "heading")]
        blocks += [line(clean(path), indent=2) for path in group]
        if number:
            difference = groups.differences[number - 1]
            blocks.append(line(f"against {clean(difference.a)}: {clean(difference.sentence)}", indent=2))
    return blocks
