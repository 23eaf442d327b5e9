"""`introspect report`: one self-contained page about a run, or two."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, last_runs, say, selecting, selection_of
from introspect_cli.commands.shared import rtol as tolerated
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.compare.element.closeup import Closeup
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.inspect.data_flow import Graph
    from introspect_cli.records import Record
    from introspect_cli.render.html_parts import OpRow
    from introspect_cli.render.page_data import Page
    from introspect_cli.store.reader import Run


@click.command(
    short_help="Write a page about one run, or about two.",
    epilog="""\b
Examples:
  introspect report --open                      (the last run, in the browser)
  introspect report runA -o report.html
  introspect report runA runB --noise runA2 -o report.html
  introspect report runA runB --modules 'blocks.*' -o blocks.html""",
)
@click.argument("run", type=RunType(), required=False)
@click.argument("run_b", type=RunType(), required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option("--open", "browse", is_flag=True, help="Open it in the browser; without -o, a temporary file.")
@click.option("--noise", multiple=True, type=RunType(), help="A run that should equal RUN; drawn as a band.")
@tolerated
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@selecting("steps", "kinds", "modules", "ranks")
def report(
    run: str | None,
    run_b: str | None,
    output: Path | None,
    *,
    browse: bool,
    noise: tuple[str, ...],
    rtol: float,
    force: bool,
    **asked: Any,
) -> int:
    """Make a page about RUN, or about RUN and RUN_B; without them, about the last run below introspect-runs/.

    The page is one file that needs no network: the answer of `diff`, the losses, every module's distance over the
    steps, the divergence map, histories, scales along the depth, and the findings of `check`. What is selected narrows
    the comparison; the curves stay.
    """
    from contextlib import ExitStack

    from introspect_cli.compare.moment import is_checkpoint
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.records import human_size
    from introspect_cli.render.blocks import write_whole
    from introspect_cli.render.html import page_html

    if output is None and not browse:
        raise UsageError("say where the page goes: -o report.html, or --open to see it in the browser")
    if output is not None and output.exists() and not force:
        raise UsageError(f"{output} exists: choose another name with -o, or --force to replace it")
    selection = selection_of(asked)
    if selection.narrowed and run_b is None:
        raise UsageError("--steps, --kinds, --modules and --ranks narrow a comparison: name two runs with them")
    with ExitStack() as stack:
        named = [run or last_runs(1)[0], *([run_b] if run_b else [])]
        opened = [stack.enter_context(open_any(path)) for path in named]
        if run_b is None and is_checkpoint(opened[0]):
            held = f"`introspect show {named[0]} --step 0` lists what is in it"
            raise UsageError(f"{named[0]} is a checkpoint, which has no course to draw: {held}; or name two")
        others = [stack.enter_context(open_any(path)) for path in noise]
        text = page_html(_page(opened, others, DiffOptions(**vars(selection), want_map=True, limit=200, rtol=rtol)))
    if output is None:
        output = Path(tempfile.mkdtemp(prefix="introspect-")) / "report.html"
    try:
        write_whole(output, text)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another name with -o") from None
    say(f"wrote {output} ({human_size(len(text.encode()))})")
    if browse and not webbrowser.open(output.resolve().as_uri()):
        say(f"no browser could be opened here: open {output} in one", err=True)
    return SAME


def page_of(run: str | Path) -> str:
    """The page about one run, as HTML."""
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.render.html import page_html

    with open_any(run) as opened:
        return page_html(_page([opened], [], DiffOptions()))


def _page(runs: list[Run], noise: list[Run], options: DiffOptions) -> Page:
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.moment import as_moments
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.exchange.checkpoints import written
    from introspect_cli.health.check import check_tables
    from introspect_cli.health.curves import curves, depth
    from introspect_cli.health.history import pack
    from introspect_cli.health.reading import read_table
    from introspect_cli.records import Kind
    from introspect_cli.render.page_data import Page

    result = compare_runs(*as_moments(runs[0], runs[1], written), options, noise) if len(runs) > 1 else None
    first = result.first if result is not None else None
    common = [rank for rank in runs[0].ranks if all(rank in run.ranks for run in (*runs, *noise))]
    rank = first.rank if first is not None else common[0] if common else 0
    tables = [{number: read_table(run.rank(number)) for number in run.ranks} for run in runs]
    drawn = [by_rank[rank] for by_rank in tables if rank in by_rank]
    drawn += [read_table(run.rank(rank)) for run in noise if rank in run.ranks]
    shifts = [0, first.step - first.step_b] if first is not None else []
    depths: list[tuple[str, Any]] = []
    for letter, by_rank in zip("ab", tables, strict=False):
        for direction, kind in (("forward", Kind.OUTPUT), ("gradient", Kind.GRAD_OUTPUT)):
            scales = depth(by_rank[rank], kind) if rank in by_rank else None
            if scales is not None and scales.names:
                depths.append((f"{letter} {direction}", scales))
    step = first.step if first is not None else runs[0].last_step
    ops = _ops(runs, rank, step, step - shifts[1] if shifts and step is not None else step)
    bare = DiffOptions(**{**vars(options), "limit": 0})
    return Page(
        paths=tuple(str(run.path) for run in runs),
        facts=tuple(_facts(run) for run in runs),
        result=result,
        checks=tuple(
            check_tables(str(run.path), list(by_rank.values())) for run, by_rank in zip(runs, tables, strict=True)
        ),
        curves=tuple(
            curves(by_rank[rank], shift) if rank in by_rank else ()
            for by_rank, shift in zip(tables, [*shifts, 0, 0], strict=False)
        ),
        history=pack(drawn, first.step if first is not None else None, shifts, compared=len(runs) > 1),
        depths=tuple(depths),
        noise=tuple(compare_runs(runs[0], run, bare).map for run in noise),
        ops=ops,
        ops_step=step or 0,
        closeups=_closeups(runs, result, options) if result is not None else (),
        graph=_graph(runs, rank, step) if ops and step is not None else None,
    )


def _closeups(runs: list[Run], result: DiffResult, options: DiffOptions) -> tuple[Closeup, ...]:
    """The first divergences element by element, where one of them was stored whole."""
    from dataclasses import replace

    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.element.closeup import closeup, worth_a_look
    from introspect_cli.schedule.rules import Schedule

    first = result.first
    if first is None or not any(first.step in run.rank(first.rank) for run in runs[:1]):
        return ()
    only = replace(options, steps=Schedule.only(first.step), limit=None, want_map=False)
    return tuple(
        closeup(runs[0], runs[1], divergence) for divergence in worth_a_look(compare_runs(runs[0], runs[1], only))
    )


def _graph(runs: list[Run], rank: int, step: int) -> Graph | None:
    """The dataflow of a step of run a, marked with what diverges from b; None where it has no operators."""
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.errors import UsageError
    from introspect_cli.inspect.data_flow import graph_of, prune
    from introspect_cli.render.graph import marked
    from introspect_cli.schedule.rules import Schedule

    try:
        graph = graph_of(runs[0], step, rank)
    except UsageError:
        return None
    if len(runs) > 1:
        only = DiffOptions(steps=Schedule.only(step), ranks=(rank,), limit=None)
        graph = marked(graph, compare_runs(runs[0], runs[1], only))
    return prune(graph)


def _ops(runs: list[Run], rank: int, step: int | None, step_b: int | None) -> tuple[OpRow, ...]:
    """Operators of one step, those of run a in their order, then those that only run b has."""
    from introspect_cli.records import Kind
    from introspect_cli.render.html_parts import OpRow

    sides: list[dict[Any, Any]] = []
    for run, number in zip(runs, (step, step_b), strict=False):
        recorded = number is not None and rank in run.ranks and number in run.rank(rank)
        records = run.rank(rank).records(number) if recorded and number is not None else ()
        sides.append({record.site: record for record in records if record.site.kind is Kind.OP_OUTPUT})
    a, b = sides[0], sides[1] if len(sides) > 1 else {}
    rows = []
    for site in dict.fromkeys([*a, *b]):
        one, two = a.get(site), b.get(site)
        record: Record = one if one is not None else b[site]
        state = ""
        if len(runs) > 1:
            same = one and two and one.summary.checksum == two.summary.checksum
            state = "equal" if same else "differs" if one and two else "only in a" if one else "only in b"
        layout = record.summary.layout
        described = f"{'x'.join(map(str, layout.shape)) or 'scalar'} {layout.dtype}"
        means = [side.summary.stats.get("mean") if side else None for side in (one, two)]
        name = site.path or record.info.op
        rows.append(OpRow(name, site.fqn, site.phase.value, record.info.source, described, means[0], means[1], state))
    return tuple(rows)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    """What ran, on what, how it ended."""
    manifest = run.manifest
    runtime = run.settings.get("runtime")
    argv = manifest.get("argv")
    facts = {
        "command": " ".join(map(str, argv)) if isinstance(argv, list) else manifest.get("imported_from", ""),
        "state": run.state.value,
        "exit code": manifest.get("exit_code", ""),
        "exception": manifest.get("exception", ""),
        "started": manifest.get("started", ""),
        "ended": manifest.get("ended", ""),
        "steps": max((len(run.rank(rank)) for rank in run.ranks), default=0),
        "ranks": len(run.ranks),
        "not observed": "; ".join(map(str, manifest.get("not_observed") or ())),
    }
    if isinstance(runtime, dict):
        facts |= {name: runtime[name] for name in ("python", "torch", "cuda") if runtime.get(name)}
    return tuple((name, str(value)) for name, value in facts.items() if value not in ("", None))
