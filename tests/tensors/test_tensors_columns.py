"""What the compiled kernels compute of a step at its end, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formulas import fill
from summaries import arrays_of, taken

from introspect_cli.records import Layout, Status
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import kernels
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.columns import Columns, EndedRows
from introspect_cli.tensors.row_notes import ALL_OF_IT, BITS_ALONE, NOTHING, LayoutNumbers, RowNotes
from introspect_cli.tensors.rows import ROWS, Arena
from introspect_cli.tensors.summarizer import Summarizer

NAMES = list(STATISTICS)


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


def arena_of(count):
    """An arena whose first rows hold anything, with what is known of them beside, and their notes."""
    arena, random = Arena(), np.random.default_rng(1)
    arena.reserve(count)
    for block, anything in zip(arena.blocks, blocks_of_anything([ROWS] * len(arena.blocks)), strict=True):
        block[:] = anything
    layouts, notes = LayoutNumbers(), RowNotes()
    for number in range(5):
        layouts.number(Layout((number,), "float32", "cpu", "contiguous"))
    sorts = ["", "bits", "text", "header", Status.NOT_OBSERVED, Status.VALUE]
    for slot, kind in enumerate([sorts[number] for number in random.integers(0, len(sorts), count)]):
        if kind == "bits":
            notes.unmeasured.append(slot)
        elif kind == "header":
            notes.header_of[slot] = slot << 40
        elif kind:
            notes.set_status(
                slot, Status.PARTIAL if kind == "text" else Status(int(kind)), f"text {slot}" if slot % 3 else ""
            )
        if kind == str(Status.VALUE):
            notes.fixed[slot] = slot + 1
    return arena, notes, notes.facts(random.integers(0, 5, count).tolist(), layouts)


COUNTS = pytest.mark.parametrize("count", [0, 1, 150, ROWS, ROWS + 1, 3 * ROWS - 1])


@COUNTS
@pytest.mark.parametrize(("names", "with_sketch"), [(NAMES, True), ([], False)], ids=["everything", "checksums"])
def test_the_kernels_fill_columns_as_numpy_does_bit_by_bit(count, names, with_sketch):
    """In three steps: the second has the slots of the first and other values, the third has others."""
    arena, notes, facts = arena_of(count)
    assert count <= 1 or set(facts.seen.tolist()) == {ALL_OF_IT, BITS_ALONE, NOTHING}
    random = np.random.default_rng(2)
    records = count + 7 if count else 0  # some slots are of several records
    slots = random.integers(0, max(count, 1), records).tolist()
    arrays, wanted = (arrays_of(records, names, with_sketch=with_sketch) for _ in range(2))
    columns = Columns(arrays)
    for step in range(3):
        if step == 1:
            notes.fixed.update({slot: value + 1 for slot, value in notes.fixed.items()})
            notes.texts.update({slot: text + "!" for slot, text in notes.texts.items()})
        elif step == 2:
            slots = slots[::-1]
        for block in arena.blocks:
            block[:, r.RAW] += np.uint64(1)
        columns.fill(arena, facts, list(slots), notes.fixed, notes.texts)
        fill(wanted, arena.snapshot(count), facts, slots, notes.fixed)
        for name, column in wanted.items():
            assert arrays[name].tobytes() == column.tobytes(), (step, name)
        assert not records or len(np.unique(arrays["checksum"])) > 1 or records < 9
        assert columns.layout.tolist() == facts.layout_index[slots].tolist()
        texts = {record: notes.texts.get(slot) for record, slot in enumerate(slots)}
        assert columns.texts == {record: text for record, text in texts.items() if text}


def test_rows_that_a_device_still_computes_are_filled_in_when_they_are_asked_for():
    class OnDevice:
        def send(self):
            pass

        def ready(self):
            return True

        def fill(self, rows):
            rows[[2, 5]] = blocks_of_anything((2,))[0]

    arena, notes, facts = arena_of(8)
    slots = list(range(8))
    arena.blocks[0][[2, 5]] = blocks_of_anything((2,))[0]
    wanted, found = (arrays_of(8, NAMES, with_sketch=True) for _ in range(2))
    assert not EndedRows([(Columns(wanted), slots)], arena, facts, (notes.fixed, notes.texts), []).waits
    copy = arena.copy(8)
    for block in (*arena.blocks, copy.blocks[0][[2, 5]]):
        block[:] = 0
    copy.blocks[0][[2, 5]] = 0
    late = EndedRows([(Columns(found), slots)], copy, facts, (notes.fixed, notes.texts), [OnDevice()])
    assert late.waits
    assert late.ready()
    late.finish()
    assert not late.waits
    for name, column in wanted.items():
        assert found[name].tobytes() == column.tobytes(), name


def test_a_thousand_large_tensors_that_come_again_are_told_apart():
    summarizer = Summarizer()
    large = torch.arange(1000.0).repeat_interleave(kernels.WORTHWHILE).split(kernels.WORTHWHILE)
    for _ in range(3):
        summarizer.add_all(large)
        assert taken(summarizer).floats["mean"].tolist() == list(range(1000))
    summarizer.close()


def test_an_exception_while_a_layout_is_numbered_gives_no_number_to_two_of_them():
    """As a signal or another thread may send: the layout that was under way is as if it had never come."""

    class Stops(dict):
        def __setitem__(self, key, value):
            raise KeyboardInterrupt

    first, second, third = (Layout((size,), "float32", "cpu", "contiguous") for size in (2, 3, 4))
    met, undisturbed = LayoutNumbers(), LayoutNumbers()
    met.number(first)
    numbers, met._numbers = met._numbers, Stops(met._numbers)
    with pytest.raises(KeyboardInterrupt):
        met.number(second)
    met.headers()
    met._numbers = numbers
    assert [met.number(layout) for layout in (third, second, first)] == [1, 2, 0]
    for layout in (first, third, second):
        undisturbed.number(layout)
    assert met.layouts == undisturbed.layouts == [first, third, second]
    assert met.headers().tolist() == undisturbed.headers().tolist()
