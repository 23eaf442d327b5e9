"""`introspect diff`: options in, answer out, exit code for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import (
    Comparing,
    Linking,
    RunType,
    Working,
    answer,
    exit_code,
    option,
    pair_of,
    takes,
    tell,
)
from introspect_cli.exit_codes import CANNOT_TEST, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.result import Verdict


@dataclass(frozen=True)
class Shown(Working):
    """The options that change what is shown of a comparison."""

    format_: str = option("table", "How the answer is written [default: table].", choices=("table", "json", "yaml"))
    all_: bool = option(False, "List every divergence and every setting that differs.")
    limit: int | None = option(None, "List N divergences one by one [default: the first; json: 12].", least=0)
    settings: bool = option(False, "Show only what differs besides numbers.")
    changes: bool = option(False, "List changed statements, the likeliest cause first.")
    level: str = option("module", "op: show the operators of the first diverging step, too.", choices=("module", "op"))
    output: str | None = option(None, "Draw these operators into a file, .svg.", "-o", metavar="FILE")
    map_: bool = option(False, "Show from which step on each module differs.")
    verbose: bool = option(False, "Show what differs in each listed divergence.", "-v")
    values: bool = option(False, "Show the stored values of the first divergence.")
    bisect: bool = option(False, "Exit with 0, 1 or 125, for `git bisect run`.")

    @property
    def is_grouped(self) -> bool:
        """Whether only the first divergence is shown, with how many follow: a table without --all, --limit and -v."""
        return self.format_ == "table" and self.limit is None and not (self.all_ or self.verbose)

    @property
    def most(self) -> int | None:
        """How many divergences are listed at most: 12 unless --limit says; None, with --all, for all."""
        return None if self.all_ else 12 if self.limit is None else self.limit


@dataclass(frozen=True)
class Again(Linking):
    """The options that belong to revisions."""

    fresh: bool = option(False, "With revisions: capture again what was captured before.")


class DiffCommand(click.Command):
    """A command that takes the words after `--` for a command to capture, where any word stands before `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the first `--`, and set `ctx.meta["command"]` to those after it.

        Without `--`, or with one only as the first word, it is not set, and all words are parsed.
        """
        if "--" in args[1:]:
            at = args.index("--")
            ctx.meta["command"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The words of the usage line, with the command after `--`."""
        return [*super().collect_usage_pieces(ctx), "[-- [CAPTURE OPTIONS] SCRIPT [ARGS]...]"]


@click.command(
    cls=DiffCommand,
    epilog="""\b
Examples:
  introspect diff                         (the last two below introspect-runs/)
  introspect diff runA runB --noise runA2 --map
  introspect diff runA runB --modules 'blocks.*' --kinds output,grad -v
  introspect diff runA runB --values      (captured with --save-tensors)
  introspect diff runA checkpoint-40      (or two checkpoints: .pt, ...)
  introspect diff main my-branch -- train.py --epochs 1

Exit status: 0 the same, 1 diverged, 2 could not tell (with --bisect: 125).""",
)
@click.argument("a", type=click.Path(), required=False)
@click.argument("b", type=click.Path(), required=False)
@click.argument("more", type=RunType(), nargs=-1)
@takes(Shown, "shown")
@takes(Comparing, "compared")
@takes(Again, "again")
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    a: str | None,
    b: str | None,
    more: tuple[str, ...],
    shown: Shown,
    compared: Comparing,
    again: Again,
) -> int:
    """Find where runs A and B first diverge, and why. Of more runs, say which agree with which.

    A run is a path, or @1 for the last one, @2 for the one before it; without runs, these two are compared.
    With a script behind `--`, A and B may be git revisions, or `.` for the work tree: both are captured first.
    """
    from introspect_cli.errors import IntrospectError, UsageError
    from introspect_cli.inspect.runs import chosen

    if shown.values and shown.format_ != "table":
        raise UsageError("--values shows a table; `introspect show values --format json` writes the values of a run.")
    if shown.output and shown.level != "op":
        raise UsageError("-o draws operators: give --level op with it.")
    command = ctx.meta.get("command")
    if command is None and again != Again():
        raise UsageError("--fresh and --link belong to revisions: name what to run after `--`.")
    if command is not None and more:
        raise UsageError("give two revisions: leave the rest out.")
    try:
        if command is None:
            a, b = pair_of(*(None if word is None else str(chosen(word)) for word in (a, b)))
        else:
            a, b = _capture_revisions(a, b, command, compared, shown, again)
        verdict = _group_runs((a, b, *more), compared, shown) if more else _compare_two(a, b, compared, shown)
    except IntrospectError as error:
        if shown.bisect:
            error.exit_code = CANNOT_TEST
        raise
    code = exit_code(verdict)
    return CANNOT_TEST if shown.bisect and code == UNDECIDED else code


def _capture_revisions(
    a: str | None, b: str | None, command: tuple[str, ...], compared: Comparing, shown: Shown, again: Again
) -> tuple[str, str]:
    """Capture whichever of a and b is a revision, and return the paths of both runs; progress goes to stderr.

    Args:
        a: a revision, `.` or a run; None where it was not named, which is an error, as for b.
        b: as a.
        command: capture options, script and arguments; not run where both are runs.
        compared: what changes the answer; decides whether b may be ended at its first divergence.
        shown: what is shown; as `compared`.
        again: what belongs to revisions.

    Raises:
        UsageError: a, b or the script is not named, or as `capture_pair`.
    """
    from introspect_cli.commands.capture import split_words
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import is_checkpoint
    from introspect_cli.rerun.commits import Command, capture_pair
    from introspect_cli.rerun.variant import stop_options

    if a is None or b is None:
        raise UsageError("name two revisions before `--`, such as `introspect diff HEAD . -- train.py`.")
    if not command:
        raise UsageError("nothing to run: name a script after `--`.")
    one, two = _run_of(a), _run_of(b)
    if one is not None and two is not None:
        tell(f"{a} and {b} are runs, so {' '.join(command)} is not run")
        return one, two
    # b may be ended at its first divergence; but what the process that compares while b runs does not know of is asked
    # of the whole of it
    known = Comparing(rtol=compared.rtol, noise=compared.noise)
    stop = compared == known and not (shown.all_ or shown.map_ or is_checkpoint(one or ""))
    ends_b = partial(stop_options, rtol=compared.rtol, noise=compared.noise) if stop else lambda _: ()
    rerun = Command(*split_words(command), again.link)
    return capture_pair((a, b), (one, two), rerun, tell, ends_b, fresh=again.fresh)


def _run_of(word: str) -> str | None:
    """Path of the run or checkpoint that a path or `@1` stands for; None where it stands for none.

    A URL, and any file, counts as one without being opened. UsageError where there are not so many runs.
    """
    from introspect_cli.exchange.checkpoints import is_checkpoint
    from introspect_cli.inspect.runs import chosen
    from introspect_cli.store.files import MANIFEST
    from introspect_cli.store.remote import is_remote

    path = Path(run := str(chosen(word)))
    is_run = run != word or is_remote(run) or path.is_file() or (path / MANIFEST).exists() or is_checkpoint(run)
    return run if is_run else None


def _group_runs(paths: tuple[str, ...], compared: Comparing, shown: Shown) -> Verdict:
    """Compare more than two runs, write which agree with which, and return the verdict.

    Raises:
        UsageError: an option is given that shows two runs.
    """
    from introspect_cli.compare.groups import group_runs
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import opened
    from introspect_cli.render.diff_text import groups_blocks
    from introspect_cli.render.json import document
    from introspect_cli.workers import at_work

    of_two = (shown.values, shown.settings, shown.changes, shown.map_, shown.output)
    if any(of_two) or shown.level == "op":
        raise UsageError("--values, --settings, --changes, --map, --level op and -o show two runs; name two.")
    options = compared.options(limit=shown.most)
    with opened(*compared.noise) as noise, at_work(shown.workers) as work, opened(*paths) as runs:
        groups = group_runs(runs, options, noise, work)
    answer(shown.format_, lambda: document(**vars(groups)), lambda: groups_blocks(groups))
    return groups.verdict


def _compare_two(a: str, b: str, compared: Comparing, shown: Shown) -> Verdict:
    """Compare two runs, write what was asked for (the picture of operators into its file), and return the verdict.

    Of a run that is compared with a checkpoint, only one moment counts.

    Raises:
        UsageError: an option cannot be read or selects nothing, or --level op is given and no operator was recorded.
    """
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.exchange.checkpoints import opened, written
    from introspect_cli.records import Kind
    from introspect_cli.render.blocks import line
    from introspect_cli.render.diff_text import changes_blocks, diff_blocks, settings_blocks
    from introspect_cli.render.json import diff_document
    from introspect_cli.selection import Selection, check_selection
    from introspect_cli.workers import at_work

    options = compared.options(limit=shown.most, whole_step=shown.is_grouped, want_map=shown.map_)
    with opened(a, b, *compared.noise) as (run_a, run_b, *noise), at_work(shown.workers) as work:
        one, two, seen = run_a, run_b, None
        if any("checkpoint" in run.manifest for run in (one, two)):
            from introspect_cli.compare.checkpoints import as_moments

            one, two = as_moments(one, two, written)
        if shown.level == "op":
            check_selection(Selection(kinds=frozenset({Kind.OP_OUTPUT})), (one, two))
        result = compare_runs(one, two, options, noise, work)
        first, graph = result.first, None
        if shown.level == "op" and first is not None:
            from introspect_cli.commands.page import graph_at

            graph = graph_at((one, two), first.step, options)
        if shown.values and first is not None:
            from introspect_cli.compare.closeup import closeup

            seen = closeup(one, two, first)
    if graph is not None and shown.output:
        from introspect_cli.render.graph import draw

        draw(graph, shown.output)

    def blocks() -> Iterator[Any]:
        """The answer as drawn: settings alone, or else changed statements alone, or the comparison and its extras."""
        if shown.settings or shown.changes:
            yield from settings_blocks(result) if shown.settings else changes_blocks(result.code)
            return
        yield from diff_blocks(result, everything=shown.all_, verbose=shown.verbose, grouped=shown.is_grouped)
        if seen is not None:
            from introspect_cli.render.values_text import closeup_blocks

            yield from (line(), *closeup_blocks(seen))
        if shown.map_:
            from introspect_cli.render.diff_text import map_blocks

            yield from map_blocks(result)
        if graph is not None and not shown.output:
            from introspect_cli.render.graph import graph_blocks

            yield from graph_blocks(graph)

    answer(shown.format_, lambda: diff_document(result), blocks)
    return result.verdict
