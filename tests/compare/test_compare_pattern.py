"""What differs between two tensors, on differences planted with a known shape."""

from __future__ import annotations

import math

import numpy as np
import pytest

from introspect_cli.compare.elements import difference, rounded, ulp_bins

FLOAT32 = ("float32", "float32")


def planted(shape, at, change=lambda x: x + 1.0, seed=0):
    """Random numbers, and the same with those at an index changed."""
    a = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    b = a.copy()
    b[at] = change(b[at])
    return a, b


def clauses(shape, at, change=lambda x: x * 1.7 + np.random.default_rng(9).standard_normal(x.shape)):
    a, b = planted(shape, at, lambda x: np.asarray(change(x), np.float32))
    return "; ".join(difference(a, b, FLOAT32).where)


PLANTED = {
    "one row": ((16, 24), np.s_[3], "row 3 (of 16), every element there"),
    "one column": ((16, 24), np.s_[:, 0], "column 0 (of 24), every element there"),
    "a range": ((16, 24), np.s_[4:8, 2:5], "rows 4 to 7 (of 16); columns 2 to 4 (of 24), every element there"),
    "one element": ((16, 24), np.s_[3:4, 5:6], "row 3 (of 16); column 5 (of 24), every element there"),
    "all": ((4, 5), np.s_[:], "all of them"),
    "every fourth column": ((8, 32), np.s_[:, 1::4], "columns 1, 5, ... 29 (of 32), every element there"),
    "every fourth up to": ((8, 32), np.s_[:, 1:18:4], "columns 1, 5, ... 17 (of 32), every element there"),
    "a few rows": ((16, 24), np.s_[[1, 2, 9, 15]], "rows 1, 2, 9, 15 (of 16)"),
    "one index": ((4, 6, 8), np.s_[2], "dimension 0 at 2 (of 4), every element there"),
    "some of one index": ((4, 6, 8), np.s_[2, ::5, 3], "dimension 1 at 0, 5 (of 6); dimension 2 at 3"),
    "a part of one": ((6, 6), (np.arange(1, 4), np.arange(2, 5)), "rows 1 to 3 (of 6)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_places_are_named(name):
    shape, at, wanted = PLANTED[name]
    assert wanted in clauses(shape, at)


def test_scattered_places_have_no_shape():
    rng = np.random.default_rng(3)
    a = rng.standard_normal((40, 50)).astype(np.float32)
    b = a.copy()
    chosen = rng.choice(2000, 700, replace=False)
    b.reshape(-1)[chosen] += 1
    assert difference(a, b, FLOAT32).where == ()


RELATIONS = {
    "zeroed": (np.s_[2], lambda x: x * 0, "b is 0 in all of them"),
    "constant": (np.s_[2], lambda x: x * 0 + 3, "b is 3 in all of them"),
    "factor": (np.s_[:], lambda x: x * 2, "b is 2 times a"),
    "negated": (np.s_[:], lambda x: -x, "b is -1 times a"),
    "nan": (np.s_[1], lambda x: x * np.nan, "b is nan in all of them"),
    "infinite": (np.s_[1], lambda x: x * 0 + np.inf, "b is inf in all of them"),
    "bfloat16": (np.s_[:], lambda x: rounded(x, "bfloat16"), "b is a rounded to bfloat16"),
    "float16": (np.s_[:], lambda x: x.astype(np.float16).astype(np.float32), "b is a rounded to float16"),
    "transposed": (np.s_[:], lambda x: x.T.copy(), "the values of a in another order"),
    "shuffled": (np.s_[:], lambda x: np.sort(x.reshape(-1)).reshape(8, 8), "the values of a in another order"),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_planted_relations_are_named(name):
    at, change, wanted = RELATIONS[name]
    a, b = planted((8, 8), at, change)
    assert wanted in "; ".join(difference(a, b, FLOAT32).relation)


def test_noise_has_no_relation():
    rng = np.random.default_rng(5)
    a = rng.standard_normal((8, 8)).astype(np.float32)
    b = (a * (1 + 1e-5 * rng.standard_normal((8, 8)))).astype(np.float32)
    assert difference(a, b, FLOAT32).relation == ()
    assert difference(a, b, FLOAT32).where == ("all of them",)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_ulps_count_representable_numbers(dtype):
    base = np.array([1.0, -1.0, 3.5, 1e-3, 0.0], dtype)
    other = base.copy()
    for _ in range(4):
        other[1] = np.nextafter(other[1], np.array(np.inf, dtype))
    other[0] = np.nextafter(base[0], np.array(2, dtype))
    other[2] = np.nextafter(np.nextafter(base[2], np.array(0, dtype)), np.array(0, dtype))
    other[4] = np.nextafter(np.nextafter(base[4], np.array(1, dtype)), np.array(1, dtype))
    bins, unit = ulp_bins(base, other, (dtype, dtype))
    assert unit == dtype
    assert bins == (("1", 1), ("2", 2), ("3 to 4", 1))


def test_ulps_of_float64_are_exact_where_the_numbers_are_large():
    a = np.array([1e300, -1e300])
    b = np.array([np.nextafter(1e300, np.inf), 1e300])
    assert ulp_bins(a, b, ("float64", "float64"))[0] == (("1", 1), ("over 8,388,608", 1))


def test_rounding_to_bfloat16_is_torchs():
    torch = pytest.importorskip("torch")
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 1e3
    values[:3] = torch.tensor([math.inf, 3.4e38, 0.0])
    assert np.array_equal(rounded(values.numpy(), "bfloat16"), values.bfloat16().float().numpy())


def test_a_picture_never_loses_a_lone_element():
    a, b = planted((3000, 700), np.s_[2999, 699:])
    picture = difference(a, b, FLOAT32).picture
    assert len(picture.cells) <= 48
    assert len(picture.cells[0]) <= 96
    assert picture.cells[-1][-1] > 0
    assert sum(cell > 0 for row in picture.cells for cell in row) == 1
    assert picture.tile == (63, 8)


def test_other_shapes_and_plain_bytes_have_no_difference():
    assert difference(np.zeros(3), np.zeros(4), ("float64", "float64")) is None
    assert difference(np.zeros(3, "S1"), np.zeros(3, "S1"), ("x", "x")) is None


def test_equal_tensors_have_neither_place_nor_relation():
    found = difference(np.ones(4), np.ones(4), ("float64", "float64"))
    assert (found.where, found.relation, found.ulps) == ((), (), ())
    assert difference(np.zeros(0), np.zeros(0), ("float64", "float64")).elements.differing == 0
