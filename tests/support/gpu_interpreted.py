"""The GPU kernels against their formulas in numpy, run on the CPU by Triton's interpreter.

Not collected by its name: `test_gpu_kernels.py` runs it in a process of its own, since Triton decides when it is
imported whether it interprets. By hand: TRITON_INTERPRET=1 pytest tests/support/gpu_interpreted.py
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from kernel_values import COMPLEX, EIGHTS, EVERY, STRIDED, example, expected_row
from kernel_values import assert_same as close
from sweeps import sliced

from introspect_cli.records import Part
from introspect_cli.tensors import places
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu import engine as engines
from introspect_cli.tensors.gpu import kernels, launch
from introspect_cli.tensors.gpu.engine import DeviceEngine, Item

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")

CPU = torch.device("cpu")
ROUNDED = 2e-5
"""The interpreter adds up the sums of columns one by one, a GPU in a tree."""
assert_same = partial(close, rel=ROUNDED)


class Interpreted:
    """Launches by running the kernel at once, and remembers what was launched."""

    def __init__(self):
        self.launched = []

    def __call__(self, variant, programs, _stream, arguments):
        self.launched.append((variant, programs))
        launch.function_of(variant)[(programs,)](*arguments, *variant)


class Made:
    """An engine whose device is the CPU."""

    def __init__(self, **wanted):
        self.launcher = Interpreted()
        self.engine = DeviceEngine(CPU, self.launcher, stream=lambda _index: 0, **wanted)

    def one(self, tensor, first=0, **wanted):
        if first:
            self.engine.launch_one(0, self.engine.prepare(tensor), tensor.data_ptr(), first, **wanted)
        else:
            assert self.engine.add(0, tensor, **wanted)
        return self.rows(1)

    def many(self, tensors):
        self.engine.launch_tables([(slot, [self.item(tensor)]) for slot, tensor in enumerate(tensors)])
        return self.rows(len(tensors))

    def rows(self, count):
        rows = r.empty(count)
        self.engine.hand_over().fill(rows)
        return rows

    def item(self, tensor, first=0):
        return Item(self.engine.prepare(tensor), tensor.data_ptr(), first)


@pytest.fixture(scope="module", autouse=True)
def _language_patched_once_a_launch():
    """Triton looks through its language for what to interpret at each call of a function: a third of the time."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    look = getattr(interpreter, "_patch_lang", None)
    homes, seen = {}, set()

    def look_once(fn):
        """Beyond the kernel itself, only where a function has the language under a module not looked at yet."""
        if fn.__name__ in {kernels.summarise.__name__, kernels.transpose.__name__, kernels.merge.__name__}:
            seen.clear()
            return look(fn)
        if fn not in homes:
            language = interpreter.tl, interpreter.tl.core
            homes[fn] = tuple(any(each is home for each in fn.__globals__.values()) for home in language)
        if homes[fn] in seen:
            return None
        seen.add(homes[fn])
        return look(fn)

    with pytest.MonkeyPatch.context() as patch:
        if look is not None:
            patch.setattr(interpreter, "_patch_lang", look_once)
        yield


@pytest.fixture(scope="module")
def made():
    return Made()


def at(first, tensor):
    """The row of a tensor whose first element has an index in the whole tensor."""
    return expected_row(tensor, runs=[(first, tensor)])


FEW = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("count", sliced([2, 15, 16, 17, 511, 512, 2047, 2048, 2049, 2500, 70_003], [2500]))
@pytest.mark.parametrize("dtype", sliced([each for each in EVERY if each is not torch.complex32], FEW), ids=str)
def test_every_type_and_many_sizes(made, dtype, count):
    x = example(dtype, (count,))
    assert_same(made.one(x), expected_row(x))


