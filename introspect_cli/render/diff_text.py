"""A comparison as lines and tables: the sentence, its evidence, the settings, the divergences."""

from __future__ import annotations

from introspect_cli.compare.join.shapes import shapeless, shapes_differ
from introspect_cli.compare.reasons.settings import describe
from introspect_cli.compare.result import DiffResult, Divergence, Role, SettingChange, Verdict
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Status, Summary, count
from introspect_cli.render.blocks import Block, Column, Line, Table, line
from introspect_cli.render.structure_text import structure_blocks
from introspect_cli.render.text import brief_what, clean, distance, number, shape, site_text, two_numbers
from introspect_cli.render.values_text import elements_words

_VERDICT_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}
_SHOWN_SETTINGS = 3
_COMPARED = ("mean", "std", "amean", "min", "max")
_TELLING = ("nans", "infs", "zeros", "mean", "std", "min", "max")
_PHASES = {Phase.START: "at the start", Phase.RECOMPUTE: "computed again", Phase.EVAL: "in evaluation"}
_SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}


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
    blocks: list[Block] = [Line(((clean(result.sentence), _VERDICT_STYLE[result.verdict]),))]
    blocks += [line(f"- {clean(text)}", indent=2) for text in result.evidence]
    told = result.candidates if len(result.candidates) > 1 else ()
    if told:
        blocks += [line(), line("First on each rank, by step and phase (no other order is known):", "heading")]
        blocks.append(divergence_table(told, ranks=True))
    blocks += structure_blocks(result, everything=everything)
    blocks += _settings(result, everything=everything)
    if result.divergences:
        several = len({divergence.rank for divergence in result.divergences}) > 1
        already = {_place(divergence) for divergence in told}
        listed = [own for own in result.divergences[: 1 if grouped else None] if _place(own) not in already]
        if listed:
            blocks += [line(), divergence_table(tuple(listed), ranks=several)]
        if grouped:
            blocks += _groups(result.divergences)
        if verbose:
            blocks += _details(result)
        blocks += _rest(result, len(told) + len(listed))
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


def _place(divergence: Divergence) -> tuple[int, int, Site]:
    return divergence.rank, divergence.step, divergence.site


def _groups(divergences: tuple[Divergence, ...]) -> list[Block]:
    """What else diverges in the step of the first divergence, a line for each kind, in the order they began."""
    first = divergences[0]
    groups: dict[str, list[Divergence]] = {}
    for own in divergences[1:]:
        if own.step == first.step:
            groups.setdefault(_group(own), []).append(own)
    if not groups:
        return []
    rows = []
    for name, members in groups.items():
        known = [divergence for divergence in members if divergence.rel_l2 is not None]
        low, high = (pick((d.rel_l2 or 0.0 for d in known), default=0.0) for pick in (min, max))
        reach = distance(low) if distance(low) == distance(high) else f"{distance(low)} to {distance(high)}"
        largest = max(known, key=lambda divergence: divergence.rel_l2 or 0.0, default=members[0])
        sides = [sum(getattr(divergence, side) is None for divergence in members) for side in ("b", "a")]
        alone = ", ".join(f"{number} only in {side}" for number, side in zip(sides, "ab", strict=True) if number)
        count_of = f"{len(members):,}{f' ({alone})' if alone else ''}"
        rows.append((name, count_of, reach if known else "-", clean(largest.site.fqn)))
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


def _settings(result: DiffResult, *, everything: bool) -> list[Block]:
    settings = result.settings
    if not settings or (result.verdict is not Verdict.DIVERGED and not everything):
        return []
    explaining = [change for change in settings if change.explains]
    shown = settings if everything else tuple(explaining[:_SHOWN_SETTINGS] or settings[:_SHOWN_SETTINGS])
    title = "Settings that differ and can explain it:" if explaining else "Settings that differ:"
    blocks: list[Block] = [line(), line(title, "heading")]
    blocks += [_setting(change) for change in shown]
    if len(settings) > len(shown):
        blocks.append(line(f"and {len(settings) - len(shown)} more (--settings lists them)", "dim", 2))
    return blocks


def settings_blocks(result: DiffResult) -> list[Block]:
    """What differs besides numbers, what can explain the divergence first."""
    if not result.settings:
        return [line("No setting that both runs kept differs.")]
    blocks: list[Block] = []
    for title, chosen in (("These can explain the divergence:", True), ("Other settings that differ:", False)):
        own = [change for change in result.settings if change.explains is chosen]
        if own:
            blocks += [line(), line(title, "heading"), *map(_setting, own)]
    return blocks[1:]


def _setting(change: SettingChange) -> Line:
    return Line(((clean(describe(change), 240), "name"), (f"  ({clean(change.source)})", "dim")), indent=2)


