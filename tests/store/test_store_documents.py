"""Documents are plain data, whatever they are given and whoever wrote them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from introspect_cli.errors import StoreError
from introspect_cli.store.documents import dump, load

TEXTS = st.text("ab \u00e9\u4e00\U0001f600{}[]:,\"'\\-1#")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5), max_leaves=30
)


def round_trip(value):
    return load(dump(value), "x")


@settings(max_examples=300)
@given(PLAIN)
def test_plain_data_comes_back(value):
    assert round_trip(value) == value


def test_whatever_a_script_leaves_in_its_settings():
    class Odd:
        def __str__(self):
            return "odd"

    shared = [1, 2]
    nested: list = []
    for _ in range(200):
        nested = [nested]
    value = {
        "numpy": np.float32(0.5),
        "integer": np.int64(3),
        "tuple": (1, 2),
        "set": {3, 1, 2},
        "path": Path("a/b"),
        "odd": Odd(),
        "ordered": OrderedDict(a=1),
        ("a", 1): "key",
        "shared": [shared, shared],
        "huge": 10**5000,
        "nan": math.nan,
        "surrogate": "\udc80",
        "bytes": b"x",
        "deep": nested,
    }
    back = round_trip(value)
    assert back["numpy"] == 0.5
    assert back["integer"] == 3
    assert back["tuple"] == [1, 2]
    assert back["set"] == [1, 2, 3]
    assert back["path"] == "a/b"
    assert back["odd"] == "odd"
    assert back["('a', 1)"] == "key"
    assert back["shared"] == [[1, 2], [1, 2]]
    assert back["huge"].startswith("0x")
    assert math.isnan(back["nan"])
    assert back["surrogate"] == "\\udc80"


HOSTILE = {
    "deep": b"[" * 200_000,
    "deep closed": b"[" * 300 + b"]" * 300,
    "deep keys": b'{"a":' * 50_000,
    "long number": b"9" * 5000,
    "not text": b"\xff\xfe\x00\x01\x80",
    "nul": b'{"a": "\0"}',
    "bad": b"[1, 2",
    "two": b"{} {}",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_end_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()
    with pytest.raises(StoreError, match=r"run/manifest\.json is damaged: "):
        load(HOSTILE[name], "run/manifest.json")
    assert time.process_time() - begin < 10
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=500)
@given(st.binary(max_size=60) | st.text('[]{}:,"\\u \n\tdb01.-eNanInfity', max_size=60).map(str.encode))
def test_any_bytes_are_plain_data_or_a_sentence(data):
    try:
        value = load(data, "x")
    except StoreError:
        return
    assert_plain(value)


def assert_plain(value):
    if isinstance(value, dict):
        for key, item in value.items():
            assert_plain(key)
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or type(value) in (bool, int, float, str)
