"""The GPU kernels, and captures with them, on a real GPU: are they right, how fast, what do they cost, do they disturb?

    python benchmarks/gpu.py                       # at most ten minutes on one GPU; torch and Triton are all it needs
    python benchmarks/gpu.py --only kernels host
    python benchmarks/gpu.py --dry-run             # every section on the CPU with tiny sizes: does this script work?

Prints a table as it goes and writes gpu.json. Sections: overhead (first, of the models that have targets), correctness,
kernels, host, memory, processes, others (overhead of further models), counted. What would begin after --minutes is left
out, and a line says so.
A section that fails is a line that says why, and the exit status is 1 if anything failed or the bits of a way differ.
A missed target is a line too. With --dry-run, Triton's interpreter runs the kernels, and figures mean nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import measuring
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import torch
import workloads
from kernel_values import expected_row
from made_gpu import made_gpu
from measuring import Row, bounded

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.gpu.engine import DeviceEngine, Devices, Item
from introspect_cli.tensors.gpu.launch import Merging
from introspect_cli.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPERATORS = frozenset({Kind.OP_OUTPUT})
MODES: dict[str, CaptureOptions] = {
    "everything": CaptureOptions(),
    "everything, in full": CaptureOptions(full_every=1),
    "checksums only": CaptureOptions(stats=(), sketch=False),
    "state": CaptureOptions(record=frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})),
    "op level": CaptureOptions(level="op", record=CaptureOptions().record | OPERATORS),
    "off schedule": CaptureOptions(steps=Schedule.parse("1000000")),
}
FIRST, COUNTED = 10, 20
"""Captured steps that are not counted, all in full, and those that are: one of them in full, as of any twenty after."""
TARGETS = {
    ("GPT 124M", "everything"): 1.30,
    ("GPT 124M", "checksums only"): 1.15,
    ("GPT 124M", "state"): 1.03,
    ("GPT 124M", "op level"): 2.0,
    ("GPT 124M", "off schedule"): 1.001,
    ("ResNet-50", "everything"): 1.6,
}


@dataclass(frozen=True)
class Place:
    """Where it runs.

    Attributes:
        device: GPU, or the CPU for a dry run.
        dry: whether sizes are tiny.
        models: names of the models whose overhead is measured, as a glob.
        blocks: how often captured steps are measured between bare ones.
        end: when nothing more is begun, by `time.monotonic`.
    """

    device: torch.device
    dry: bool
    models: str = "*"
    blocks: int = 4
    end: float = math.inf

    def wait(self) -> None:
        """Until the device has done all that was queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], goes: int = 20) -> float:
        """Seconds of the quickest go, by the device's clock where it has one."""
        if self.dry:
            goes = 2
        call()
        self.wait()
        best = math.inf
        for _ in range(goes):
            if self.device.type == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) / 1e3
            else:
                start = time.perf_counter()
                call()
                took = time.perf_counter() - start
            best = min(best, took)
        return best


class Interpreted:
    """Launches by Triton's interpreter, for dry runs."""

    def __call__(self, variant: Any, programs: int, _stream: int, arguments: tuple[int, ...]) -> None:
        """See `launch.Launcher`."""
        from introspect_cli.tensors.gpu import launch

        launch.function_of(variant)[(programs,)](*arguments, *variant)


class Nothing:
    """Launches nothing: what is left is what the host does."""

    def __call__(self, _variant: Any, _programs: int, _stream: int, _arguments: tuple[int, ...]) -> None:
        """See `launch.Launcher`."""


def engine_of(place: Place, *, stats: bool = True, sketch: bool = True) -> DeviceEngine:
    """An engine for the device, or one that interprets."""
    if place.dry:
        return DeviceEngine(place.device, Interpreted(), lambda _index: 0, None, stats, sketch)
    devices = Devices(stats=stats, sketch=sketch)
    engine = devices.engine(place.device)
    if engine is None:
        raise RuntimeError(f"no kernels for {place.device}: {devices.reasons.get(place.device)}")
    return engine


def rows_of(engine: DeviceEngine, count: int) -> r.Rows:
    """The rows of so many slots, waited for."""
    rows = r.empty(count)
    engine.hand_over().fill(rows)
    return rows


