"""What a summary costs: bandwidth of each kernel, latency of a small tensor, against what torch takes.

    python benchmarks/throughput.py [--device cuda] [--megabytes 256] [--seconds 0.5]

Every figure is the best of repeated runs within the time given, in this process, one after the other. The read
bandwidth that the targets refer to is that of `x.sum()` in the same run. Misses are printed as misses.
Not called `kernels.py`: tests have this folder on their path, and transformers imports a package of that name.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

import torch
from measuring import Row, bounded, quickest, seconds, show

from introspect_cli.tensors import kernels, parallel
from introspect_cli.tensors.summarizer import Summarizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (1 << 18, 1 << 22)
"""Elements of the smaller tensors that bandwidth is shown for, beside the large one."""


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


def wait_for(device: torch.device) -> Callable[[], object]:
    """What waits until the device has done what it was asked for."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def bandwidths(device: torch.device, megabytes: int, within: float) -> Iterator[Row]:
    """Rows about large tensors."""
    checks, everything, alone = Summarizer(stats=False, sketch=False), Summarizer(), Summarizer(alone=True)
    for count in (*SIZES, megabytes << 18):
        x = torch.randn(count, device=device)
        size = x.numel() * 4 / 1e9

        def rate(call: Callable[[], object], size: float = size) -> float:
            return size / quickest(call, within, wait_for(device))

        large, name = count >= megabytes << 18, f"float32, {size * 1e3:.0f} MB"
        read, full = rate(x.sum), rate(changing(everything, x))
        yield bounded(f"{name}: x.sum()", read, "GB/s")
        checksum = rate(changing(checks, x))
        yield bounded(f"{name}: checksum", checksum, "GB/s", least=read / 2 if large else None)
        yield bounded(f"{name}: checksum, statistics, sketch", full, "GB/s", least=read / 4 if large else None)
        yield bounded(f"{name}: the same on one thread", rate(changing(alone, x)), "GB/s")
        yield bounded(f"{name}: the same, unchanged since last seen", rate(partial(everything.add, x)), "GB/s")
        if large:
            separate = rate(partial(per_statistic, x))
            yield bounded(f"{name}: statistics as separate torch calls", separate, "GB/s")
            yield bounded(f"{name}: all three over separate calls", full / separate, "x", least=60)
        for summarizer in (checks, everything, alone):
            summarizer.end_step()
    for summarizer in (alone, checks, everything):
        summarizer.close()


def types(device: torch.device, within: float) -> Iterator[Row]:
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
    summarizer = Summarizer()
    for name, tensor in cases.items():
        took = quickest(changing(summarizer, tensor), within / 2, wait_for(device))
        yield bounded(f"{name}, all three", tensor.numel() * tensor.element_size() / 1e9 / took, "GB/s")
        summarizer.end_step()
    summarizer.close()


def latencies(device: torch.device, within: float) -> Iterator[Row]:
    """Rows about small tensors."""
    summarizer = Summarizer()
    for count in (1, 1000, 10_000):
        x = torch.randn(count, device=device)

        def many(x: torch.Tensor = x) -> None:
            for _ in range(500):
                summarizer.add(x)

        took = quickest(many, within, wait_for(device)) / 500 * 1e6
        summarizer.end_step()
        most = 10 if count == 1000 and device.type == "cpu" else None
        yield bounded(f"{count} elements, all three, Python included", took, "us", most=most)
    x = torch.randn(1000, device=device)
    took = quickest(lambda: per_statistic(x), within, wait_for(device))
    yield bounded("1000 elements by separate torch calls", took * 1e6, "us")
    tensors = [torch.randn(1000, device=device) for _ in range(1500)]
    for tensor in tensors:
        summarizer.add(tensor)
    yield bounded("finalising a step of 1500 tensors", seconds(summarizer.end_step) * 1e3, "ms")
    summarizer.close()


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the large tensor")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print(f"levels of this processor: {', '.join(kernels.KERNELS.levels())}", end="\n\n")
    parallel.note_computation([torch.empty(1 << 20)])  # as after an optimizer step: torch's workers may be called
    show(bandwidths(device, options.megabytes, options.seconds))
    show(types(device, options.seconds))
    show(latencies(device, options.seconds))


if __name__ == "__main__":
    main()
