"""Model debug trees read into records."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.exchange.incoming import Incoming, Row, checksum_of, read_bytes, value
from introspect_cli.exchange.tree import NUMBERS
from introspect_cli.inspect.nested import flattened
from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE = re.compile(r"(.+)_debug_tree_(FULL_TENSORS|SUMMARY)\.json")
_STEP = re.compile(r"step=(\d{1,18})")
_RANK = re.compile(r"rank(\d{1,6})")
_TENSOR = re.compile(r"tensor\(\s*([-+0-9.einfa]+)")
_TOP = " (top-level)"
_DEEPEST = 200


def find_trees(directory: Path) -> dict[tuple[int, int], list[Path]]:
    """The files of each (step, rank) below a directory; with values where both of a pair are there.

    Step and rank are those of the directory names `step=<n>` and `rank<n>`, 0 where there are none.
    """
    found: dict[tuple[int, int], dict[str, Path]] = {}
    for path in sorted(directory.glob("**/*_debug_tree_*.json")):
        match = _FILE.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        step = rank = 0
        for part in path.relative_to(directory).parts[:-1]:
            if own := _STEP.fullmatch(part):
                step = int(own[1])
            elif own := _RANK.fullmatch(part):
                rank = int(own[1])
        pairs = found.setdefault((step, rank), {})
        if match[2] == "FULL_TENSORS" or match[1] not in pairs:
            pairs[match[1]] = path
    return {key: list(pairs.values()) for key, pairs in sorted(found.items())}


def read_trees(directory: Path) -> Iterator[Incoming]:
    """Every tree as records.

    Raises:
        StoreError: a file cannot be read.
    """
    for (step, rank), paths in find_trees(directory).items():
        rows: list[Row] = []
        seen: dict[str, int] = {}
        for path in paths:
            try:
                document = json.loads(read_bytes(path))
            except (ValueError, RecursionError):
                raise StoreError(f"{path} is not a debug tree: it is not valid JSON") from None
            if not isinstance(document, dict) or "module_path" not in document:
                raise StoreError(f"{path} is not a debug tree: it has no module_path at its top")
            rows += _node(document, seen, str(path), 0)
        yield Incoming(step, rank, tuple(rows))


def _node(document: Any, seen: dict[str, int], path: str, depth: int) -> Iterator[Row]:
    if not isinstance(document, dict) or depth > _DEEPEST:
        raise StoreError(f"{path} is not a debug tree: a child is no object, or lies more than {_DEEPEST} deep")
    fqn = str(document.get("module_path", "")).removesuffix(_TOP)
    call = seen[fqn] = seen.get(fqn, -1) + 1
    inputs = document.get("inputs")
    inputs = inputs if isinstance(inputs, dict) else {}
    for group in ("args", "kwargs"):
        for place, leaf in _leaves(inputs.get(group)):
            yield Site(Phase.FORWARD, Kind.INPUT, fqn, call, place), SiteInfo(), _summary(leaf)
    for child in document.get("children") or ():
        yield from _node(child, seen, path, depth + 1)
    if document.get("outputs") is not None:
        for place, leaf in _leaves(document["outputs"]):
            yield Site(Phase.FORWARD, Kind.OUTPUT, fqn, call, place), SiteInfo(), _summary(leaf)


def _leaves(found: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves with their paths; the object that stands for a tensor is a leaf."""
    if isinstance(found, dict) and "shape" in found and "dtype" in found:
        return [(path, found)]
    if isinstance(found, dict):
        return [leaf for key, item in found.items() for leaf in _leaves(item, f"{path}[{key!r}]")]
    if isinstance(found, list):
        return [leaf for place, item in enumerate(found) for leaf in _leaves(item, f"{path}[{place}]")]
    return [] if found is None else flattened(found, path)


def _summary(leaf: Any) -> Summary:
    if not isinstance(leaf, dict):
        return value(leaf)
    shape = tuple(int(size) for size in re.findall(r"\d+", str(leaf["shape"]))[:64])
    dtype = str(leaf["dtype"]).removeprefix("torch.")
    stats: dict[str, float] = {}
    for name in NUMBERS:
        match = _TENSOR.match(str(leaf.get(name, "")))
        try:
            stats[name] = float(match[1]) if match else float("nan")
        except ValueError:
            continue
    stats = {name: number for name, number in stats.items() if number == number}  # noqa: PLR0124 - leaves NaN out
    layout = Layout(shape, dtype)
    if "std" in stats and layout.numel > 0:
        stats["var"] = stats["std"] ** 2 * (layout.numel - 1) / layout.numel
    text = json.dumps([leaf.get("value"), str(leaf["shape"]), dtype, *sorted(stats.items())])
    return Summary(Status.PARTIAL, layout, checksum_of(text), stats)
