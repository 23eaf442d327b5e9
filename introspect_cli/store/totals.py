"""What each rank's records of a step add up to, so that steps of two layouts are seen to be equal without reading them.

Two runs that share out their tensors differently have no rank in common, and no digest of a rank means anything to the
other. But a checksum is a sum over elements that is made final; undone, multiplied by a key of its site and added up,
it is a number that parts on several ranks add up to. So each rank of a launch keeps such totals for each step, a few
hundred bytes beside its records.

A rank does not know who else has a copy of what it holds, and a copy must count once. So it keeps a total for each
*share*: parameters that it has whole, gradients of which it has one range of rows, and so on. Ranks whose shares are of
the same sites and the same place have copies of one another; their totals must then be equal, and one of them counts.
What each rank may have its own of (samples, activations, losses) is one share whose numbers cannot be taken apart
again: such totals are equal where the ranks together have the same values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import KIND_CODES, SETTING_KINDS, Kind
from introspect_cli.store.files import DamageError
from introspect_cli.store.log import step_digest
from introspect_cli.sums import header, mix, unmix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from introspect_cli.records import Layout
    from introspect_cli.store.log import Entries

    Array = NDArray[Any]


class Spread(NamedTuple):
    """How the values of a kind are spread over several ranks.

    Attributes:
        copied: ranks hold equal copies, or parts or summands of one value.
        state: what training leaves (parameters, optimizer state); a missing part is missing in the model.
        first: where copies differ, the first rank's counts: DDP broadcasts its buffers before each forward pass.
        own: each rank may have its own value: samples, and what is computed of them.
        flows: activations and their gradients, of which data-parallel ranks have their own samples.
        by_call: one value per call, so per microbatch.
        left_out: ignored where layouts are compared.
    """

    copied: bool = False
    state: bool = False
    first: bool = False
    own: bool = False
    flows: bool = False
    by_call: bool = False
    left_out: bool = False


_FLOWS = Spread(own=True, flows=True, by_call=True)
_COPIED = Spread(copied=True, state=True)

SPREADS: dict[Kind, Spread] = {
    Kind.HYPERPARAMETER: Spread(first=True, left_out=True),
    Kind.COLLECTIVE: Spread(left_out=True),
    Kind.PARAM: _COPIED,
    Kind.GRAD: _COPIED,
    Kind.OPTIMIZER_STATE: _COPIED,
    Kind.BUFFER: Spread(state=True, first=True),
    Kind.BATCH: Spread(own=True, by_call=True),
    Kind.LOSS: Spread(own=True, by_call=True),
    Kind.RNG: Spread(own=True),
    Kind.VALUE: Spread(by_call=True),
    Kind.INPUT: _FLOWS,
    Kind.OUTPUT: _FLOWS,
    Kind.GRAD_INPUT: _FLOWS,
    Kind.GRAD_OUTPUT: _FLOWS,
    Kind.OP_OUTPUT: Spread(flows=True),
}


def kinds_that(are: str) -> frozenset[Kind]:
    """The kinds whose `Spread` has the field named `are` set, such as `flows`."""
    return frozenset(kind for kind, spread in SPREADS.items() if getattr(spread, are))


def codes_that(are: str) -> list[int]:
    """Codes of the kinds whose `Spread` has the field named `are` set, sorted."""
    return sorted(KIND_CODES[kind] for kind in kinds_that(are))


# --- totals


SHARE = np.dtype([("kind", "<u4"), ("rows", "<u4"), ("part", "<u8"), ("sites", "<u8", (2,))])
"""A share: the code of its records' kind, how many, where in the whole they are (0: all of it), their sites' digest."""

MIXED, SET = 255, 254
"""The kinds of two shares: what each rank may have its own of; and settings, whose total is 0, since none counts."""

STATE, FIRST, LEFT_OUT = map(codes_that, ("state", "first", "left_out"))
SETTINGS = tuple(KIND_CODES[kind] for kind in sorted(SETTING_KINDS))
_SECOND = np.uint64(0xD1B54A32D192ED03)


@lru_cache(maxsize=4096)
def part_hash(layout: Layout) -> int:
    """A 64-bit hash of a layout's dtype, whole shape and part, never 0; 0 for a layout without a part. Cached."""
    if layout.part is None:
        return 0
    part = layout.part
    text = f"{layout.dtype}{list(layout.shape)}{part.ranges}{part.reduction}{part.reduced_over}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") | 1


def site_factors(sites: Array) -> Array:
    """Odd multipliers for the checksums of sites, uint64 (n, 2), derived from the sites' keys."""
    return np.asarray(np.stack([mix(sites), mix(sites ^ _SECOND)], axis=1) | np.uint64(1))


