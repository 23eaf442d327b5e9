"""`introspect show`: what is in a run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import (
    DefaultGroup,
    RunType,
    Selecting,
    Written,
    answer,
    last_runs,
    option,
    takes,
)
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.store.run import Run


@click.group(
    cls=DefaultGroup,
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


@dataclass(frozen=True)
class OfRank(Written):
    """Of which rank, and how."""

    rank: int | None = option(None, "Show this rank [default: the first].", least=0)


def _open_in(stack: ExitStack, run: str | None) -> Run:
    """Open the run that is named until the stack is closed; None: the last one, which is written to stderr."""
    from introspect_cli.exchange.checkpoints import open_any

    return stack.enter_context(open_any(run or last_runs(1)[0]))


@show.command()
@_run
@takes(Written)
def run(run: str | None, asked: Written) -> int:
    """What ran, on what, with which options, how it ended, and what was recorded."""
    from introspect_cli.inspect.overview import overview
    from introspect_cli.render.json import overview_document
    from introspect_cli.render.show_text import overview_blocks

    with ExitStack() as stack:
        about = overview(_open_in(stack, run))
    answer(asked.format_, lambda: overview_document(about), lambda: overview_blocks(about))
    return SAME


@dataclass(frozen=True)
class TreeOptions(OfRank):
    """How much of the tree is shown."""

    unfold: bool = option(False, "Repeated layers one by one.")
    depth: int | None = option(None, "N levels below the root, of modules and values.", least=0)


@show.command()
@_run
@takes(TreeOptions)
def tree(run: str | None, asked: TreeOptions) -> int:
    """Modules as a tree: class, parameters, output, nested values."""
    from introspect_cli.inspect.module_tree import module_tree
    from introspect_cli.render.json import tree_document
    from introspect_cli.render.show_text import tree_blocks

    with ExitStack() as stack:
        rows = module_tree(_open_in(stack, run), fold=not asked.unfold, rank=asked.rank, depth=asked.depth)
    answer(asked.format_, lambda: tree_document(rows), lambda: tree_blocks(rows))
    return SAME


@show.command()
@click.argument("step")
@_run
@takes(Selecting, "selected", only=("kinds", "modules"))
@takes(OfRank)
def step(step: str, run: str | None, selected: Selecting, asked: OfRank) -> int:
    """Records of one STEP: 3, or as its framework calls it, epoch=1,batch=12."""
    from introspect_cli.inspect.overview import reader_of, step_records
    from introspect_cli.render.json import records_document
    from introspect_cli.render.show_text import records_blocks
    from introspect_cli.selection import check_selection, one_step

    with ExitStack() as stack:
        opened = _open_in(stack, run)
        number = one_step(step, opened, asked.rank)
        records = step_records(opened, number, check_selection(selected.read(), [opened]), rank=asked.rank)
        labels = reader_of(opened, asked.rank).labels.get(number, {})
    shown = records, number, labels
    answer(asked.format_, lambda: records_document(*shown), lambda: records_blocks(*shown))
    return SAME


@dataclass(frozen=True)
class HistoryOptions(OfRank):
    """Which statistic is shown."""

    stat: str = option("mean", "Which statistic [default: mean].", metavar="NAME")


@show.command()
@click.argument("fqn")
@_run
@click.argument("run_b", type=RunType(), required=False)
@takes(Selecting, "selected", only=("kinds",))
@takes(HistoryOptions)
def history(fqn: str, run: str | None, run_b: str | None, selected: Selecting, asked: HistoryOptions) -> int:
    """One site, or those of a glob, over all steps; of two runs side by side."""
    from introspect_cli.inspect.overview import histories, paired
    from introspect_cli.render.json import history_document
    from introspect_cli.render.plots_text import history_blocks, pair_blocks
    from introspect_cli.selection import check_selection

    with ExitStack() as stack:
        runs = [_open_in(stack, run), *([] if run_b is None else [_open_in(stack, run_b)])]
        kinds = check_selection(selected.read(), runs).kinds
        series = [histories(each, fqn, asked.stat, kinds, rank=asked.rank) for each in runs]

    def document() -> Any:
        """The histories of the run as plain values; of two runs, a dict of these by `a` and `b`."""
        by_run = [history_document(each, asked.stat) for each in series]
        return by_run[0] if len(by_run) == 1 else dict(zip("ab", by_run, strict=True))

    def blocks() -> Any:
        """Blocks with a line for each history; of two runs, the histories of each site side by side."""
        if len(series) == 1:
            return history_blocks(series[0], asked.stat)
        return pair_blocks(paired(series[0], series[1]), asked.stat)

    answer(asked.format_, document, blocks)
    return SAME


@dataclass(frozen=True)
class ValuesOptions(OfRank):
    """Of which step values are shown."""

    step: str | None = option(None, "Where: a step, or the first that has some.", metavar="STEP")


@show.command()
@click.argument("fqn")
@_run
@takes(Selecting, "selected", only=("kinds",))
@takes(ValuesOptions)
def values(fqn: str, run: str | None, selected: Selecting, asked: ValuesOptions) -> int:
    """The stored values of a site (capture --save-tensors)."""
    from introspect_cli.inspect.overview import stored_values
    from introspect_cli.render.json import values_document
    from introspect_cli.render.values_text import values_blocks
    from introspect_cli.selection import check_selection, one_step

    with ExitStack() as stack:
        opened = _open_in(stack, run)
        number = None if asked.step is None else one_step(asked.step, opened, asked.rank)
        selection = check_selection(selected.read(), [opened])
        stored = stored_values(opened, fqn, selection, step=number, rank=asked.rank)
    answer(asked.format_, lambda: values_document(stored), lambda: values_blocks(stored))
    return SAME


@dataclass(frozen=True)
class GraphOptions(OfRank):
    """Which operators are shown, and where."""

    step: str | None = option(None, "Which step [default: the first that has operators].", metavar="STEP")
    prune: bool = option(True, "Leave out middle layers and operators that keep the scale [default: yes].")
    target: tuple[str, ...] = option((), "Only modules or operators of that name.", metavar="GLOB")
    output: str | None = option(None, "Draw into this file, .svg.", "-o", metavar="FILE")


@show.command()
@_run
@takes(GraphOptions)
def graph(run: str | None, asked: GraphOptions) -> int:
    """Operators of one step and what flows between them (capture --level op)."""
    from introspect_cli.inspect import data_flow
    from introspect_cli.render.graph import draw, graph_blocks
    from introspect_cli.render.json import graph_document
    from introspect_cli.selection import one_step

    with ExitStack() as stack:
        opened = _open_in(stack, run)
        step = None if asked.step is None else one_step(asked.step, opened, asked.rank)
        flow = data_flow.graph_of(opened, step, asked.rank)
    if asked.prune or asked.target:
        flow = data_flow.prune(flow, asked.target, scales=asked.prune, layers=asked.prune)
    if asked.output:
        draw(flow, asked.output)
    else:
        answer(asked.format_, lambda: graph_document(flow), lambda: graph_blocks(flow))
    return SAME


@show.command()
@_run
@takes(Written)
def settings(run: str | None, asked: Written) -> int:
    """Everything that is not a tensor: versions, flags, environment."""
    from introspect_cli.render.json import settings_document
    from introspect_cli.render.show_text import settings_blocks

    with ExitStack() as stack:
        held = dict(_open_in(stack, run).settings)
    answer(asked.format_, lambda: settings_document(held), lambda: settings_blocks(held))
    return SAME
