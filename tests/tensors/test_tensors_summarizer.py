"""The summarizer: what every sort of tensor gets, that answers are never stale, and that nothing is felt."""

from __future__ import annotations

import gc
import math
import os
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from summaries import taken
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.records import EXPANDED_TEXT, Status
from introspect_cli.tensors import intake, kernels
from introspect_cli.tensors.summarizer import Summarizer

warnings.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def summarizer():
    made = Summarizer()
    yield made
    made.close()


def one(summarizer, tensor):
    """Layout, status, text, checksum, statistics, sketch of one tensor."""
    assert summarizer.add(tensor) == 0
    return read(taken(summarizer), 0)


def read(table, row):
    stats = {name: float(column[row]) for name, column in (table.floats | table.counts).items()}
    return {
        "layout": table.layouts[table.layout_index[row]],
        "status": Status(int(table.status[row])),
        "text": table.text[row],
        "checksum": int(table.checksum[row]),
        "stats": {name: value for name, value in stats.items() if not math.isnan(value)},
        "sketch": []
        if table.sketch is None
        else [value for value in table.sketch[row].tolist() if not math.isnan(value)],
    }


def fresh(tensor):
    """The answer of a summarizer that has seen nothing."""
    made = Summarizer(alone=True)
    found = one(made, tensor)
    made.close()
    return found


def test_an_added_batch_is_the_same_as_one_after_the_other(summarizer):
    tensors = [
        torch.randn(10),
        torch.randn(300_000),
        torch.randn(70_000).half(),
        torch.randn(20, 30).t(),
        torch.empty(0),
        torch.arange(100_000),
        torch.ones(2, device="meta"),
    ]
    tensors.append(tensors[1])
    assert summarizer.add_all(tensors) == list(range(8))
    together = taken(summarizer)
    for tensor in tensors:
        summarizer.add(tensor)
    table = taken(summarizer)
    assert [read(together, row) for row in range(8)] == [read(table, row) for row in range(8)]
    assert summarizer.add_all([]) == []


SEEN = {
    "0-dim": (lambda: torch.tensor(2.5), "contiguous"),
    "empty": (lambda: torch.empty(0, 3), "contiguous"),
    "expanded": (lambda: torch.tensor([3.0]).expand(4, 5), "expanded"),
    "transposed": (lambda: torch.randn(4, 5).t(), "strided"),
    "channels_last": (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "channels_last"),
    "conjugate": (lambda: torch.randn(4, dtype=torch.complex64).conj(), "contiguous"),
    "parameter": (lambda: torch.nn.Parameter(torch.randn(3)), "contiguous"),
    "inference": (lambda: torch.inference_mode()(torch.randn)(20_000), "contiguous"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.randn(9), 0.1, 2, torch.quint8), "contiguous"),
}
WITH_A_TEXT = {
    "sparse_coo": lambda: torch.eye(5).to_sparse(),
    "sparse_csr": lambda: torch.eye(5).to_sparse_csr(),
    "sparse_csc": lambda: torch.eye(5).to_sparse_csc(),
    "sparse_bsr": lambda: torch.eye(6).to_sparse_bsr((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
}


@pytest.mark.parametrize("sort", [*SEEN, *WITH_A_TEXT])
def test_every_sort_of_tensor_has_an_answer(summarizer, sort):
    make, strides = SEEN.get(sort) or (WITH_A_TEXT[sort], sort)
    found = one(summarizer, make())
    assert (found["layout"].strides, found["status"]) == (strides, Status.OBSERVED)
    assert found["checksum"] != 0
    assert (found["text"] != "") == (sort in WITH_A_TEXT)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such type")
def test_packed_numbers_have_a_checksum_alone(summarizer):
    found = one(summarizer, torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    assert found["status"] is Status.PARTIAL
    assert found["checksum"] != 0
    assert found["text"] != ""


def test_quantized_tensors_by_the_numbers_they_stand_for(summarizer):
    x = torch.randn(50)
    make = torch.quantize_per_tensor
    tensors = [make(x, 0.1, 2, torch.quint8), make(x, 0.1, 2, torch.quint8), make(x, 0.1, 3, torch.quint8)]
    ints = tensors[0].int_repr()
    tensors.append(torch._make_per_tensor_quantized_tensor(ints, 0.2, 2))
    found = [one(summarizer, tensor) for tensor in tensors]
    assert found[0] == found[1]
    assert len({entry["checksum"] for entry in found}) == 3
    assert found[0]["stats"]["mean"] == pytest.approx(float(tensors[0].dequantize().double().mean()))
    scales = [torch.full((50,), 0.1), torch.cat([torch.full((49,), 0.1), torch.tensor([1.3])])]
    channels = [torch.quantize_per_channel(x, scale, torch.zeros(50), 0, torch.qint8) for scale in scales]
    assert len({one(summarizer, tensor)["checksum"] for tensor in channels}) == 2


def test_sparse_tensors_are_summarised_by_values_and_indices_once_added_up(summarizer):
    a = torch.sparse_coo_tensor([[0, 2], [1, 3]], [1.0, 2.0], (4, 4))
    b = torch.sparse_coo_tensor([[0, 2], [1, 2]], [1.0, 2.0], (4, 4))
    c = torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 3]], [0.5, 0.5, 2.0], (4, 4))
    found = [one(summarizer, tensor) for tensor in (a, c, b, a.to_dense(), a.to_sparse_csr())]
    assert found[0]["checksum"] == found[1]["checksum"]  # added up
    assert len({entry["checksum"] for entry in found}) == 4
    assert found[0]["stats"]["mean"] == 1.5
    assert not c.is_coalesced()


