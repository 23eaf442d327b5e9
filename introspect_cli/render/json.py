"""What the verbs say as plain nested data, and as strict JSON; scripts build on it, so the docs have its keys."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from introspect_cli.render.findings import findings_document
from introspect_cli.render.plain import label_document, plain, site_document
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.groups import Groups
    from introspect_cli.compare.result import DiffResult, Separate
    from introspect_cli.health.findings import CheckResult, Rule
    from introspect_cli.inspect.data_flow import Graph
    from introspect_cli.inspect.module_tree import ModuleRow, ValueRow
    from introspect_cli.inspect.overview import History, Overview, Stored
    from introspect_cli.inspect.runs import RunList
    from introspect_cli.labels import Labels
    from introspect_cli.records import Record
    from introspect_cli.rerun.bisect import Culprit
    from introspect_cli.rerun.changes.search import Proof

FORMAT = 1
"""Version of every document; a key may be added under the same version, none removed or changed."""

_UNUSUAL = re.compile(r"[^\n -~]")


def to_json(document: dict[str, Any]) -> str:
    """A document as strict JSON, indented by 2; NaN and infinities become null, "inf" and "-inf".

    Names come from stores and from directories: characters that a terminal would obey are written as JSON escapes.
    """
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False)
    return _UNUSUAL.sub(_harmless, text)


def _harmless(match: re.Match[str]) -> str:
    """The matched character, as JSON's escape of it where a terminal would obey it."""
    char = match[0]
    return char if clean(char) == char else "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def to_yaml(document: dict[str, Any]) -> str:
    """A document as YAML: block style, keys in order, without a line end after it."""
    import yaml  # JSON is what most ask for

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)).rstrip("\n")


# Comparisons.


_DIFF = (
    *("a", "b", "verdict", "sentence", "first", "divergences", "settings", "counts", "evidence", "candidates"),
    *("notes", "rests_on"),
)


def diff_document(result: DiffResult) -> dict[str, Any]:
    """A comparison of two runs; `findings` are those that explain the divergence, and `map` is there if it was made."""
    return {
        "format": FORMAT,
        **{name: plain(getattr(result, name)) for name in _DIFF},
        "findings": plain(result.explains),
        "causes": plain(result.causes),
        **{name: _separate(getattr(result, name)) for name in ("training", "evaluation")},
        **findings_document(result),
        **({} if result.map is None else {"map": plain(result.map)}),
    }


def _separate(result: Separate | None) -> dict[str, Any] | None:
    """Verdict, sentence and first divergence of training or evaluation by itself; None for None."""
    names = ("verdict", "sentence", "first")
    return None if result is None else {name: plain(getattr(result, name)) for name in names}


def groups_document(groups: Groups) -> dict[str, Any]:
    """A comparison of more than two runs."""
    return {"format": FORMAT, **plain(groups)}


# One run.


def overview_document(run: Overview) -> dict[str, Any]:
    """An overview as plain values."""
    return {"format": FORMAT, **vars(run), "ranks": list(run.ranks)}


def tree_document(rows: Sequence[ModuleRow]) -> dict[str, Any]:
    """The module tree, flat, in order."""
    return {"format": FORMAT, "modules": [_module(row) for row in rows]}


def _module(row: ModuleRow) -> dict[str, Any]:
    """A row of the module tree with its nested values, as plain values."""
    info, values = row.info, []
    for place, value in enumerate(row.values):
        at = {"side": _side(row.values, place), "path": value.path, "class": value.value_class or None}
        what = {"shape": plain(value.shape), "dtype": value.dtype or None, "std": value.scale, "folded": value.folded}
        values.append(at | what)
    named = {"fqn": info.fqn, "class": info.module_class, "variable": info.variable or None, "source": info.source}
    own = {"own_parameters": info.parameters, "own_buffers": info.buffers, "aliases": info.aliases}
    output = {"output_shape": row.shape, "output_dtype": row.dtype or None, "output_std": row.scale}
    counts = {"calls": row.calls, "folded": row.folded, "values": values}
    found: dict[str, Any] = plain(named | own | {"parameters": row.parameters} | output | counts)
    return found


def _side(values: Sequence[ValueRow], place: int) -> str:
    """The name (`input` or `output`) of the nearest row of depth 1 at or before `place`; `output` for none."""
    return next((value.name for value in reversed(values[: place + 1]) if value.depth == 1), "output")


