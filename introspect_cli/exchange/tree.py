"""Model debug trees: the calls of one forward as nested JSON, with inputs and outputs.

A node is `module_path`, `inputs` (`args`, `kwargs`), `outputs` and `children`, in call order; outputs are left out
where there are children. A tensor has its shape, dtype, lines of values where it was stored whole, and mean, std, min
and max for the float dtypes that the format gives them to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.exchange.formats import wanted_steps
from introspect_cli.inspect.nested import keys, nested
from introspect_cli.records import Kind, Phase, Record, Status

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.reader import Run

_ADDRESS = re.compile(r"object at 0x[0-9a-fA-F]+")
_DESCRIBED = ("float16", "bfloat16", "float32")
NUMBERS = ("mean", "std", "min", "max")
"""The statistics that the format has, in its order."""

_BLOCK = re.compile(r"\.\d+$")
_SAFE = re.compile(r"[^A-Za-z0-9_#.-]")


@dataclass
class Call:
    """One call of a module, while the tree is put together."""

    fqn: str
    number: int
    inputs: list[Record] = field(default_factory=list)
    outputs: list[Record] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """Sequence of the first thing recorded of it."""
        return min(record.sequence for record in (*self.inputs, *self.outputs))

    @property
    def end(self) -> int:
        """Sequence of the last."""
        return max(record.sequence for record in (*self.inputs, *self.outputs))


def write_tree(run: Run, directory: Path, selection: Selection, *, prune_layers: bool = False) -> int:
    """A pair of files for each outermost call of each step; files written.

    `step=<n>/rank<n>/<Class>_debug_tree_SUMMARY.json`, and `..._FULL_TENSORS.json` where a tensor of it was stored.
    """
    written = 0
    for step, rank in wanted_steps(run, selection):
        for root in calls(run, step, rank, selection):
            place = directory / f"step={step}" / f"rank{rank}"
            place.mkdir(parents=True, exist_ok=True)
            again = f"_call{root.number}" if root.number else ""
            stem = f"{_SAFE.sub('_', root.fqn)[:100]}{again}_debug_tree"
            for name, values in (("FULL_TENSORS", True), ("SUMMARY", False)):
                document = node(run, root, values=values, top=True)
                if values and not _has_values(document):
                    continue
                tree = pruned(document) if prune_layers else document
                text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
                (place / f"{stem}_{name}.json").write_text(text + "\n", encoding="utf-8")
                written += 1
    return written


def calls(run: Run, step: int, rank: int, selection: Selection) -> list[Call]:
    """The outermost calls of a step, what each called inside it."""
    found: dict[tuple[str, int], Call] = {}
    for record in run.rank(rank).records(step):
        site = record.site
        if site.phase is not Phase.FORWARD or site.kind not in (Kind.INPUT, Kind.OUTPUT):
            continue
        if not selection.wants(site.kind, site.fqn):
            continue
        call = found.setdefault((site.fqn, site.call), Call(site.fqn, site.call))
        (call.inputs if site.kind is Kind.INPUT else call.outputs).append(record)
    roots: list[Call] = []
    stack: list[Call] = []
    # A module that was given nothing worth recording is known by its outputs alone; it still encloses by its name.
    for call in sorted(found.values(), key=lambda own: (own.begin, -own.end)):
        while stack and stack[-1].end < call.begin:
            stack.pop()
        (stack[-1].children if stack else roots).append(call)
        stack.append(call)
    return [root for root in roots if root.children or "." not in root.fqn]


def node(run: Run, call: Call, *, values: bool, top: bool = False) -> dict[str, Any]:
    """One call as nested data."""
    args: list[tuple[str, Any]] = []
    kwargs: list[tuple[str, Any]] = []
    for record in call.inputs:
        first = keys(record.site.path)[:1]
        (args if first and isinstance(first[0], int) else kwargs).append((record.site.path, leaf(run, record, values)))
    given, named = nested(args) if args else [], nested(kwargs) if kwargs else {}
    document: dict[str, Any] = {
        "module_path": f"{call.fqn} (top-level)" if top else call.fqn,
        "inputs": {"args": given if isinstance(given, list) else [given], "kwargs": named},
    }
    if not call.children:
        document["outputs"] = (
            nested([(r.site.path, leaf(run, r, values)) for r in call.outputs]) if call.outputs else None
        )
    document["children"] = [node(run, child, values=values) for child in call.children]
    return document


def leaf(run: Run, record: Record, values: bool) -> Any:
    """A tensor or a plain value."""
    summary = record.summary
    if summary.status in (Status.VALUE, Status.NOT_OBSERVED):
        return _ADDRESS.sub("object at 0xXXXXXXXX", summary.text)
    layout = summary.layout
    found: dict[str, Any] = {"shape": f"torch.Size({list(layout.shape)})", "dtype": f"torch.{layout.dtype}"}
    stored = run.tensor(summary.checksum) if values and summary.checksum else None
    if stored is not None:
        found["value"] = printed(stored)
    if layout.dtype in _DESCRIBED:
        # torch's std is the unbiased one.
        own = {**summary.stats, "std": summary.stats.get("uvar", np.nan) ** 0.5}
        found |= {name: f"tensor({own[name]:.4e})" for name in NUMBERS if name in own}
    return found


def printed(array: np.ndarray[Any, Any]) -> list[str]:
    """A tensor's values as torch prints them in scientific notation at a width of 120, one line an item."""
    formats: Any = {"float_kind": lambda value: f"{value: .4e}"}
    body = np.array2string(array, separator=", ", max_line_width=120, prefix="tensor(", formatter=formats)
    return f"tensor({body})".splitlines()


def _has_values(found: Any) -> bool:
    if isinstance(found, dict):
        return "value" in found or any(_has_values(item) for item in found.values())
    return isinstance(found, list) and any(_has_values(item) for item in found)


def pruned(document: dict[str, Any]) -> dict[str, Any]:
    """The tree with runs of layer blocks (numbered, with children below) cut to their first and last."""
    children = [pruned(child) for child in document["children"]]
    blocks = [child for child in children if _BLOCK.search(child["module_path"]) and child["children"]]
    dropped = {id(block) for block in blocks[1:-1]}
    return {**document, "children": [child for child in children if id(child) not in dropped]}