def divergence_table(divergences: tuple[Divergence, ...], *, ranks: bool = False) -> Table:
    """Divergences as a table; columns without content are left out."""
    noisy = any(divergence.floor is not None for divergence in divergences)
    shifted = any(divergence.step_b != divergence.step for divergence in divergences)
    brief_a, brief_b = zip(*(_brief(divergence) for divergence in divergences), strict=True)
    columns = [Column("step", right=True)]
    columns += [Column("of b", right=True)] if shifted else []
    columns += [Column("rank", right=True)] if ranks else []
    columns += [
        Column("phase", drop_at=2),
        Column("module", least=18, brief=tuple(clean(d.site.fqn) for d in divergences), brief_at=1),
        Column("what", least=14, brief=tuple(brief_what(d.site) for d in divergences), brief_at=2),
        Column("a", least=7, brief=tuple(brief_a), brief_at=3),
        Column("b", least=7, brief=tuple(brief_b), brief_at=3),
        Column("rel. L2", right=True),
    ]
    columns += [Column("x noise", right=True)] if noisy else []
    columns.append(Column("role"))
    rows, styles = [], []
    for divergence in divergences:
        one, two = glance(divergence)
        row = [str(divergence.step)]
        row += [str(divergence.step_b)] if shifted else []
        row += [str(divergence.rank)] if ranks else []
        row += [divergence.site.phase.value, _module(divergence), _what(divergence), one, two]
        row.append(distance(divergence.rel_l2))
        row += [_over_noise(divergence)] if noisy else []
        row.append(divergence.role.value)
        rows.append(tuple(row))
        styles.append("origin" if divergence.role is Role.ORIGIN else "")
    return Table(tuple(columns), tuple(rows), tuple(styles))


def _over_noise(divergence: Divergence) -> str:
    if divergence.rel_l2 is None or not divergence.floor:
        return "-"
    return f"{divergence.rel_l2 / divergence.floor:.3g}"


def _module(divergence: Divergence) -> str:
    name, owner = clean(divergence.site.fqn), clean(divergence.module_class)
    return f"{name} ({owner})" if owner and owner != name else name


def _what(divergence: Divergence) -> str:
    return site_text(divergence.site)


def _short_dtype(name: str) -> str:
    return _SHORT.get(name, name)


def glance(divergence: Divergence) -> tuple[str, str]:
    """Run a and run b at a glance: what tells them apart in a few characters."""
    a, b = divergence.a, divergence.b
    if a is None or b is None:
        return _alone(a), _alone(b)
    if shapes_differ(a, b):
        return shape(a.layout.shape), shape(b.layout.shape)
    if Status.VALUE in (a.status, b.status):
        return _plain(a), _plain(b)
    if a.layout.dtype != b.layout.dtype:
        return _short_dtype(a.layout.dtype), _short_dtype(b.layout.dtype)
    if divergence.site.kind is Kind.RNG:
        return f"#{a.checksum:016x}"[:9], f"#{b.checksum:016x}"[:9]
    for name, word in (("nans", "NaN"), ("infs", "Inf")):
        if a.stats.get(name, 0) != b.stats.get(name, 0):
            return f"{a.stats.get(name, 0):.0f} {word}", f"{b.stats.get(name, 0):.0f} {word}"
    return _statistic(a, b)


def _brief(divergence: Divergence) -> tuple[str, str]:
    """The same in fewer characters: no name of the statistic, fewer digits."""
    one, two = glance(divergence)
    name, _, value = one.partition(" ")
    if name not in _COMPARED:
        return one, two
    return two_numbers(float(value), float(two), least=2)


def _alone(summary: Summary | None) -> str:
    if summary is None:
        return "(none)"
    if summary.status is Status.VALUE:
        return _plain(summary)
    return f"{shape(summary.layout.shape)} {_short_dtype(summary.layout.dtype)}"


def _shape(summary: Summary) -> str:
    return f"{summary.layout.numel} elements" if shapeless(summary) else shape(summary.layout.shape)


def _plain(summary: Summary) -> str:
    if summary.status is Status.VALUE:
        return clean(summary.text, 24)
    if summary.layout.numel == 1 and "mean" in summary.stats:
        return number(summary.stats["mean"])
    return f"{shape(summary.layout.shape)} {_short_dtype(summary.layout.dtype)}"


def _statistic(a: Summary, b: Summary) -> tuple[str, str]:
    """The statistic that moved most, against the spread of the values; the checksum where none moved visibly."""
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


def _details(result: DiffResult) -> list[Block]:
    """Of each listed divergence what differs, in two or three lines."""
    blocks: list[Block] = []
    for divergence in result.divergences:
        a, b = divergence.a, divergence.b
        title = f"{divergence.step_words}: {_what(divergence)} of {_module(divergence)}"
        blocks += [line(), line(title, "origin" if divergence.role is Role.ORIGIN else "heading")]
        if a is None or b is None:
            blocks.append(line(f"only in {'a' if b is None else 'b'}: {_alone(a or b)}", indent=2))
            continue
        told = statistics_words(divergence)
        if divergence.elements is not None:
            blocks.append(line(elements_words(divergence.elements), indent=2))
        if told:
            blocks.append(line(told, indent=2))
        elif divergence.elements is None:
            blocks.append(line(f"checksum {a.checksum:016x} -> {b.checksum:016x}", indent=2))
    return blocks


def statistics_words(divergence: Divergence) -> str:
    """What differs between the records of both runs: layout, value, statistics; "" where only one has the site."""
    a, b = divergence.a, divergence.b
    if a is None or b is None:
        return ""
    told = [
        f"{name} {one or '-'} -> {two or '-'}"
        for name, one, two in (
            ("shape", *((_shape(a), _shape(b)) if shapes_differ(a, b) else ("", ""))),
            ("dtype", a.layout.dtype, b.layout.dtype),
            ("device", a.layout.device, b.layout.device),
            ("value", clean(a.text, 60), clean(b.text, 60)),
        )
        if one != two
    ]
    told += [
        f"{name} {' -> '.join(two_numbers(a.stats[name], b.stats[name], 5, 17))}"
        for name in _TELLING
        if name in a.stats and name in b.stats and a.stats[name] != b.stats[name]
    ]
    return ", ".join(told)
