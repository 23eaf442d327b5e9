"""Documents are plain data, whatever they are given and whoever wrote them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from introspect_cli.errors import StoreError
from introspect_cli.store.documents import check, dump, load

ID = "0" * 32
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5), max_leaves=30
)


def round_trip(value):
    data = dump(value, "x", ID)
    check(data, "x", ID, "x")
    return load(data, "x")


@settings(max_examples=300, deadline=None)
@given(PLAIN)
def test_plain_data_comes_back(value):
    assert round_trip(value) == value


@pytest.mark.parametrize(
    "text",
    ["1e5", "1_000", "0x1f", "yes", "null", "~", "1:30:30", "2020-01-01", "<<", "=", "*a", "&a", "!t", "- x", ""],
)
def test_texts_that_look_like_something_else(text):
    assert round_trip({text: [text]}) == {text: [text]}


def test_other_people_read_the_same():
    value = {"lr": 1e-5, "names": ["a", "é"], "none": None, "n": 10**30}
    assert yaml.safe_load(dump(value, "x", ID)) == value


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


def bomb(levels=12):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines).encode()


HOSTILE = {
    "aliases": bomb(),
    "anchor": b"a: &x 1",
    "merge": b"a: &x {b: 1}\nc:\n  <<: *x",
    "python tag": b"a: !!python/object/apply:os.system ['touch owned']",
    "own tag": b"a: !thing 1",
    "standard tag": b"a: !!binary aGk=",
    "deep flow": b"[" * 200_000,
    "deep flow closed": b"[" * 3000 + b"]" * 3000,
    "deep block": b"\n".join(b" " * n + b"a:" for n in range(2000)),
    "deep keys": b"? " * 50_000,
    "many": b"[" + b"1," * 400_000 + b"]",
    "two documents": b"a: 1\n---\nb: 2",
    "list key": b"? [1, 2]\n: 3",
    "twice": b"a: 1\na: 2",
    "long number": b"a: " + b"9" * 5000,
    "long float": b"a: 1." + b"9" * 5000,
    "sexagesimal": b"a: " + b"1:" + b"30:" * 1000 + b"30",
    "not text": b"\xff\xfe\x00\x01\x80",
    "nul": b"a: \0",
    "bad": b"a: [1, 2",
    "tab": b"a:\n\t- b",
    "colon": b"a: b: c",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_end_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()
    with pytest.raises(StoreError, match=r"run/manifest\.yaml is damaged: "):
        load(HOSTILE[name], "run/manifest.yaml")
    assert time.process_time() - begin < 10
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60) | st.text("[]{}:,-?&*!|>'\"#% \n\tab01.~<=", max_size=60).map(str.encode))
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


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_document_cut_short_is_reported(cut):
    data = dump({"a": 1, "b": [1, 2, 3], "c": "text"}, "x", ID)
    with pytest.raises(StoreError, match="altered or cut short"):
        check(data[:cut], "x", ID, "x")


@pytest.mark.parametrize(("name", "run"), [("x", "1" * 32), ("settings/b.yaml", ID)])
def test_a_document_of_another_run_or_name_is_reported(name, run):
    with pytest.raises(StoreError, match="elsewhere"):
        check(dump({"a": 1}, name, run), "x", ID, "x")
