"""Many reads at once: reading a file and taking its CRC leave python to others, so several processors share them.

The threads live as long as one round of reads. Nothing of ours is left in a process that asks for a comparison and
forks afterwards, and starting them takes a hundredth of what they read.
"""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.processors import processors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Found = TypeVar("Found")

_MOST = 8
"""Threads: what each does in python has to wait for the others."""

_FEW = 8
"""Reads that are not worth a thread."""


def side_by_side(reads: Sequence[Callable[[], Found]]) -> list[Found]:
    """What each of the reads gives, in order.

    Raises:
        Exception: what the first of them that fails raises.
    """
    threads = min(_MOST, processors(), len(reads) // _FEW)
    if threads < 2:
        return [read() for read in reads]
    found: dict[int, Found] = {}
    failed: dict[int, BaseException] = {}
    left = iter(enumerate(reads))  # each is taken once: next() of it is one step of python
    others = [Thread(target=_take, args=(left, found, failed), daemon=True) for _ in range(threads - 1)]
    try:
        for thread in others:
            thread.start()
        _take(left, found, failed)
    finally:
        for _ in left:  # of an interrupt: nobody begins another
            pass
        for thread in others:
            if thread.ident is not None:
                thread.join()
    if failed:
        raise failed[min(failed)]
    return [found[number] for number in range(len(reads))]


def _take(
    left: Iterator[tuple[int, Callable[[], Found]]], found: dict[int, Found], failed: dict[int, BaseException]
) -> None:
    for number, read in left:
        try:
            found[number] = read()
        except Exception as error:  # noqa: PERF203 -- told by the thread that asked
            failed[number] = error
            return
