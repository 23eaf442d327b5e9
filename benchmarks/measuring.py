"""What benchmarks share: the quickest of repeated calls, a capture, and a table of figures beside their targets."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from introspect_cli.capture.options import CaptureOptions


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        what: was measured.
        figure: the number; None where it could not be had.
        unit: of the number.
        target: "" where there is none.
        verdict: "met", "MISSED", "ok", "FAILED" or "".
        note: why, or what else is to be said.
        section: of a script that has several.
    """

    what: str
    figure: float | None
    unit: str = ""
    target: str = ""
    verdict: str = ""
    note: str = ""
    section: str = ""

    def line(self) -> str:
        """As text."""
        figure = "-" if self.figure is None else f"{self.figure:,.4g}"
        section = f"{self.section:<12} " if self.section else ""
        words = f"{section}{self.what:<62} {figure:>10} {self.unit:<5} {self.target:<16}"
        return f"{words} {self.verdict} {self.note}".rstrip()


def bounded(
    what: str, figure: float, unit: str, *, least: float | None = None, most: float | None = None, section: str = ""
) -> Row:
    """A row with a target, where there is one."""
    if least is not None:
        verdict = "met" if figure >= least else "MISSED"
        return Row(what, figure, unit, f">= {least:.4g}", verdict, section=section)
    if most is not None:
        verdict = "met" if figure <= most else "MISSED"
        return Row(what, figure, unit, f"<= {most:.4g}", verdict, section=section)
    return Row(what, figure, unit, section=section)


def show(rows: Iterable[Row]) -> int:
    """Print a table as it comes; how many targets are missed."""
    missed = 0
    for row in rows:
        print(row.line(), flush=True)
        missed += row.verdict == "MISSED"
    return missed


def seconds(call: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of a call, until its work is done."""
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def quickest(call: Callable[[], object], within: float, wait: Callable[[], object] = lambda: None) -> float:
    """Seconds of the quickest of the calls that fit into a time, after one that is not counted."""
    seconds(call, wait)
    end, best = time.perf_counter() + within, float("inf")
    while True:
        best = min(best, seconds(call, wait))
        if time.perf_counter() > end:
            return best


@contextmanager
def captured(options: CaptureOptions, directory: Path) -> Iterator[None]:
    """A capture of what is trained meanwhile in this process, into a directory."""
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.session import Session

    options = CaptureOptions(**{**vars(options), "output": directory, "force": True, "quiet": True})
    with Session(None, options) as session:
        session.start()
        yield
