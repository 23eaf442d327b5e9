"""Sums over the records of several ranks: what is compiled against numpy, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic import COUNTS, NUMBERS

from introspect_cli.store import adding as adding_module
from introspect_cli.store.adding import Adding
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.compiled import compiled

pytestmark = pytest.mark.skipif(compiled() is None, reason="nothing is compiled")

ODD = [np.nan, 0.0, 1e-30, -1e-30, 1e30, -1e30]


def batch_of(size, random, *, odd):
    """Records with ordinary numbers, or with every sort of number that a store may hold."""

    def numbers(name):
        found = random.standard_normal(size)
        if odd:
            some = random.random(size) < 0.2
            found[some] = random.choice(ODD, int(some.sum()))
        return np.abs(found) if name in ("absmin", "amean", "var") else found

    counts = {name: random.integers(-1, 9, size) if odd else np.zeros(size, np.int64) for name in COUNTS}
    return StepBatch(
        site=np.arange(size, dtype=np.uint32),
        sequence=np.arange(size, dtype=np.uint32),
        layout=np.zeros(size, np.uint32),
        status=np.zeros(size, np.uint8),
        checksum=random.integers(0, 2**64, size, np.uint64),
        counts=counts,
        floats={name: numbers(name).astype("<f4" if name in ("skew", "kurt") else "<f8") for name in NUMBERS},
        sketch=random.standard_normal((size, 16)).astype(np.float32),
    )


def every_row(ranks, size):
    return np.repeat(np.arange(ranks), size), np.tile(np.arange(size), ranks), np.tile(np.arange(size), ranks)


def some_rows(ranks, size):
    """Ranks that are not alike: some have fewer rows, others several rows for one sum, and in another order."""
    rank, row, to = every_row(ranks, size)
    to[rank == 1] = to[rank == 1][::-1] // 2
    keep = (rank != 2) | (row % 3 > 0)
    return rank[keep], row[keep], to[keep]


def both(monkeypatch, of, batches, counts=COUNTS, floats=NUMBERS):
    """What is compiled, and numpy, add up; the first a second time, with what it kept."""
    random = np.random.default_rng(1)
    held, heads = random.integers(0, 12, len(of[0])), random.integers(0, 2**64, len(of[0]), np.uint64)
    made = Adding(*of, held, heads)
    first, again = (made.add(batches, counts, floats) for _ in range(2))
    assert_equal(first, again)
    monkeypatch.setattr(adding_module, "compiled", lambda: None)
    return again, Adding(*of, held, heads).add(batches, counts, floats)


def assert_equal(found, wanted):
    assert found.checksum.tobytes() == wanted.checksum.tobytes()
    assert (found.sketch is None) == (wanted.sketch is None)
    if found.sketch is not None:
        assert found.sketch.tobytes() == wanted.sketch.tobytes()
    for own, other in ((found.counts, wanted.counts), (found.floats, wanted.floats)):
        assert own.keys() == other.keys()
        for name, column in other.items():
            assert own[name].dtype == column.dtype
            absent = np.isnan(column)
            assert np.array_equal(np.isnan(own[name]), absent), name
            assert own[name][~absent].tobytes() == column[~absent].tobytes(), name


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("rows", [every_row, some_rows])
@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (3, 7), (9, 1), (20, 700)])
def test_sums_are_bit_by_bit_those_of_numpy(monkeypatch, odd, rows, ranks, size):
    random = np.random.default_rng(ranks)
    batches = [batch_of(size, random, odd=odd) for _ in range(ranks)]
    with np.errstate(all="ignore"):
        found, wanted = both(monkeypatch, rows(ranks, size), batches)
    assert_equal(found, wanted)
    assert set(found.floats) == {"min", "max", "absmin", "mean", "amean", "var"}


def test_what_ranks_did_not_keep_is_not_added(monkeypatch):
    random = np.random.default_rng(0)
    batches = [batch_of(5, random, odd=False) for _ in range(3)]
    bare = [*batches[:2], replace(batches[2], sketch=None)]
    for floats in ((), ("min",), ("var", "max"), ("mean", "var")):
        found, wanted = both(monkeypatch, every_row(3, 5), bare, COUNTS[:2], floats)
        assert_equal(found, wanted)
        assert found.sketch is None
        assert ("var" in found.floats) == (floats == ("mean", "var"))


def test_columns_of_other_types_are_left_to_numpy(monkeypatch):
    random = np.random.default_rng(0)
    batches = [batch_of(5, random, odd=False) for _ in range(3)]
    lean = replace(batches[0], floats={name: own.astype("<f4") for name, own in batches[0].floats.items()})
    found, wanted = both(monkeypatch, every_row(3, 5), [lean, *batches[1:]])
    assert_equal(found, wanted)


def test_columns_that_lie_elsewhere_are_found_again():
    random = np.random.default_rng(0)
    made = Adding(*every_row(3, 5), np.ones(15, np.int64), np.zeros(15, np.uint64))
    for _ in range(3):
        batches = [batch_of(5, random, odd=False) for _ in range(3)]
        found = made.add(batches, COUNTS, NUMBERS)
        assert np.array_equal(found.sketch, sum(own.sketch.astype(np.float64) for own in batches))
