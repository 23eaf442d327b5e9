"""What a summary costs: bandwidth of each kernel, latency of a small tensor, against what torch takes.

    python benchmarks/kernels.py [--device cuda] [--megabytes 256] [--seconds 0.5]

Every figure is the best of repeated runs within the time given, in this process, one after the other. The read
bandwidth that the targets refer to is that of `x.sum()` in the same run. Misses are printed as misses.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from introspect_cli.tensors import kernels, parallel, reference
from introspect_cli.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1 << 18, 1 << 22)
"""Elements of the smaller tensors that bandwidth is shown for, beside the large one."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: measured.
        figure: as text, with its unit.
        target: as text; "" where there is none.
        met: whether the target is met.
    """

    what: str
    figure: str
    target: str = ""
    met: bool = True


def best(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds of the quickest of repeated calls; on an accelerator, until its work is done."""
    call()
    wait(device)
    end, quickest = time.perf_counter() + seconds, float("inf")
    while True:
        start = time.perf_counter()
        call()
        wait(device)
        now = time.perf_counter()
        quickest = min(quickest, now - start)
        if now > end:
            return quickest


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def per_statistic(x: torch.Tensor) -> None:
    """The statistics as separate torch calls, each a pass over memory or several."""
    finite = x[torch.isfinite(x)]
    deviation = finite - finite.mean()
    for call in (torch.isnan, torch.isposinf, torch.isneginf):
        call(x).sum()
    (x == 0).sum()
    for value in (
        finite.min(),
        finite.max(),
        finite.abs().min(),
        finite.abs().max(),
        finite.mean(),
        finite.abs().mean(),
    ):
        value.item()
    finite.var(unbiased=False).item()
    finite.std().item()
    (deviation**3).mean().item()
    (deviation**4).mean().item()
    finite.norm().item()


def changing(summarizer: Summarizer, x: torch.Tensor) -> Callable[[], None]:
    """A call that summarises x as if never seen: the short cut for unchanged tensors would flatter."""

    def call() -> None:
        summarizer._memory.clear()  # noqa: SLF001  # there is no other reason to forget
        summarizer.add(x)

    return call


def bandwidths(device: torch.device, megabytes: int, seconds: float) -> list[Row]:
    """Rows about large tensors."""
    checks, everything, alone = Summarizer(stats=False, sketch=False), Summarizer(), Summarizer(threads=1)
    rows = []
    for count in (*SIZES, megabytes << 18):
        x = torch.randn(count, device=device)
        size = x.numel() * 4 / 1e9
        read = size / best(x.sum, seconds, device)
        check = size / best(changing(checks, x), seconds, device)
        full = size / best(changing(everything, x), seconds, device)
        single = size / best(changing(alone, x), seconds, device)
        again = size / best(lambda x=x: everything.add(x), seconds, device)
        large = count >= megabytes << 18
        name = f"float32, {size * 1e3:.0f} MB"
        rows += [
            Row(f"{name}: x.sum()", f"{read:.1f} GB/s"),
            *targeted(f"{name}: checksum", check, read / 2, large=large),
            *targeted(f"{name}: checksum, statistics, sketch", full, read / 4, large=large),
            Row(f"{name}: the same on one thread", f"{single:.1f} GB/s"),
            Row(f"{name}: the same, unchanged since last seen", f"{again:.1f} GB/s"),
        ]
        if large:
            separate = size / best(lambda x=x: per_statistic(x), seconds, device)
            rows.append(Row(f"{name}: statistics as separate torch calls", f"{separate:.2f} GB/s"))
            rows += targeted(f"{name}: all three over separate calls", full / separate, 60.0, unit="x")
        checks.end_step()
        everything.end_step()
        alone.end_step()
    alone.close()
    checks.close()
    everything.close()
    return rows


def targeted(what: str, figure: float, target: float, *, large: bool = True, unit: str = " GB/s") -> list[Row]:
    """One row, with a target where it applies."""
    if not large:
        return [Row(what, f"{figure:.1f}{unit}")]
    return [Row(what, f"{figure:.1f}{unit}", f"at least {target:.1f}{unit}", figure >= target)]


def types(device: torch.device, seconds: float) -> list[Row]:
    """Rows about other types and strides, 4 million elements."""
    x = torch.randn(2048, 2048, device=device)
    cases = {
        "float64": x.double(),
        "bfloat16": x.bfloat16(),
        "float16": x.half(),
        "float8_e4m3fn": x.to(torch.float8_e4m3fn),
        "int64": (x * 100).to(torch.int64),
        "bool": x > 0,
        "complex64": torch.complex(x, x),
        "float32 with a NaN in each block": x.masked_fill(torch.arange(2048, device=device) == 7, float("nan")),
        "float32 with half zeros": x.relu(),
        "float32 transposed": x.t(),
        "float32, channels last": x.view(16, 64, 64, 64).to(memory_format=torch.channels_last),
    }
    summarizer, rows = Summarizer(), []
    for name, tensor in cases.items():
        quickest = best(changing(summarizer, tensor), seconds / 2, device)
        rate = tensor.numel() * tensor.element_size() / 1e9 / quickest
        rows.append(Row(f"{name}, all three", f"{rate:.1f} GB/s"))
        summarizer.end_step()
    summarizer.close()
    return rows


def latencies(device: torch.device, seconds: float) -> list[Row]:
    """Rows about small tensors."""
    summarizer, rows = Summarizer(), []
    for count in (1, 1000, 10_000):
        x = torch.randn(count, device=device)

        def many(x: torch.Tensor = x) -> None:
            for _ in range(500):
                summarizer.add(x)

        took = best(many, seconds, device) / 500 * 1e6
        summarizer.end_step()
        bound = count == 1000 and device.type == "cpu"
        target = ("at most 10.0 us", took <= 10) if bound else ("", True)
        rows.append(Row(f"{count} elements, all three, Python included", f"{took:.1f} us", *target))
    x = torch.randn(1000, device=device)
    rows.append(
        Row("1000 elements by separate torch calls", f"{best(lambda: per_statistic(x), seconds, device) * 1e6:.0f} us")
    )
    tensors = [torch.randn(1000, device=device) for _ in range(1500)]
    for tensor in tensors:
        summarizer.add(tensor)
    start = time.perf_counter()
    summarizer.end_step()
    rows.append(Row("finalising a step of 1500 tensors", f"{(time.perf_counter() - start) * 1e3:.2f} ms"))
    summarizer.close()
    return rows


def oracle(seconds: float) -> list[Row]:
    """What remains where there are no compiled kernels."""
    x = torch.randn(1 << 20)
    rate = x.numel() * 4 / 1e9 / best(lambda: reference.row(x), seconds, x.device)
    return [Row("without compiled kernels, all three, 4 MB", f"{rate:.2f} GB/s")]


def show(rows: list[Row]) -> None:
    """Print the table."""
    for row in rows:
        verdict = ("met" if row.met else "MISSED") if row.target else ""
        print(f"{row.what:<58} {row.figure:>12}  {row.target:<18} {verdict}".rstrip())


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the large tensor")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print(kernels.REASON or f"levels of this processor: {', '.join(kernels.KERNELS.levels())}", end="\n\n")
    parallel.note_computation([torch.empty(1 << 20)])  # as after an optimizer step: torch's workers may be called
    show(bandwidths(device, options.megabytes, options.seconds))
    show(types(device, options.seconds))
    show(latencies(device, options.seconds))
    if device.type == "cpu":
        show(oracle(options.seconds))


if __name__ == "__main__":
    main()
