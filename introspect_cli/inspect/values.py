"""The stored values of a tensor: what `--save-tensors` kept whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.inspect.history import steps_in_words
from introspect_cli.inspect.overview import reader_of
from introspect_cli.records import Record, Status
from introspect_cli.selection import Selection, matches, near_module

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Stored:
    """A record and its tensor.

    Attributes:
        record: the record.
        values: the whole tensor; None where it was not stored.
    """

    record: Record
    values: NDArray[Any] | None


def stored_values(
    run: Any, fqn: str, selection: Selection, *, step: int | None = None, rank: int | None = None
) -> list[Stored]:
    """The records of an FQN (or glob) at one step, with the tensors that were stored.

    Args:
        run: the run.
        fqn: name of a module or parameter, or a glob.
        selection: kinds that are wanted.
        step: the step; the first at which any of them was stored whole where None.
        rank: the rank, the first by default.

    Raises:
        UsageError: there is no such site or step, or nothing of it was stored whole.
    """
    reader = reader_of(run, rank)
    if step is not None and step not in reader:
        raise UsageError(f"{run.path} has no step {step}: {steps_in_words(reader)}.")
    known = False
    for number in [step] if step is not None else reader.entries["step"].tolist():
        records = [
            record
            for record in reader.records(int(number))
            if matches(record.site.fqn, fqn) and selection.wants(record.site.kind, record.site.fqn)
        ]
        known = known or bool(records)
        found = [Stored(record, _values(run, record)) for record in records]
        if any(own.values is not None or own.record.summary.status is Status.VALUE for own in found):
            return found
    if not known:
        hint = near_module(fqn, set(reader.sites.fqn)) or ": `introspect show --tree` lists the modules of a run"
        raise UsageError(f"{run.path} has no record of {fqn}{hint}")
    place = f"at step {step}" if step is not None else "at any step"
    raise UsageError(
        f"{run.path} holds no values of {fqn} {place}, only checksums and statistics: "
        f"capture with --save-tensors '{fqn}'."
    )


def _values(run: Any, record: Record) -> NDArray[Any] | None:
    checksum = record.summary.checksum
    return run.tensor(checksum) if checksum and record.summary.status is not Status.VALUE else None
