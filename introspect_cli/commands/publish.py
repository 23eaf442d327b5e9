"""`introspect publish`: a run shown in a logger, or sent to object storage, while it is written or after."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, Selecting, option, say, takes
from introspect_cli.errors import IntrospectError
from introspect_cli.exit_codes import SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.publish.places import Place

_LONGEST = 600
"""Characters of an error of a logger that are shown."""


@dataclass(frozen=True)
class PublishOptions:
    """What is published beside the usual numbers."""

    stats: str = option("mean,std,l2", "Statistics of what is selected [default: mean,std,l2].", metavar="NAMES")
    sources: bool = option(False, "With the text of the source files.")
    rank: int | None = option(None, "Send only this rank.", least=0)


@click.command(
    epilog="""\b
Examples:
  introspect publish runA mlflow wandb s3://bucket/runs
  introspect publish runA tensorboard:logs --kinds grad --stats l2,absmax
  introspect capture --publish mlflow -o runA train.py

Exit status: 0, or 2 where something could not be published.""",
)
@click.argument("run", type=RunType())
@click.argument("places", nargs=-1, required=True, metavar="PLACE...")
@takes(Selecting, "selected", only=("kinds", "modules"))
@takes(PublishOptions)
def publish(run: str, places: tuple[str, ...], selected: Selecting, asked: PublishOptions) -> int:
    """Send the numbers of each step of RUN to a logger, or RUN itself to object storage.

    A PLACE is tensorboard[:DIR], mlflow[:RUN_ID], wandb[:PROJECT], or a URL such as s3://bucket/runs, which
    gets the run itself.
    """
    from introspect_cli.publish.follow import follow, numbers_of
    from introspect_cli.publish.places import Remote, open_place
    from introspect_cli.selection import choose
    from introspect_cli.statistics import DERIVED_STATS, STATISTICS
    from introspect_cli.store.run import open_run
    from introspect_cli.texts import count as counted

    selection = selected.read()
    chosen = choose([asked.stats], (*STATISTICS, *DERIVED_STATS), "statistic")
    with open_run(run) as opened:
        name = Path(opened.path).resolve().name
    targets = _Places()
    for text in dict.fromkeys(places):
        with targets.giving_up(text):
            targets.open[text] = open_place(text, run, name, asked.rank, sources=asked.sources)

    def take(reader: Any, step: int) -> None:
        """Log the numbers of a step at every open place; does nothing where `--rank` names a rank other than 0."""
        if not asked.rank:  # the first of a launch publishes numbers
            numbers = numbers_of(reader, step, selection if selection.narrowed else None, chosen)
            targets.each(lambda _, place: place.log(step, numbers))

    def between() -> None:
        """Upload what is new to each open place in object storage whose interval is over."""
        targets.each(lambda _, place: place.send_if_due() if isinstance(place, Remote) else None)

    count = 0
    if targets.open:
        count = follow(run, take, rank=asked.rank or None, between=between)
    targets.each(lambda text, place: say(f"published {counted(count, 'step')} of {name} to {text} ({place.close()})"))
    for text, why in targets.failed.items():
        say(f"introspect: {name} was not published to {text} completely: {why}", err=True)
    return UNDECIDED if targets.failed else SAME


class _Places:
    """Several places by what names them; one that fails takes no other with it.

    Attributes:
        open: those that did not fail yet.
        failed: why each of the others failed, on one line.
    """

    def __init__(self) -> None:
        """Begin without places; who uses it adds them to `open`."""
        self.open: dict[str, Place] = {}
        self.failed: dict[str, str] = {}

    def each(self, do: Callable[[str, Place], object]) -> None:
        """Call `do` with the text and the place of each that is still open; where it raises, the place is failed."""
        for text, place in list(self.open.items()):
            with self.giving_up(text):
                do(text, place)

    @contextmanager
    def giving_up(self, text: str) -> Iterator[None]:
        """A context manager: if its block raises, note why in `failed` under `text`, and drop that place and the error.

        Interrupts come out; of the reason 600 characters are kept.
        """
        try:
            yield
        except Exception as error:
            why = str(error) if isinstance(error, IntrospectError) else f"{type(error).__name__}: {error}"
            self.failed[text] = " ".join(why.split())[:_LONGEST]
            self.open.pop(text, None)
