"""What happens on the host around the GPU kernels, with a device made up: plans, tables, streams, buffers, steps."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counted import calls_of
from kernel_values import expected_row
from made_gpu import made_gpu
from opcapture import captured
from summaries import taken

from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu import engine as engines
from introspect_cli.tensors.gpu.engine import DeviceEngine
from introspect_cli.tensors.gpu.launch import Merging, Variant
from introspect_cli.tensors.summarizer import Summarizer

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")


class Stream:
    def __init__(self, cuda, handle):
        self.cuda, self.cuda_stream = cuda, handle

    def wait_stream(self, other):
        self.cuda.log.append(("wait", self.cuda_stream, other.cuda_stream))


class Event:
    def __init__(self, cuda):
        self.cuda, self.over = cuda, False

    def record(self, stream):
        self.cuda.log.append(("record", stream.cuda_stream))

    def synchronize(self):
        self.cuda.log.append(("host waits",))
        self.over = True

    def query(self):
        return self.over


class Cuda:
    """Stands for `torch.cuda`: notes what is asked of streams and events, in order."""

    def __init__(self):
        self.log, self.current, self.capturing = [], 1, False
        self.streams = {}

    def Stream(self, _device):
        return self.streams.setdefault(99, Stream(self, 99))

    def Event(self):
        return Event(self)

    def current_stream(self, _device):
        return self.streams.setdefault(self.current, Stream(self, self.current))

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(("on", stream.cuda_stream))
        self.current, before = stream.cuda_stream, self.current
        yield
        self.current = before
        self.log.append(("off", stream.cuda_stream))

    def is_current_stream_capturing(self):
        return self.capturing

    def is_available(self):
        return False  # nothing is pinned


class Stub:
    """Launches nothing; notes where each launch went, and writes the row that the tensors of a test have."""

    def __init__(self):
        self.launched = []

    def __call__(self, variant, programs, stream, arguments):
        self.launched.append(SimpleNamespace(variant=variant, programs=programs, stream=stream, arguments=arguments))


def made(cuda=None, **wanted):
    cuda = cuda or Cuda()
    launcher = Stub()
    engine = DeviceEngine(CPU, launcher, stream=lambda _index: cuda.current, cuda=cuda, **wanted)
    return cuda, launcher, engine


def test_rows_are_copied_on_introspects_stream_behind_those_that_wrote_them():
    cuda, _, engine = made()
    x = torch.randn(32)
    for stream in (1, 5, 1):
        cuda.current = stream
        engine.launch_one(0, engine.prepare(x), x.data_ptr())
    cuda.log.clear()
    pending = engine.hand_over()
    assert cuda.log[-2:] == [("record", 99), ("off", 99)]
    assert [entry for entry in cuda.log[:-3] if entry[0] == "wait"] == [("wait", 99, 1), ("wait", 99, 5)]
    cuda.log.clear()
    assert pending.is_ready()
    assert cuda.log == []
    pending.fill(r.empty(1))
    assert cuda.log == [("host waits",)]


def test_rows_of_programs_are_added_up_on_their_stream_before_they_are_copied():
    cuda, launcher, engine = made()
    x, small = torch.randn(10_000), torch.randn(32)
    for stream, tensor in ((1, x), (1, x), (1, small), (5, x)):
        cuda.current = stream
        engine.launch_one(0, engine.prepare(tensor), tensor.data_ptr())
    cuda.log.clear()
    engine.hand_over()
    assert [type(each.variant) for each in launcher.launched] == [Variant] * 4 + [Merging] * 2
    assert [(each.stream, each.programs) for each in launcher.launched[4:]] == [(1, 3), (5, 1)]
    merged = [("on", 1), ("record", 1), ("off", 1), ("on", 5), ("record", 5), ("off", 5)]
    assert [entry for entry in cuda.log if entry[1] != 99] == merged
    assert [entry[0] for entry in cuda.log if entry[1] == 99] == ["wait", "wait", "on", "record", "off"]
    engine.hand_over()
    assert len(launcher.launched) == 6


def test_nothing_is_copied_or_waited_for_while_a_graph_is_captured():
    cuda, _, engine = made()
    x = torch.randn(32)
    engine.launch_one(0, engine.prepare(x), x.data_ptr())
    cuda.capturing = True
    cuda.log.clear()
    pending = engine.hand_over()
    assert not pending.is_ready()
    assert cuda.log == []
    cuda.capturing = False
    assert pending.is_ready()
    assert ("wait", 99, 1) in cuda.log


def test_what_comes_again_in_a_lean_step_is_not_read_again():
    with made_gpu() as launches:
        summarizer = Summarizer()

        def slot(x, *, lean=True):
            return summarizer.add(x, lean=lean), len(launches.read)

        x = torch.randn(64, 48)
        assert [slot(x), slot(x), slot(x.view(64, 48)), slot(x.detach())] == [(0, 1)] * 4
        assert slot(x[:32]) == slot(x[:32]) == (1, 2), "another layout"
        x += 1
        assert slot(x) == (2, 3), "written to"
        assert slot(x, lean=False) == (3, 4), "whoever wants all of it does not get a lean row"
        assert slot(x, lean=False) == (4, 5), "in full it is read again"
        assert summarizer.add_all([x, torch.ones(3), x], lean=True) == [2, 5, 2]
        with torch.inference_mode():
            y = torch.ones(9)
            assert slot(y)[0] < slot(y)[0], "torch counts no writes"
        taken(summarizer)
        assert slot(x)[0] == 0, "in the next step, it is"


def test_a_storage_that_is_freed_leaves_its_slot_to_no_other():
    with made_gpu():
        summarizer = Summarizer()
        slots = [summarizer.add(torch.full((1 << 18,), float(i)), lean=True) for i in range(20)]
        assert slots == list(range(20))
        assert taken(summarizer).floats["max"].tolist() == list(range(20))


def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    """An engine is tried on a tensor whose row is known; one that writes other rows is not had."""
    _, launcher, engine = made()
    assert "another" in engines.reason_to_distrust(engine)

    def exactly(variant, programs, stream, arguments):
        Stub.__call__(launcher, variant, programs, stream, arguments)
        for block in engine._blocks:
            block.device[: len(engine.slots)] = right
            block.device[3, [r.M3, r.M4, *range(r.SKETCH, r.WORDS)]] = np.array(np.nan).view(np.int64).item()

    y = (torch.arange(150_000, dtype=torch.float32) * 0.618).sin_() * 3 + 1
    y[1000], y[2000], y[3000] = float("nan"), float("inf"), 0.0
    right = torch.from_numpy(expected_row(y).view(np.int64))[0]
    engine.launch = exactly
    assert engines.reason_to_distrust(engine) == ""
    right[r.RAW] += 1
    assert "checksum" in engines.reason_to_distrust(engine)
    right[r.RAW] -= 1
    right.view(torch.float64)[r.MEAN] += 1.0
    assert "statistics" in engines.reason_to_distrust(engine)


def test_a_step_has_half_a_launch_a_tensor_adds_rows_up_once_and_reads_nothing_twice_where_it_is_lean(tmp_path):
    steps = []

    def train():
        torch.manual_seed(0)
        body = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(32, 32), torch.nn.ReLU())))
        optimizer, batch = torch.optim.AdamW(body.parameters()), torch.randn(8, 32)
        for _ in range(12):
            launches.launched.clear(), launches.read.clear()
            body(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append((list(launches.launched), list(launches.read)))

    with made_gpu() as launches:
        captured(tmp_path / "run", train)
    for step, most_launched, most_read in ((9, 0.55, 1.15), (11, 0.48, 1.03)):
        launched, read = steps[step]
        assert len(read) > 40
        assert len(launched) <= most_launched * len(read)
        assert sum(isinstance(variant, Merging) for variant, _, _ in launched) == 1
        different = {(checksum, size) for _, size, _, checksum in read}
        assert sum(size for _, size, _, _ in read) <= most_read * sum(size for _, size in different)


@pytest.mark.parametrize(("lean", "most"), [(False, 8), (True, 6.5)])
def test_the_host_does_little_for_a_tensor(lean, most):
    """Functions of introspect that are called for one, half of them twice, beside a launcher that does nothing."""
    tensors, launched = [torch.randn(64 + at % 5) for at in range(200)], []
    with made_gpu(lambda *given: launched.append(given)):
        summarizer = Summarizer()
        for _ in range(2):  # layouts are met for the first time in the first step
            launched.clear()
            made, _ = calls_of(lambda: [summarizer.add(x, lean=lean) for x in tensors for _ in range(2)])
            together, _ = calls_of(lambda: summarizer.add_all([x.clone() for x in tensors], lean=lean))
            ended, _ = calls_of(summarizer.end_step)
        assert made <= most * 400
        assert together <= 9 * 200
        assert ended <= 50
        assert len(launched) <= (200 if lean else 400) + 5