def samples(place: Place) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of every type, many sizes and strides, with numbers that are not finite."""
    generator = torch.Generator().manual_seed(1)
    types = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16]
    types += [torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]
    types += [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
    for dtype in types:
        for count in (1, 513, 3000) if place.dry else (1, 17, 513, 70_003, 1 << 20, (1 << 22) + 5):
            x = torch.randn(count, generator=generator) * 3 + 0.5
            if count > 40 and dtype.is_floating_point:
                x[7], x[11], x[20] = float("nan"), float("inf"), 0.0
            yield f"{dtype} {count}", (x.clamp(0, 100) if not dtype.is_floating_point else x).to(dtype)
    square = torch.randn(40, 50, generator=generator) if place.dry else torch.randn(1111, 777, generator=generator)
    yield "transposed", square.t()
    yield "sliced", square[::3, 1::2]
    yield "expanded", square[:1].expand(70, -1)
    images = torch.randn(2, 5, 6, 7, generator=generator) if place.dry else torch.randn(8, 64, 28, 28)
    yield "channels last", images.to(memory_format=torch.channels_last)
    yield "heads", images.permute(0, 2, 1, 3)


def far(mine: r.Rows, wanted: r.Rows) -> str:
    """What of a row is wrong; "" if nothing is."""
    if mine[: r.ZEROS + 1].tolist() != wanted[: r.ZEROS + 1].tolist():
        return "checksum or counts differ"
    a, b = mine.view(np.float64), wanted.view(np.float64)
    if not np.allclose(a[r.MIN : r.ABSMIN + 1], b[r.MIN : r.ABSMIN + 1], rtol=1e-14, atol=0, equal_nan=True):
        return "extrema differ"
    count = max(1, int(wanted[r.FINITE]))
    spread = math.sqrt(b[r.M2] / count)
    bound = {r.MEAN: 1e-6 * spread, r.M3: 2e-6 * math.sqrt(b[r.M2] * b[r.M4])}
    for word in (r.MEAN, r.M2, r.M3, r.M4, r.ABSSUM):
        if not math.isclose(a[word], b[word], rel_tol=2e-6, abs_tol=bound.get(word, 0.0)):
            return f"word {word} is {a[word]}, not {b[word]}"
    size = max(np.abs(b[r.SKETCH :]).max(), abs(b[r.ABSSUM]) / math.sqrt(count))
    return "" if np.allclose(a[r.SKETCH :], b[r.SKETCH :], rtol=1e-6, atol=1e-6 * size) else "sketch differs"


def correctness(place: Place) -> Iterator[Row]:
    """All kernels on the device against their formulas in numpy; alone, in tables, twice."""
    engine = engine_of(place)
    wrong, total = [], 0
    there, wanted = [], []
    for name, x in samples(place):
        memory_of_x = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        moved = memory_of_x.to(place.device).as_strided(x.shape, x.stride(), x.storage_offset())
        for slot in range(2):
            assert engine.add(slot, moved), name
        got = rows_of(engine, 2)
        expected = expected_row(x)[0]
        total += 1
        problem = far(got[0], expected) or ("" if got[0].tobytes() == got[1].tobytes() else "twice, it differs")
        if problem:
            wrong.append(f"{name}: {problem}")
        if moved.is_contiguous() and (prepared := engine.prepare(moved)) is not None:
            there.append(Item(prepared, moved.data_ptr()))
            wanted.append((moved, got[0].copy()))
    engine.launch_tables([(slot, [item]) for slot, item in enumerate(there)])
    got = rows_of(engine, len(there))
    others = sum(row.tobytes() != alone.tobytes() for row, (_, alone) in zip(got, wanted, strict=True))
    yield Row(
        "tensors whose row is right",
        total - len(wrong),
        f"/{total}",
        "all",
        _ok(not wrong),
        "; ".join(wrong[:3]),
    )
    yield Row("rows that are another in a table", others, "", "0", _ok(not others))
    if not place.dry and torch.cuda.get_device_properties(place.device).total_memory > 12 << 30:
        large = torch.ones((1 << 31) + 4096, dtype=torch.int8, device=place.device)
        large[-1] = 2
        prepared = engine.prepare(large)
        assert prepared is not None
        engine.launch_one(0, prepared, large.data_ptr())
        row = rows_of(engine, 1)[0]
        right = int(row[r.FINITE]) == large.numel() and row.view(np.float64)[r.MAX] == 2.0
        yield Row("elements of the largest tensor", large.numel(), "", "all", _ok(right))


def _ok(right: bool) -> str:
    return "ok" if right else "FAILED"


def kernels(place: Place) -> Iterator[Row]:
    """Bandwidth beside that of a sum and of a copy (bytes read and written) at four sizes, float32 and bfloat16."""
    alone, full = engine_of(place, stats=False, sketch=False), engine_of(place)
    sizes = (
        {"1 kB": 1 << 10, "64 kB": 1 << 16}
        if place.dry
        else {"1 kB": 1000, "1 MB": 10**6, "100 MB": 10**8, "4 GB": 4 * 10**9}
    )
    for dtype in (torch.float32, torch.bfloat16):
        for name, size in sizes.items():
            x = torch.ones(size // dtype.itemsize // 16 * 16, dtype=dtype, device=place.device).uniform_()
            target = torch.empty_like(x)
            gigabytes = x.numel() * dtype.itemsize / 1e9
            copy = 2 * gigabytes / place.seconds(lambda x=x, target=target: target.copy_(x))
            del target
            figures = {"copy": copy, "x.sum()": gigabytes / place.seconds(x.sum)}
            for what, engine in (("checksum", alone), ("all three", full)):
                figures[what] = gigabytes / place.seconds(_again(engine, x))
                engine.hand_over()
            large = name == "100 MB" and dtype == torch.float32
            for what, figure in figures.items():
                share = {"checksum": 0.6, "all three": 0.35}.get(what) if large else None
                yield bounded(f"{dtype} {name}: {what}", figure, "GB/s", least=None if share is None else share * copy)
    many = [torch.randn(64, 48, device=place.device) for _ in range(10 if place.dry else 500)]
    together = [(slot, [Item(full.prepare(x), x.data_ptr())]) for slot, x in enumerate(many)]  # type: ignore[arg-type]

    def table() -> None:
        full.launch_tables(together)
        rows_of(full, len(many))

    yield Row(f"{len(many)} tensors of 3,072 elements in one launch", place.seconds(table) * 1e6, "us")


def _again(engine: DeviceEngine, x: torch.Tensor) -> Callable[[], None]:
    """A call that summarises a tensor."""
    prepared = engine.prepare(x)
    assert prepared is not None
    return lambda: engine.launch_one(0, prepared, x.data_ptr())


def host(place: Place) -> Iterator[Row]:
    """Host microseconds of a tensor, alone and in a table of 500: with a launcher that does nothing, and real."""
    x = torch.randn(4096, device=place.device)
    many = [torch.randn(256, device=place.device) for _ in range(500)]
    handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001  # as `Devices`
    stream, cuda = (lambda _index: 0, None) if place.dry else (handle, torch.cuda)
    engines = {"with a stub launcher": DeviceEngine(place.device, Nothing(), stream, cuda)}
    engines |= {} if place.dry else {"launched": engine_of(place)}
    for name, engine in engines.items():
        best, together = math.inf, math.inf
        for _ in range(20):
            start = time.perf_counter()
            for slot in range(len(many)):
                prepared = engine.prepare(x)
                assert prepared is not None
                engine.launch_one(slot, prepared, x.data_ptr())
            best = min(best, (time.perf_counter() - start) / len(many))
            rows_of(engine, len(many))
            start = time.perf_counter()
            engine.launch_tables([(slot, [Item(engine.prepare(y), y.data_ptr())]) for slot, y in enumerate(many)])  # type: ignore[arg-type]
            together = min(together, (time.perf_counter() - start) / len(many))
            rows_of(engine, len(many))
        yield bounded(f"a launch, {name}", best * 1e6, "us", most=10.0)
        yield Row(f"a tensor of a table of 500, {name}", together * 1e6, "us")
    again = [x for number in range(250) for x in [torch.randn(256 + number % 20 * 16)] * 2]
    with made_gpu(Nothing()):
        summarizer = Summarizer()
        for lean in (False, True):
            best = math.inf
            for _ in range(20):
                start = time.perf_counter()
                for x in again:
                    summarizer.add(x, lean=lean)
                best = min(best, (time.perf_counter() - start) / len(again))
                summarizer.end_step().finish()
            what = f"a tensor in a {'lean' if lean else 'full'} step, half of them again, with a stub launcher"
            yield bounded(what, best * 1e6, "us", most=3.0)


def counted(_place: Place) -> Iterator[Row]:
    """Launches and bytes of a captured step in full and of a lean one, on a made-up GPU: the same wherever it runs."""
    step = workloads.WORKLOADS["gpt d=128"]()
    with made_gpu() as launches, tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        with measuring.captured(CaptureOptions(), run):
            for number in range(12):
                launches.launched.clear()
                launches.read.clear()
                step()
                if number in (9, 11):
                    name = "in full" if number == 9 else "lean"
                    merged = sum(isinstance(kernel, Merging) for kernel, _, _ in launches.launched)
                    distinct = {(checksum, size) for _, size, _, checksum in launches.read}
                    yield Row(f"GPT d=128, a step {name}: launches", len(launches.launched))
                    yield Row(f"GPT d=128, a step {name}: of these, to add up rows of programs", merged)
                    yield Row(f"GPT d=128, a step {name}: tensors read", len(launches.read))
                    yield Row(f"GPT d=128, a step {name}: read", sum(one[1] for one in launches.read) / 1e6, "MB")
                    yield Row(f"GPT d=128, a step {name}: that differ", sum(size for _, size in distinct) / 1e6, "MB")


def captured(options: CaptureOptions, directory: Path, step: Callable[[], None], count: int, place: Place) -> float:
    """Seconds a step of `count` captured ones, after the first ones, which are in full."""
    with measuring.captured(options, directory):
        timed(step, 2 if place.dry else FIRST, place)
        return timed(step, count, place)


def timed(step: Callable[[], None], count: int, place: Place) -> float:
    """Seconds a step, the device's work included."""
    place.wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    place.wait()
    return (time.perf_counter() - start) / count


