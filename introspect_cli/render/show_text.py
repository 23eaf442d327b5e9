"""One run as lines and tables, and a list of runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.say import some
from introspect_cli.inspect.runs import DEEPEST, RunList, RunRow, command_words
from introspect_cli.labels import Labels, label_words, step_words
from introspect_cli.records import Kind, Record, Status, Summary, perturbed_by
from introspect_cli.render.blocks import Block, Column, Line, line, number, shape, site_text, statistic, table_of
from introspect_cli.render.json import plain, to_yaml
from introspect_cli.texts import clean, count, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.inspect.module_tree import ModuleRow
    from introspect_cli.inspect.overview import History, Overview


_STATE_STYLE = {"complete": "good", "running": "unsure", "interrupted": "bad"}
_MOST_CELLS = 20
_SHOWN = (("mean", 0), ("std", 0), ("min", 5), ("max", 4))
"""Statistics in a step's table, and when each column is left out."""


def overview_blocks(run: Overview) -> list[Block]:
    """(name, value) lines and notes about a run or checkpoint."""
    facts = facts_of(run)
    wide = max(len(name) for name, _ in facts)
    styles = {"ended": _STATE_STYLE.get(run.state, "")}
    told = [((f"{name.rjust(wide)}  ", "dim"), (clean(text), styles.get(name, ""))) for name, text in facts if text]
    return [*(Line(spans, hang=wide + 2) for spans in told), *notes_of(run)]


def notes_of(run: Overview) -> list[Block]:
    """Notes on what a run lacks: steps, ranks, records."""
    notes = [*run.endings, *(f"not held: {clause}" for clause in run.thinned)]
    notes += map(str, run.manifest.get("not_observed", ()))
    if run.not_observed:
        notes.append(f"{count(run.not_observed, 'record')} of the first step could not be observed")
    return [line(f"Note: {clean(text)}", "unsure") for text in notes]


def facts_of(run: Overview) -> list[tuple[str, str]]:
    """(name, value) pairs about a run or checkpoint; some values are ""."""
    manifest = run.manifest
    if isinstance(manifest.get("checkpoint"), dict):
        return _facts_of_checkpoint(run)
    kinds, seed = sorted(run.kinds.items(), key=lambda item: (-item[1], item[0])), perturbed_by(manifest)
    named = [str(labels["framework"]) for labels in run.labels[:1] if "framework" in labels]
    ends = [words for words in (label_words(-1, labels) for labels in run.labels) if words]
    return [
        ("run", run.path),
        ("ran", " ".join(command_words(manifest))),
        ("in", run.directory),
        ("on", run.machine),
        ("started", _time(manifest, "started")),
        ("imported", f"from {source}" if (source := manifest.get("imported_from")) else ""),
        ("ended", "" if source else _ending(run)),
        ("named", ", ".join(named + ([" to ".join(ends)] if ends else []))),
        ("steps", _steps(run)),
        ("records", f"{run.records:,} at {count(run.sites, 'site')}, {human_size(run.size)}"),
        ("model", f"{count(run.modules, 'module')}, {run.parameters:,} parameters" if run.modules else ""),
        ("seen", f"calls of {count(run.called, 'module')}{_unseen(manifest)}" if run.called else ""),
        ("perturbed", "" if seed is None else f"the initial parameters were moved by one rounding (--perturb {seed})"),
        ("first step", ", ".join(f"{amount} {kind}" for kind, amount in kinds)),
        ("ranks", f"{len(run.ranks)} ({run.ranks[0]} to {run.ranks[-1]})" if len(run.ranks) > 1 else ""),
    ]


def _unseen(manifest: dict[str, Any]) -> str:
    """`; 2 modules ran without being seen: ...`; "" where none did."""
    unseen = manifest.get("ran_unseen")
    names = list(map(clean, unseen)) if isinstance(unseen, dict) else []
    return f"; {count(len(names), 'module')} ran without being seen: {some(names, _NAMED)}" if names else ""