@pytest.mark.parametrize(
    "dtype",
    sliced([torch.float32, torch.float16, torch.int64, torch.complex64, torch.uint8], (torch.float32,)),
    ids=str,
)
@pytest.mark.parametrize("stride", sliced(STRIDED, ("transposed", "sliced", "channels_last", "offset")))
@pytest.mark.parametrize("limit", [1 << 28, 4000])
def test_other_strides_are_read_in_order(made, monkeypatch, dtype, stride, limit):
    monkeypatch.setattr(engines, "LARGEST_COPY", limit)
    x = STRIDED[stride](example(dtype, (70, 30)))
    if x.numel() > 5000:
        x = x[:100]
    dense = x.contiguous().clone(memory_format=torch.contiguous_format)
    row = made.one(x)
    assert_same(row, expected_row(dense))
    if x.numel() * x.element_size() <= limit:  # the same elements in the same order, so the same roundings
        assert row.tobytes() == made.one(dense).tobytes()


MATRICES = {
    "images with channels last": (torch.bfloat16, (2, 72, 8, 16), lambda x: x.to(memory_format=torch.channels_last)),
    "of odd sizes": (torch.bfloat16, (3, 65, 7, 7), lambda x: x.to(memory_format=torch.channels_last)),
    "volumes": (torch.uint8, (2, 17, 4, 5, 6), lambda x: x.to(memory_format=torch.channels_last_3d)),
    "one transposed matrix": (torch.float32, (70, 130), lambda x: x.t().contiguous().t()),
    "at an odd address": (torch.float64, (67, 66), lambda x: x.t().reshape(-1).repeat(2)[1:4423].reshape(66, 67).t()),
}


@pytest.mark.parametrize("what", sliced(MATRICES, ("of odd sizes", "at an odd address")))
def test_matrices_are_transposed_to_the_bit(made, what):
    dtype, shape, laid_out = MATRICES[what]
    x = laid_out(example(dtype, shape))
    assert not x.is_contiguous()
    copy = made.engine.transposed(x)
    assert copy.is_contiguous()
    bits = torch.uint8 if dtype == torch.uint8 else torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(copy.view(bits), x.contiguous().view(bits))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(80, 60)[:, ::2],
        torch.zeros(20, 30, 40).permute(2, 1, 0),
        torch.zeros(2, 50, 30, 4).transpose(1, 2),
        torch.zeros(2, 3, 30, 40).to(memory_format=torch.channels_last),
    ],
    ids=["with gaps", "turned round", "rows of vectors", "three colours"],
)
def test_no_other_layout_is_taken_for_matrices(made, x):
    assert made.engine.transposed(x) is None


@pytest.mark.parametrize("first", sliced([1, 16, 511, 512, 3000, (1 << 33) + 77, (1 << 40) + 512], (1, (1 << 33) + 77)))
@pytest.mark.parametrize("dtype", sliced([torch.float32, torch.bfloat16, torch.float64], (torch.float32,)), ids=str)
def test_elements_are_keyed_by_their_index_in_the_whole(made, dtype, first):
    x = example(dtype, (1100,))
    assert_same(made.one(x, first), at(first, x))


CASES = {
    "nothing finite": torch.tensor([float("nan"), float("inf"), -float("inf")] * 50),
    "one number": torch.full((3000,), 0.1),
    "one number in float64": torch.full((3000,), 0.1, dtype=torch.float64),
    "zeros of both signs": torch.cat([torch.zeros(900), -torch.zeros(700)]),
    "a far mean": torch.randn(5000) + 1e6,
    "a farther mean": torch.randn(5000, dtype=torch.float64) + 1e9,
    "a ramp": torch.arange(9000.0),
    "a step": torch.cat([torch.full((4000,), 7.0), torch.randn(4000) * 1e-3]),
    "large": torch.randn(5000) * 1e37,
    "whose sum overflows": torch.full((5000,), 3e38),
    "large in float64": torch.randn(3000, dtype=torch.float64) * 1e75,
    "small": torch.randn(5000) * 1e-30,
    "subnormal": torch.arange(1, 3000, dtype=torch.int32).view(torch.float32),
    "one outlier": torch.cat([torch.randn(4000) * 1e-3, torch.tensor([1e4])]),
    "nothing finite at first": torch.cat([torch.full((2048,), float("nan")), torch.randn(2100) * 1e-2 + 1e5]),
    "finite ones among others": torch.where(torch.arange(6000) % 3 == 0, float("inf"), torch.randn(6000)),
    "large integers": torch.tensor([2**62, -(2**62), 2**53 + 1, -1] * 100),
    "unsigned": torch.tensor([2**63 + 2**62, 5] * 100, dtype=torch.uint64),
    "complex with infinities": torch.complex(torch.tensor([1.0, float("inf"), float("nan")] * 9), torch.ones(27)),
    "huge complex": torch.randn(100, dtype=torch.complex128) * 1e300,
    "tiny complex": torch.randn(100, dtype=torch.complex128) * 1e-300,
}


