"""What happens on the host around the GPU kernels, with a device made up: plans, tables, streams, buffers, steps."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_values import expected_row

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.capture.recording.keeping import StepPolicy
from introspect_cli.capture.recording.recorder import Recorder
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.format.columns import Message
from introspect_cli.store.format.schemas import record_columns
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu import devices
from introspect_cli.tensors.gpu.buffers import DeviceRows
from introspect_cli.tensors.gpu.engine import DeviceEngine, Item
from introspect_cli.tensors.gpu.launch import Transposing, Variant
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
        yield
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
    rows, launcher = DeviceRows(CPU, cuda), Stub()
    engine = DeviceEngine(CPU, rows, launcher, stream=lambda _index: cuda.current, cuda=cuda, **wanted)
    return cuda, rows, launcher, engine


def items(engine, *tensors):
    return [(slot, [Item(engine.prepare(tensor), tensor.data_ptr())]) for slot, tensor in enumerate(tensors)]


def test_nothing_is_looked_up_twice_or_allocated_in_a_step_like_the_last(monkeypatch):
    _, rows, _, engine = made()
    tensors = [torch.randn(30, 40), torch.randn(40, 30).t(), torch.randn(9).bfloat16()]

    def step():
        for slot, x in enumerate(tensors):
            engine.launch_one(slot, engine.prepare(x), x.data_ptr())
        engine.launch_tables(items(engine, *tensors))
        return rows.hand_over()

    before = step()
    for table in engine._tables:
        table.done.over = True
    step().rows()
    before.rows()

    def refuse(*_args, **_options):
        raise AssertionError("allocated")

    for table in engine._tables:
        table.done.over = True
    for name in ("empty", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, refuse)
    monkeypatch.setattr(engine, "_prepare", refuse)
    step().rows()


def test_what_a_step_launches_and_how_often_it_reads_a_tensor():
    """One launch a tensor, one for a table; another for what comes again, and for a copy of what is not contiguous."""
    _, _, launcher, engine = made()
    x, y, small = torch.randn(4096), torch.randn(64, 64).t(), [torch.randn(16) for _ in range(20)]
    assert engine.add(0, x, (1,))
    assert engine.add(1, x, (1,))
    assert engine.add(2, y)
    engine.launch_tables(items(engine, *small))
    kernels = [launch.variant for launch in launcher.launched]
    assert [type(kernel) for kernel in kernels] == [Variant, Variant, Variant, Transposing, Variant, Variant]
    assert [kernel.stats for kernel in kernels if isinstance(kernel, Variant)] == [True, False, True, True, True]
    address, _, _, row, known = launcher.launched[2].arguments[3:8]
    assert address == x.data_ptr()
    assert known != row, "it reads no element where the checksum is that of the known row"


def test_rows_are_copied_on_introspects_stream_behind_those_that_wrote_them():
    cuda, rows, _, engine = made()
    x = torch.randn(32)
    for stream in (1, 5, 1):
        cuda.current = stream
        engine.launch_one(0, engine.prepare(x), x.data_ptr())
    cuda.log.clear()
    pending = rows.hand_over()
    assert cuda.log == [("wait", 99, 1), ("wait", 99, 5), ("on", 99), ("off", 99), ("record", 99)]
    cuda.log.clear()
    assert pending.is_ready()
    assert cuda.log == []
    assert len(pending.rows()) == 3
    assert cuda.log == [("host waits",)]


def test_nothing_is_copied_or_waited_for_while_a_graph_is_captured():
    cuda, rows, _, engine = made()
    x = torch.randn(32)
    engine.launch_one(0, engine.prepare(x), x.data_ptr())
    cuda.capturing = True
    cuda.log.clear()
    pending = rows.hand_over()
    assert not pending.is_ready()
    assert cuda.log == []
    cuda.capturing = False
    assert pending.is_ready()
    assert ("wait", 99, 1) in cuda.log


def on_a_device(summarizer, monkeypatch, cuda):
    """Have a summarizer treat tensors in CPU memory as those of a device with streams."""
    rows = DeviceRows(CPU, cuda)
    summarizer._devices._rows[CPU] = rows
    monkeypatch.setattr(summarizer, "_add_plain", lambda *_: False)
    monkeypatch.setattr(
        summarizer,
        "_summarise_on_cpu",
        lambda _row, parts: summarizer._devices.add(len(summarizer._layout_of) - 1, parts.values, parts.runs),
    )


class Rank:
    """Stands for a store's rank: notes what is appended."""

    def __init__(self):
        self.steps, self.sites = [], []
        self.last_step = None

    def site(self, site, _info):
        self.sites.append(site)
        return len(self.sites) - 1

    def layout(self, layout):
        return hash(layout) % 1000

    def message(self, rows):
        return Message(record_columns(), rows)

    def append(self, step, message, labels=None):
        self.steps.append((step, {name: column.tolist() for name, column in message.columns.items()}))


@pytest.fixture
def recording(monkeypatch):
    cuda, rank, summarizer = Cuda(), Rank(), Summarizer()
    on_a_device(summarizer, monkeypatch, cuda)
    recorder = Recorder(summarizer, rank, None, StepPolicy(CaptureOptions(steps=Schedule.parse("0:99")), rank, None))
    yield cuda, rank, recorder
    summarizer.close()


def record(recorder, value):
    site = recorder.site(Site(Phase.FORWARD, Kind.OUTPUT, "Net", 0, ""))
    recorder.emit(site, torch.full((5,), float(value)))


def test_a_step_is_written_when_the_next_has_ended(recording):
    cuda, rank, recorder = recording
    for step in range(4):
        record(recorder, step)
        cuda.log.clear()
        recorder.tick()
        assert [number for number, _ in rank.steps] == list(range(step))
        assert cuda.log.count(("host waits",)) == (step > 0)
    recorder.flush(current=False)
    assert [number for number, _ in rank.steps] == [0, 1, 2, 3]
    assert [columns["mean"] for _, columns in rank.steps] == [[0.0], [1.0], [2.0], [3.0]]


def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    """An engine is tried on a tensor whose row is known; one that writes other rows is not had."""
    _, rows, launcher, engine = made()
    assert "another" in devices.reason_to_distrust(engine, rows, CPU)

    def exactly(variant, programs, stream, arguments):
        Stub.__call__(launcher, variant, programs, stream, arguments)
        for block in rows._blocks:
            block.device[: len(rows.slots)] = right

    y = (torch.arange(150_000, dtype=torch.float32) * 0.618).sin_() * 3 + 1
    y[1000], y[2000], y[3000] = float("nan"), float("inf"), 0.0
    right = torch.from_numpy(expected_row(y).view(np.int64))[0]
    engine.launch = exactly
    assert devices.reason_to_distrust(engine, rows, CPU) == ""
    right[r.RAW] += 1
    assert "checksum" in devices.reason_to_distrust(engine, rows, CPU)
    right[r.RAW] -= 1
    right.view(torch.float64)[r.MEAN] += 1.0
    assert "statistics" in devices.reason_to_distrust(engine, rows, CPU)
