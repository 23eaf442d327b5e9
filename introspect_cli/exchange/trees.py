"""Model debug trees: the calls of one forward as nested JSON, with inputs and outputs; written, and read into records.

A node is `module_path`, `inputs` (`args`, `kwargs`), `outputs` and `children`, in call order; outputs are left out
where there are children. A tensor has its shape, dtype, lines of values where it was stored whole, and mean, std, min
and max for the float dtypes that the format gives them to.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.exchange.formats import wanted_records, wanted_steps
from introspect_cli.exchange.incoming import (
    Incoming,
    Row,
    add_biased_variance,
    checksum_of,
    plain_summary,
    read_bytes,
    step_and_rank,
)
from introspect_cli.inspect.module_tree import flattened, keys, nested
from introspect_cli.records import Kind, Layout, Phase, Record, Site, SiteInfo, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.read.run import Run

_ADDRESS = re.compile(r"object at 0x[0-9a-fA-F]+")
_DESCRIBED = ("float16", "bfloat16", "float32")
NUMBERS = ("mean", "std", "min", "max")
"""The statistics that the format has, in its order."""

_SAFE = re.compile(r"[^A-Za-z0-9_#.-]")
_FILE = re.compile(r"(.+)_debug_tree_(FULL_TENSORS|SUMMARY)\.json")
_TENSOR = re.compile(r"tensor\(\s*([-+0-9.einfa]+)")
_TOP = " (top-level)"
_DEEPEST = 200


@dataclass
class Call:
    """One call of a module, while the tree is put together."""

    fqn: str
    number: int
    inputs: list[Record] = field(default_factory=list)
    outputs: list[Record] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)

    def span(self) -> tuple[int, int]:
        """The lowest and the highest sequence number of its inputs and outputs."""
        sequences = [record.sequence for record in (*self.inputs, *self.outputs)]
        return min(sequences), max(sequences)


def write_tree(run: Run, directory: Path, selection: Selection) -> int:
    """Write a pair of files for each outermost call of each step; returns the number of files.

    `step=<n>/rank<n>/<Class>_debug_tree_SUMMARY.json`, and `..._FULL_TENSORS.json` where a tensor of it was stored.
    """
    written = 0
    for step, rank in wanted_steps(run, selection):
        for root in nested_calls(run, step, rank, selection):
            place = directory / f"step={step}" / f"rank{rank}"
            place.mkdir(parents=True, exist_ok=True)
            again = f"_call{root.number}" if root.number else ""
            stem = f"{_SAFE.sub('_', root.fqn)[:100]}{again}_debug_tree"
            for name, values in (("FULL_TENSORS", True), ("SUMMARY", False)):
                document = written_node(run, root, values=values, top=True)
                if values and not _has_values(document):
                    continue
                text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
                (place / f"{stem}_{name}.json").write_text(text + "\n", encoding="utf-8")
                written += 1
    return written


def nested_calls(run: Run, step: int, rank: int, selection: Selection) -> list[Call]:
    """The outermost forward calls of a step, each with its nested `children`.

    A call lies inside another where its records were made between that one's. Outermost calls without children count
    only where they are of a root module.
    """
    by_call: dict[tuple[str, int], Call] = {}
    for record in wanted_records(run, step, rank, selection):
        site = record.site
        if site.phase is not Phase.FORWARD or site.kind not in (Kind.INPUT, Kind.OUTPUT):
            continue
        call = by_call.setdefault((site.fqn, site.call), Call(site.fqn, site.call))
        (call.inputs if site.kind is Kind.INPUT else call.outputs).append(record)
    roots: list[Call] = []
    stack: list[tuple[int, Call]] = []
    # A module that was given nothing worth recording is known by its outputs alone; it still encloses by its name.
    spans = ((*call.span(), call) for call in by_call.values())
    for begin, end, call in sorted(spans, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1][0] < begin:
            stack.pop()
        (stack[-1][1].children if stack else roots).append(call)
        stack.append((end, call))
    return [root for root in roots if root.children or "." not in root.fqn]


def written_node(run: Run, call: Call, *, values: bool, top: bool = False) -> dict[str, Any]:
    """One call, with its children, as the nested data of a debug tree; outputs only where it has no children.

    Args:
        run: whose stored tensors are looked up.
        call: the call.
        values: whether elements of stored tensors are written.
        top: whether it is the outermost one, which its path then says.
    """
    args: list[tuple[str, Any]] = []
    kwargs: list[tuple[str, Any]] = []
    for record in call.inputs:
        first = keys(record.site.path)[:1]
        (args if first and isinstance(first[0], int) else kwargs).append(
            (record.site.path, written_value(run, record, values))
        )
    given, named = nested(args) if args else [], nested(kwargs) if kwargs else {}
    document: dict[str, Any] = {
        "module_path": f"{call.fqn} (top-level)" if top else call.fqn,
        "inputs": {"args": given if isinstance(given, list) else [given], "kwargs": named},
    }
    if not call.children:
        document["outputs"] = (
            nested([(r.site.path, written_value(run, r, values)) for r in call.outputs]) if call.outputs else None
        )
    document["children"] = [written_node(run, child, values=values) for child in call.children]
    return document


def written_value(run: Run, record: Record, values: bool) -> Any:
    """A tensor as shape, dtype, statistics and, with `values`, its elements where stored; a plain value as its text.

    Statistics are given of the dtypes in `_DESCRIBED`. Addresses in texts are masked; what was not observed is its
    text.
    """
    summary = record.summary
    if summary.status in (Status.VALUE, Status.NOT_OBSERVED):
        return _ADDRESS.sub("object at 0xXXXXXXXX", summary.text)
    layout = summary.layout
    described: dict[str, Any] = {"shape": f"torch.Size({list(layout.shape)})", "dtype": f"torch.{layout.dtype}"}
    stored = run.tensor(summary.checksum) if values and summary.checksum else None
    if stored is not None:
        described["value"] = printed_lines(stored)
    if layout.dtype in _DESCRIBED:
        # torch's std is the unbiased one.
        stats = {**summary.stats, "std": summary.stats.get("uvar", np.nan) ** 0.5}
        described |= {name: f"tensor({stats[name]:.4e})" for name in NUMBERS if name in stats}
    return described


def printed_lines(array: np.ndarray[Any, Any]) -> list[str]:
    """A tensor's values as torch prints them in scientific notation, in lines of at most 120 characters.

    Of over 1000 elements numpy leaves out those in the middle, by its print options.
    """
    formats: Any = {"float_kind": lambda value: f"{value: .4e}"}
    body = np.array2string(array, separator=", ", max_line_width=120, prefix="tensor(", formatter=formats)
    return f"tensor({body})".splitlines()


def _has_values(item: Any) -> bool:
    """Whether any dict inside has the key `value`: a stored tensor."""
    if isinstance(item, dict):
        return "value" in item or any(map(_has_values, item.values()))
    return isinstance(item, list) and any(map(_has_values, item))


# --- reading


def find_trees(directory: Path) -> dict[tuple[int, int], list[Path]]:
    """The files of each (step, rank) below a directory, both rising; of a pair the FULL_TENSORS file alone.

    Step and rank are those of the directory names `step=<n>` and `rank<n>`, 0 where there are none. Links are passed
    over.
    """
    files: dict[tuple[int, int], dict[str, Path]] = {}
    for path in sorted(directory.glob("**/*_debug_tree_*.json")):
        match = _FILE.fullmatch(path.name)
        if match is not None and not path.is_symlink():
            pairs = files.setdefault(step_and_rank(path.relative_to(directory).parts[:-1]), {})
            if match[2] == "FULL_TENSORS" or match[1] not in pairs:
                pairs[match[1]] = path
    return {key: list(pairs.values()) for key, pairs in sorted(files.items())}


def read_trees(directory: Path) -> Iterator[Incoming]:
    """Read `*_debug_tree_*.json` below a directory: records by step and rank, from `step=N` and `rankN` in paths.

    Raises:
        StoreError: a file is not JSON or has no `module_path`.
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
            rows += _read_node(document, seen, str(path), 0)
        yield Incoming(step, rank, tuple(rows))