def test_nested_tensors_by_values_and_offsets(summarizer):
    flat = torch.arange(12.0).view(6, 2)
    nested = [torch.nested.nested_tensor([flat[:cut], flat[cut:]], layout=torch.jagged) for cut in (2, 2, 3)]
    sums = [one(summarizer, tensor)["checksum"] for tensor in nested]
    assert sums[0] == sums[1] != sums[2]


class Wrapper(torch.Tensor):
    """A subclass without storage of its own, whose operations are forbidden."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Loud(torch.Tensor):
    """A subclass with storage that must not notice."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_subclasses_are_summarised_or_said_to_be_unseen(summarizer):
    assert one(summarizer, Wrapper(torch.randn(3)))["status"] is Status.NOT_OBSERVED
    x = torch.randn(30, 40)
    plain = one(summarizer, x)
    assert one(summarizer, x.as_subclass(Loud)) == plain


def uninitialised():
    return torch.nn.LazyLinear(3).weight


def fake():
    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "meta"),
        (fake, "fake"),
        (uninitialised, "uninitialised"),
        (lambda: Wrapper(torch.randn(3)), "storage"),
    ],
)
def test_what_cannot_be_seen_says_why(summarizer, make, why):
    found = one(summarizer, make())
    assert found["status"] is Status.NOT_OBSERVED
    assert why in found["text"]
    assert found["checksum"] == 0
    assert set(found["stats"].values()) == {-1}  # counts; absent


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[100:], lambda x: x.view(100, 100).t(), lambda x: x[::2]])
def test_a_freed_storage_is_not_read(summarizer, view):
    x = torch.randn(10_000)
    y = view(x)
    wanted = one(summarizer, y)
    size = x.untyped_storage().nbytes()
    for left in (0, 300):
        x.untyped_storage().resize_(left)
        summarizer.add(y)
        summarizer.add_all([y])
        table = taken(summarizer)
        assert table.status.tolist() == [Status.NOT_OBSERVED] * 2
        assert "storage" in table.text[0]
    x.untyped_storage().resize_(size)
    x.copy_(torch.zeros(10_000))
    assert one(summarizer, y)["checksum"] not in {0, wanted["checksum"]}


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_inside_transforms_nothing_is_seen_and_nothing_breaks(summarizer, transform):
    def function(x):
        summarizer.add(x)
        return (x * x).sum()

    x = torch.randn(4, 5)
    if transform == "vmap":
        result = torch.vmap(function)(x)
    elif transform == "grad":
        result = torch.func.grad(function)(x)
    else:
        result = torch.func.jvp(function, (x,), (x,))[1]
    assert torch.isfinite(result).all()
    found = read(taken(summarizer), 0)
    assert found["status"] is Status.NOT_OBSERVED
    assert "transform" in found["text"]


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@pytest.mark.parametrize(
    "mode", [Functions, Operators, lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode]
)
def test_no_mode_of_the_script_notices(summarizer, mode):
    tensors = [
        torch.randn(30, 40),
        torch.randn(30, 40).t(),
        torch.randn(30, requires_grad=True),
        torch.eye(3).to_sparse(),
    ]
    wanted = [fresh(tensor) for tensor in tensors]
    with mode():
        for tensor in tensors:
            summarizer.add(tensor)
        table = taken(summarizer)
    assert [read(table, row) for row in range(4)] == wanted


