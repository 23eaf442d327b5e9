"""YAML introspection reports: one document a step and rank, that plain `diff -u` can compare.

`introspection/<stage>/step=<n>/rank<n>.yaml`, beside `env_vars.yaml` and `pip_freeze.yaml`. Keys are in the order of
the format, never sorted. A hash is the MD5 of the raw bytes where the tensor was stored whole (bfloat16 widened to
float32, as the format has it), else the 16 hex digits of our own checksum: the bytes are gone by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import TYPE_CHECKING, Any

import yaml

from introspect_cli.exchange.formats import wanted_steps
from introspect_cli.exchange.symbols import write_tensor
from introspect_cli.inspect.nested import nested
from introspect_cli.records import Kind, Phase, Record, Status

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.reader import Run

STAGE = "fit"

_WHOLE = re.compile(r"[-+]?\d{1,300}")

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Plain(_Dumper):  # type: ignore[misc] # whichever dumper this PyYAML was built with
    """A safe dumper that writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


def dump(document: object) -> str:
    """Block style, unsorted keys, two spaces, unicode as it is, no folded lines."""
    text: str = yaml.dump(
        document, Dumper=_Plain, sort_keys=False, allow_unicode=True, default_flow_style=False, indent=2, width=2**30
    )
    return text


def write_yaml(run: Run, directory: Path, selection: Selection) -> int:
    """Write the reports; files written."""
    top = directory / "introspection"
    top.mkdir()
    written = 0
    for name, file in (("environment", "env_vars.yaml"), ("packages", "pip_freeze.yaml")):
        if name in run.settings:
            (top / file).write_text(dump(run.settings[name]), encoding="utf-8")
            written += 1
    for step, rank in wanted_steps(run, selection):
        place = top / STAGE / f"step={step}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank{rank}.yaml").write_text(dump(report(run, step, rank, selection)), encoding="utf-8")
        written += 1
    return written


def report(run: Run, step: int, rank: int, selection: Selection) -> dict[str, Any]:
    """The document of one step of one rank, as nested data."""
    records = [
        record
        for record in run.rank(rank).records(step)
        if selection.wants(record.site.kind, record.site.fqn) and record.summary.status is not Status.NOT_OBSERVED
    ]
    by_kind: dict[Kind, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.site.kind, []).append(record)
    root = _only_root(by_kind)
    parts = {
        "parameters": _parameters(run, by_kind, root),
        "buffers": _buffers(run, by_kind, root),
        "optimizers": _optimizers(run, by_kind),
        "rngs": _rngs(by_kind),
        "batch": _batch(run, by_kind, step),
    }
    return {name: part for name, part in parts.items() if part}


def _only_root(by_kind: dict[Kind, list[Record]]) -> str:
    """`Net.` where every parameter is the same model's, since other tools write their names without it; else ""."""
    kinds = (Kind.PARAM, Kind.BUFFER, Kind.GRAD)
    roots = {record.site.fqn.partition(".")[0] for kind in kinds for record in by_kind.get(kind, [])}
    return f"{roots.pop()}." if len(roots) == 1 else ""


def _latest(records: Iterable[Record]) -> dict[str, Record]:
    """By FQN, what the step left behind, else what it began with."""
    found: dict[str, Record] = {}
    for record in records:
        known = found.get(record.site.fqn)
        if known is None or record.site.phase is Phase.OPTIMIZER or known.site.phase is not Phase.OPTIMIZER:
            found[record.site.fqn] = record
    return found


def digest_of(run: Run, record: Record) -> str:
    """The hash of a record's bits."""
    stored = run.tensor(record.summary.checksum) if record.summary.checksum else None
    if stored is None:
        return f"{record.summary.checksum:016x}"
    return hashlib.md5(stored.tobytes(), usedforsecurity=False).hexdigest()


def _all(digests: Iterable[str]) -> str:
    """The digest of the digests, in order."""
    joined = "".join(digests).encode()
    return hashlib.md5(joined, usedforsecurity=False).hexdigest()


def _leaf(run: Run, record: Record) -> Any:
    summary = record.summary
    if summary.status is Status.VALUE:
        return yaml_value(summary.text)
    line = write_tensor(summary.layout, summary.stats, digest_of(run, record))
    return yaml_value(line) if not summary.layout.shape else line


