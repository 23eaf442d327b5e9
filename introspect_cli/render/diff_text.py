"""A comparison as lines and tables: the sentence, its evidence, the settings, the divergences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.origins import together
from introspect_cli.compare.reasons.settings import describe
from introspect_cli.compare.result import DiffResult, Divergence, Reach, Restored, SettingChange, StepReach, Verdict
from introspect_cli.compare.structure import SHOWN, clause_of
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, count
from introspect_cli.render.blocks import Block, Column, Line, Table, line, table_of
from introspect_cli.render.code_text import code_blocks
from introspect_cli.render.divergence_text import detail_blocks, divergence_table
from introspect_cli.render.text import clean, distance, site_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.groups import Groups


_VERDICT_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
_SHOWN_SETTINGS = 3
_SHOWN_STRUCTURE = 12
_SHOWN_TENSORS = 8
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
        blocks.append(divergence_table(by_rank, ranks=True))
    blocks += _resumed(result)
    blocks += _origins(result)
    blocks += _structure(result, everything=everything)
    if result.verdict is Verdict.DIVERGED or (result.code is not None and result.code.likely):
        blocks += code_blocks(result.code)
    blocks += _settings(result, everything=everything)
    blocks += reach_blocks(result.reach)
    if result.subject == "checkpoints":
        blocks += _tensors(result, everything=everything, verbose=verbose)
    elif result.divergences:
        several = len({divergence.rank for divergence in result.divergences}) > 1
        already = {_place(divergence) for divergence in by_rank}
        listed = [one for one in result.divergences[: 1 if grouped else None] if _place(one) not in already]
        if listed:
            blocks += [line(), divergence_table(listed, ranks=several)]
        if grouped:
            blocks += _by_kind(result.divergences)
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
    more = len(result.divergences) - len(shown)
    return [*blocks, line(f"and {more:,} more (--all lists them)", "dim")] if more else blocks


def _place(divergence: Divergence) -> tuple[int, int, Site]:
    return divergence.rank, divergence.step, divergence.site


def _by_kind(divergences: tuple[Divergence, ...]) -> list[Block]:
    """What else diverges in the step of the first divergence, a line for each kind, in the order they began."""
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
        Column(f"also at {step_words(first.step, first.labels)}", least=16),
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


def _resumed(result: DiffResult) -> list[Block]:
    """What a resumed run goes on with: what was not restored a line each, the rest in a line."""
    resumed = result.resumed
    if resumed is None:
        return []
    whole = "ba"["ab".index(resumed.run)]
    title = f"What run {resumed.run} begins with, against step {resumed.at} of {whole}:"
    blocks: list[Block] = [line(), line(title, "heading")]
    for state in (Restored.NO, Restored.YES, Restored.UNSEEN):
        parts = together([part for part in resumed.parts if part.state is state])
        if parts:
            blocks.append(line(clean(f"{state.value}: {'; '.join(parts)}"), "bad" if state is Restored.NO else "", 2))
    return blocks


def _origins(result: DiffResult) -> list[Block]:
    """Every origin, where there are several; the parts of a checkpoint are listed as such."""
    if len(result.origins) < 2 or all(origin.part for origin in result.origins):
        return []
    blocks: list[Block] = [line(), line("Each of these rests on nothing that differs:", "heading")]
    blocks += [line(clean(origin.sentence), indent=2) for origin in result.origins]
    return blocks


def _structure(result: DiffResult, *, everything: bool) -> list[Block]:
    """What differs in structure, with what that rests on; nothing where the sentence has said it all."""
    changes = result.structure
    in_sentence = result.verdict is not Verdict.DIVERGED and len(changes) <= SHOWN
    if not changes or (in_sentence and not any(change.evidence for change in changes)):
        return []
    shown = changes if everything else changes[:_SHOWN_STRUCTURE]
    blocks: list[Block] = [line(), line("What differs besides numbers:", "heading")]
    for change in shown:
        text = f"{clause_of(change)} ({change.evidence})" if change.evidence else clause_of(change)
        blocks.append(line(clean(text), indent=2))
    if len(changes) > len(shown):
        blocks.append(line(f"and {len(changes) - len(shown)} more (--all lists them)", "dim", 2))
    return blocks


def _settings(result: DiffResult, *, everything: bool) -> list[Block]:
    settings = result.settings
    counts = result.counts
    shorter = result.verdict is Verdict.UNDECIDED and counts.steps_a != counts.steps_b  # why one run ends earlier
    if not settings or not (everything or shorter or result.verdict is Verdict.DIVERGED):
        return []
    if not everything:  # what is shown as a changed statement
        settings = tuple(change for change in settings if change.source != "sources" or not _is_shown(change, result))
    explaining = [change for change in settings if change.explains]
    if not settings:
        return []
    shown = settings if everything else tuple(explaining[:_SHOWN_SETTINGS] or settings[:_SHOWN_SETTINGS])
    title = "Settings that differ and can explain it:" if explaining else "Settings that differ:"
    blocks: list[Block] = [line(), line(title, "heading")]
    blocks += [_setting(change) for change in shown]
    if len(settings) > len(shown):
        blocks.append(line(f"and {len(settings) - len(shown)} more (--settings lists them)", "dim", 2))
    return blocks


def _is_shown(change: SettingChange, result: DiffResult) -> bool:
    best = result.code.ranked[0] if result.code is not None and result.code.ranked else None
    return best is not None and best.likely and best.change.file == change.name


def settings_blocks(result: DiffResult) -> list[Block]:
    """What differs besides numbers, what can explain the divergence first."""
    if not result.settings:
        return [line("No setting that both runs kept differs.")]
    blocks: list[Block] = []
    for title, chosen in (("These can explain the divergence:", True), ("Other settings that differ:", False)):
        changes = [change for change in result.settings if change.explains is chosen]
        if changes:
            blocks += [line(), line(title, "heading"), *map(_setting, changes)]
    return blocks[1:]


def _setting(change: SettingChange) -> Line:
    return Line(((clean(describe(change), 240), "name"), (f"  ({clean(change.source)})", "dim")), indent=2)


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


_ROWS = 8


def reach_blocks(reach: Reach | None) -> list[Block]:
    """A row for the first and the last step, for that in which b goes furthest, and for some between."""
    if reach is None or all(step.site is None for step in reach.steps):
        return []
    columns: list[tuple[Column, Callable[[StepReach], str]]] = [
        (Column("step", right=True), lambda step: str(step.step)),
        (Column("parameters: one rounding", right=True), lambda step: distance(step.rounding)),
        (Column("b", right=True), lambda step: distance(step.b)),
        (Column("most, x rounding", right=True), lambda step: f"{step.times:.2g}"),
        (Column("at", least=18), _reached_at),
    ]
    seeds = ", ".join(map(str, reach.seeds))
    title = f"How far one rounding of the parameters (--perturb {seeds}) carries a, and b beside it:"
    furthest = reach.furthest
    return [
        line(),
        line(title, "heading"),
        table_of(_rows_of(reach), columns, lambda step: "origin" if step is furthest else ""),
    ]


def _rows_of(reach: Reach) -> list[StepReach]:
    """The steps of the rows: between first and last as far apart as rounding takes to grow, by a factor each."""
    steps = reach.steps
    last = len(steps) - 1
    places = {0, last, steps.index(reach.furthest)}
    places |= {round((last + 1) ** (place / (_ROWS - 1))) - 1 for place in range(_ROWS)}
    return [steps[place] for place in sorted(places)]


def _reached_at(step: StepReach) -> str:
    return "" if step.site is None else clean(f"{site_text(step.site)} of {step.site.fqn}")