def _facts_of_checkpoint(run: Overview) -> list[tuple[str, str]]:
    """(name, value) pairs about a checkpoint."""
    kinds = sorted(Kind, key=lambda kind: kind is Kind.RNG)
    parts = [(kind, run.kinds[kind.value]) for kind in kinds if kind.value in run.kinds]
    return [
        ("checkpoint", run.path),
        ("holds", ", ".join(f"{kind.several}: {amount:,}" for kind, amount in parts)),
        ("elements", f"{run.parameters:,} in all parameters" if run.parameters else ""),
        ("size", human_size(run.size)),
        ("its tensors", "introspect show step 0 CHECKPOINT lists them, show settings its plain values"),
    ]


def _time(manifest: dict[str, Any], name: str) -> str:
    """When a run `started` or `ended` (`name`), to the second; "" where the manifest does not say."""
    return re.sub(r"\.\d+", "", str(manifest.get(name) or ""))


def _ending(run: Overview) -> str:
    """How a run ended, in words: when, by what signal or exception, with which exit code.

    Or that it is still being written, or was interrupted.
    """
    manifest = run.manifest
    if run.state == "running":
        return "still being written"
    ended = _time(manifest, "ended")
    if manifest.get("signal"):
        return f"by signal {manifest['signal']} {ended}".strip()
    if run.state == "interrupted":
        return f"interrupted {ended}".strip()
    raised = f" by {manifest['exception']}" if manifest.get("exception") else ""
    return f"{ended}{raised} with exit code {manifest.get('exit_code', 'unknown')}".strip()


def _steps(run: Overview) -> str:
    """How many steps a run has, from which to which, and what came after the last one."""
    whole = run.manifest.get("how") == "returned" or run.manifest.get("exit_code") == 0
    after = f"; the last {'has what came after training' if whole else 'did not end'}"
    after = after if run.manifest.get("remainder") else ""
    return f"{run.steps} ({run.first_step} to {run.last_step}{after})" if run.steps else "none"


def tree_blocks(rows: Sequence[ModuleRow]) -> list[Block]:
    """The module tree as one table; a line where no module was recorded."""
    roots = [row.info.module_class for row in rows if "." not in row.info.fqn]

    def name(row: ModuleRow) -> str:
        """The last part of the name, indented; the variable of one of several roots; how many the row stands for."""
        own = f"{'  ' * row.info.fqn.count('.')}{clean(row.info.fqn.rpartition('.')[2])}"
        is_twin = row.info.variable and roots.count(row.info.module_class) > 1
        twin = f" ({clean(row.info.variable)})" if is_twin else ""
        return f"{own}{twin}{f' and {row.folded} more like it' if row.folded else ''}"

    columns: list[tuple[Column, Callable[[ModuleRow], str]]] = [
        (Column("module", least=16), name),
        (Column("class", least=10), lambda row: clean(row.info.module_class)),
        (Column("parameters", right=True), lambda row: f"{row.parameters:,}" if row.parameters else ""),
        (Column("output"), lambda row: "" if row.shape is None else shape(row.shape)),
        (Column("dtype", drop_at=2), lambda row: row.dtype),
        (Column("std", right=True), lambda row: "" if row.scale is None else number(row.scale, 3)),
        (Column("calls", right=True, drop_at=1), lambda row: str(row.calls) if row.calls > 1 else ""),
    ]
    table = table_of(rows, columns, lambda row: "" if "." in row.info.fqn else "heading")
    return [table if rows else line("No module was recorded.")]


def records_blocks(records: Sequence[Record], step: int, labels: Labels) -> list[Block]:
    """The records of one step as a table, under what its framework calls it; a line where there are none.

    Then up to 5 reasons why some were not observed.
    """
    if not records:
        return [line(f"Step {step} has no record of what was selected.")]

    def statistics(name: str) -> Callable[[Record], str]:
        return lambda record: statistic(record.summary, name)

    columns: list[tuple[Column, Callable[[Record], str]]] = [
        (Column("phase", drop_at=3), lambda record: record.site.phase.value),
        (Column("module", least=18), lambda record: clean(record.site.fqn)),
        (Column("what", least=12), lambda record: site_text(record.site)),
        (Column("shape"), lambda record: _seen(record.summary)),
        (Column("dtype", drop_at=2), lambda record: record.summary.layout.dtype),
        *((Column(name, right=True, drop_at=drop_at), statistics(name)) for name, drop_at in _SHOWN),
        (Column("checksum", drop_at=1), lambda record: f"{record.summary.checksum:016x}"),
    ]
    named = [line(step_words(step, labels).capitalize(), "heading")] if labels else []
    unseen = {clean(r.summary.text, 100) for r in records if r.summary.status is Status.NOT_OBSERVED and r.summary.text}
    notes = [line(f"Not observed: {text}", "unsure") for text in sorted(unseen)[:5]]
    return [*named, table_of(records, columns, _record_style), *notes]


