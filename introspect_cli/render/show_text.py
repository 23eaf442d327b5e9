"""One run as lines and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.labels import shown, step_words
from introspect_cli.records import Record, Status, count
from introspect_cli.render.blocks import Block, Column, Line, Table, line
from introspect_cli.render.text import brief_what, clean, number, shape, site_text, size, sparkline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.inspect.history import History
    from introspect_cli.inspect.module_tree import ModuleRow
    from introspect_cli.inspect.overview import Overview
    from introspect_cli.labels import Labels

_STATE_STYLE = {"complete": "good", "running": "unsure", "interrupted": "bad"}
_MOST_CELLS = 20
_SHOWN = (("mean", 0), ("std", 0), ("min", 5), ("max", 4))
"""Statistics in a step's table, and when each column is left out."""


def overview_blocks(run: Overview) -> list[Block]:
    """What a run is."""
    manifest = run.manifest
    facts = [
        ("run", run.path),
        ("ran", _command(manifest)),
        ("in", run.directory),
        ("on", run.machine),
        ("started", str(manifest.get("started", ""))),
        ("ended", _ending(run)),
        ("steps", _steps(run)),
        ("records", f"{run.records:,} at {count(run.sites, 'site')}, {size(run.size)} on disk"),
        ("model", f"{count(run.modules, 'module')}, {run.parameters:,} parameters" if run.modules else ""),
        ("first step", ", ".join(f"{amount} {kind}" for kind, amount in sorted(run.kinds.items(), key=_by_amount))),
    ]
    if run.labels:
        facts.insert(7, ("named", ", ".join(_named(*run.labels))))
    if len(run.ranks) > 1:
        facts.append(("ranks", f"{len(run.ranks)} ({run.ranks[0]} to {run.ranks[-1]})"))
    wide = max(len(name) for name, _ in facts)
    blocks: list[Block] = [
        Line(
            (
                (f"{name.rjust(wide)}  ", "dim"),
                (clean(text), _STATE_STYLE.get(run.state, "") if name == "ended" else ""),
            )
        )
        for name, text in facts
        if text
    ]
    told = manifest.get("not_observed")
    notes = [
        *run.endings,
        *(f"not held: {own}" for own in run.thinned),
        *(str(text) for text in (told if isinstance(told, (list, tuple)) else ())),
    ]
    if run.not_observed:
        notes.append(f"{count(run.not_observed, 'record')} of the first step could not be observed")
    blocks += [line(f"Note: {clean(text)}", "unsure") for text in notes]
    return blocks