TROUBLE = (
    "nothing finite", "a far mean", "one outlier", "subnormal", "finite ones among others", "unsigned",
    "complex with infinities",
)  # fmt: skip


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("case", sliced(CASES, TROUBLE))
def test_numbers_that_make_trouble(made, case, lean):
    x = CASES[case]
    mine, wanted = made.one(x, lean=lean), expected_row(x)
    assert mine[0, : r.ZEROS + 1].tolist() == wanted[0, : r.ZEROS + 1].tolist()
    a, b = mine.view(np.float64)[0], wanted.view(np.float64)[0]
    # the absolute value of a complex number may be rounded another way
    assert a[r.MIN : r.ABSMIN + 1] == pytest.approx(b[r.MIN : r.ABSMIN + 1], rel=1e-14 if x.is_complex() else 0, abs=0)
    spread = np.sqrt(b[r.M2] / max(1, int(mine[0, r.FINITE])))
    assert a[r.MEAN] == pytest.approx(b[r.MEAN], rel=1e-6, abs=1e-6 * spread if np.isfinite(spread) else None)
    for word in (r.M2, r.ABSSUM) if lean else (r.M2, r.M4, r.ABSSUM):
        if np.isfinite(b[word]):  # what would overflow float64 is absent
            assert a[word] == pytest.approx(b[word], rel=ROUNDED, abs=0), word
    if "one number" in case:
        assert a[r.M2] == a[r.M3] == a[r.M4] == 0.0


LEFT_OUT = [r.M3, r.M4, *range(r.SKETCH, r.WORDS)]
LENGTHS = [16, 500, 2048, 2049, 6144, 70_000]


@pytest.mark.parametrize("count", sliced(LENGTHS, (2049, 6144)))
@pytest.mark.parametrize(
    "dtype",
    sliced(
        [each for each in EVERY if each not in COMPLEX],
        (torch.float32, torch.bfloat16, torch.int64, torch.uint8),
    ),
    ids=str,
)
def test_a_lean_row_is_the_full_one_but_for_what_it_leaves_out(made, dtype, count):
    x = example(dtype, (count,))
    lean, full = made.one(x, lean=True), made.one(x)
    left = lean.view(np.float64)[0, LEFT_OUT]
    assert np.isnan(left[2:]).all()
    assert np.isnan(left[:2]).all() or lean.view(np.float64)[0, r.M2] == 0
    lean[0, LEFT_OUT] = full[0, LEFT_OUT]
    assert_same(lean, full)


def test_a_lean_pass_reads_what_is_not_finite_once_more(made):
    x = torch.randn(8192)
    for at, odd in ((0, float("nan")), (3000, float("inf")), (8191, -float("inf"))):
        x[at] = odd
        row = made.one(x, lean=True)
        assert row[0, : r.ZEROS + 1].tolist() == made.one(x)[0, : r.ZEROS + 1].tolist()


@pytest.mark.parametrize("dtype", sliced(EIGHTS, EIGHTS[:1]), ids=str)
def test_every_byte_of_a_small_type(made, dtype):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert_same(made.one(x), expected_row(x))


MIXED = [
    torch.randn(64, 48),
    torch.randn(3000),
    torch.randn(7),
    torch.tensor(3.0),
    torch.randn(5000).bfloat16(),
    torch.randint(9, (300,)),
    torch.randn(20).to(torch.float8_e5m2),
    torch.randn(20).to(torch.float8_e4m3fn),
    torch.randn(9_000),
]


