"""Step digests are equal where, and only where, the values at the sites are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from synthetic import row, write_run

from introspect_cli.records import Kind, Layout, Phase, Site, Status, Summary
from introspect_cli.store.frames import chained
from introspect_cli.store.log import step_digest
from introspect_cli.store.run import open_run

WORDS = st.integers(0, 2**64 - 1)
RECORDS = st.lists(st.tuples(WORDS, WORDS, st.integers(0, 3), st.booleans()), max_size=30)


def digest(records):
    keys = np.array([record[0] for record in records], np.uint64)
    checksums = np.array([record[1] for record in records], np.uint64)
    statuses = np.array([record[2] for record in records], np.uint8)
    return step_digest(keys, checksums, statuses, np.array([record[3] for record in records], np.bool_))


@given(RECORDS, st.randoms(use_true_random=False))
def test_the_order_of_records_does_not_change_a_digest(records, random):
    shuffled = list(records)
    random.shuffle(shuffled)
    assert digest(shuffled) == digest(records)


@given(RECORDS, st.integers(0, 29), st.integers(0, 63))
def test_one_bit_changes_a_digest(records, position, bit):
    kept = [record for record in records if not record[3]]
    if not kept:
        return
    at = position % len(kept)
    key, checksum, status, setting = kept[at]
    for other in (
        (key ^ (1 << bit), checksum, status, setting),
        (key, checksum ^ (1 << bit), status, setting),
        (key, checksum, status ^ 1, setting),
    ):
        assert digest([*kept[:at], other, *kept[at + 1 :]]) != digest(kept)
    assert digest([*kept, kept[at]]) != digest(kept)
    assert digest(kept[:at] + kept[at + 1 :]) != digest(kept)


def chain_of(path):
    with open_run(path) as run:
        return [(entry.digest, entry.chain) for entry in run.rank(0).steps]


def test_a_digest_leaves_out_what_differs_between_equal_runs(tmp_path):
    def steps(device="cpu", strides="contiguous", text="", mean=1.0, rate=0.1, checksum=7):
        layout = Layout((3,), "float32", device, strides)
        value = Summary(Status.OBSERVED, layout, checksum, {"mean": mean}, (mean,) * 16, text)
        hyper = row("optimizer", "hyperparameter", "AdamW", rate, path="[0]['lr']")
        return [[row("forward", "output", "A", value), hyper]]

    base = chain_of(write_run(tmp_path / "base", steps()))
    others = [{"device": "cuda:0"}, {"strides": "strided"}, {"text": "x"}, {"mean": 2.0}, {"rate": 0.2}]
    for number, other in enumerate(others):
        assert chain_of(write_run(tmp_path / str(number), steps(**other))) == base, other
    assert chain_of(write_run(tmp_path / "checksum", steps(checksum=8))) != base


def test_the_chain_tells_the_first_step_that_differs(tmp_path):
    def steps(different):
        return [[row("forward", "output", "A", float(step == different))] for step in range(8)]

    a = chain_of(write_run(tmp_path / "a", steps(None)))
    b = chain_of(write_run(tmp_path / "b", steps(5)))
    assert [x[0] == y[0] for x, y in zip(a, b, strict=True)] == [True] * 5 + [False] + [True] * 2
    assert [x[1] == y[1] for x, y in zip(a, b, strict=True)] == [True] * 5 + [False] * 3


def test_step_numbers_are_in_the_chain(tmp_path):
    steps = [[row("forward", "output", "A", 1.0)]]
    a = chain_of(write_run(tmp_path / "a", steps, numbers=[3]))
    b = chain_of(write_run(tmp_path / "b", steps, numbers=[4]))
    assert a[0][0] == b[0][0]
    assert a[0][1] != b[0][1]


def test_digests_have_not_changed_since_the_first_format():
    """Pinned: a change here breaks comparing with stores that are out there, and needs a new format."""
    fixed = digest([(1, 2, 0, False), (2**64 - 1, 3, 1, False), (9, 9, 0, True)])
    assert fixed.hex() == "06a5fa020330eb5bcc42f086b79b3314"
    assert chained(bytes(16), 7, fixed).hex() == "1e9bf5e45339b1f0c9dec747dbf93703"
    assert Site(Phase.FORWARD, Kind.OUTPUT, "GPT.blocks.0", 1, "[0]").key() == 1396856681926015125
