"""`introspect publish`: a run shown in a logger, a directory or object storage, while it is written or after."""

from __future__ import annotations

from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, Selecting, say, selecting
from introspect_cli.errors import IntrospectError
from introspect_cli.exit_codes import SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.publish.places import Place


@click.command(
    epilog="""\b
Examples:
  introspect publish introspect-runs/a tensorboard
  introspect publish runA mlflow wandb s3://bucket/runs
  introspect publish runA tensorboard:logs --kinds grad --stats l2,absmax
  introspect capture --publish mlflow -o runA train.py

Exit status: 0, or 2 where something could not be published.""",
)
@click.argument("run", type=RunType())
@click.argument("places", nargs=-1, required=True, metavar="PLACE...")
@selecting("kinds", "modules")
@click.option(
    "--stats", metavar="NAMES", default="mean,std,l2", help="Statistics of what is selected [default: mean,std,l2]."
)
@click.option(
    "--files/--no-files",
    default=True,
    help="At the end also the page and the packed run [default: yes].",
)
@click.option("--sources/--no-sources", default=False, help="With the text of the source files [default: no].")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Send only this rank.")
@click.option("--wait/--no-wait", default=True, help="Go on until the run is over [default: yes].")
def publish(
    run: str,
    places: tuple[str, ...],
    selected: Selecting,
    stats: str,
    *,
    files: bool,
    sources: bool,
    wait: bool,
    rank: int | None,
) -> int:
    """Send the numbers of each step of RUN to a logger, a directory or object storage.

    A PLACE is tensorboard[:DIR], mlflow[:RUN_ID], wandb[:PROJECT], a directory, or a URL such as s3://bucket/runs,
    which gets the run itself.
    """
    from introspect_cli.publish.follow import follow, numbers_of
    from introspect_cli.publish.places import Remote
    from introspect_cli.selection import choose
    from introspect_cli.statistics import DERIVED_STATS, STATISTICS
    from introspect_cli.store.read.run import RunState, open_run

    selection = selected.read()
    chosen = choose([stats], (*STATISTICS, *DERIVED_STATS), "statistic")
    with open_run(run) as opened:
        name = Path(opened.path).resolve().name
    opened_places = _Places()
    for text in dict.fromkeys(places):
        opened_places.open(text, run, name, rank, sources=sources)

    def take(reader: Any, step: int) -> None:
        if rank:  # the first of a launch publishes numbers
            return
        narrowed = selection if selection.narrowed else None
        numbers = numbers_of(reader, step, narrowed, chosen)
        opened_places.each(methodcaller("log", step, numbers))

    alone = rank or None

    def between() -> None:  # some send at times of their own
        opened_places.each(lambda place: place.look() if isinstance(place, Remote) else None)

    count, state = follow(run, take, wait=wait, rank=alone, between=between) if opened_places else (0, RunState.RUNNING)
    if files and state is not RunState.RUNNING and count and not rank:
        _files(run, name, opened_places, sources=sources)
    return opened_places.close(count, name)


_LONGEST = 600


class _Places:
    """Several places; one that fails takes no other with it."""

    def __init__(self) -> None:
        self._open: dict[str, Place] = {}
        self._failed: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, text: str, run: str, name: str, rank: int | None, *, sources: bool) -> None:
        """Open a place for a run of a name."""
        from introspect_cli.publish.places import open_place

        with self._failing(text):
            self._open[text] = open_place(text, run, name, rank, sources=sources)

    def each(self, do: Callable[[Place], object]) -> None:
        """Do something with each place that is still open."""
        for text, place in list(self._open.items()):
            with self._failing(text):
                do(place)

    @contextmanager
    def _failing(self, text: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, IntrospectError) else f"{type(error).__name__}: {error}"
            self._failed[text] = " ".join(why.split())[:_LONGEST]
            self._open.pop(text, None)

    def close(self, count: int, name: str) -> int:
        """Close them, and say what came of it."""
        from introspect_cli.texts import count as counted

        for text, place in list(self._open.items()):
            with self._failing(text):
                where = place.close()
                say(f"published {counted(count, 'step')} of {name} to {text} ({where})")
        for text, why in self._failed.items():
            say(f"introspect: {name} was not published to {text} completely: {why}", err=True)
        return UNDECIDED if self._failed else SAME


def _files(run: str, name: str, places: _Places, *, sources: bool) -> None:
    """The page about the run, and the run in one file."""
    import tempfile

    from introspect_cli.commands.page import page_of
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.store.remote.pack import ENDING, local_copy, pack

    with tempfile.TemporaryDirectory() as folder, local_copy(run) as source, open_any(run) as opened:
        page, packed = Path(folder) / f"{name}.html", Path(folder) / f"{name}{ENDING}"
        page.write_text(page_of([opened], (), DiffOptions()), encoding="utf-8")
        pack(source, packed, sources=sources)
        for file in (page, packed):
            places.each(methodcaller("keep", file))
