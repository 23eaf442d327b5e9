"""Common steps of two runs, and those that have to be opened.

A store's index has, for each step, a digest of its records and a digest chained over all steps so far. With equal step
numbers, equal chains at step k mean that nothing differs up to k: the first differing step is a binary search. After
it, only steps with unequal digests are opened. All is arrays, for tens of thousands of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.terms.sites import columns
from introspect_cli.compare.terms.watched import is_list
from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from introspect_cli.compare.correspondence import Correspondence
    from introspect_cli.compare.terms.distance import Tensors
    from introspect_cli.compare.terms.names import Rename
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.terms.sites import Columns
    from introspect_cli.compare.wholes import Splits
    from introspect_cli.store.format.log import Entries, StepEntry
    from introspect_cli.store.read.step_reader import Reader

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sides:
    """Readers of one rank of both runs, or of all ranks as one, with what applies to all steps.

    Attributes:
        tensors: whole tensors, where they are stored.
        noise: readers of the noise runs' ranks, each with its run's manifest.
        match: which name of a is which of b.
        splits: how both are split up, where ranks or calls are put together.
        files: files of tensors that a read, and b, by what they are.
        ends: the last step of a, and of b, that counts; None for all.
    """

    rank: int
    a: Reader
    b: Reader
    manifests: tuple[dict[str, Any], dict[str, Any]]
    tensors: Tensors
    noise: tuple[tuple[Reader, dict[str, Any]], ...] = ()
    match: Correspondence
    splits: Splits | None = None
    files: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    ends: tuple[int | None, int | None] = (None, None)

    @property
    def rename(self) -> Rename | None:
        """Function from a's FQNs to b's; None where all are the same."""
        return self.match.rename

    @cached_property
    def sites(self) -> tuple[Columns, Columns]:
        """Sites of a, with FQNs renamed, and of b, as columns; computed once."""
        return columns(self.a.sites, self.rename), columns(self.b.sites)


@dataclass(frozen=True)
class Paired:
    """Common steps of two runs, and the steps of each alone.

    Attributes:
        rows_a: positions among a's entries of the steps both have, in order.
        rows_b: positions of their partners among b's.
        aligned: whether the chains may be compared: the same steps from the very first on.
        only_a: steps that only a has, in order; those after the last common one included.
        only_b: steps that only b has, in a's numbering.
        tail_a: how many steps a has after the last common one.
        tail_b: how many steps b has after the last common one.
        changed: a tensor that only one run changes after the last common step, where it trains no more, in words.
    """

    a: Reader
    b: Reader
    rows_a: Ids
    rows_b: Ids
    aligned: bool
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    tail_a: int
    tail_b: int
    changed: str = ""

    def __len__(self) -> int:
        return len(self.rows_a)

    def __getitem__(self, place: int) -> tuple[StepEntry, StepEntry]:
        """(index entry of a, index entry of b) of the common step at index `place`.

        A negative one counts from the end.
        """
        return self.a.entry(int(self.rows_a[place])), self.b.entry(int(self.rows_b[place]))

    def __iter__(self) -> Iterator[tuple[StepEntry, StepEntry]]:
        return (self[place] for place in range(len(self)))

    @property
    def steps(self) -> Ids:
        """Number of each common step in a, in order."""
        return np.asarray(self.a.entries["step"][self.rows_a], dtype=np.int64)

    @property
    def records(self) -> int:
        """Number of records that a has in the common steps; of combined ranks, in those that were read."""
        return self.a.rows_in(self.rows_a)


def pair_steps(
    a: Reader,
    b: Reader,
    offset: int,
    wanted: Callable[[int], bool] | None,
    ends: tuple[int | None, int | None] = (None, None),
) -> Paired:
    """Match steps of a and b by number.

    Steps of one run alone are given by their number in a, of b with `offset` added; `tail_a` and `tail_b` count those
    after the last common step.

    Args:
        a: reader of run a's rank; its `entries` are ascending.
        b: reader of run b's rank.
        offset: step k of b belongs to step k + offset of a.
        wanted: which steps count, by their number in a; None for all.
        ends: the last step of a, and of b, that counts, each in its own count; None for all.
    """
    numbers_a, numbers_b = (
        (steps := reader.entries["step"].astype(np.int64))[: None if end is None else np.searchsorted(steps, end + 1)]
        for reader, end in zip((a, b), ends, strict=True)
    )
    numbers_b = numbers_b + offset
    shared = min(len(numbers_a), len(numbers_b))
    common, rows_a, rows_b = np.intersect1d(numbers_a, numbers_b, assume_unique=True, return_indices=True)
    only_a, only_b = (numbers[~np.isin(numbers, common)] for numbers in (numbers_a, numbers_b))
    if wanted is not None:
        keep = np.fromiter((wanted(int(step)) for step in common), dtype=np.bool_, count=len(common))
        common, rows_a, rows_b = common[keep], rows_a[keep], rows_b[keep]
        only_a, only_b = (np.array([s for s in only if wanted(int(s))], dtype=np.int64) for only in (only_a, only_b))
    last = int(common[-1]) if len(common) else -1
    return Paired(
        a=a,
        b=b,
        rows_a=rows_a.astype(np.int64),
        rows_b=rows_b.astype(np.int64),
        aligned=wanted is None and offset == 0 and np.array_equal(numbers_a[:shared], numbers_b[:shared]),
        only_a=tuple(only_a.tolist()),
        only_b=tuple(only_b.tolist()),
        tail_a=int((only_a > last).sum()),
        tail_b=int((only_b > last).sum()),
    )


def steps_of(sides: Sides, options: DiffOptions, offset: int) -> Paired:
    """The common steps that the options select, and the steps of each run alone.

    `tail_a` and `tail_b` count only steps that the other capture was not told to leave out; 0 where the other run is a
    list, whose end is unknown.

    Args:
        sides: both runs.
        options: what counts.
        offset: step k of b belongs to step k + offset of a.
    """
    wanted = options.wants_step if options.steps else None
    paired = pair_steps(sides.a, sides.b, offset, wanted, sides.ends)
    asked_a, asked_b = (manifest.get("options", {}).get("steps") for manifest in sides.manifests)
    lists_a, lists_b = map(is_list, sides.manifests)
    return replace(
        paired,
        tail_a=0 if lists_b else _count_wanted(paired.only_a[len(paired.only_a) - paired.tail_a :], asked_b, offset),
        tail_b=0 if lists_a else _count_wanted(paired.only_b[len(paired.only_b) - paired.tail_b :], asked_a, 0),
    )


def _count_wanted(steps: tuple[int, ...], asked: object, offset: int) -> int:
    """How many of `steps`, after subtracting `offset`, a capture's schedule selects; all without a valid schedule.

    Args:
        steps: numbers of steps.
        asked: the option `steps` of the capture; any value.
        offset: the capture's numbers are as much smaller.
    """
    if not isinstance(asked, str):
        return len(steps)
    from introspect_cli.schedule.rules import Schedule

    try:
        wanted = Schedule.parse(asked).wants
    except UsageError:  # a store from elsewhere
        return len(steps)
    return sum(wanted(step - offset) for step in steps)


def digest_words(entries: Entries, rows: Ids, name: str) -> Words:
    """A 16-byte field of these index entries (`digest`, `chain`) as uint64 (rows, 2)."""
    return np.frombuffer(np.ascontiguousarray(entries[name][rows]).tobytes(), dtype=np.uint64).reshape(-1, 2)


def differing(paired: Paired) -> list[int]:
    """Indices of the common steps whose digests are unequal, in order; only the index is read."""
    count = len(paired)
    if not count:
        return []
    start = 0
    if paired.aligned:

        def same(place: int) -> bool:
            """Whether all steps up to the common one at this index are equal, by chained digests."""
            return bool(
                paired.a.entries["chain"][paired.rows_a[place]].tobytes()
                == paired.b.entries["chain"][paired.rows_b[place]].tobytes()
            )

        if same(count - 1):
            return []
        low, high = 0, count - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if same(middle) else (low, middle)
        start = low
    digests_a = digest_words(paired.a.entries, paired.rows_a[start:], "digest")
    digests_b = digest_words(paired.b.entries, paired.rows_b[start:], "digest")
    return [start + int(place) for place in np.flatnonzero((digests_a != digests_b).any(axis=1))]
