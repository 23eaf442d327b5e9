"""Cutting tensors into chunks and sharing those out among threads, in jitted code.

The problem: a large tensor wants all cores for a tenth of a millisecond, in which a few lines of Python are a tenth
as well. The way: one call from Python does all of it; whoever takes part, in the runtime's own threads, draws the
next chunk from counters. Chunks depend on the tensor's size alone and their rows are merged in order, so that the
result does not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from introspect_cli.tensors import codes, vector
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.codes import CHUNK, ITEM_WORDS, WORTHWHILE
from introspect_cli.tensors.summation import merge, run
from introspect_cli.tensors.vector import inner, pointer


@inner  # type: ignore[untyped-decorator]
def _chunk(count: Any) -> Any:
    """Elements in a chunk: more for huge tensors, so that the rows stay small beside them."""
    return CHUNK * max(1, (count + (CHUNK << 12) - 1) // (CHUNK << 12))


@inner  # type: ignore[untyped-decorator]
def _sample(address: Any, count: Any, code: Any) -> Any:
    """Eight bytes from the middle of a tensor of at least 16."""
    middle = address + np.uint64(count * codes.SIZES[code] >> 1)
    return pointer(middle - middle % np.uint64(8), np.int64)[0]


@inner  # type: ignore[untyped-decorator]
def prepare(team: Any) -> Any:
    """Number the chunks of all items."""
    vector.keep_apart()
    words = pointer(team, np.int64)
    items = pointer(np.uint64(words[codes.ITEMS]), np.int64)
    chunks = 0
    parts = 0
    for at in range(0, words[codes.COUNT] * ITEM_WORDS, ITEM_WORDS):
        chunk = _chunk(items[at + 1])
        number = max(1, (items[at + 1] + chunk - 1) // chunk)
        items[at + 6] = chunks
        items[at + 7] = parts
        chunks += number
        if number > 1:
            parts += number
    words[codes.CHUNKS] = chunks
    for counter in range(codes.COUNTER, codes.CHUNKS):
        words[counter] = 0
    return 0


@inner  # type: ignore[untyped-decorator]
def take(team: Any) -> Any:
    """Summarise chunks until none is left; several threads may, for the same team."""
    vector.keep_apart()
    words = pointer(team, np.int64)
    items = pointer(np.uint64(words[codes.ITEMS]), np.int64)
    last = (words[codes.COUNT] - 1) * ITEM_WORDS
    # Torch's threads have just written the tensor, the first one its beginning: what is in their caches goes first.
    function = pointer(team, np.uint64)[codes.NUMBER]
    back = np.int64(function != 0 and vector.call_number(function) > 0)
    at = 0
    while True:
        if vector.fetch_add(team) >= words[codes.CHUNKS]:
            return 0
        number = vector.fetch_add(team + np.uint64(8 * (1 + back)))
        if back:
            number = words[codes.CHUNKS] - 1 - number
        while items[at + 6] > number:
            at -= ITEM_WORDS
        while at < last and items[at + ITEM_WORDS + 6] <= number:
            at += ITEM_WORDS
        count, code = items[at + 1], items[at + 3]
        chunk = _chunk(count)
        done = (number - items[at + 6]) * chunk
        row = items[at + 4]
        if count > chunk:
            row = words[codes.PARTS] + (items[at + 7] + number - items[at + 6]) * r.ROW_BYTES
        run(
            np.uint64(items[at] + done * codes.SIZES[code]),
            min(chunk, count - done),
            items[at + 2] + done,
            code,
            words[codes.FLAGS],
            np.uint64(items[at + 5]),
            np.uint64(row),
        )


@inner  # type: ignore[untyped-decorator]
def finish(team: Any) -> Any:
    """Merge the rows of the chunks, item by item, and note the samples."""
    vector.keep_apart()
    words = pointer(team, np.int64)
    items = pointer(np.uint64(words[codes.ITEMS]), np.int64)
    for at in range(0, words[codes.COUNT] * ITEM_WORDS, ITEM_WORDS):
        count = items[at + 1]
        chunk = _chunk(count)
        if count > chunk:
            parts = words[codes.PARTS] + items[at + 7] * r.ROW_BYTES
            merge(np.uint64(parts), (count + chunk - 1) // chunk, np.uint64(items[at + 4]))
        if count >= WORTHWHILE:
            pointer(np.uint64(items[at + 4]), np.int64)[r.SAMPLE] = _sample(np.uint64(items[at]), count, items[at + 3])
    return 0


@inner  # type: ignore[untyped-decorator]
def everything(team: Any) -> Any:
    """Summarise all items, with as many threads as the team has."""
    vector.keep_apart()
    prepare(team)
    words = pointer(team, np.uint64)
    if words[codes.THREADS] > 1 and words[codes.CHUNKS] > 1:
        vector.call_parallel(words[codes.PARALLEL], words[codes.PART], team, words[codes.THREADS])
    else:
        take(team)
    return finish(team)


@inner  # type: ignore[untyped-decorator]
def _cut(address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any, team: Any) -> Any:
    """Summarise one tensor, cut into chunks."""
    vector.keep_apart()
    item = vector.scratch(8)
    words, items = pointer(team, np.int64), pointer(item, np.int64)
    items[0] = np.int64(address)
    items[1] = count
    items[2] = first
    items[3] = code
    items[4] = np.int64(row)
    items[5] = np.int64(lut)
    words[codes.ITEMS] = np.int64(item)
    words[codes.COUNT] = 1
    words[codes.FLAGS] = flags
    return everything(team)


@inner  # type: ignore[untyped-decorator]
def one(address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any, team: Any) -> Any:
    """Summarise one contiguous tensor into a row; arguments as `summation.run` has them."""
    vector.keep_apart()
    if count > CHUNK:
        return _cut(address, count, first, code, flags, lut, row, team)
    run(address, count, first, code, flags, lut, row)
    if count >= WORTHWHILE:
        pointer(row, np.int64)[r.SAMPLE] = _sample(address, count, code)
    return 0


@inner  # type: ignore[untyped-decorator]
def alike(address: Any, count: Any, known: Any, code: Any) -> Any:
    """Whether a few bytes are what they were when the known row was filled."""
    return np.int64(pointer(known, np.int64)[r.SAMPLE] == _sample(address, count, code))


@inner  # type: ignore[untyped-decorator]
def again(address: Any, count: Any, known: Any, code: Any, row: Any, team: Any) -> Any:
    """Copy the known row if the elements still have its checksum: 1; 0, and nothing done, if not."""
    vector.keep_apart()
    old, out = pointer(known, np.int64), pointer(row, np.int64)
    place = vector.scratch(32)
    one(address, count, 0, code, 0, np.uint64(0), place, team)
    if old[r.RAW] != pointer(place, np.int64)[r.RAW]:
        return 0
    for word in range(r.WORDS):
        out[word] = old[word]
    return 1
