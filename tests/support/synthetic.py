"""Builds small runs by hand, so that compare, health and render can be tested without torch or a capture.

A value given as an array or a number gets a layout, a checksum (of another kind than the real kernels', but equal
exactly for equal bits, dtype and shape) and statistics in plain numpy.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Kind, Layout, ModuleInfo, Phase, Site, SiteInfo, Status, Summary
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch, Texts
from introspect_cli.store.rank_writer import RankWriter
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

COUNTS = tuple(name for name, each in STATISTICS.items() if each.type == "<i8")
NUMBERS = tuple(name for name, each in STATISTICS.items() if each.type != "<i8" and not each.on_request)
"""Statistics that every capture keeps."""

Row = tuple[Site, SiteInfo, Any]
"""A site, what is known of it, and a `Summary`, an array, a number, a text, or None for what was not observed."""


def site(phase: str, kind: str, fqn: str, call: int = 0, path: str = "") -> Site:
    return Site(Phase(phase), Kind(kind), fqn, call, path)


def row(phase: str, kind: str, fqn: str, value: Any, *, call: int = 0, path: str = "", module_class: str = "") -> Row:
    return site(phase, kind, fqn, call, path), SiteInfo(module_class), value


def summary(value: Any) -> Summary:
    """What a capture might keep of `value`."""
    if isinstance(value, Summary):
        return value
    if value is None:
        return Summary(Status.NOT_OBSERVED, Layout((), ""), 0, text="not observed")
    if isinstance(value, (str, int, float)) and not isinstance(value, np.generic):
        text = repr(value)
        name = f"python.{type(value).__name__}"
        return Summary(Status.VALUE, Layout((), name), _hash(name, text.encode()), text=text)
    array = np.asarray(value)
    layout = Layout(array.shape, str(array.dtype), "cpu", "contiguous")
    checksum = _hash(f"{array.dtype}{array.shape}", array.tobytes())
    return Summary(Status.OBSERVED, layout, checksum, stats(array), sketch(array))


def _hash(kind: str, data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(kind.encode() + b"\0" + data, digest_size=8).digest(), "little")


def stats(array: np.ndarray) -> dict[str, float]:
    """The stored statistics by their definition, in float64."""
    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    out: dict[str, float] = {
        "nans": int(np.isnan(values).sum()),
        "posinfs": int(np.isposinf(values).sum()),
        "neginfs": int(np.isneginf(values).sum()),
        "zeros": int((values == 0).sum()),
    }
    if not len(finite):
        return out
    mean, var = float(finite.mean()), float(finite.var())
    out |= {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "absmin": float(np.abs(finite).min()),
        "mean": mean,
        "amean": float(np.abs(finite).mean()),
        "var": var,
    }
    if var > 0:
        scaled = (finite - mean) / math.sqrt(var)
        out |= {"skew": float((scaled**3).mean()), "kurt": float((scaled**4).mean())}
    return out


def sketch(array: np.ndarray) -> tuple[float, ...]:
    """A count sketch keyed by element index; its distances estimate those of the arrays."""
    values = np.nan_to_num(array.astype(np.float64).ravel(), posinf=0, neginf=0)
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(0xABCDEF)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    sign = np.where(mixed >> np.uint64(63), 1.0, -1.0)
    bucket = ((mixed >> np.uint64(40)) % np.uint64(SKETCH_SIZE)).astype(np.int64)
    return tuple(np.bincount(bucket, values * sign, SKETCH_SIZE).astype(np.float32).tolist())


def batch(writer: RankWriter, rows: Iterable[Row]) -> StepBatch:
    """The rows as columns, in order of recording; sites and layouts interned with `writer`."""
    rows = list(rows)
    kept = [summary(value) for _, _, value in rows]
    counts = {name: np.array([s.stats.get(name, -1) for s in kept], np.int64) for name in COUNTS}
    floats = {
        name: np.array([s.stats.get(name, math.nan) for s in kept], np.float64) for name in (*NUMBERS, "med", "mode")
    }
    sketches = np.zeros((len(kept), SKETCH_SIZE), np.float32)
    for number, statistic in enumerate(kept):
        if statistic.sketch:
            sketches[number] = statistic.sketch
    return StepBatch(
        site=np.array([writer.site(each, info) for each, info, _ in rows], np.uint32),
        sequence=np.arange(len(rows), dtype=np.uint32),
        layout=np.array([writer.layout(s.layout) for s in kept], np.uint32),
        status=np.array([s.status.value for s in kept], np.uint8),
        checksum=np.array([s.checksum for s in kept], np.uint64),
        counts=counts,
        floats=floats,
        sketch=sketches,
        text=Texts(enumerate(s.text for s in kept)),
    )


def write_run(
    path: Path,
    steps: Sequence[Sequence[Row]],
    *,
    manifest: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    modules: Sequence[ModuleInfo] = (),
    first_step: int = 0,
    numbers: Sequence[int] | None = None,
    ranks: int = 1,
    stats: bool = True,
    sketch: bool = True,
    sorted_stats: tuple[str, ...] = (),
    complete: bool = True,
    force: bool = False,
    sources: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    whole: bool = False,
) -> Path:
    """Write a run whose i-th step (number `first_step + i`, or `numbers[i]`) holds the rows of `steps[i]`.

    Every rank gets the same rows. With `complete=False` the run ends as one that was killed. With `whole=True` arrays
    are stored whole. `sources` are the texts of source files by their names, `files` those of files that it read.
    """
    store = StoreWriter.create(path, force=force)
    documents = dict(settings or {})
    command = documents.get("command")
    argv = command.get("argv", []) if isinstance(command, dict) else []
    about = {"tool": {"name": "introspect", "version": "0.1.0"}, "script": "train.py", "argv": argv, "exit_code": 0}
    kept = {name: hex_digest(text.encode()) for name, text in {**(sources or {}), **(files or {})}.items()}
    for name, digest in kept.items():
        store.save_source(digest, {**(sources or {}), **(files or {})}[name].encode())
    if sources is not None:
        documents["sources"] = {name: kept[name] for name in sources}
    if files is not None:
        documents["files"] = {name: {"digest": kept[name], "size": len(text)} for name, text in files.items()}
    for name, value in documents.items():
        store.write_settings(name, value)
    for array in {id(value): value for rows in steps for *_, value in rows if whole}.values():
        store.save_tensor(summary(array).checksum, memoryview(array), str(array.dtype), array.shape)
    for number in range(ranks):
        writer = store.rank(number, stats=stats, sketch=sketch, sorted_stats=sorted_stats)
        writer.modules(modules)
        for position, rows in enumerate(steps):
            step = numbers[position] if numbers is not None else first_step + position
            writer.append(step, batch(writer, rows))
    about["status"] = "complete" if complete else "running"
    store.write_manifest({**about, **(manifest or {})})
    if complete:
        store.close()
    else:
        store.abandon()
    return path