def models(place: Place) -> dict[str, Callable[[], Callable[[], None]]]:
    """Name to what builds a training step."""
    device = place.device
    if place.dry:
        return {
            "GPT 124M": lambda: workloads.large_gpt(workloads.GPT_TINY, device),
            "ResNet-50": lambda: workloads.resnet(device, tiny=True),
        }
    return {
        "GPT 124M": lambda: workloads.large_gpt(workloads.GPT_124M, device),
        "GPT 124M, compiled": lambda: workloads.large_gpt(workloads.GPT_124M, device, compiled=True),
        "GPT 1.3B": lambda: workloads.large_gpt(workloads.GPT_1300M, device),
        "ResNet-50": lambda: workloads.resnet(device),
        "ResNet-50, compiled": lambda: workloads.resnet(device, compiled=True),
    }


def overhead(place: Place, *, held: bool = True) -> Iterator[Row]:
    """Captured over bare steps that alternate, by model and mode: of the models with a target, or of the others."""
    blocks, count = (1, 1) if place.dry else (place.blocks, COUNTED)
    for name, build in models(place).items():
        if not fnmatch.fnmatchcase(name, place.models) or held != any(name == model for model, _ in TARGETS):
            continue
        try:
            step = build()
            for _ in range(1 if place.dry else 5):
                step()
        except Exception as error:
            yield Row(name, None, verdict="FAILED", note=_said(error))
            continue
        bare = []
        with tempfile.TemporaryDirectory() as scratch:
            for mode, options in MODES.items():
                if time.monotonic() > place.end:
                    yield Row(f"{name}: {mode}", None, note=NO_TIME)
                    continue
                ratios = []
                for block in range(blocks):
                    before = timed(step, count, place)
                    during = captured(options, Path(scratch) / f"{block}", step, count, place)
                    beside = (before + timed(step, count, place)) / 2
                    ratios.append(during / beside)
                    bare.append(beside)
                target = None if place.dry else TARGETS.get((name, mode))
                yield bounded(f"{name}: {mode}", statistics.median(ratios), "x", most=target)
        yield Row(f"{name}: a bare step", statistics.median(bare) * 1e3 if bare else None, "ms")
        del step
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def memory(place: Place) -> Iterator[Row]:
    """Peak of the device's memory that captures add."""
    if place.device.type != "cuda":
        yield Row("peak of the device's memory", None, note="a CPU has none")
        return
    step = workloads.large_gpt(workloads.GPT_124M, place.device)
    step()
    peaks = []
    with tempfile.TemporaryDirectory() as scratch:
        for options in (None, MODES["everything"]):
            torch.cuda.reset_peak_memory_stats(place.device)
            if options is None:
                timed(step, 3, place)
            else:
                captured(options, Path(scratch) / "run", step, 3, place)
            peaks.append(torch.cuda.max_memory_allocated(place.device))
    yield bounded("GPT 124M: peak that capturing everything adds", (peaks[1] - peaks[0]) / 2**20, "MiB", most=64.0)


