"""What the compiled kernels compute of a step at its end, against numpy and zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from introspect_cli.records import STATISTICS
from introspect_cli.store.index import Sums
from introspect_cli.tensors import columns, kernels
from introspect_cli.tensors import rows as r

pytestmark = pytest.mark.skipif(kernels.KERNELS is None, reason="no compiled kernels")

NAMES = [name for name, own in STATISTICS.items() if not own.on_request]


def blocks_of_anything(sizes):
    """Blocks of rows that hold ordinary numbers, none at all, and every sort of number that is not ordinary."""
    random = np.random.default_rng(0)
    odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e300, -1e300, 5e-324]
    blocks = []
    for size in sizes:
        rows = r.empty(size)
        rows[:, r.RAW] = random.integers(0, 2**64, size, np.uint64)
        rows[:, r.FINITE : r.MIN] = random.integers(0, 3, (size, r.MIN - r.FINITE))
        floats = rows.view(np.float64)
        floats[:, r.MIN :] = random.standard_normal((size, r.WORDS - r.MIN))
        for word in range(r.MIN, r.WORDS):
            some = random.random(size) < 0.2
            floats[some, word] = random.choice(odd, int(some.sum()))
        blocks.append(rows)
    return blocks


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 150])
def test_columns_are_bit_by_bit_those_of_numpy(count):
    blocks = blocks_of_anything((64, 64, 64))
    random = np.random.default_rng(1)
    headers = random.integers(0, 2**64, count, np.uint64)
    seen = random.choice([columns.ALL_OF_IT, columns.BITS_ALONE, columns.NOTHING], count, p=[0.8, 0.1, 0.1]).astype(
        "u1"
    )
    found = columns.of_blocks(blocks, headers, seen, NAMES, with_sketch=True)
    wanted = columns.of_rows(r.gathered(blocks, count), headers, seen, NAMES, with_sketch=True)
    assert found.checksum.tobytes() == wanted.checksum.tobytes()
    assert list(found.statistics) == list(wanted.statistics) == NAMES
    for name, column in wanted.statistics.items():
        assert found.statistics[name].dtype == column.dtype
        np.testing.assert_array_equal(found.statistics[name], column, err_msg=name)
        assert found.statistics[name].tobytes() == column.tobytes(), name
    np.testing.assert_array_equal(found.sketch, wanted.sketch)
    assert found.sketch.flags.c_contiguous


def test_columns_that_nobody_wants_are_left_out():
    blocks, headers, seen = blocks_of_anything((8,)), np.zeros(8, np.uint64), np.zeros(8, np.uint8)
    found = columns.of_blocks(blocks, headers, seen, ["max"], with_sketch=False)
    assert list(found.statistics) == ["max"]
    assert found.sketch is None
    assert columns.of_blocks(blocks, headers, seen, [], with_sketch=False).statistics == {}


def test_a_statistic_that_the_kernels_do_not_know_is_left_to_numpy():
    assert (
        columns.of_blocks(
            blocks_of_anything((8,)), np.zeros(8, np.uint64), np.zeros(8, np.uint8), [*NAMES, "med"], with_sketch=True
        )
        is None
    )


@pytest.mark.parametrize("size", [*range(150), 1000, 4095, 100_003])
def test_the_crc_is_that_of_zlib(size):
    data = np.random.default_rng(size).bytes(size)
    assert kernels.KERNELS.crc32(data) == zlib.crc32(data)


def test_what_is_no_bytes_has_no_crc():
    with pytest.raises(TypeError):
        kernels.KERNELS.crc32("text")


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_step_has_the_digest_that_the_store_computes(count):
    random = np.random.default_rng(count)
    keys, left_out = random.integers(0, 2**64, 50, np.uint64), random.random(50) < 0.2
    sites = random.integers(0, 50, count).astype(np.uint32)
    checksums = random.integers(0, 2**64, count, np.uint64)
    statuses = random.integers(0, 4, count).astype(np.uint8)
    records = (keys, left_out, sites, checksums, statuses)
    assert kernels.step_digest(*records) == Sums().digest(*records)


def test_rows_used_in_a_step_are_kept_for_the_next():
    memory, rows = kernels.KERNELS.memory(100), blocks_of_anything((3,))[0]
    base = rows.ctypes.data
    memory.note(1000, kernels.F32, 10, base + 2 * r.ROW_BYTES)
    memory.note(2000, kernels.F64, 20, base)
    before = rows.copy()
    memory.turn()
    rows[:] = 0
    again = np.empty((2, r.WORDS), np.uint64)
    kept = [memory.find(1000, kernels.F32, 10), memory.find(2000, kernels.F64, 20)]
    kernels.KERNELS.rows(kept, again.ctypes.data)
    assert again.tobytes() == before[[2, 0]].tobytes()
    assert memory.find(3000, kernels.F64, 20) == 0
    assert memory.find(1000, kernels.F16, 10) == 0
    assert memory.find(1000, kernels.F32, 11) == 0
    memory.turn()  # both were found, so both are kept on
    kept = [memory.find(1000, kernels.F32, 10), memory.find(2000, kernels.F64, 20)]
    kernels.KERNELS.rows(kept, again.ctypes.data)
    assert again.tobytes() == before[[2, 0]].tobytes()
    memory.turn()
    memory.turn()
    assert [memory.find(1000, kernels.F32, 10), memory.find(2000, kernels.F64, 20)] == [0, 0]


def test_a_thousand_addresses_are_told_apart():
    memory, rows = kernels.KERNELS.memory(5000), np.zeros((1000, r.WORDS), np.uint64)
    rows[:, 0] = np.arange(1000)
    where = range(1 << 20, (1 << 20) + 64 * 1000, 64)
    for step in range(3):
        for at, place in enumerate(where):
            if step == 0:
                memory.note(place, kernels.F32, at, rows[at].ctypes.data)
            found = np.empty((1, r.WORDS), np.uint64)
            kernels.KERNELS.rows([memory.find(place, kernels.F32, at)], found.ctypes.data)
            assert found[0, 0] == at
        memory.turn()
    memory.clear()
    assert not any(memory.find(place, kernels.F32, at) for at, place in enumerate(where))