def test_nothing_of_the_script_changes(summarizer):
    x = torch.randn(300_000, requires_grad=True)
    y = (x * 2).view(300, 1000).t()
    state, version = torch.get_rng_state(), y._version
    threads = torch.get_num_threads()
    summarizer.add(x)
    summarizer.add(y)
    taken(summarizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert (y._version, y.requires_grad, torch.is_grad_enabled()) == (version, True, True)
    assert torch.get_num_threads() == threads
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_no_tensor_is_kept(summarizer):
    x = torch.randn(50_000)
    views = [x.view(500, 100).t(), x.half(), x]
    for tensor in views:
        summarizer.add(tensor)
    gone = [weakref.ref(tensor) for tensor in views]
    del tensor, views, x
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert taken(summarizer).status.tolist() == [0, 0, 0]


def numpy_write(x):
    x.numpy()[777] = 9


def shared_write(x):
    torch.from_dlpack(x)[3] = 9


WRITES = {
    "in place": lambda x: x.add_(1),
    "one element": lambda x: x.view(-1)[5].fill_(7),
    ".data": lambda x: x.data.view(-1)[5].fill_(7),
    ".data whole": lambda x: x.data.copy_(torch.randn(x.shape)),
    "a view": lambda x: x.view(-1)[100:200].zero_(),
    "detached": lambda x: x.detach()[8:9].neg_(),
    "numpy": numpy_write,
    "shared": shared_write,
    "no_grad": lambda x: torch.no_grad()(x.mul_)(2),
    "storage": lambda x: x.untyped_storage().copy_(torch.randn(len(x)).untyped_storage()),
    "set_": lambda x: x.set_(torch.randn(len(x))),
    "last": lambda x: x[-1:].fill_(3),
    "swap of two": lambda x: x.copy_(torch.cat([x[1:2], x[:1], x[2:]])),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("between", ["within a step", "from step to step"])
def test_an_answer_is_never_stale(summarizer, write, between):
    x = torch.randn(kernels.WORTHWHILE * 3)
    summarizer.add(x)
    if between == "from step to step":
        taken(summarizer)
    before = fresh(x)
    WRITES[write](x)
    slot = summarizer.add(x)
    found = read(taken(summarizer), slot)
    assert found == fresh(x)
    assert found["checksum"] != before["checksum"]


def test_several_threads_summarise_at_once(summarizer):
    tensors = [torch.randn(300_000 if number % 10 == 0 else 500) for number in range(100)]
    slots = {}

    def add(part):
        for number in part:
            slots[number] = summarizer.add(tensors[number])

    threads = [threading.Thread(target=add, args=(range(start, 100, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = taken(summarizer)
    assert sorted(slots.values()) == list(range(100))
    for number, tensor in enumerate(tensors):
        assert read(table, slots[number]) == fresh(tensor)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_waits_for_nobody(two_threads):
    summarizer = Summarizer()
    x = torch.randn(1 << 20)
    for _ in range(3):
        wanted = one(summarizer, x.clone())
    summarizer.add(x)
    # copied here, since torch's own operations would wait for its workers in the child
    copies = [x.clone() for _ in range(3)]
    held, release = threading.Event(), threading.Event()

    def hold():
        with summarizer._lock:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            slots = [summarizer.add(copy) for copy in copies]
            table = taken(summarizer)
            code = 0 if all(read(table, slot) == wanted for slot in slots) else 2
            summarizer.close()
        finally:
            os._exit(code)
    release.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    assert read(taken(summarizer), 0) == wanted
    summarizer.close()


def test_plain_values_are_kept_as_text_and_arrays_as_tensors(summarizer):
    class Bad:
        def __repr__(self):
            raise ValueError

    array = np.arange(6.0).reshape(2, 3)[:, ::-1]
    different = [1, 1.0, True, "1", None, b"1", np.float32(1), np.int64(1), (1, 2), "x" * 10_000, "x" * 9_999]
    alike = [object(), object(), {"b", "a"}, {"a", "b"}, array, torch.from_numpy(array.copy())]
    for value in (*different, *alike, Bad()):
        (summarizer.add if isinstance(value, torch.Tensor) else summarizer.add_value)(value)
    table = taken(summarizer)
    assert table.status.tolist() == [Status.VALUE] * 15 + [Status.OBSERVED] * 2 + [Status.NOT_OBSERVED]
    assert table.text[:4] == ["1", "1.0", "True", "'1'"]
    assert max(map(len, table.text)) <= 200
    dtypes = [table.layouts[index].dtype for index in table.layout_index]
    assert (*dtypes[:3], dtypes[6]) == ("python.int", "python.float", "python.bool", "numpy.float32")
    sums = table.checksum.tolist()
    assert len(set(sums[:11])) == 11
    assert sums[11:17:2] == sums[12:17:2]


def freed(left):
    x = torch.randn(4, 5)
    x.untyped_storage().resize_(left)
    return x


BASE = torch.arange(20.0).view(4, 5)
SORTS = {
    "again": lambda: BASE,
    "parameter": lambda: torch.nn.Parameter(BASE),
    "offset": lambda: torch.arange(50.0)[7:27].view(4, 5),
    "a column less": lambda: BASE[:, 1:],
    "transposed": lambda: torch.arange(20.0).view(5, 4).t(),
    "expanded": lambda: torch.arange(5.0).expand(4, 5),
    "negated": lambda: torch.complex(torch.zeros(4, 5), torch.ones(4, 5)).conj().imag,
    "negated lazily": lambda: torch._neg_view(BASE),
    "copied lazily": BASE._lazy_clone,
    **{str(dtype): lambda dtype=dtype: BASE.to(dtype) for dtype in intake._TYPES if dtype is not None},
    "complex": lambda: torch.complex(torch.ones(4, 5), torch.ones(4, 5)),
    "meta": lambda: torch.empty(4, 5, device="meta"),
    "sparse": lambda: torch.eye(4, 5).to_sparse(),
    "of another library": BASE.to_mkldnn,
    "subclass": lambda: BASE.as_subclass(type("Own", (torch.Tensor,), {})),
    "cut": lambda: freed(40),
    "freed": lambda: freed(0),
    "functional": lambda: torch._to_functional_tensor(BASE),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 5), 0.1, 2, torch.quint8),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 5),
    "seven dimensions": lambda: torch.zeros(1, 2, 1, 2, 1, 2, 1),
    "no tensor": lambda: "text",
}


@pytest.fixture
def _functions_are_asked_anew():
    intake.functions.cache_clear()
    yield
    intake.functions.cache_clear()


def answers():
    """What is said of every sort, one by one and many at once, after plain tensors of the same shapes and types."""
    made, found = Summarizer(), []
    for dtype in (torch.float32, torch.int32, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint8):
        for shape in ((4, 5), (), (0, 5)):
            made.add(torch.ones(shape).to(dtype))
    taken(made)
    for _ in range(2):  # a shape is learnt by the first of it
        torch.manual_seed(0)
        given = [make() for make in SORTS.values()]
        slots = [*map(made.add, given), *made.add_all([*given, torch.ones(4, 5)])]
        table = taken(made)
        found.append([read(table, slot) for slot in slots])
    made.close()
    return found


@pytest.mark.usefixtures("_functions_are_asked_anew")
def test_the_short_way_answers_as_the_long_one(monkeypatch):
    """By functions of torch's that tell compiled code where a tensor is, and without them."""
    if intake.functions() is None:
        pytest.skip("this torch has none")
    short = answers()
    intake.functions.cache_clear()
    monkeypatch.setattr(intake, "_functions_of_torch", lambda: torch.absent)
    assert intake.functions() is None
    for one_by_one, others in zip(short, answers(), strict=True):
        for name, found, wanted in zip([*SORTS, *SORTS, "last"], one_by_one, others, strict=True):
            assert found == wanted, name


@pytest.mark.usefixtures("_functions_are_asked_anew")
@pytest.mark.parametrize("attribute", ["_TYPES", "_QUESTIONS", "_tensor_offset"])
def test_functions_of_torch_that_say_anything_else_than_its_methods_are_not_used(monkeypatch, attribute):
    if intake.functions() is None:
        pytest.skip("this torch has none")
    asked = intake._QUESTIONS
    other = {
        "_TYPES": intake._TYPES[::-1],
        "_QUESTIONS": (*asked[:6], asked[7], asked[6], asked[8]),
        "_tensor_offset": lambda _samples: None,
    }
    intake.functions.cache_clear()
    monkeypatch.setattr(intake, attribute, other[attribute])
    assert intake.functions() is None


@pytest.mark.parametrize(
    ("tensor", "memory", "changed"),
    [
        (torch.arange(3.0).view(3, 1).expand(3, 2**40), torch.arange(3.0), torch.ones(3, 1).expand(3, 2**40)),
        (torch.tensor(2.5).expand(2**20, 2**20, 2**20), torch.tensor([2.5]), torch.tensor(2.0).expand(2**40)),
        (torch.arange(2.0**20).unfold(0, 2**19, 1), torch.arange(2.0**20), torch.ones(2**20).unfold(0, 2**19, 1)),
    ],
    ids=["a row", "a number", "windows that overlap"],
)
def test_work_is_bounded_by_the_memory_and_not_by_the_shape(summarizer, tensor, memory, changed):
    for value in (tensor, tensor, memory, changed):
        summarizer.add(value)
    table = taken(summarizer)
    assert table.status[0] == Status.PARTIAL
    assert table.text[0].startswith(EXPANDED_TEXT)
    assert "in memory" in table.text[0]
    layout = table.layouts[table.layout_index[0]]
    assert (layout.shape, layout.strides) == (tuple(tensor.shape), "expanded")
    assert table.checksum[0] == table.checksum[1]
    assert len(set(table.checksum.tolist())) == 3
    assert table.floats["mean"][0] == table.floats["mean"][2]


def test_zeros_without_memory_are_zeros(summarizer):
    """A constant's tangent under forward-mode differentiation has a size and no memory: reading it ends the process."""
    for tensor in (torch._efficientzerotensor(5), torch.zeros(5), torch._efficientzerotensor(2**40)):
        summarizer.add(tensor)
    table = taken(summarizer)
    assert table.checksum[0] == table.checksum[1]
    assert list(table.status) == [Status.OBSERVED, Status.OBSERVED, Status.PARTIAL]


def test_chunks_of_many_tensors_stay_in_the_memory_for_them():
    """Each of many tensors has a chunk that is not full; there was room for full chunks only, and the heap broke."""
    summarizer = Summarizer(alone=True)
    engine = summarizer._engine
    count, number = kernels.CHUNK + 1, 200
    guard = np.full((4 * number, 32), 7, dtype=np.uint64)
    engine._make_room(number * count)
    room = len(engine._parts)
    guard[:room] = 0
    engine._parts = guard
    engine.team[kernels.PARTS] = guard.ctypes.data
    value = torch.ones(count)
    summarizer.add_all([value] * number)
    assert (guard[room:] == 7).all()
    assert len(set(taken(summarizer).checksum)) == 1
    summarizer.close()
