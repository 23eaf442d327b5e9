"""`introspect show`: what is in a run."""

from __future__ import annotations

from typing import Any

import click

from introspect_cli.commands.shared import RunType, answer, formats, last_runs, selecting, selection_of
from introspect_cli.exit_codes import SAME


@click.command(
    epilog="""\b
Examples:
  introspect show runA
  introspect show runA --tree --depth 2
  introspect show runA --step 3 --kinds output,loss --modules 'blocks.*'
  introspect show runA --step epoch=3,batch=12
  introspect show --history 'blocks.*.attn' --kinds grad --stat l2 runA runB
  introspect show runA --values blocks.0.mlp --step 3""",
)
@click.argument("run", type=RunType(), required=False)
@click.argument("run_b", type=RunType(), required=False)
@click.option("--tree", is_flag=True, help="Modules as a tree: class, parameters, output, nested values.")
@click.option("--unfold", is_flag=True, help="With --tree: repeated layers one by one.")
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --tree: show N levels below the root, of modules and values.",
)
@click.option("--graph", is_flag=True, help="Operators of one step and what flows between them (capture --level op).")
@click.option(
    "--prune/--no-prune", default=True, help="With --graph: leave out middle layers and operators that keep the scale."
)
@click.option("--target", multiple=True, metavar="GLOB", help="With --graph: only modules or operators of that name.")
@click.option("-o", "--output", type=click.Path(), help="With --graph: draw into this file, .svg or .html.")
@click.option("--step", metavar="STEP", help="Records of one step (3, or epoch=1,batch=12); with --values, where.")
@click.option(
    "--history", metavar="FQN", help="One site over all steps, of two runs side by side; a glob selects several."
)
@click.option("--values", metavar="FQN", help="The stored values of a site (capture --save-tensors).")
@click.option("--stat", metavar="NAME", default="mean", show_default=True, help="With --history: which statistic.")
@selecting("kinds", "modules")
@click.option("--settings", is_flag=True, help="Everything that is not a tensor: versions, flags, environment.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Show this rank [default: the first].")
@formats()
def show(run: str | None, run_b: str | None, format_: str, **asked: Any) -> int:
    """Show what ran, on what, how it ended, and what was recorded.

    Without RUN, the last one below introspect-runs/ is shown. With --history, RUN_B is shown beside RUN.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import opened

    if run_b is not None and not asked["history"]:
        raise UsageError("two runs are shown side by side with --history alone; `introspect diff` compares them.")
    if asked["graph"]:
        return _graph(run or last_runs(1)[0], format_, asked)
    if asked["output"] or asked["target"] or not asked["prune"]:
        raise UsageError("-o, --target and --no-prune belong to --graph; give it with them.")
    if asked["depth"] is not None and not asked["tree"]:
        raise UsageError("--depth belongs to --tree; give it with it.")
    given = {name for name, value in asked.items() if value is not None and value is not False and value != ()}
    views = [name for name in ("tree", "values", "step", "history", "settings") if name in given]
    if views == ["values", "step"]:
        views = ["values"]
    if len(views) > 1:
        raise UsageError(f"--{views[0]} and --{views[1]} show different things; ask for one at a time.")
    view = views[0] if views else ""
    for name, takers in (("kinds", ("step", "history", "values")), ("modules", ("step",))):
        if name in given and view not in takers:
            raise UsageError(f"--{name} narrows --{' and --'.join(takers)}: give one of these with it.")
    with opened(run or last_runs(1)[0], *([] if run_b is None else [run_b])) as runs:
        document, blocks = _two(runs, asked) if len(runs) > 1 else _view(runs[0], view, asked)
    answer(format_, document, blocks)
    return SAME


def _graph(run: str, format_: str, asked: dict[str, Any]) -> int:
    """Operators of a step as a table, or drawn into a file."""
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.inspect.data_flow import graph_of, prune
    from introspect_cli.render.graph import draw, graph_blocks
    from introspect_cli.render.json import graph_document
    from introspect_cli.selection import one_step

    with open_any(run) as opened:
        step = None if asked["step"] is None else one_step(asked["step"], opened, asked["rank"])
        graph = graph_of(opened, step, asked["rank"])
    if asked["prune"] or asked["target"]:
        graph = prune(graph, tuple(asked["target"]), scales=asked["prune"], layers=asked["prune"])
    if asked["output"]:
        draw(graph, asked["output"], f"{run}: operators")
    else:
        answer(format_, lambda: graph_document(graph), lambda _: graph_blocks(graph))
    return SAME


def _view(run: Any, view: str, asked: dict[str, Any]) -> tuple[Any, Any]:
    """What was asked for, read from the run: one function makes its document, the other its blocks."""
    from introspect_cli.inspect import module_tree, overview
    from introspect_cli.render import json, plots_text, show_text
    from introspect_cli.selection import check_selection, one_step

    rank = asked["rank"]
    step = None if asked["step"] is None else one_step(asked["step"], run, rank)
    chosen = check_selection(selection_of(asked), [run])
    if view == "tree":
        rows = module_tree.module_tree(run, fold=not asked["unfold"], rank=rank, depth=asked["depth"])
        return lambda: json.tree_document(rows), lambda _: show_text.tree_blocks(rows)
    if view == "step" and step is not None:
        records = overview.step_records(run, step, chosen, rank=rank)
        labels = overview.reader_of(run, rank).labels.get(step, {})
        return (
            lambda: json.records_document(records, step, labels),
            lambda _: show_text.records_blocks(records, step, labels),
        )
    if view == "history":
        stat = asked["stat"]
        series = overview.histories(run, asked["history"], stat, chosen.kinds, rank=rank)
        return (
            lambda: json.history_document(series, stat),
            lambda screen: plots_text.history_blocks(series, stat, screen.width, ascii_only=not screen.unicode),
        )
    if view == "values":
        from introspect_cli.render.values_text import values_blocks

        stored = overview.stored_values(run, asked["values"], chosen, step=step, rank=rank)
        return lambda: json.values_document(stored), lambda screen: values_blocks(stored, screen.width)
    if view == "settings":
        settings = dict(run.settings)
        return lambda: json.settings_document(settings), lambda _: show_text.settings_blocks(settings)
    about = overview.overview(run)
    return lambda: json.overview_document(about), lambda _: show_text.overview_blocks(about)


def _two(runs: list[Any], asked: dict[str, Any]) -> tuple[Any, Any]:
    """Histories of two runs side by side."""
    from introspect_cli.inspect.overview import histories, paired
    from introspect_cli.render.json import history_document
    from introspect_cli.render.plots_text import pair_blocks
    from introspect_cli.selection import check_selection

    stat, rank = asked["stat"], asked["rank"]
    chosen = check_selection(selection_of(asked), runs)
    series = [histories(run, asked["history"], stat, chosen.kinds, rank=rank) for run in runs]
    return (
        lambda: {
            name: history_document(histories_of_run, stat) for name, histories_of_run in zip("ab", series, strict=True)
        },
        lambda screen: pair_blocks(paired(*series), stat, screen.width, ascii_only=not screen.unicode),
    )
