"""Records of a step that are equal are there once in its columns, and nothing else is."""

from __future__ import annotations

import numpy as np
import torch
from summaries import arrays_of

from introspect_cli.statistics import STATISTICS
from introspect_cli.store.columns import VALUE
from introspect_cli.tensors.columns import Columns
from introspect_cli.tensors.summarizer import Summarizer


def columns_of(values):
    """The columns of values, recorded in this order."""
    summarizer = Summarizer()
    slots = [summarizer.add(each) if isinstance(each, torch.Tensor) else summarizer.add_value(each) for each in values]
    arrays = arrays_of(len(slots), [name for name, own in STATISTICS.items() if not own.on_request], with_sketch=True)
    columns = Columns({**arrays, "layout": np.full(len(slots), 9, "<u4"), VALUE: np.full(len(slots), 9, "<u4")})
    summarizer.end_step((columns, slots)).finish()
    summarizer.close()
    return columns


def test_equal_tensors_of_one_layout_are_there_once():
    x, y = torch.randn(5), torch.randn(20_000)
    columns = columns_of([x, y, x.clone(), x + 1, y, y.clone(), x[:4], x.double()])
    assert columns.arrays[VALUE].tolist() == [0, 1, 0, 2, 1, 1, 3, 4]
    assert columns.rows == 5
    means = [each.double().mean().item() for each in (x, y, x + 1, x[:4], x)]
    assert np.allclose(columns.arrays["mean"][: columns.rows], means)


def test_other_strides_plain_values_and_what_was_not_seen_have_rows_of_their_own():
    x, meta = torch.ones(4, 4), torch.empty(3, device="meta")
    columns = columns_of([x, x.t().contiguous().t(), 1.5, 1.5, meta, meta])
    assert columns.arrays[VALUE].tolist() == [*range(6)]
    assert columns.texts[2] == columns.texts[3]
    assert columns.texts[4] == columns.texts[5]
