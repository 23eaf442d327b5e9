"""Records of a step that are equal are there once in its columns, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from neutrality import watched
from summaries import arrays_of
from torch import nn

from introspect_cli.statistics import STATISTICS
from introspect_cli.store.run import open_run
from introspect_cli.tensors.columns import Columns
from introspect_cli.tensors.summarizer import Summarizer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "store-format.md"


def columns_of(values):
    """The columns of values, recorded in this order."""
    summarizer = Summarizer()
    slots = [summarizer.add(each) if isinstance(each, torch.Tensor) else summarizer.add_value(each) for each in values]
    arrays = arrays_of(len(slots), [name for name, own in STATISTICS.items() if not own.on_request], with_sketch=True)
    columns = Columns({**arrays, "layout": np.full(len(slots), 9, "<u4"), "value": np.full(len(slots), 9, "<u4")})
    summarizer.end_step((columns, slots)).finish()
    summarizer.close()
    return columns


def test_equal_tensors_of_one_layout_are_there_once():
    x, y = torch.randn(5), torch.randn(20_000)
    columns = columns_of([x, y, x.clone(), x + 1, y, y.clone(), x[:4], x.double()])
    assert columns.arrays["value"].tolist() == [0, 1, 0, 2, 1, 1, 3, 4]
    assert columns.rows == 5
    means = [each.double().mean().item() for each in (x, y, x + 1, x[:4], x)]
    assert np.allclose(columns.arrays["mean"][: columns.rows], means)


def test_other_strides_plain_values_and_what_was_not_seen_have_rows_of_their_own():
    x, meta = torch.ones(4, 4), torch.empty(3, device="meta")
    columns = columns_of([x, x.t().contiguous().t(), 1.5, 1.5, meta, meta])
    assert columns.arrays["value"].tolist() == [*range(6)]
    assert columns.texts[2] == columns.texts[3]
    assert columns.texts[4] == columns.texts[5]


def test_a_captured_run_has_them_once_and_gives_each_record_its_values(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Identity(), nn.Linear(4, 1))
    with watched(tmp_path / "run"):
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(2):
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "reader.py").write_text(code)
    command = [sys.executable, "-I", "reader.py", "run"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    with open_run(tmp_path / "run") as run:
        rank = run.rank(0)
        records = [record for entry in rank.steps for record in rank.records(entry.step)]
        assert len(records) == sum(entry.rows for entry in rank.steps)
        assert all(entry.length < entry.rows * 150 for entry in rank.steps)  # of 178 where each had its own
    assert [line.split()[-1] for line in said.splitlines()] == [f"{each.summary.checksum:016x}" for each in records]
    passed = [each.summary for each in records if each.site.fqn in {"Sequential.1", "Sequential.2"}]
    values = {(each.checksum, each.stats["mean"], each.sketch) for each in passed if each.layout.shape == (3, 4)}
    assert len(values) < len(passed) / 2