def records_document(records: Sequence[Record], step: int, labels: Labels) -> dict[str, Any]:
    """The records of one step with rank, sequence, site and summary, and what the framework calls the step."""
    rows = [
        {"rank": record.rank, "sequence": record.sequence}
        | site_document(record.site, record.info.module_class)
        | plain(record.summary)
        for record in records
    ]
    return {"format": FORMAT, "step": step, "labels": label_document(labels), "records": rows}


def history_document(histories: Sequence[History], stat: str) -> dict[str, Any]:
    """Sites over all steps: steps, values of `stat`, and texts (null where there are none)."""
    listed = [{**plain(history), "texts": list(history.texts) or None} for history in histories]
    return {"format": FORMAT, "stat": stat, "histories": listed}


def values_document(records: Sequence[Stored]) -> dict[str, Any]:
    """Stored tensors, nested lists of numbers; null where one was not stored."""
    rows = []
    for stored in records:
        site = stored.record.site
        about = {"step": stored.record.step, "fqn": site.fqn, "kind": site.kind.value, "path": site.path}
        values = None if stored.values is None else _plain_array(stored.values)
        rows.append({**about, "summary": plain(stored.record.summary), "values": values})
    return {"format": FORMAT, "values": rows}


def _plain_array(values: Any) -> Any:
    """An array as nested lists that JSON can hold; a complex one as [real parts, imaginary parts]."""
    if values.dtype.kind == "c":
        return [_plain_array(values.real), _plain_array(values.imag)]
    return plain(values.tolist())


def settings_document(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run, by document."""
    return {"format": FORMAT, "settings": dict(settings)}


def graph_document(graph: Graph) -> dict[str, Any]:
    """The operators of a step, edges as pairs of site numbers, and how many operators there were before pruning."""
    nodes = []
    for node in graph.nodes:
        site, info = node.record.site, node.record.info
        what = {"site": node.number, "phase": site.phase.value, "fqn": site.fqn, "operator": info.op, "path": site.path}
        where = {"call": site.call, "source": info.source, "forward": node.forward}
        nodes.append({**what, **where, "summary": plain(node.record.summary)})
    return {"format": FORMAT, "step": graph.step, "total": graph.total, "nodes": nodes, "edges": plain(graph.edges)}


# Checks, and lists of runs.


def check_document(result: CheckResult) -> dict[str, Any]:
    """A check's result as plain values; `not_observed` are the rules that could not be decided, and what each needs."""
    return {
        "format": FORMAT,
        "run": result.run,
        "steps": result.steps,
        "findings": plain(result.findings),
        "checked": list(result.checked),
        "not_observed": [{"rule": rule, "needs": needs} for rule, needs in result.unseen],
        "notes": list(result.notes),
    }


def rules_document(rules: Sequence[Rule]) -> dict[str, Any]:
    """The rules of a check."""
    keys = ("level", "about", "when", "cause")
    return {
        "format": FORMAT,
        "rules": [{"rule": rule.id, **{key: plain(getattr(rule, key)) for key in keys}} for rule in rules],
    }


def runs_document(search: RunList) -> dict[str, Any]:
    """Runs below some directories; times are ISO 8601 in UTC, sizes bytes, `not_searched` directories."""
    unseen = {"unreadable": plain(search.unread), "too_deep": search.deeper, "too_many": search.left}
    return {"format": FORMAT, "runs": plain(search.rows), "not_searched": unseen}


# Runs that were made again.


def culprit_document(culprit: Culprit) -> dict[str, Any]:
    """A bisection over commits, with its proof and its comparison as documents; null for a missing one."""
    proof = None if culprit.proof is None else proof_document(culprit.proof)
    return _with_result({"format": FORMAT, **vars(culprit), "proof": proof}, culprit.result)


def proof_document(proof: Proof) -> dict[str, Any]:
    """The smallest set of changes that makes two runs diverge: each with kind and place.

    `result` is the comparison; null where there is none.
    """
    from introspect_cli.rerun.changes.elements import kind_of, place_of

    elements = [{"kind": kind_of(element), "place": place_of(element), **plain(element)} for element in proof.elements]
    return _with_result({"format": FORMAT, **vars(proof), "elements": elements}, proof.result)


def _with_result(document: dict[str, Any], result: DiffResult | None) -> dict[str, Any]:
    """A document as plain values, with the comparison `result` as a document below the key `result`."""
    made: dict[str, Any] = plain({**document, "result": None})
    return {**made, "result": None if result is None else diff_document(result)}
