"""Ranks' records put together as columns: each kind of site, next to what can be worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from introspect_cli.records import KIND_CODES, SKETCH_SIZE, Joined, Kind, Layout, Part, Phase, Site, SiteInfo
from introspect_cli.store.format.batch import StepBatch
from introspect_cli.store.ranks.combine import Combiner
from introspect_cli.store.ranks.plan import covering, share
from introspect_cli.store.ranks.stacked import LayoutTables, Rows, StackedStep
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.run import open_run
from introspect_cli.store.write.launch import Launch
from introspect_cli.store.write.run_writer import StoreWriter
from introspect_cli.sums import header, mix

SHAPE = (4, 3)
WHOLE = Layout(SHAPE, "float32", "cpu", "contiguous")


def rows(first, number):
    """The layout of some rows of the whole."""
    return Layout(SHAPE, "float32", "cpu", "contiguous", Part((((first, number),) if number else (), ((0, 3),))))


def owed(how, over=2):
    return Layout(SHAPE, "float32", "cpu", "contiguous", Part((((0, 4),), ((0, 3),)), how, over))


class Rank:
    def __init__(self, rank, layouts):
        self.rank, self.layouts = rank, layouts


def put(kinds, *ranks, complete=False, folded=None):
    """What becomes of sites; each rank a list of (site, layout, checksum, status, text, mean) or of less."""
    readers, batches, numbers = [], [], []
    for rank, records in enumerate(ranks):
        full = [(*each, *(None, 0, "", 1.0)[len(each) - 2 :]) for each in records]
        layouts = list(dict.fromkeys(layout for _, layout, *_ in full))
        sites, parts, sums, statuses, texts, means = zip(*full, strict=True)
        readers.append(Rank(rank, layouts))
        numbers.append(np.arange(len(kinds)) if folded is None else np.array(folded))
        batches.append(
            StepBatch(
                site=np.array(sites, np.uint32),
                sequence=np.arange(len(full), dtype=np.uint32),
                layout=np.array([layouts.index(layout) for layout in parts], np.uint32),
                status=np.array(statuses, np.uint8),
                checksum=np.array(sums, np.uint64),
                counts={"nans": np.zeros(len(full), np.int64), "zeros": np.arange(len(full))},
                floats={name: np.array(means, np.float64) for name in ("min", "max", "mean")}
                | {"var": np.zeros(len(full)), "skew": np.ones(len(full))},
                sketch=np.array(means, np.float32)[:, None] * np.ones((1, SKETCH_SIZE), np.float32),
                text=list(texts),
            )
        )
    places = LayoutTables(readers)
    known = []

    def number_of(layout):
        if layout not in known:
            known.append(layout)
        return known.index(layout)

    names = SimpleNamespace(
        kinds=np.array([KIND_CODES[kind.value] for kind in kinds]),
        value_of=np.full(len(kinds), -1),
        buffers_at_first=np.zeros(len(kinds), np.bool_),
        left_out=lambda step: np.zeros(len(step.rows.site), np.bool_),
        layout_number=number_of,
    )
    combiner = Combiner(places, names, complete=complete)
    rows = Rows(batches, numbers, places.common_numbers)
    found, again = (combiner.combine(StackedStep(batches, range(len(ranks)), rows)) for _ in range(2))
    assert np.array_equal(found.checksum, again.checksum)  # by the plan that was kept
    return found, known


def test_equal_copies_count_once_and_stay_as_recorded():
    found, known = put([Kind.PARAM], [(0, WHOLE, 7)], [(0, WHOLE, 7)])
    assert (len(found), found.how[0], found.checksum[0], known) == (1, Joined.AS_RECORDED, 7, [WHOLE])


def test_parts_add_up_modulo_two_to_the_64_whoever_else_has_a_copy():
    head = header("float32", SHAPE)
    raws = [(1 << 64) - 5, 9]
    sums = [mix((raw + head) % (1 << 64)) for raw in raws]
    found, known = put(
        [Kind.PARAM],
        [(0, rows(0, 3), sums[0], 0, "", 2.0)],
        [(0, rows(3, 1), sums[1], 0, "", 6.0)],
        [(0, rows(0, 3), sums[0], 0, "", 2.0)],
        [(0, rows(4, 0), mix(head), 0, "", 50.0)],
    )
    assert (found.how[0], int(found.checksum[0])) == (Joined.PARTS, mix((sum(raws) + head) % (1 << 64)))
    assert known == [WHOLE]
    assert found.floats["mean"][0] == pytest.approx((9 * 2 + 3 * 6) / 12)
    assert found.floats["var"][0] == pytest.approx((9 * 1 + 3 * 9) / 12)
    assert (found.floats["min"][0], found.floats["max"][0]) == (2.0, 6.0)
    assert np.isnan(found.floats["skew"][0])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[(0, rows(0, 2), 1)], [(0, rows(2, 1), 2)]], "the parts of it on record cover 3/4 of it"),
        ([[(0, rows(0, 2), 1)], [(0, rows(1, 3), 2)]], "parts of it overlap: those of ranks 0, 1"),
        ([[(0, rows(0, 2), 1)], [(0, rows(1, 2), 2)]], "parts of it overlap: those of ranks 0, 1"),
        ([[(0, rows(0, 4), 1)], [(0, rows(0, 4), 2)]], "ranks 0, 1 hold the same part of it with different values"),
        ([[(0, rows(0, 2), 1)], [(0, WHOLE, 2)]], "some ranks hold parts of it and others what has no known place"),
        ([[(0, WHOLE, 1, 1, "a meta tensor")], [(0, WHOLE, 2)]], "a meta tensor"),
        ([[(0, owed("max"), 1)], [(0, owed("max"), 2)]], "a max over 2 ranks is still owed"),
    ],
)
def test_what_cannot_be_put_together_says_why_and_is_called_nothing(ranks, said):
    found, _ = put([Kind.PARAM], *ranks)
    assert (found.status[0], int(found.checksum[0]), found.text[0]) == (1, 0, said)
    assert np.isnan(found.sketch[0]).all()


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.OUTPUT])
def test_of_a_run_with_all_its_ranks_what_is_missing_of_the_model_is_missing(kind):
    found, _ = put([kind], [(0, rows(0, 2), 1)], [(0, rows(2, 1), 2)], complete=True)
    said = "the parts of it on record cover 3/4 of it"
    if kind is Kind.PARAM:
        assert (found.status[0], found.text[0]) == (0, f"parts are not the whole: {said}")
        assert found.checksum[0] != 0
    else:
        assert (found.status[0], found.text[0]) == (1, said)


def test_ranks_are_counted_and_not_their_records():
    """Two batches a rank, folded into one site."""
    given = [[(0, WHOLE, 7), (1, WHOLE, 8)], [(0, WHOLE, 9), (1, WHOLE, 8)]]
    found, _ = put([Kind.OUTPUT, Kind.OUTPUT], *given, folded=[0, 0])
    assert (len(found), found.text[0]) == (1, "values of 2 ranks together")
    found, _ = put([Kind.OUTPUT, Kind.OUTPUT], given[0], folded=[0, 0])
    assert found.text[0] == "values of 2 calls together"


def test_a_rank_that_holds_nothing_of_it_changes_nothing():
    found, _ = put([Kind.PARAM], [(0, rows(4, 0), 5)], [(0, WHOLE, 7)])
    assert (found.how[0], found.checksum[0]) == (Joined.AS_RECORDED, 7)


def test_copies_that_differ_by_rounding_are_one_and_others_are_reported():
    found, _ = put([Kind.PARAM], [(0, WHOLE, 1, 0, "", 1.0)], [(0, WHOLE, 2, 0, "", 1.0 + 1e-6)])
    assert (found.how[0], found.checksum[0]) == (Joined.AS_RECORDED, 1)
    found, _ = put([Kind.PARAM], [(0, WHOLE, 1)], [(0, WHOLE, 2, 0, "", 1.1)], [(0, WHOLE, 1)])
    assert (found.how[0], found.text[0]) == (Joined.COPIES, "copies differ: rank 1 from rank 0")


def test_samples_of_ranks_are_gathered_and_their_order_means_nothing():
    one, two = [(0, WHOLE, 1, 0, "", 2.0)], [(0, Layout((2, 3), "float32", "cpu", "contiguous"), 2, 0, "", 5.0)]
    found, known = put([Kind.OUTPUT], one, two)
    assert (found.how[0], found.text[0]) == (Joined.GATHERED, "values of 2 ranks together")
    assert known[int(found.layout[0])].shape == (6, 3)
    assert found.floats["mean"][0] == pytest.approx(3.0)
    other, _ = put([Kind.OUTPUT], two, one)
    assert other.checksum[0] == found.checksum[0]


@pytest.mark.parametrize("how", ["sum", "avg"])
def test_sums_still_owed_are_added_up_by_sketches(how):
    found, _ = put([Kind.GRAD], [(0, owed(how), 1, 2, "", 1.0)], [(0, owed(how), 2, 2, "", 4.0)])
    assert found.how[0] == Joined.OWED
    assert found.sketch[0] == pytest.approx(5.0 if how == "sum" else 2.5)
    assert found.text[0] == f"{how} over 2 ranks, still owed"


def test_buffers_are_the_first_ranks_and_random_states_nobodys():
    found, _ = put(
        [Kind.BUFFER, Kind.RNG, Kind.OUTPUT],
        [(0, WHOLE, 1), (1, WHOLE, 3), (2, WHOLE, 5, 3, "2")],
        [(0, WHOLE, 2), (1, WHOLE, 4), (2, WHOLE, 6, 3, "3")],
    )
    assert found.checksum.tolist() == [1, 0, 0]
    assert list(found.text) == ["", "each rank has its own", "a plain value, another on each rank"]
    assert found.status.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("starts", "covered", "doubled"),
    [([0, 2], 12, 0), ([0, 1], 9, 3), ([0], 6, 0), ([2, 2], 6, 6)],
)
def test_what_parts_cover_is_reported_from_what_several_have(starts, covered, doubled):
    found = covering([rows(start, 2).part for start in starts])
    assert (found.covered, found.doubled) == (covered, doubled)
    assert (found.first is None) == (doubled == 0)


def test_a_share_is_reported_as_people_say_it():
    assert share(9, 12) == "3/4 of it"
    assert share(1234, 5678) == "1,234 of its 5,678 elements"


def test_what_was_put_together_stays_when_the_next_step_is_read(tmp_path):
    """Ranks read every step into the same memory."""
    sites = 40
    for rank in range(2):
        store = StoreWriter.create(tmp_path / "run", launch=Launch("0" * 32, "0" * 32, rank, 2))
        store.write_manifest({"status": "complete", "rank": rank, "world_size": 2, "steps": 2})
        writer = store.rank(rank, stats=True, sketch=True, sorted_stats=())
        numbers = [writer.site(Site(Phase.OPTIMIZER, Kind.PARAM, f"Net.{at}"), SiteInfo("Net")) for at in range(sites)]
        placed, whole = writer.layout(rows(2 * rank, 2)), writer.layout(WHOLE)
        for step in range(2):
            values = np.arange(sites, dtype=np.float64) + 100.0 * step
            writer.append(
                step,
                StepBatch(
                    site=np.array(numbers, np.uint32),
                    sequence=np.arange(sites, dtype=np.uint32),
                    layout=np.where(np.arange(sites) % 2, placed, whole).astype(np.uint32),
                    status=np.zeros(sites, np.uint8),
                    checksum=(values + 1).astype(np.uint64),
                    counts={name: np.full(sites, step) for name in ("nans", "posinfs", "neginfs", "zeros")},
                    floats={name: values.copy() for name in ("min", "max", "absmin", "mean", "amean", "var")}
                    | {name: values.astype(np.float32) for name in ("skew", "kurt")},
                    sketch=np.repeat(values.astype(np.float32)[:, None], SKETCH_SIZE, axis=1),
                    text=[f"{step}"] * sites,
                ),
            )
        store.close()
    with open_run(tmp_path / "run") as run:
        whole = WholeReader("run", [run.rank(0), run.rank(1)], complete=True)
        first = whole.read(0)
        before = [
            np.array(each) for each in (first.checksum, first.sketch, *first.floats.values(), *first.counts.values())
        ]
        texts = list(first.text)
        whole.read(1)
        after = [first.checksum, first.sketch, *first.floats.values(), *first.counts.values()]
        assert all(
            np.array_equal(one, two, equal_nan=one.dtype.kind == "f") for one, two in zip(before, after, strict=True)
        )
        assert (texts, set(texts)) == (list(first.text), {"0", ""})
        assert {Joined.PARTS, Joined.AS_RECORDED} == set(first.how.tolist())