def _by_amount(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _command(manifest: dict[str, Any]) -> str:
    argv = manifest.get("argv")
    words = [str(word) for word in argv] if isinstance(argv, (list, tuple)) else []
    return " ".join(words) or str(manifest.get("script", ""))


def _ending(run: Overview) -> str:
    manifest = run.manifest
    if run.state == "running":
        return "still being written"
    ended = str(manifest.get("ended") or "")
    if manifest.get("signal"):
        return f"by signal {manifest['signal']} {ended}".strip()
    if run.state == "interrupted":
        return f"interrupted {ended}".strip()
    code = "an exit code that was not seen"
    if manifest.get("exit_code") is not None:
        code = f"exit code {manifest['exit_code']}"
    raised = str(manifest.get("exception") or "")
    return f"{ended} by {raised} ({code})".strip() if raised else f"{ended} with {code}".strip()


def _steps(run: Overview) -> str:
    if not run.steps:
        return "none"
    if run.steps == 1:
        return f"1 (step {run.first_step})"
    return f"{run.steps} ({run.first_step} to {run.last_step})"


def _named(first: Labels, last: Labels) -> list[str]:
    """What a framework calls the first and the last step."""
    told = [str(last["framework"])] if "framework" in last else []
    told += [
        f"{name} {shown(first[name])} to {shown(last[name])}"
        for name in ("global_step", "epoch")
        if name in first and name in last
    ]
    if "accumulation" in last:
        told.append(f"{shown(last['accumulation'])} batches a step")
    return told


def tree_blocks(rows: Sequence[ModuleRow]) -> list[Block]:
    """The module tree."""
    columns = (
        Column("module", least=16),
        Column("class", least=10),
        Column("parameters", right=True),
        Column("output"),
        Column("dtype", drop_at=2),
        Column("std", right=True),
        Column("calls", right=True, drop_at=1),
    )
    cells, styles = [], []
    roots = [row for row in rows if "." not in row.info.fqn]
    for row in rows:
        fqn = row.info.fqn
        depth = fqn.count(".")
        name = fqn.rpartition(".")[2] if depth else fqn
        if row.info.variable and sum(other.info.module_class == row.info.module_class for other in roots) > 1:
            name += f" ({row.info.variable})"
        cells.append(
            (
                "  " * depth + clean(name),
                clean(row.info.module_class),
                f"{row.parameters:,}" if row.parameters else "",
                shape(row.shape) if row.shape is not None else "",
                row.dtype,
                number(row.scale, 3) if row.scale is not None else "",
                str(row.calls) if row.calls > 1 else "",
            )
        )
        styles.append("heading" if not depth else "")
        for value in row.values:
            own = "  " * (depth + value.depth)
            form = shape(value.shape) if value.shape is not None else ""
            scale = number(value.scale, 3) if value.scale is not None else ""
            cells.append((own + clean(value.name), clean(value.value_class), "", form, clean(value.dtype), scale, ""))
            styles.append("dim")
            if value.folded:
                cells.append((f"{own}... {value.folded} more like it", "", "", "", "", "", ""))
                styles.append("dim")
        if row.folded:
            cells.append(("  " * depth + f"... {row.folded} more like it", "", "", "", "", "", ""))
            styles.append("dim")
    if not cells:
        return [line("No module was recorded.")]
    return [Table(columns, tuple(cells), tuple(styles))]


def records_blocks(records: Sequence[Record], step: int, labels: Labels) -> list[Block]:
    """The records of one step, under what its framework calls it."""
    if not records:
        return [line(f"Step {step} has no record of what was selected.")]
    columns = (
        Column("phase", drop_at=3),
        Column("module", least=18),
        Column("what", least=12, brief=tuple(brief_what(record.site) for record in records), brief_at=4),
        Column("shape"),
        Column("dtype", drop_at=2),
        *(Column(name, right=True, drop_at=drop_at) for name, drop_at in _SHOWN),
        Column("checksum", drop_at=1),
    )
    rows, styles = [], []
    for record in records:
        site, kept = record.site, record.summary
        what = site_text(site)
        if kept.status is Status.OBSERVED:
            cells = [shape(kept.layout.shape), kept.layout.dtype]
        elif kept.status is Status.VALUE:
            cells = [clean(kept.text, _MOST_CELLS), kept.layout.dtype]
        else:
            cells = [kept.status.name.lower().replace("_", " "), kept.layout.dtype]
        cells += [number(kept.stats[name]) if name in kept.stats else "" for name, _ in _SHOWN]
        rows.append((site.phase.value, clean(site.fqn), what, *cells, f"{kept.checksum:016x}"))
        sick = kept.stats.get("nans", 0) or kept.stats.get("infs", 0)
        styles.append("hot" if sick else "dim" if kept.status is Status.NOT_OBSERVED else "")
    named = [line(step_words(step, labels).capitalize(), "heading")] if labels else []
    blocks: list[Block] = [*named, Table(columns, tuple(rows), tuple(styles))]
    unseen = {clean(r.summary.text, 100) for r in records if r.summary.status is Status.NOT_OBSERVED and r.summary.text}
    blocks += [line(f"Not observed: {text}", "unsure") for text in sorted(unseen)[:5]]
    return blocks


def history_blocks(histories: Sequence[History], stat: str, width: int, *, ascii_only: bool) -> list[Block]:
    """Sites over all steps: a sparkline and the numbers."""
    blocks: list[Block] = []
    for own in histories:
        known = [value for value in own.values if value is not None]
        span = f"{number(min(known))} to {number(max(known))}" if known else "no number"
        title = (
            f" {stat}: {span} over {count(len(own.steps), 'step')}"
            if not own.texts
            else f" over {count(len(own.steps), 'step')}"
        )
        blocks.append(Line(((clean(own.site), "heading"), (title, ""))))
        if known:
            room = max(min(width, 120) - 4, 10)
            blocks.append(line(sparkline(own.values, room, ascii_only=ascii_only), "name", 2, wrap=False))
        texts = own.texts or tuple(number(value, 5) for value in own.values)
        pairs = [f"{step}: {clean(text, 40)}" for step, text in zip(own.steps, texts, strict=True)]
        if len(pairs) > 2 * _MOST_CELLS:
            pairs = [*pairs[:_MOST_CELLS], f"... {len(pairs) - 2 * _MOST_CELLS} more ...", *pairs[-_MOST_CELLS:]]
        blocks.append(line("  ".join(pairs), "", 2))
    return blocks


def settings_blocks(settings: dict[str, Any]) -> list[Block]:
    """All settings, nested ones indented."""
    blocks: list[Block] = []
    for name, value in settings.items():
        blocks.append(line(clean(name), "heading"))
        blocks += _nested(value, 2)
    return blocks or [line("No settings were kept.")]


def _nested(value: Any, indent: int) -> list[Block]:
    if isinstance(value, dict):
        pairs = [(clean(str(key)), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        if not any(isinstance(item, (dict, list, tuple)) for item in value):
            return [line(", ".join(clean(str(item)) for item in value) or "(none)", "", indent)]
        pairs = [(str(place), item) for place, item in enumerate(value)]
    else:
        return [line(clean(str(value)), "", indent)]
    blocks: list[Block] = []
    for key, item in pairs:
        if isinstance(item, (dict, list, tuple)) and item:
            blocks.append(line(f"{key}:", "", indent))
            blocks += _nested(item, indent + 2)
        else:
            text = "(none)" if isinstance(item, (dict, list, tuple)) else clean(str(item))
            blocks.append(Line(((f"{key}: ", "dim"), (text, "")), indent))
    return blocks
