"""A batch's message that is filled in piece by piece, against the one that is written at once."""

from __future__ import annotations

import numpy as np
import pytest

from introspect_cli.store.format.arrow import Message, encode_batch
from introspect_cli.store.format.arrow_decoder import Decoder
from introspect_cli.store.format.arrow_schema import Column
from introspect_cli.store.format.batch import short_texts
from introspect_cli.store.format.columns import Lists, Texts, integer_lists, sparse_texts, text_lists, texts
from introspect_cli.store.format.schemas import LIMIT_TEXT, record_columns

SCHEMA = (
    *record_columns(operators=True),
    Column("after", "|u1"),
    Column("vector", "vector", 3),
    Column("words", "list<utf8>"),
)


def column_of(column, rows, random):
    if column.type == "utf8":
        return texts(["x" * number for number in random.integers(0, 9, rows)])
    if column.type == "list<utf8>":
        return text_lists([["ab"] * number for number in random.integers(0, 3, rows)])
    if column.type.startswith("list<"):
        kind = np.int64 if column.type == "list<i8>" else np.int32
        return integer_lists([[number] * number for number in random.integers(0, 3, rows)], kind)
    if column.type == "vector":
        return random.standard_normal((rows, column.width)).astype("<f4")
    return random.integers(0, 100, rows).astype(column.type)


def plain(column):
    return column.tolist() if isinstance(column, (Texts, Lists)) else np.asarray(column).tolist()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33])
def test_a_message_is_that_of_its_columns_in_every_step(rows):
    """Columns of fixed size are filled in where they lie, or put there; others stay, or change, or change in length."""
    random, message = np.random.default_rng(rows), Message(SCHEMA, rows)
    columns = {column.name: column_of(column, rows, random) for column in SCHEMA}
    decoder = Decoder(SCHEMA)
    for name, column in columns.items():
        message.put(name, column)
    assert message.encoded() == encode_batch(SCHEMA, columns, rows)
    for column in SCHEMA:
        columns[column.name] = made = column_of(column, rows, random)
        if column.name in message.columns:
            message.columns[column.name][:] = made
        else:
            message.put(column.name, made)
        assert message.encoded() == encode_batch(SCHEMA, columns, rows)
        assert message.encoded() == encode_batch(SCHEMA, columns, rows)
        found = decoder.decode(memoryview(message.encoded()))
        assert found.rows == rows
        assert {name: plain(each) for name, each in found.columns.items()} == {
            name: plain(each) for name, each in columns.items()
        }
    assert set(message.columns) == {column.name for column in record_columns()} - {"text"}
    assert "words" in message
    assert "others" not in message


def test_what_has_not_changed_is_not_encoded_again(monkeypatch):
    message, encoded = Message(record_columns(operators=True), 2), []
    monkeypatch.setattr("introspect_cli.store.format.arrow._encode", lambda column, *_: encoded.append(column.name))
    same = {"text": sparse_texts(2, {1: "a"}), "given": integer_lists([[], [5]], np.int32)}
    for _ in range(3):
        for name, column in same.items():
            message.put(name, column)
    message.put("text", Texts(same["text"].offsets, b"b"))
    message.put("given", Lists(same["given"].offsets, np.array([6], np.int32)))
    assert encoded == ["text", "given", "text", "given"]


def test_a_message_knows_the_largest_number_of_a_column():
    message = Message(SCHEMA, 3)
    assert (message.largest("site"), message.largest("layout")) == (0, 0)
    message.put("site", np.array([4, 9, 2], np.uint32))
    message.put("checksum", np.array([40, 90, 20], np.uint64))
    assert (message.largest("site"), message.largest("layout")) == (9, 0)
    message.put("site", np.array([0, 1, 2], np.uint32))
    assert message.largest("site") == 2
    assert Message(SCHEMA, 0).largest("site") == -1


def test_a_message_needs_all_its_columns():
    message = Message(SCHEMA, 1)
    with pytest.raises(ValueError, match="the column given was not filled in"):
        message.encoded()


def test_texts_are_cut_where_they_are_longer_than_a_store_holds():
    long = "é" * (LIMIT_TEXT + 1)
    fits = texts(["", "x" * LIMIT_TEXT])
    assert short_texts(fits, 2) is fits
    for given in (["", long], texts(["", long])):
        assert short_texts(given, 2).tolist() == ["", long[:-1]]
    assert short_texts((), 2).tolist() == short_texts(["", ""], 2).tolist() == ["", ""]
