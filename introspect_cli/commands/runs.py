"""`introspect runs`: which runs there are, and removing those nobody needs."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from introspect_cli.commands.shared import RunType, answer, formats, say
from introspect_cli.exit_codes import SAME


class _Runs(click.Group):
    """`runs` alone lists; words that are no subcommand are directories to look in."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not any(word in ("-h", "--help") for word in args[:1]) and (not args or args[0] not in self.commands):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_Runs,
    subcommand_metavar="[list|label|prune] [DIR]...",
    epilog="""\b
Examples:
  introspect runs
  introspect runs experiments/ --format json
  introspect runs label runA 'before the new tokenizer'
  introspect runs prune --keep 10 --older-than 7d""",
)
def runs() -> None:
    """List the runs below introspect-runs/ (or DIR), label them, and remove old ones."""


@runs.command("list")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@formats()
def list_(directories: tuple[Path, ...], format_: str) -> int:
    """List runs, the latest first."""
    from introspect_cli.inspect.runs import find_runs
    from introspect_cli.render.json import runs_document
    from introspect_cli.render.show_text import runs_blocks

    places = _places(directories)
    search = find_runs(places)
    answer(format_, lambda: runs_document(search), lambda: runs_blocks(search, [str(place) for place in places]))
    return SAME


@runs.command("label")
@click.argument("run", type=RunType(file_okay=False))
@click.argument("text")
def label(run: str, text: str) -> int:
    """Give RUN a label, shown in the list.

    Every verb takes the label for a run below introspect-runs/. An empty TEXT removes it.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.store.files.folders import LONGEST_LABEL
    from introspect_cli.store.write.launch import write_label
    from introspect_cli.texts import clean

    cleaned = clean(text.strip())
    if len(cleaned) > LONGEST_LABEL:
        raise UsageError(f"a label has at most {LONGEST_LABEL} characters, this one {len(cleaned)}.")
    write_label(run, cleaned)
    return SAME


@runs.command("prune")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--keep", type=click.IntRange(min=0), default=0, metavar="N", help="Keep the N latest runs.")
@click.option("--older-than", metavar="AGE", help="Remove only runs that started longer ago: 7d, 12h, 30m, 2w.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(directories: tuple[Path, ...], keep: int, older_than: str | None, *, dry_run: bool) -> int:
    """Remove old runs.

    Give --keep, --older-than or both: a run goes if each of them lets it go.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.inspect.runs import find_runs, parse_age, prunable
    from introspect_cli.render.show_text import unseen_sentences
    from introspect_cli.store.write.launch import remove_run
    from introspect_cli.texts import count, human_size

    if not keep and older_than is None:
        raise UsageError("say which runs to remove: --keep N keeps the N latest, --older-than 7d spares recent ones.")
    age = parse_age(older_than) if older_than is not None else None
    search = find_runs(_places(directories))
    going = prunable(search.rows, keep=keep, older_than=age, now=dt.datetime.now(dt.timezone.utc))
    for row in going:
        if not dry_run:
            remove_run(row.path)
        say(f"{'would remove' if dry_run else 'removed'} {row.path} ({human_size(row.size)})")
    for sentence in unseen_sentences(search):
        say(sentence, err=True)
    freed = human_size(sum(row.size for row in going))
    click.echo(f"{count(len(going), 'run')}, {freed}{' would be freed' if dry_run else ' freed'}")
    return SAME


def _places(directories: tuple[Path, ...]) -> list[Path]:
    from introspect_cli.errors import UsageError
    from introspect_cli.store.files.folders import RUNS

    if not directories and not Path(RUNS).is_dir():
        raise UsageError(f"there is no {RUNS}/ here; name a directory that holds runs, or capture one first.")
    return list(directories) or [Path(RUNS)]