def _read_node(document: Any, seen: dict[str, int], path: str, depth: int) -> Iterator[Row]:
    """The records of a call in a tree and of the calls inside it, in order.

    Args:
        document: the call's node.
        seen: by name, the number of the module's last call in this step; counted up here.
        path: of the file, for messages.
        depth: how deep the node lies, 0 for the outermost.

    Raises:
        StoreError: it is no object, or lies too deep.
    """
    if not isinstance(document, dict) or depth > _DEEPEST:
        raise StoreError(f"{path} is not a debug tree: a child is no object, or lies more than {_DEEPEST} deep")
    fqn = str(document.get("module_path", "")).removesuffix(_TOP)
    call = seen[fqn] = seen.get(fqn, -1) + 1
    inputs = document.get("inputs")
    inputs = inputs if isinstance(inputs, dict) else {}
    for group in ("args", "kwargs"):
        for place, item in _tensor_leaves(inputs.get(group)):
            yield Site(Phase.FORWARD, Kind.INPUT, fqn, call, place), SiteInfo(), _read_summary(item)
    for child in document.get("children") or ():
        yield from _read_node(child, seen, path, depth + 1)
    if document.get("outputs") is not None:
        for place, item in _tensor_leaves(document["outputs"]):
            yield Site(Phase.FORWARD, Kind.OUTPUT, fqn, call, place), SiteInfo(), _read_summary(item)


def _tensor_leaves(item: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of nested data; a dict that describes a tensor is a leaf, None is left out."""
    return [(path, leaf) for path, leaf in flattened(item, is_leaf=_is_tensor) if leaf is not None]


def _is_tensor(item: Any) -> bool:
    """Whether a dict describes a tensor: it has `shape` and `dtype`."""
    return isinstance(item, dict) and "shape" in item and "dtype" in item


def _read_summary(item: Any) -> Summary:
    """The summary of a leaf: a tensor's statistics for a dict, else that of a plain value.

    A tensor's status is PARTIAL, its checksum a hash of its shape, dtype, statistics and printed elements. Statistics
    that are NaN or no number are left out.
    """
    if not isinstance(item, dict):
        return plain_summary(item)
    shape = tuple(int(size) for size in re.findall(r"\d+", str(item["shape"]))[:64])
    dtype = str(item["dtype"]).removeprefix("torch.")
    stats: dict[str, float] = {}
    for name in NUMBERS:
        match = _TENSOR.match(str(item.get(name, "")))
        with suppress(ValueError):
            if match and not math.isnan(float(match[1])):
                stats[name] = float(match[1])
    layout = Layout(shape, dtype)
    add_biased_variance(stats, layout.numel)
    text = json.dumps([item.get("value"), str(item["shape"]), dtype, *sorted(stats.items())])
    return Summary(Status.PARTIAL, layout, checksum_of(text), stats)