class StepTotals:
    """Adds up the steps that a rank writes, one after the other."""

    def __init__(self) -> None:
        """Start without layouts."""
        self._places, self._heads = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self._arranged: tuple[Array, ...] = ()  # sites, layouts and statuses of the step that the rest is worked out of
        self._order = self._starts = self._mixed = np.zeros(0, np.int64)
        self._factors = self._row_heads = np.zeros(0, np.uint64)
        self._form = b""

    def name_layouts(self, counted: int, layouts: list[Layout]) -> None:
        """Set the layouts numbered from `counted` on; those that had these numbers are forgotten."""
        places = np.array([part_hash(layout) for layout in layouts], np.uint64)
        heads = [0 if layout.part is None else header(layout.dtype, layout.shape) for layout in layouts]
        self._places = np.concatenate([self._places[:counted], places])
        self._heads = np.concatenate([self._heads[:counted], np.array(heads, np.uint64)])

    def encoded(self, columns: dict[str, Any], keys: Array, kinds: Array) -> bytes:
        """The bytes of a step's TOTALS frame: its shares (rows that are added up together), and the total of each.

        Which rows belong to which share is kept for the next step, and worked out again where its sites, layouts or
        statuses are others.

        Args:
            columns: of the step's records.
            keys: uint64, of all sites by number.
            kinds: int64, codes of their kinds.
        """
        site, layout, status = (np.asarray(columns[name]) for name in ("site", "layout", "status"))
        if not self._arranged or not all(map(np.array_equal, self._arranged, (site, layout, status))):
            self._arrange(site.copy(), layout.copy(), status.copy(), keys, kinds)
        checksum = np.asarray(columns["checksum"], np.uint64)
        raw = unmix(checksum[self._order]) - self._row_heads
        totals = np.zeros((len(self._form) // SHARE.itemsize, 2), np.uint64)
        if len(self._order):
            totals[: len(self._starts)] = np.add.reduceat(self._factors * raw[:, None], self._starts, axis=0)
        if len(self._mixed):
            rows = self._mixed
            none = np.zeros(len(rows), np.bool_)
            totals[-1] = struct.unpack("<QQ", step_digest(keys[site[rows]], checksum[rows], status[rows], none))
        return len(totals).to_bytes(8, "little") + self._form + totals.tobytes()

    def _arrange(self, site: Array, layout: Array, status: Array, keys: Array, kinds: Array) -> None:
        """Group the rows into shares: by kind and part for state and parts, one for settings, one for all other rows.

        Rows of kinds in LEFT_OUT are only in the share of settings, if they are settings. Of shares that add up,
        `_order` has their rows, share by share, `_starts` where in that each begins, `_factors` by what each row is
        multiplied, `_row_heads` what its checksum has beside its elements, 0 of wholes.
        """
        self._arranged = ()  # should an interrupt come before the end
        kind, place = kinds[site], self._places[layout]
        counts = ~np.isin(kind, LEFT_OUT)
        adds_up = counts & (np.isin(kind, STATE) | (place > 0))
        rows, mixed = np.flatnonzero(adds_up), np.flatnonzero(counts & ~adds_up)
        order = rows[np.lexsort((place[rows], kind[rows]))]
        new = np.ones(len(order), np.bool_)
        new[1:] = (np.diff(kind[order]) != 0) | (place[order][1:] != place[order][:-1])
        starts = np.flatnonzero(new)
        settings = np.flatnonzero(np.isin(kind, SETTINGS))
        shares = np.zeros(len(starts) + bool(len(settings)) + bool(len(mixed)), SHARE)
        seen = mix(keys[site] ^ mix(status.astype(np.uint64) + np.uint64(1)))
        for number, members in enumerate(np.split(order, starts[1:]) if len(order) else ()):
            shares[number] = kind[members[0]], len(members), place[members[0]], _two_sums(seen[members])
        if len(settings):
            shares[len(starts)] = SET, len(settings), 0, _two_sums(seen[settings])
        if len(mixed):
            shares[-1] = MIXED, len(mixed), 0, _two_sums(seen[mixed])
        self._order, self._starts, self._mixed, self._form = order, starts, mixed, shares.tobytes()
        self._factors, self._row_heads = site_factors(keys[site[order]]), self._heads[layout[order]]
        self._arranged = site, layout, status


def _two_sums(values: Array) -> tuple[int, int]:
    """Two sums of numbers modulo 2**64, independent of their order: of the numbers, and of the numbers mixed."""
    return int(values.sum(dtype=np.uint64)), int(mix(values + _SECOND).sum(dtype=np.uint64))


# --- reading


@dataclass(frozen=True, eq=False)
class Totals:
    """The totals of a rank.

    Attributes:
        forms: by number, the shares of a form, as `SHARE`.
        form: int64, of each step of the rank, the number of its form; -1 where no total is known.
        position: int64, of each step, where among those of its form its totals are.
        totals: by form, uint64 (steps, shares, 2).
    """

    forms: list[Array]
    form: Array
    position: Array
    totals: list[Array]


def decode(frames: Iterable[tuple[int, bytes]], entries: Entries, path: str) -> Totals:
    """The totals of the steps of a rank, given (step, body) of each TOTALS frame.

    Frames of steps that are not in `entries` are ignored; of several for one step the last counts.

    Raises:
        DamageError: a frame has another length than its shares need.
    """
    row_of = {step: row for row, step in enumerate(entries["step"].tolist())}
    numbers: dict[bytes, int] = {}
    of_each: list[tuple[int, bytes]] = [(-1, b"")] * len(entries)
    for step, data in frames:
        shares = int.from_bytes(data[:8], "little")
        begin = 8 + shares * SHARE.itemsize
        if len(data) != begin + 16 * shares:
            raise DamageError(path, f"the totals of step {step} are not whole")
        if step in row_of:
            of_each[row_of[step]] = numbers.setdefault(data[8:begin], len(numbers)), data[begin:]
    form = np.array([of for of, _ in of_each], np.int64)
    position, totals = np.zeros(len(entries), np.int64), []
    forms = [np.frombuffer(body, SHARE) for body in numbers]
    for of, table in enumerate(forms):
        rows = np.flatnonzero(form == of)
        position[rows] = np.arange(len(rows))
        joined = b"".join(of_each[row][1] for row in rows.tolist())
        totals.append(np.frombuffer(joined, "<u8").reshape(len(rows), len(table), 2))
    return Totals(forms, form, position, totals)