def _seen(summary: Summary) -> str:
    """A record's shape, its plain value, or its status in words."""
    if summary.status is Status.OBSERVED:
        return shape(summary.layout.shape)
    if summary.status is Status.VALUE:
        return clean(summary.text, _MOST_CELLS)
    return summary.status.name.lower().replace("_", " ")


def _record_style(record: Record) -> str:
    """The style of a record's row: `hot` with NaN or infinities, `dim` where it was not observed."""
    stats = record.summary.stats
    if stats.get("nans", 0) or stats.get("infs", 0):
        return "hot"
    return "dim" if record.summary.status is Status.NOT_OBSERVED else ""


_ENDS = 20


def history_blocks(histories: Sequence[History], stat: str) -> list[Block]:
    """For each site a heading and one paragraph of its values, or texts: all, or the first and the last `_ENDS`."""
    blocks: list[Block] = []
    for history in histories:
        numbers = [value for value in history.values if value is not None]
        span = f"{number(min(numbers))} to {number(max(numbers))}" if numbers else "no number"
        title = f"{'' if history.texts else f' {stat}: {span}'} over {count(len(history.steps), 'step')}"
        blocks.append(Line(((clean(history.site), "heading"), (title, ""))))
        texts = history.texts or tuple(number(value, 5) for value in history.values)
        pairs = [f"{step}: {clean(text, 40)}" for step, text in zip(history.steps, texts, strict=True)]
        if len(pairs) > 2 * _ENDS:
            pairs = [*pairs[:_ENDS], f"... {len(pairs) - 2 * _ENDS} more ...", *pairs[-_ENDS:]]
        blocks.append(line("  ".join(pairs), "", 2))
    return blocks


def settings_blocks(settings: dict[str, Any]) -> list[Block]:
    """All settings, as lines of YAML; a line where none were kept."""
    if not settings:
        return [line("No settings were kept.")]
    return [line(clean(row), wrap=False) for row in to_yaml(plain(settings)).splitlines()]


_STYLES = {"complete": "", "running": "unsure", "unreadable": "unsure"}
_NAMED = 3


def runs_blocks(search: RunList, places: Sequence[str]) -> list[Block]:
    """A table of runs in their order, a total, and directories that were not searched; a line where there is no run."""
    rows, named = search.runs, some([clean(str(path), 200) for path in search.not_searched], _NAMED)
    why = f"not readable, or more than {DEEPEST} levels down: name one further down"
    unseen = [line(f"Not searched: {named} ({why}).", "unsure")] if search.not_searched else []
    if not rows:
        return [line(f"No runs {'found ' * bool(unseen)}below {', '.join(map(clean, places))}."), *unseen]
    columns: list[tuple[Column, Callable[[RunRow], str]]] = [
        (Column("run", least=16), lambda row: clean(str(row.path))),
        (Column("started (UTC)", drop_at=4), lambda row: f"{row.started:%Y-%m-%d %H:%M}" if row.started else ""),
        (Column("steps", right=True), lambda row: f"{row.steps:,}"),
        (Column("size", right=True, drop_at=1), lambda row: human_size(row.size)),
        (Column("ended"), lambda row: row.ended),
        (Column("why", drop_at=2), lambda row: clean(row.detail, 60)),
        (Column("ran", least=12, drop_at=3), lambda row: clean(row.script, 80)),
        (Column("perturbed"), lambda row: "" if row.perturbed is None else f"--perturb {row.perturbed}"),
    ]
    total = f"{count(len(rows), 'run')}, {human_size(sum(row.size for row in rows))}"
    table = table_of(rows, columns, lambda row: _STYLES.get(row.ended, "bad"))
    return [table, line(), line(total, "dim"), *unseen]
