"""Torch's C functions say of a tensor what its methods say, or are not used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from summaries import taken

from introspect_cli.tensors import intake
from introspect_cli.tensors.summarizer import Summarizer


@pytest.fixture
def _asked_anew():
    intake.functions.cache_clear()
    yield
    intake.functions.cache_clear()


def of_every_sort():
    """Tensors that the functions answer for, and such as they must leave alone."""
    x = torch.randn(6, 5)
    shrunk, freed = torch.randn(100), torch.randn(100)
    shrunk.untyped_storage().resize_(40)
    freed.untyped_storage().resize_(0)
    sort = [x, x.t(), x[1:], x[:, 1:], x.expand(3, 6, 5), torch.randn(()), torch.randn(0, 3), torch.nn.Parameter(x)]
    sort += [x.to(each) for each in intake._TYPES if each is not None] + [
        x.to(torch.complex64),
        x.to(torch.float8_e5m2),
    ]
    sort += [torch.complex(x, x).conj().imag, x._lazy_clone(), x.to_sparse(), x.to_mkldnn(), shrunk, freed]
    sort += [torch.empty(3, device="meta"), torch._to_functional_tensor(x), torch.randn(2, 1, 2, 1, 2, 1, 2)]
    return [*sort, torch._neg_view(x)]


def summaries(tensors):
    summarizer = Summarizer()
    for _ in range(3):  # a shape is learnt by the first of it
        assert [summarizer.add(each) for each in tensors] == list(range(len(tensors)))
        marks = summarizer.marks(
            [each for each in tensors if each.layout is torch.strided and each.device.type == "cpu"]
        )
        table = taken(summarizer)
    summarizer.close()
    return table, marks


@pytest.mark.usefixtures("_asked_anew")
def test_what_is_recorded_is_the_same_with_and_without_them(monkeypatch):
    tensors = of_every_sort()
    with_them, marks = summaries(tensors)
    intake.functions.cache_clear()
    monkeypatch.setattr(intake, "_functions_of_torch", lambda: torch.absent)
    assert intake.functions() is None
    without, stood = summaries(tensors)
    assert with_them.text == without.text
    assert with_them.layouts == without.layouts
    for name in ("layout_index", "checksum", "status", "sketch"):
        np.testing.assert_array_equal(getattr(with_them, name), getattr(without, name))
    for name in with_them.floats:
        np.testing.assert_array_equal(with_them.floats[name], without.floats[name])
    assert [each is None for each in marks] == [each is None for each in stood]


@pytest.mark.usefixtures("_asked_anew")
def test_none_are_used_that_say_anything_else_than_torch(monkeypatch):
    if intake.functions() is None:
        pytest.skip("this torch has none")
    for attribute, other in (
        ("_TYPES", intake._TYPES[::-1]),
        ("_QUESTIONS", (*intake._QUESTIONS[:6], intake._QUESTIONS[7], intake._QUESTIONS[6], intake._QUESTIONS[8])),
        ("_place", lambda _samples: None),
    ):
        intake.functions.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(intake, attribute, other)
            assert intake.functions() is None


def test_a_tensor_of_a_transform_goes_the_long_way(capfd):
    summarizer = Summarizer()
    seen = []

    def inside(x):
        seen.append(x)
        summarizer.add(x)
        return x * 2

    torch.vmap(inside)(torch.ones(4, 3))
    summarizer.add(seen[0])
    table = taken(summarizer)
    assert len(table) == 2
    assert capfd.readouterr().err == ""
    summarizer.close()


def test_a_lazy_negation_is_seen_in_the_tensor_itself():
    if intake.functions() is None:
        pytest.skip("this torch has none")
    x = torch.arange(24.0).reshape(4, 6)
    lazy = torch._neg_view(x)
    summarizer = Summarizer()
    for tensor in (x, lazy, -x, x, lazy, -x):  # a shape is learnt by the first of it
        summarizer.add(tensor)
    checksums = taken(summarizer).checksum.tolist()
    summarizer.close()
    assert checksums[1] == checksums[2] != checksums[0]
    assert checksums[:3] == checksums[3:]
