"""`introspect show`: what is in a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, Selecting, answer, formats, last_runs, selecting
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.store.read.run import Run

_RUN = "run"


class _Views(click.Group):
    """`show` alone, or with a run, is `show run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the view first where none is named: also where `run` is what somebody called a run."""
        help_asked = args[:1] and args[0] in ("-h", "--help")
        named = not any(not word.startswith("-") for word in args[1:]) and Path(_RUN).exists()
        if not help_asked and (not args or args[0] not in self.commands or (args[0] == _RUN and named)):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_Views,
    subcommand_metavar="[run|tree|step|history|values|graph|settings] ...",
    epilog="""\b
Examples:
  introspect show runA
  introspect show tree runA --depth 2
  introspect show step 3 runA --kinds output,loss --modules 'blocks.*'
  introspect show step epoch=3,batch=12 runA
  introspect show history 'blocks.*.attn' runA runB --kinds grad --stat l2
  introspect show values blocks.0.mlp runA --step 3""",
)
def show() -> None:
    """Show what ran, on what, how it ended, and what was recorded.

    Without a run, each shows the last one below introspect-runs/.
    """


_run = click.argument("run", type=RunType(), required=False)
_rank = click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Show this rank [default: the first].")


def _opened(stack: ExitStack, run: str | None) -> Run:
    """The run that is named, or the last one, open until the stack is closed."""
    from introspect_cli.exchange.checkpoints import open_any

    return stack.enter_context(open_any(run or last_runs(1)[0]))


@show.command()
@_run
@formats()
def run(run: str | None, format_: str) -> int:
    """What ran, on what, with which options, how it ended, and what was recorded."""
    from introspect_cli.inspect.overview import overview
    from introspect_cli.render.json import overview_document
    from introspect_cli.render.show_text import overview_blocks

    with ExitStack() as stack:
        about = overview(_opened(stack, run))
    answer(format_, lambda: overview_document(about), lambda: overview_blocks(about))
    return SAME


@show.command()
@_run
@click.option("--unfold", is_flag=True, help="Repeated layers one by one.")
@click.option(
    "--depth", type=click.IntRange(min=0), metavar="N", help="N levels below the root, of modules and values."
)
@_rank
@formats()
def tree(run: str | None, format_: str, *, unfold: bool, depth: int | None, rank: int | None) -> int:
    """Modules as a tree: class, parameters, output, nested values."""
    from introspect_cli.inspect.module_tree import module_tree
    from introspect_cli.render.json import tree_document
    from introspect_cli.render.show_text import tree_blocks

    with ExitStack() as stack:
        rows = module_tree(_opened(stack, run), fold=not unfold, rank=rank, depth=depth)
    answer(format_, lambda: tree_document(rows), lambda: tree_blocks(rows))
    return SAME


@show.command()
@click.argument("step")
@_run
@selecting("kinds", "modules")
@_rank
@formats()
def step(step: str, run: str | None, selected: Selecting, format_: str, *, rank: int | None) -> int:
    """Records of one STEP: 3, or as its framework calls it, epoch=1,batch=12."""
    from introspect_cli.inspect.overview import reader_of, step_records
    from introspect_cli.render.json import records_document
    from introspect_cli.render.show_text import records_blocks
    from introspect_cli.selection import check_selection, one_step

    with ExitStack() as stack:
        opened = _opened(stack, run)
        number = one_step(step, opened, rank)
        records = step_records(opened, number, check_selection(selected.read(), [opened]), rank=rank)
        labels = reader_of(opened, rank).labels.get(number, {})
    answer(
        format_,
        lambda: records_document(records, number, labels),
        lambda: records_blocks(records, number, labels),
    )
    return SAME


@show.command()
@click.argument("fqn")
@_run
@click.argument("run_b", type=RunType(), required=False)
@click.option("--stat", metavar="NAME", default="mean", show_default=True, help="Which statistic.")
@selecting("kinds")
@_rank
@formats()
def history(
    fqn: str, run: str | None, run_b: str | None, selected: Selecting, stat: str, format_: str, *, rank: int | None
) -> int:
    """One site, or those of a glob, over all steps; of two runs side by side."""
    from introspect_cli.inspect.overview import histories, paired
    from introspect_cli.render.json import history_document
    from introspect_cli.render.plots_text import history_blocks, pair_blocks
    from introspect_cli.selection import check_selection

    with ExitStack() as stack:
        runs = [_opened(stack, run), *([] if run_b is None else [_opened(stack, run_b)])]
        kinds = check_selection(selected.read(), runs).kinds
        series = [histories(each, fqn, stat, kinds, rank=rank) for each in runs]

    def document() -> Any:
        by_run = [history_document(each, stat) for each in series]
        return by_run[0] if len(by_run) == 1 else dict(zip("ab", by_run, strict=True))

    def blocks() -> Any:
        return history_blocks(series[0], stat) if len(series) == 1 else pair_blocks(paired(series[0], series[1]), stat)

    answer(format_, document, blocks)
    return SAME


@show.command()
@click.argument("fqn")
@_run
@click.option("--step", metavar="STEP", help="Where: a step, or the first that has some.")
@selecting("kinds")
@_rank
@formats()
def values(fqn: str, run: str | None, selected: Selecting, step: str | None, format_: str, *, rank: int | None) -> int:
    """The stored values of a site (capture --save-tensors)."""
    from introspect_cli.inspect.overview import stored_values
    from introspect_cli.render.json import values_document
    from introspect_cli.render.values_text import values_blocks
    from introspect_cli.selection import check_selection, one_step

    with ExitStack() as stack:
        opened = _opened(stack, run)
        number = None if step is None else one_step(step, opened, rank)
        stored = stored_values(opened, fqn, check_selection(selected.read(), [opened]), step=number, rank=rank)
    answer(format_, lambda: values_document(stored), lambda: values_blocks(stored))
    return SAME


@show.command()
@_run
@click.option("--step", metavar="STEP", help="Which step [default: the first that has operators].")
@click.option("--prune/--no-prune", default=True, help="Leave out middle layers and operators that keep the scale.")
@click.option("--target", multiple=True, metavar="GLOB", help="Only modules or operators of that name.")
@click.option("-o", "--output", type=click.Path(), help="Draw into this file, .svg or .html.")
@_rank
@formats()
def graph(
    run: str | None,
    format_: str,
    target: tuple[str, ...],
    output: str | None,
    *,
    step: str | None,
    prune: bool,
    rank: int | None,
) -> int:
    """Operators of one step and what flows between them (capture --level op)."""
    from introspect_cli.inspect import data_flow
    from introspect_cli.render.graph import draw, graph_blocks
    from introspect_cli.render.json import graph_document
    from introspect_cli.selection import one_step

    with ExitStack() as stack:
        opened = _opened(stack, run)
        flow = data_flow.graph_of(opened, None if step is None else one_step(step, opened, rank), rank)
    if prune or target:
        flow = data_flow.prune(flow, target, scales=prune, layers=prune)
    if output:
        draw(flow, output, f"{opened.path}: operators")
    else:
        answer(format_, lambda: graph_document(flow), lambda: graph_blocks(flow))
    return SAME


@show.command()
@_run
@formats()
def settings(run: str | None, format_: str) -> int:
    """Everything that is not a tensor: versions, flags, environment."""
    from introspect_cli.render.json import settings_document
    from introspect_cli.render.show_text import settings_blocks

    with ExitStack() as stack:
        held = dict(_opened(stack, run).settings)
    answer(format_, lambda: settings_document(held), lambda: settings_blocks(held))
    return SAME
