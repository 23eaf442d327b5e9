"""What `capture --against` starts beside the script: compares as the run is written, and answers in lines of JSON.

A comparison that takes longer than a step falls behind, looks at more steps at once the next time, and rests twice as
long as it worked.

It ends with whoever reads its answers: where the training is killed, nobody is left who asked.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.commands.shared import Comparing
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.rerun.live import LiveReference

_NICE = 10
_PAUSE = 0.05
"""Seconds between two looks at a run that goes on, at least."""
_REST = 2
"""How many times as long as a look took the pause after it is, at least."""


def main() -> NoReturn:
    """Compare as the first argument says, answer in lines of JSON on stdout, and exit with 0, whatever comes of it.

    The argument is an object in JSON: `reference`, `run`, `asked` (words as for diff). Answers are `agreed` (a step),
    once `first`, then `verdict`, or `failed` with a sentence. The process has a low priority and ends when nobody reads
    its answers.
    """
    from introspect_cli.commands.shared import compared_as
    from introspect_cli.errors import IntrospectError, abridged, scarcity

    asked = json.loads(sys.argv[1])
    os.nice(_NICE)
    threading.Thread(target=_end_with_reader, daemon=True).start()
    run = Path(asked["run"])

    try:
        with reference_of(asked["reference"], run, compared_as(asked["asked"])) as against:
            result = _compare(against, run)
        _answer(verdict=result.verdict.value, place=_place(result), said=result.sentence)
    except IntrospectError as error:
        _answer(failed=abridged(str(error)))
    except Exception as error:  # whatever it is, training goes on, and one line says what is lost
        _answer(failed=scarcity(error) or f"{type(error).__name__}: {error}")
    sys.exit(0)


def _compare(against: LiveReference, path: Path) -> DiffResult:
    """Compare a run with a reference while it is written, answer what is new, and return the comparison of all of it.

    `agreed` is each further last step that all ranks have and up to which the two do not diverge. After `first` only
    the last comparison follows.

    Raises:
        StoreError: one of them cannot be read.
        UsageError: the two cannot be compared.
    """
    from introspect_cli.compare.result import Verdict
    from introspect_cli.store.run import Run, RunState, poll

    last: int | None = None
    is_reported = False

    def look(run: Run) -> DiffResult | None:
        """Compare the run so far where it has a new step, or is over; None where no comparison was made."""
        nonlocal last, is_reported
        is_over = run.state is not RunState.RUNNING
        if not is_over and (is_reported or run.last_step == last):
            return None
        last, result = run.last_step, against.result(run)
        if result is not None and result.verdict is Verdict.DIVERGED and not is_reported:
            is_reported = True
            step = result.first.step_b if result.first is not None else None
            _answer(first=step, place=_place(result), said=result.sentence)
        elif result is not None and result.counts.steps_compared and last is not None and not is_over:
            _answer(agreed=last)
        return result

    result = poll(path, look, pause=_PAUSE, rest=_REST, unreadable=against.close)
    assert result is not None  # the run is over
    return result


@contextmanager
def reference_of(reference: str, run: Path, compared: Comparing) -> Iterator[LiveReference]:
    """A `LiveReference` for the length of a block: opens the reference when asked for, and closes it at the end.

    Args:
        reference: a run, pack or URL; a golden run is compared by its own tolerance.
        run: the run.
        compared: options of the comparison; noise is kept open for the length of the block.

    Raises:
        StoreError: a golden run cannot be read.
        UsageError: the reference is a checkpoint, or a golden run that is to be compared otherwise than it says.
    """
    from introspect_cli.commands.shared import Comparing
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import is_checkpoint, open_any, opened
    from introspect_cli.rerun import golden
    from introspect_cli.rerun.live import LiveReference

    if is_checkpoint(reference):
        raise UsageError(f"{reference} is a checkpoint, which has one step: a run is compared with a run as it goes")
    kept = Path(reference)
    is_golden = (kept / golden.ABOUT).is_file()
    if is_golden and compared != Comparing():
        raise UsageError(f"{reference} is a golden run, which has its own options: leave these out")
    with opened(*compared.noise) as noise:
        if is_golden:
            about, place = golden.read_golden(kept), kept / golden.STORE
            made = LiveReference(lambda: open_any(place), lambda *_: golden.compare_golden(kept, about, run))
        else:
            options = compared.options()
            made = LiveReference(lambda: open_any(reference), lambda one, two: compare_runs(one, two, options, noise))
        with closing(made):
            yield made


def _place(result: DiffResult) -> list[Any] | None:
    """[step in a, step in b, rank, key of the site] of the first divergence, which identify it; None for none."""
    first = result.first
    return None if first is None else [first.step, first.step_b, first.rank, first.site.key()]


def _answer(**facts: Any) -> None:
    """Write one object in JSON, on a line, to standard output at once."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def _end_with_reader() -> None:
    """Wait until nobody reads standard output any more, then end this process with 0, without cleanup."""
    waits = select.poll()
    waits.register(1, 0)  # an end that was closed is told whatever is asked for
    waits.poll()
    os._exit(0)
