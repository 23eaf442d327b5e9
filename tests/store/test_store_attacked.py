"""Mutated stores end in an error or the right answer, quickly, within memory, and never in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import store_attacks
from store_attacks import answer, build, clumsy_problem, forged, forged_problem
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.store.format.arrow import encode_batch
from introspect_cli.store.format.arrow_decoder import Decoder
from introspect_cli.store.format.arrow_schema import Column, Malformed, schema_message
from introspect_cli.store.format.columns import integer_lists, text_lists, texts
from introspect_cli.store.read.run import open_run

COUNT = int(os.environ.get("INTROSPECT_TEST_MUTATIONS", "600"))
SCHEMA = (
    Column("a", "<u4"),
    Column("t", "utf8"),
    Column("l", "list<i8>"),
    Column("s", "list<utf8>"),
    Column("v", "vector", 4),
)
COLUMNS = {
    "a": np.arange(3, dtype=np.uint32),
    "t": texts(["x", "", "yy"]),
    "l": integer_lists([[1], [], [2, 3]]),
    "s": text_lists([["p", "qq"], [], []]),
    "v": np.ones((3, 4), np.float32),
}


def test_a_mutated_store_never_misleads():
    """In a process of its own, so that its memory can be measured."""
    script = Path(store_attacks.__file__)
    command = [sys.executable, script, str(COUNT), "5"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.stderr == ""
    assert out.stdout.startswith(f"{COUNT} mutations in ")
    assert out.stdout.endswith(": 0 problems\n"), out.stdout
    assert out.returncode == 0


def test_the_attacks_would_notice(tmp_path):
    """The judges say so when an answer is another, shorter, or raises."""
    build(tmp_path / "run")
    before = answer(tmp_path / "run")
    assert clumsy_problem(before, tmp_path / "run") is None
    build(tmp_path / "other", shift=1.0)
    assert clumsy_problem(before, tmp_path / "other") == "another manifest, setting or tensor was read"
    state, fixed, ranks = before
    changed = {0: ranks[0], 1: (ranks[1][0], ranks[1][1][1:])}
    assert clumsy_problem((state, fixed, changed), tmp_path / "run") == "other records were read"
    longer = {0: ranks[0], 1: (ranks[1][0], [*ranks[1][1], ranks[1][1][0]])}
    assert clumsy_problem((state, fixed, longer), tmp_path / "run") == "a run that lost steps is called complete"


def test_forging_an_untouched_store_changes_nothing(tmp_path):
    files = build(tmp_path / "run")
    assert forged(files) == files


def test_a_forged_store_reaches_the_deepest_code(tmp_path):
    """Forged checks pass, so it is the checks of meaning that refuse."""
    files = build(tmp_path / "run")
    records = bytearray(files["rank0/records.arrow"])
    with open_run(tmp_path / "run") as run:
        entry = run.rank(0).entry(1)
        header = len(Decoder(run.rank(0)._schema)._frame.template)
    at = entry.offset + header  # the first column is the site
    records[at : at + 4] = b"\xff\xff\xff\x7f"
    changed = forged({**files, "rank0/records.arrow": bytes(records)})
    for name in ("rank0/records.arrow", "rank0/index.bin"):
        (tmp_path / "run" / name).write_bytes(changed[name])
    assert forged_problem(tmp_path / "run") is None
    with pytest.raises(StoreError, match="names a site, layout or status that is not there"):
        answer(tmp_path / "run")


def test_a_batch_cut_short_is_malformed():
    data = encode_batch(SCHEMA, COLUMNS, 3)
    assert Decoder(SCHEMA).decode(memoryview(data)).length == len(data)
    for cut in range(len(data)):
        with pytest.raises(Malformed):
            Decoder(SCHEMA).decode(memoryview(data)[:cut])


def test_every_byte_of_a_batch_header_matters():
    data = encode_batch(SCHEMA, COLUMNS, 3)
    for at in range(len(Decoder(SCHEMA)._frame.template)):
        for bit in (0, 7):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(Malformed):
                Decoder(SCHEMA).decode(memoryview(bytes(changed)))


def test_a_batch_of_another_schema_is_malformed():
    data = memoryview(encode_batch(SCHEMA, COLUMNS, 3))
    for schema in (SCHEMA[:-1], SCHEMA[::-1], (*SCHEMA, Column("b", "<u4"))):
        assert schema_message(schema) != schema_message(SCHEMA)
        with pytest.raises(Malformed):
            Decoder(schema).decode(data)


def test_a_shape_of_many_dimensions_is_refused(tmp_path):
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", 1.0)]])
    from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo
    from introspect_cli.store.write.run_writer import StoreWriter

    with StoreWriter.create(path, force=True) as store:
        writer = store.rank(0)
        writer.layout(Layout((1,) * 5000, "float32"))
        writer.site(Site(Phase.LOSS, Kind.LOSS, "x"), SiteInfo())
    with open_run(path) as run, pytest.raises(StoreError, match="more dimensions than a tensor can have"):
        len(run.rank(0).layouts)
