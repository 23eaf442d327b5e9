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

from introspect_cli.exchange.formats import wanted_records, wanted_steps
from introspect_cli.inspect.module_tree import keys, nested
from introspect_cli.records import Kind, Phase, Record, Status

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run

_DESCRIBED = ("float16", "bfloat16", "float32")
NUMBERS = ("mean", "std", "min", "max")
"""The statistics that the format has, in its order."""

_SAFE = re.compile(r"[^A-Za-z0-9_#.-]")


@dataclass
class Call:
    """One call of a module, while the tree is put together."""

    fqn: str
    number: int
    records: list[Record] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)


def write_tree(run: Run, directory: Path, selection: Selection) -> None:
    """Write a pair of files for each outermost call of each step.

    `step=<n>/rank<n>/<Class>_debug_tree_SUMMARY.json`, and `..._FULL_TENSORS.json` where a tensor of it was stored.
    """
    for step, rank in wanted_steps(run, selection):
        for root in nested_calls(run, step, rank, selection):
            place = directory / f"step={step}" / f"rank{rank}"
            place.mkdir(parents=True, exist_ok=True)
            again = f"_call{root.number}" if root.number else ""
            stem = f"{_SAFE.sub('_', root.fqn)[:100]}{again}_debug_tree"
            for name, values in (("FULL_TENSORS", True), ("SUMMARY", False)):
                document = written_node(run, root, values=values, top=True)
                text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
                if not values or '"value": [' in text:  # any of it was stored
                    (place / f"{stem}_{name}.json").write_text(text + "\n", encoding="utf-8")


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
        by_call.setdefault((site.fqn, site.call), Call(site.fqn, site.call)).records.append(record)
    roots: list[Call] = []
    stack: list[tuple[int, Call]] = []
    # A module that was given nothing worth recording is known by its outputs alone; it still encloses by its name.
    spans = ((call.records[0].sequence, call.records[-1].sequence, call) for call in by_call.values())
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
    parts: dict[str, list[tuple[str, Any]]] = {"args": [], "kwargs": [], "outputs": []}
    for record in call.records:
        path = record.site.path
        passed = "args" if isinstance(next(iter(keys(path)), None), int) else "kwargs"
        part = passed if record.site.kind is Kind.INPUT else "outputs"
        if part != "outputs" or not call.children:
            parts[part].append((path, written_value(run, record, values)))
    given = nested(parts["args"]) if parts["args"] else []
    document: dict[str, Any] = {
        "module_path": f"{call.fqn} (top-level)" if top else call.fqn,
        "inputs": {"args": given if isinstance(given, list) else [given], "kwargs": nested(parts["kwargs"])},
    }
    if not call.children:
        document["outputs"] = nested(parts["outputs"]) if parts["outputs"] else None
    document["children"] = [written_node(run, child, values=values) for child in call.children]
    return document


def written_value(run: Run, record: Record, values: bool) -> Any:
    """A tensor as shape, dtype, statistics and, with `values`, its elements where stored; a plain value as its text.

    Statistics are given of the dtypes in `_DESCRIBED`. What was not observed is its text.
    """
    summary = record.summary
    if summary.status in (Status.VALUE, Status.NOT_OBSERVED):
        return summary.text
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
