"""Copying a strided box into contiguous memory, in jitted code.

The problem: reading a transposed matrix in logical order touches a cache line for each element. The way: where some
dimension is closer together in the source than the one that is contiguous in the target, both are walked in tiles of
16 by 16, so that lines are read and written whole. `engine` orders the dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from introspect_cli.tensors import vector
from introspect_cli.tensors.codes import MAX_DIMS
from introspect_cli.tensors.vector import inner, pointer


@inner  # type: ignore[untyped-decorator]
def _copy_tiles(a: Any, b: Any, t: Any, rows: Any, columns: Any, step: Any, within: Any, stride: Any) -> Any:
    """Copy a matrix a to b, reading along its rows and writing along its columns, by tiles of whole cache lines.

    Element (i, j), of `rows` and `columns`, is at a[i * step + j * within] and goes to b[j * stride + i].
    """
    for top in range(0, rows, 16):
        height = min(16, rows - top)
        for left in range(0, columns, 16):
            width = min(16, columns - left)
            if height == 16 and width == 16 and within == 1:
                for i in range(16):
                    for j in range(16):
                        t[i * 16 + j] = a[(top + i) * step + left + j]
                for j in range(16):
                    for i in range(16):
                        b[(left + j) * stride + top + i] = t[i * 16 + j]
            else:
                for i in range(height):
                    for j in range(width):
                        b[(left + j) * stride + top + i] = a[(top + i) * step + (left + j) * within]


@inner  # type: ignore[untyped-decorator]
def _copy_rows(a: Any, b: Any, rows: Any, columns: Any, step: Any, within: Any, out: Any) -> Any:
    """Copy a matrix row by row: element (i, j) is at a[i * step + j * within] and goes to b[i * out + j]."""
    for i in range(rows):
        if within == 1:
            for j in range(columns):
                b[i * out + j] = a[i * step + j]
        else:
            for j in range(columns):
                b[i * out + j] = a[i * step + j * within]


@inner  # type: ignore[untyped-decorator]
def _copy_matrix(a: Any, b: Any, t: Any, shape: Any) -> Any:
    """One of the two ways: rows where a row is contiguous in the target, tiles where a column is."""
    rows, columns, step, within, out, stride = shape
    if stride == 1:
        _copy_rows(a, b, rows, columns, step, within, out)
    else:
        _copy_tiles(a, b, t, rows, columns, step, within, stride)


@inner  # type: ignore[untyped-decorator]
def _copy_box(source: Any, target: Any, size: Any, shape: Any) -> Any:
    vector.keep_apart()
    tile = vector.scratch(256)
    if size == 4:
        _copy_matrix(pointer(source, np.uint32), pointer(target, np.uint32), pointer(tile, np.uint32), shape)
    elif size == 8:
        _copy_matrix(pointer(source, np.uint64), pointer(target, np.uint64), pointer(tile, np.uint64), shape)
    elif size == 2:
        _copy_matrix(pointer(source, np.uint16), pointer(target, np.uint16), pointer(tile, np.uint16), shape)
    else:
        _copy_matrix(pointer(source, np.uint8), pointer(target, np.uint8), pointer(tile, np.uint8), shape)


@inner  # type: ignore[untyped-decorator]
def copy(source: Any, dims: Any, size: Any, plan: Any, target: Any) -> Any:
    """Copy a strided box.

    Args:
        source: address of the first element.
        dims: number of dimensions, at least 2; one of the last two is contiguous in the target.
        size: bytes in an element: 1, 2, 4 or 8.
        plan: address of sizes, strides in the source, strides in the target (elements), and as many zeros;
            MAX_DIMS words each.
        target: address to copy to.
    """
    word = pointer(plan, np.int64)
    a, b = dims - 2, dims - 1
    step, within = word[MAX_DIMS + a], word[MAX_DIMS + b]
    shape = (word[a], word[b], step, within, word[2 * MAX_DIMS + a], word[2 * MAX_DIMS + b])
    boxes = 1
    for dim in range(dims - 2):
        boxes *= word[dim]
    for _ in range(boxes):
        _copy_box(source, target, size, shape)
        dim = dims - 3
        while dim >= 0:
            word[3 * MAX_DIMS + dim] += 1
            source += np.uint64(word[MAX_DIMS + dim] * size)
            target += np.uint64(word[2 * MAX_DIMS + dim] * size)
            if word[3 * MAX_DIMS + dim] < word[dim]:
                break
            source -= np.uint64(word[dim] * word[MAX_DIMS + dim] * size)
            target -= np.uint64(word[dim] * word[2 * MAX_DIMS + dim] * size)
            word[3 * MAX_DIMS + dim] = 0
            dim -= 1
    return 0