def test_many_at_once_are_as_each_alone(made):
    alone = [made.one(x) for x in MIXED]
    made.launcher.launched.clear()
    together = made.many(MIXED)
    for row, expected in zip(together, alone, strict=True):
        assert row.tobytes() == expected[0].tobytes()
    # those that are read alike went together, but two tables of 8 bits; the rows of programs were added up once
    assert len(made.launcher.launched) == len({variant for variant, _ in made.launcher.launched}) + 1
    assert sum(isinstance(variant, launch.Merging) for variant, _ in made.launcher.launched) == 1
    assert len(made.launcher.launched) < len(MIXED)


def test_tables_are_cut_where_programs_run_out(made, monkeypatch):
    alone = [made.one(x) for x in MIXED]
    monkeypatch.setattr(engines, "TABLE_PROGRAMS", 3)
    for row, expected in zip(made.many(MIXED[1:4]), alone[1:4], strict=False):
        assert row.tobytes() == expected[0].tobytes()


def test_the_row_does_not_depend_on_how_many_programs_share_it_but_for_rounding(made, monkeypatch):
    x = example(torch.float32, (9_011,))
    shared = launch.Element.shared
    for most in (1, 64):
        monkeypatch.setattr(launch.Element, "shared", lambda *where, most=most: (most, shared(*where)[1]))
        assert_same(Made().one(x), expected_row(x))


BOXES = [((0, 0), (9, 40)), ((3, 0), (5, 40)), ((2, 7), (6, 13)), ((0, 39), (9, 1))]


@pytest.mark.parametrize(
    "box", [pytest.param(box, marks=() if box == BOXES[2] else pytest.mark.sweep) for box in BOXES]
)
def test_shards_are_summarised_in_one_launch(made, box):
    whole = example(torch.float32, (9, 40))
    (top, left), (height, width) = box
    shard = whole[top : top + height, left : left + width].contiguous()
    runs = list(places.runs(shard, whole.shape, Part((((top, height),), ((left, width),)))))
    made.launcher.launched.clear()
    made.engine.launch_tables([(0, [made.item(run, offset) for offset, run in runs])])
    assert len(made.launcher.launched) == 1
    assert_same(made.rows(1), expected_row(shard, runs=runs))


@pytest.mark.parametrize("wanted", [{"stats": False}, {"sketch": False}, {"stats": False, "sketch": False}], ids=str)
def test_what_is_not_wanted_says_nothing(wanted):
    only = Made(**wanted)
    for count in (900, 9000):
        x = example(torch.float32, (count,))
        row, every = only.one(x), expected_row(x)
        assert row[0, r.RAW] == every[0, r.RAW]
        floats, empty = row.view(np.float64)[0], r.empty(1).view(np.float64)[0]
        if not wanted.get("stats", True):
            assert row[0, 1:6].tolist() == [0] * 5
            assert floats[6:14].tolist() == empty[6:14].tolist()
        if not wanted.get("sketch", True):
            assert not floats[r.SKETCH :].any()


def test_rows_of_programs_are_added_up_when_there_is_no_more_room(made, monkeypatch):
    tensors = [example(torch.float32, (9_000 + 2048 * i,)) for i in range(4)]
    alone = [made.one(x) for x in tensors]
    made.launcher.launched.clear()
    monkeypatch.setattr(engines, "TABLE_PROGRAMS", 12)
    for slot, x in enumerate(tensors):
        made.engine.launch_one(slot, made.engine.prepare(x), x.data_ptr())
    for row, expected in zip(made.rows(4), alone, strict=True):
        assert row.tobytes() == expected[0].tobytes()
    merged = [programs for variant, programs in made.launcher.launched if isinstance(variant, launch.Merging)]
    assert merged == [2, 1, 1], "5 and 6 programs have room together"


def test_a_row_is_the_same_each_time(made):
    x = example(torch.float32, (9_000,))
    assert made.one(x).tobytes() == made.one(x).tobytes()
