"""The compiled kernels against their formulas in numpy, over types, strides, splits and numbers of threads."""

from __future__ import annotations

import math
import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernel_values import COMPLEX, EIGHTS, EVERY, FLOATS, INTS, STRIDED, assert_same, example, expected_row

from introspect_cli.records import Part
from introspect_cli.tensors import cpu, kernels, parallel, places
from introspect_cli.tensors import rows as r


@pytest.fixture(scope="module")
def engine():
    return cpu.Engine(alone=True)


def compiled(engine, tensor, **options):
    out = r.empty(1)
    engine.fill(out[0], tensor, kernels.STATS | kernels.SKETCH, **options)
    return out


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_the_kernels_give_what_their_formulas_say(engine, dtype):
    for count in (0, 1, 17, 513, 70_003):
        x = example(dtype, (count,))
        assert_same(compiled(engine, x), expected_row(x))


@pytest.mark.parametrize("stride", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.complex64, torch.uint8], ids=str)
def test_strides_do_not_matter(engine, dtype, stride):
    x = STRIDED[stride](example(dtype, (70, 30)))
    assert_same(compiled(engine, x), expected_row(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64], ids=str)
def test_a_lone_element_of_any_stride(engine, dtype):
    column = example(dtype, (3, 2), 1)[:, 1]
    for at in range(3):
        lone = column[at : at + 1]
        assert lone.stride() == (2,)
        assert_same(compiled(engine, lone), expected_row(lone.clone()))


@pytest.mark.parametrize("make", [torch.conj, lambda x: x.conj().imag, lambda x: x.conj().t()])
def test_lazy_conjugates_and_negatives_are_resolved(engine, make):
    x = make(example(torch.complex64, (30, 40)))
    assert_same(compiled(engine, x), expected_row(x.resolve_conj().resolve_neg()))


def boxes(draw, shape):
    """A split of a shape into disjoint boxes: (start, sizes) each."""
    whole = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 4))):
        start, sizes = whole.pop(draw(st.integers(0, len(whole) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        rest = tuple(at + cut if d == dim else at for d, at in enumerate(start))
        whole.append((start, tuple(cut if d == dim else size for d, size in enumerate(sizes))))
        whole.append((rest, tuple(size - cut if d == dim else size for d, size in enumerate(sizes))))
    return draw(st.permutations(whole))


@st.composite
def splits(draw):
    shape = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) > 1))
    if draw(st.booleans()):
        shape[0] *= 100
    dtype = draw(st.sampled_from(FLOATS + INTS + COMPLEX + EIGHTS))
    order = draw(st.permutations(range(len(shape))))
    stored = example(dtype, tuple(shape[dim] for dim in order), draw(st.integers(0, 99)))
    tensor = stored.permute([order.index(dim) for dim in range(len(shape))])
    return tensor, boxes(draw, shape)


@settings(max_examples=15)
@given(splits())
def test_shards_add_up_whatever_the_split(engine, split):
    """Checksums, counts and sketches to those of the whole; each shard is what the formulas say of its elements."""
    tensor, parts = split
    whole, total = compiled(engine, tensor), r.empty(1)
    sums, floats = total.view(np.float64)[0], whole.view(np.float64)[0]
    for start, sizes in parts:
        box = tensor[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))]
        assert box.shape == sizes
        part = Part(tuple(((at, size),) for at, size in zip(start, sizes, strict=True)))
        runs = list(places.runs(box, tensor.shape, part))
        shard = compiled(engine, box, runs=runs)
        assert_same(shard, expected_row(box, runs=runs))
        total[0, : r.ZEROS + 1] += shard[0, : r.ZEROS + 1]
        sums[r.SKETCH :] += shard.view(np.float64)[0, r.SKETCH :]
    assert total[0, : r.ZEROS + 1].tolist() == whole[0, : r.ZEROS + 1].tolist()
    assert sums[r.SKETCH :] == pytest.approx(floats[r.SKETCH :], rel=1e-6, abs=1e-7 * max(1.0, floats[r.ABSSUM]))


def test_the_floating_point_environment_stays_as_it_is(engine):
    tiny = torch.full((100,), 1e-40)
    threads, before = torch.get_num_threads(), (tiny * 0.5).tolist()
    compiled(engine, torch.randn(1 << 19))
    compiled(engine, torch.randn(1 << 19).half())
    assert (tiny * 0.5).tolist() == before
    assert before[0] > 0
    assert np.float32(1e-40) * np.float32(0.5) > 0
    assert torch.get_num_threads() == threads


def test_flushing_denormals_does_not_change_a_checksum(engine):
    if not torch.set_flush_denormal(True):  # torch's own signature
        pytest.skip("this processor cannot flush denormals")
    try:
        x = torch.full((5000,), 1, dtype=torch.int32).view(torch.float32)
        flushed = compiled(engine, x)[0, r.RAW], compiled(engine, x.half())[0, r.RAW]
    finally:
        torch.set_flush_denormal(False)  # torch's own signature
    assert flushed == (compiled(engine, x)[0, r.RAW], compiled(engine, x.half())[0, r.RAW])


def test_a_large_strided_tensor_costs_little_memory(engine):
    x = torch.randn(3000, 3001).t()[:, ::2].t()
    assert not x.is_contiguous()
    resource = pytest.importorskip("resource")
    compiled(engine, x[:100])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    compiled(engine, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 12_000  # kilobytes


@pytest.fixture
def several():
    """An engine whose work torch's own workers share, of which the script has called two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    parallel.SCRIPT.threads = 0
    yield cpu.Engine()
    parallel.SCRIPT.threads = 0
    torch.set_num_threads(before)


LARGE = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.view(640, 500).t(),
    "channels_last": lambda x: x.view(10, 32, 40, 25).to(memory_format=torch.channels_last),
    "sliced": lambda x: x.view(40, 80, 100)[:, ::2, 3:97],
    "long rows": lambda x: x.view(16, 20_000).t().contiguous().t(),
}


@pytest.mark.parametrize("stride", LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_ones_are_the_same_with_several_threads(engine, several, dtype, stride):
    x = LARGE[stride](example(dtype, (320_000,)))
    alone = compiled(engine, x)
    assert_same(alone, expected_row(x))
    parallel.note_computation([torch.zeros(parallel.SHARED_OUT)])
    assert {compiled(several, x).tobytes() for _ in range(4)} == {alone.tobytes()}
    if several._has_workers and stride != "long rows":
        assert several.team[kernels.TAKING] == 2


def test_torchs_own_workers_take_part_once_the_script_has_called_them(several):
    if not several._has_workers:
        pytest.skip("no OpenMP runtime that can be shared")
    x = example(torch.float32, (1 << 20,))
    alone = compiled(several, x)
    assert several.team[kernels.TAKING] <= 1
    several.team[kernels.PACES :] = 0
    parallel.note_computation([x])
    for _ in range(2):  # the first time it is seen what that takes
        assert compiled(several, x).tobytes() == alone.tobytes()
    assert several.team[kernels.TAKING] == 2
    several.abandon()  # as in a forked child, where those workers do not exist
    several.team[kernels.TAKING] = 0
    assert compiled(several, x).tobytes() == alone.tobytes()
    assert several.team[kernels.TAKING] <= 1