def yaml_value(text: str) -> Any:
    """A plain value's repr as the value it stands for, where that is a number, a flag or None."""
    constants: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _parameters(run: Run, by_kind: dict[Kind, list[Record]], root: str) -> dict[str, Any]:
    data, grads = _latest(by_kind.get(Kind.PARAM, [])), _latest(by_kind.get(Kind.GRAD, []))
    found: dict[str, Any] = {}
    for name in dict.fromkeys([*data, *grads]):
        own = {"data": data.get(name), "grad": grads.get(name)}
        found[name.removeprefix(root)] = {key: _leaf(run, record) for key, record in own.items() if record is not None}
    if data:
        found["__all_data__"] = _all(digest_of(run, record) for record in data.values())
    if grads:
        found["__all_grads__"] = _all(digest_of(run, record) for record in grads.values())
    return found


def _buffers(run: Run, by_kind: dict[Kind, list[Record]], root: str) -> dict[str, Any]:
    buffers = _latest(by_kind.get(Kind.BUFFER, []))
    found = {name.removeprefix(root): _leaf(run, record) for name, record in buffers.items()}
    if buffers:
        found["__all_buffers__"] = _all(digest_of(run, record) for record in buffers.values())
    return found


def _optimizers(run: Run, by_kind: dict[Kind, list[Record]]) -> list[dict[str, Any]]:
    settings = run.settings.get("optimizers")
    if not isinstance(settings, list) or not (Kind.OPTIMIZER_STATE in by_kind or Kind.HYPERPARAMETER in by_kind):
        return []
    states: dict[str, list[Record]] = {}
    for record in by_kind.get(Kind.OPTIMIZER_STATE, []):
        if record.site.phase is Phase.OPTIMIZER:
            states.setdefault(record.site.fqn, []).append(record)
    rates = {(r.site.fqn, r.site.path): yaml_value(r.summary.text) for r in by_kind.get(Kind.HYPERPARAMETER, [])}
    found = []
    for own in settings:
        if not isinstance(own, dict) or not isinstance(own.get("groups"), list):
            continue
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        digests: list[str] = []
        place = 0
        for number, group in enumerate(own["groups"]):
            now = {
                key: rates.get((str(own.get("name")), f"[{number}][{key!r}]"), value)
                for key, value in group.items()
                if key != "params"
            }
            members = list(range(place, place + len(group.get("params", []))))
            groups.append({**now, "params": members})
            for index, name in zip(members, group.get("params", []), strict=True):
                kept = states.get(str(name), [])
                if kept:
                    state[index] = nested([(record.site.path, _leaf(run, record)) for record in kept])
                    digests += [digest_of(run, record) for record in kept]
            place += len(members)
        found.append(
            {
                "__type__": own.get("class"),
                "param_groups": groups,
                "__all_param_groups__": _all([repr(groups)]),
                "state": state,
                "__all_state__": _all(digests),
            }
        )
    return found


def _rngs(by_kind: dict[Kind, list[Record]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in by_kind.get(Kind.RNG, []):
        digest = f"{record.summary.checksum:016x}"
        name = record.site.fqn
        if name.startswith("cuda"):
            found.setdefault("torch.cuda", []).append(digest)
        else:
            found[name] = {"state": digest} if name in ("numpy", "python") else digest
    if "torch.cuda" in found:
        found["torch.cuda"] = _all(found["torch.cuda"])
    return found


def _batch(run: Run, by_kind: dict[Kind, list[Record]], step: int) -> dict[str, Any]:
    records = [record for record in by_kind.get(Kind.BATCH, []) if record.site.phase is Phase.DATA]
    if not records:
        return {}
    calls: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        calls.setdefault((record.site.fqn, record.site.call), []).append(record)
    batches = [nested([(r.site.path, _leaf(run, r)) for r in own]) for own in calls.values()]
    return {
        "__batch_idx__": step,
        "__batch__": batches[0] if len(batches) == 1 else batches,
        "__all_batch__": _all(digest_of(run, record) for record in records),
    }
