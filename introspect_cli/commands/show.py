"""`introspect show`: what is in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import DefaultGroup, RunType, Selecting, Written, answer, last_runs, option, takes
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.render.blocks import Block
    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run

Answer = tuple[Callable[[], dict[str, Any]], "Callable[[], Iterable[Block]]"]
"""What makes the document, and what makes the blocks."""


@click.group(
    cls=DefaultGroup,
    subcommand_metavar="[run|tree|step|history|values|graph|settings] ...",
    epilog="""\b
Examples:
  introspect show runA
  introspect show tree runA --depth 2
  introspect show step 3 runA --kinds output,loss --modules 'blocks.*'
  introspect show history 'blocks.*.attn' runA --kinds grad --stat l2
  introspect show values blocks.0.mlp runA --step 3""",
)
def show() -> None:
    """Show what ran, on what, how it ended, and what was recorded.

    Without a run, each shows the last one below introspect-runs/.
    """


@dataclass(frozen=True)
class OfRank(Written):
    """Of which rank, and how."""

    rank: int | None = option(None, "Show this rank [default: the first].", least=0)


def _shows(kind: type[Written], *narrowed: str) -> Callable[[Callable[..., Answer]], Callable[..., int]]:
    """A decorator for a verb of `show`: opens the run that is named, else the last one, and writes the verb's answer.

    Args:
        kind: the verb's options, which it gets as `asked`.
        narrowed: options of `Selecting` that it takes; if any, it gets the `selection`.
    """

    def add(verb: Callable[..., Answer]) -> Callable[..., int]:
        @wraps(verb)
        def call(run: str | None, asked: Written, selected: Selecting | None = None, **given: Any) -> int:
            from introspect_cli.exchange.checkpoints import open_any
            from introspect_cli.selection import check_selection

            with open_any(run or last_runs(1)[0]) as opened:
                if selected is not None:
                    given["selection"] = check_selection(selected.read(), [opened])
                document, blocks = verb(opened, asked, **given)
            answer(asked.format_, document, blocks)
            return SAME

        call = takes(kind)(call)
        if narrowed:
            call = takes(Selecting, "selected", only=narrowed)(call)
        return click.argument("run", type=RunType(), required=False)(call)

    return add


@show.command()
@_shows(Written)
def run(run: Run, _: Written) -> Answer:
    """What ran, on what, with which options, how it ended, and what was recorded."""
    from introspect_cli.inspect.overview import overview
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import overview_blocks

    about = overview(run)
    return lambda: document(**vars(about)), lambda: overview_blocks(about)


@dataclass(frozen=True)
class TreeOptions(OfRank):
    """How much of the tree is shown."""

    unfold: bool = option(False, "Repeated layers one by one.")
    depth: int | None = option(None, "N levels below the root.", least=0)


@show.command()
@_shows(TreeOptions)
def tree(run: Run, asked: TreeOptions) -> Answer:
    """Modules as a tree: class, parameters, output."""
    from introspect_cli.inspect.module_tree import module_tree
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import tree_blocks

    rows = module_tree(run, fold=not asked.unfold, rank=asked.rank, depth=asked.depth)
    return lambda: document(modules=rows), lambda: tree_blocks(rows)


@show.command()
@click.argument("step", type=click.IntRange(min=0))
@_shows(OfRank, "kinds", "modules")
def step(run: Run, asked: OfRank, step: int, selection: Selection) -> Answer:
    """Records of one STEP."""
    from introspect_cli.inspect.overview import reader_of, step_records
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import records_blocks

    records = step_records(run, step, selection, rank=asked.rank)
    labels = reader_of(run, asked.rank).labels.get(step, {})
    facts = {"step": step, "labels": labels or None, "records": records}
    return lambda: document(**facts), lambda: records_blocks(records, step, labels)


@dataclass(frozen=True)
class HistoryOptions(OfRank):
    """Which statistic is shown."""

    stat: str = option("mean", "Which statistic [default: mean].", metavar="NAME")


@show.command()
@click.argument("fqn")
@_shows(HistoryOptions, "kinds")
def history(run: Run, asked: HistoryOptions, fqn: str, selection: Selection) -> Answer:
    """One site, or those of a glob, over all steps."""
    from introspect_cli.inspect.overview import histories
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import history_blocks

    series = histories(run, fqn, asked.stat, selection.kinds, rank=asked.rank)
    return lambda: document(stat=asked.stat, histories=series), lambda: history_blocks(series, asked.stat)


@dataclass(frozen=True)
class ValuesOptions(OfRank):
    """Of which step values are shown."""

    step: int | None = option(None, "Where: a step, or the first that has some.", least=0)


@show.command()
@click.argument("fqn")
@_shows(ValuesOptions, "kinds")
def values(run: Run, asked: ValuesOptions, fqn: str, selection: Selection) -> Answer:
    """The stored values of a site (capture --save-tensors)."""
    from introspect_cli.inspect.overview import stored_values
    from introspect_cli.render.json import document
    from introspect_cli.render.values_text import values_blocks

    stored = stored_values(run, fqn, selection, step=asked.step, rank=asked.rank)
    return lambda: document(values=stored), lambda: values_blocks(stored)


@dataclass(frozen=True)
class GraphOptions(OfRank):
    """Which operators are shown, and where."""

    step: int | None = option(None, "Which step [default: the first that has operators].", least=0)
    prune: bool = option(True, "Leave out middle layers and operators that keep the scale [default: yes].")
    target: tuple[str, ...] = option((), "Only modules or operators of that name.", metavar="GLOB")
    output: str | None = option(None, "Draw into this file, .svg.", "-o", metavar="FILE")


@show.command()
@_shows(GraphOptions)
def graph(run: Run, asked: GraphOptions) -> Answer:
    """Operators of one step and what flows between them (capture --level op)."""
    from introspect_cli.inspect import data_flow
    from introspect_cli.render.graph import draw, graph_blocks
    from introspect_cli.render.json import document

    flow = data_flow.graph_of(run, asked.step, asked.rank)
    if asked.prune or asked.target:
        flow = data_flow.prune(flow, asked.target, repeating=not asked.prune)
    if asked.output:
        draw(flow, asked.output)
    return lambda: document(**vars(flow)), lambda: [] if asked.output else graph_blocks(flow)


@show.command()
@_shows(Written)
def settings(run: Run, _: Written) -> Answer:
    """Everything that is not a tensor: versions, flags, environment."""
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import settings_blocks

    held = dict(run.settings)
    return lambda: document(settings=held), lambda: settings_blocks(held)