WORKER = """
import sys, tempfile, pathlib, torch
sys.path.insert(0, sys.argv[1])
from torch import nn
from introspect_cli.capture.options import CaptureOptions
from measuring import captured
with tempfile.TemporaryDirectory() as scratch, captured(CaptureOptions(), pathlib.Path(scratch) / "run"):
    device = torch.device(sys.argv[2])
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
"""


def processes(place: Place) -> Iterator[Row]:
    """Several captured processes at once on one device."""
    here = str(Path(__file__).parent)
    count = 2 if place.dry else 4
    command = [sys.executable, "-c", WORKER, here, str(place.device)]
    path = os.pathsep.join([str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(count)]
    ended = [process.communicate(timeout=240)[1] for process in running]
    failed = [error for process, error in zip(running, ended, strict=True) if process.returncode]
    note = failed[0].strip().splitlines()[-1] if failed and failed[0].strip() else ""
    yield Row("captured at once on one device", count - len(failed), f"/{count}", "all", _ok(not failed), note)


NO_TIME = "no time was left"
SECTIONS: dict[str, Callable[[Place], Iterator[Row]]] = {
    "overhead": overhead,
    "correctness": correctness,
    "kernels": kernels,
    "host": host,
    "memory": memory,
    "processes": processes,
    "others": functools.partial(overhead, held=False),
    "counted": counted,
}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


def measured(place: Place, chosen: list[str]) -> Iterator[Row]:
    """The rows of all sections, as they come; what fails is a row."""
    for name in chosen:
        if time.monotonic() > place.end:
            yield Row("the section", None, note=NO_TIME, section=name)
            continue
        try:
            for row in SECTIONS[name](place):
                yield replace(row, section=name)
        except Exception as error:  # one section's failure is not the next one's
            traceback.print_exc()
            yield Row("the section", None, verdict="FAILED", note=_said(error), section=name)


def machine(place: Place) -> dict[str, Any]:
    """What it ran on."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip}
    facts["device"] = "a dry run on the CPU" if place.dry else torch.cuda.get_device_name(place.device)
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = None
    return facts


def main() -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--models", default="*", help="names of the models whose overhead is measured, as a glob")
    parser.add_argument("--blocks", type=int, default=4, help="how often overhead is measured")
    parser.add_argument("--minutes", type=float, default=8, help="after which nothing more is begun")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file to write")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --dry-run tries this script without one")
    device = torch.device("cpu" if options.dry_run else options.device)
    end = math.inf if options.dry_run else time.monotonic() + 60 * options.minutes
    place = Place(device, options.dry_run, options.models, options.blocks, end)
    facts = machine(place)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), flush=True)
    began, rows = time.perf_counter(), []
    for row in measured(place, options.only):
        rows.append(row)
        print(row.line(), flush=True)
    facts["seconds"] = round(time.perf_counter() - began, 1)
    options.json.write_text(json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(f"{facts['seconds']} s; written to {options.json}")
    return int(any(row.verdict == "FAILED" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
