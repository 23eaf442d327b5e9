"""What the page about one run, or two, is made of: read from the runs, compared, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.checkpoints import as_moments
from introspect_cli.compare.closeup import Closeup, closeup, worth_a_look
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions
from introspect_cli.errors import UsageError
from introspect_cli.exchange.checkpoints import written
from introspect_cli.health.check import check_tables
from introspect_cli.health.history import curves, depth, pack
from introspect_cli.health.table import read_table
from introspect_cli.inspect.data_flow import Graph, graph_of, prune
from introspect_cli.inspect.overview import overview
from introspect_cli.records import Kind
from introspect_cli.render.graph import mark_ops
from introspect_cli.render.html import page_html
from introspect_cli.render.page_data import Page
from introspect_cli.schedule.rules import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.store.run import Run


def page_of(runs: list[Run], noise: Sequence[Run], options: DiffOptions) -> str:
    """The page about one run, or two that are compared, as HTML.

    Of one rank it draws curves: that of the first divergence, else the first that all runs have. Operators are those of
    one step: that of the first divergence, else the last.

    Args:
        runs: one run, or a and b.
        noise: repeats of a.
        options: of the comparison; curves show all steps whatever it selects.
    """
    result = compare_runs(*as_moments(runs[0], runs[1], written), options, noise) if len(runs) > 1 else None
    first = result.first if result is not None else None
    common = [rank for rank in runs[0].ranks if all(rank in run.ranks for run in (*runs, *noise))]
    rank = first.rank if first is not None else common[0] if common else 0
    tables = [{number: read_table(run.rank(number)) for number in run.ranks} for run in runs]
    of_rank = [by_rank.get(rank) for by_rank in tables]
    drawn = [table for table in of_rank if table is not None]
    drawn += [read_table(run.rank(rank)) for run in noise if rank in run.ranks]
    shifts = [0, first.step - first.step_b] if first is not None else []
    depths: list[tuple[str, Any]] = []
    for letter, table in zip("ab", of_rank, strict=False):
        for direction, kind in (("forward", Kind.OUTPUT), ("gradient", Kind.GRAD_OUTPUT)):
            if table is not None and (scales := depth(table, kind)).names:
                depths.append((f"{letter} {direction}", scales))
    step = first.step if first is not None else runs[0].last_step
    pairs = zip(runs, tables, strict=True)
    shifted = zip(of_rank, [*shifts, 0, 0], strict=False)
    page = Page(
        runs=tuple(map(overview, runs)),
        result=result,
        checks=tuple(check_tables(str(run.path), list(by_rank.values())) for run, by_rank in pairs),
        curves=tuple(curves(table, shift) if table is not None else () for table, shift in shifted),
        history=pack(drawn, first.step if first is not None else None, shifts, compared=len(runs) > 1),
        depths=tuple(depths),
        noise=tuple(compare_runs(runs[0], run, replace(options, limit=0)).map for run in noise),
        closeups=_closeups(runs, result, options) if result is not None else (),
        graph=_graph(runs, rank, step) if step is not None else None,
    )
    return page_html(page)


def _closeups(runs: list[Run], result: DiffResult, options: DiffOptions) -> tuple[Closeup, ...]:
    """Closeups of the divergences of the first diverging step that `worth_a_look` chooses.

    () where nothing diverges, or a does not have the step.
    """
    first = result.first
    if first is None or first.step not in runs[0].rank(first.rank):
        return ()
    only = replace(options, steps=Schedule.only(first.step), limit=None, want_map=False)
    near = worth_a_look(compare_runs(runs[0], runs[1], only))
    return tuple(closeup(runs[0], runs[1], divergence) for divergence in near)


def _graph(runs: list[Run], rank: int, step: int) -> Graph | None:
    """The dataflow of a rank's step, as `graph_at` gives it; None where the step has no operators or is not there."""
    try:
        return graph_at(runs, step, DiffOptions(ranks=Schedule.only(rank)), rank)
    except UsageError:  # it has no operators
        return None


def graph_at(runs: Sequence[Run], step: int, options: DiffOptions, rank: int | None = None) -> Graph:
    """The dataflow of a step of the first run, pruned; where there is a second run, operators that diverge are marked.

    Args:
        runs: one run, or a and b.
        step: number of the step in a.
        options: of the comparison of that step.
        rank: whose dataflow; None for the first.

    Raises:
        UsageError: the run has no such step, or no operators in it.
    """
    graph = graph_of(runs[0], step, rank)
    if len(runs) > 1:
        graph = mark_ops(graph, compare_runs(runs[0], runs[1], replace(options, steps=Schedule.only(step), limit=None)))
    return prune(graph)
