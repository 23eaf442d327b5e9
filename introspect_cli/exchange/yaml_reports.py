"""YAML introspection reports: one document a step and rank, that plain `diff -u` can compare; written and read.

`introspection/<stage>/step=<n>/rank<n>.yaml`, beside `env_vars.yaml` and `pip_freeze.yaml`. Keys are in the order of
the format, never sorted. A hash is the MD5 of the raw bytes where the tensor was stored whole (bfloat16 widened to
float32, as the format has it), else the 16 hex digits of our own checksum: the bytes are gone by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import yaml

from introspect_cli.errors import StoreError
from introspect_cli.exchange.formats import wanted_records, wanted_steps
from introspect_cli.exchange.incoming import Incoming, Row, checksum_of, plain_summary, read_small, scalar_summary
from introspect_cli.exchange.symbols import read_tensor, write_tensor
from introspect_cli.inspect.module_tree import flattened, nested
from introspect_cli.records import Kind, Layout, Phase, Record, Site, SiteInfo, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from introspect_cli.selection import Selection
    from introspect_cli.store.run import Run

STAGE = "fit"

_WHOLE = re.compile(r"[-+]?\d{1,300}")

_FILE = re.compile(r".*/step=(\d{1,18})/rank(\d{1,6})\.yaml", re.DOTALL)
_SETTINGS = {"environment": "env_vars.yaml", "packages": "pip_freeze.yaml"}
"""File of each settings document."""


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MAX_DEPTH = 64


class PlainDumper(_Dumper):  # type: ignore[misc] # whichever dumper this PyYAML was built with
    """A safe dumper that writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- the signature is PyYAML's
        """Always True: a value that occurs twice is written twice, without a YAML anchor."""
        return True


def load(path: Path) -> Any:
    """The plain data of a YAML file.

    Raises:
        StoreError: it is not valid YAML, has aliases, which may stand for any number of values, or over 64 levels,
            which would end the process.
    """
    data, depth = read_small(path), 0
    try:
        for event in yaml.parse(data, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise StoreError(f"{path} is no report: it has aliases or over {_MAX_DEPTH} levels")
        return yaml.load(data, Loader=_Loader)  # noqa: S506 - a safe one
    except (yaml.YAMLError, ValueError, OverflowError):
        raise StoreError(f"{path} is no report: it is not valid YAML") from None


def dump(document: object) -> str:
    """A document as YAML text: block style, keys as they come, two spaces, unicode as it is, no folded lines."""
    return str(yaml.dump(document, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=2**30))


def write_yaml(run: Run, directory: Path, selection: Selection) -> None:
    """Write a report for each selected step and rank, and environment and packages where the run has these settings."""
    settings = ((file, run.settings[name]) for name, file in _SETTINGS.items() if name in run.settings)
    steps = wanted_steps(run, selection)
    reports = ((f"{STAGE}/step={step}/rank{rank}.yaml", report(run, step, rank, selection)) for step, rank in steps)
    for name, document in chain(settings, reports):
        place = directory / "introspection" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(dump(document), encoding="utf-8")


def report(run: Run, step: int, rank: int, selection: Selection) -> dict[str, Any]:
    """The document of one step of one rank, as nested data; parts without records are left out.

    So is what was not observed, and the name of the model where there is one alone. Of a parameter that is recorded
    twice, the one after the optimizer's step counts.
    """
    by_kind: dict[Kind, list[Record]] = defaultdict(list)
    for record in wanted_records(run, step, rank, selection):
        if record.summary.status is not Status.NOT_OBSERVED:
            by_kind[record.site.kind].append(record)
    data, grads, buffers = (_latest_by_name(by_kind[kind]) for kind in (Kind.PARAM, Kind.GRAD, Kind.BUFFER))
    roots = {name.partition(".")[0] for name in (*data, *grads, *buffers)}
    root = f"{roots.pop()}." if len(roots) == 1 else ""
    parts: dict[str, Any] = {
        "parameters": _written_parameters(run, data, grads, root),
        "buffers": {name.removeprefix(root): _written_value(run, record) for name, record in buffers.items()},
        "optimizers": _written_optimizers(run, by_kind),
        "rngs": _random_states(by_kind),
        "batch": _written_batch(run, by_kind, step),
    }
    if buffers:
        parts["buffers"]["__all_buffers__"] = _digest_of_all(run, buffers.values())
    return {name: part for name, part in parts.items() if part}


def _latest_by_name(records: Iterable[Record]) -> dict[str, Record]:
    """One record by FQN: that after the optimizer step where there is one, else the last."""
    in_order = sorted(records, key=lambda record: record.site.phase is Phase.OPTIMIZER)
    return {record.site.fqn: record for record in in_order}


def digest_of(run: Run, record: Record) -> str:
    """The MD5 of a record's stored tensor, 32 hex digits; its checksum, 16 hex digits, where none was stored."""
    stored = run.tensor(record.summary.checksum) if record.summary.checksum else None
    return f"{record.summary.checksum:016x}" if stored is None else _md5(stored.tobytes())


def _md5(data: bytes) -> str:
    """The MD5 of bytes, 32 hex digits."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _digest_of_all(run: Run, records: Iterable[Record]) -> str:
    """The MD5 of all records' digests, joined in order."""
    return _md5("".join(digest_of(run, record) for record in records).encode())


def _written_value(run: Run, record: Record) -> Any:
    """A plain value as YAML has it, a tensor as its line of statistics; one without dimensions as its number."""
    summary = record.summary
    if summary.status is Status.VALUE:
        return yaml_value(summary.text)
    line = write_tensor(summary.layout, summary.stats, digest_of(run, record))
    return yaml_value(line) if not summary.layout.shape else line


def yaml_value(text: str) -> Any:
    """The number, boolean, None or unquoted text that a repr stands for; anything else as it is."""
    constants: dict[str, Any] = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _written_parameters(run: Run, data: dict[str, Record], grads: dict[str, Record], root: str) -> dict[str, Any]:
    """Data and gradient of each parameter by name without `root`, and a digest over all of either."""
    parts: dict[str, Any] = {}
    for key, records in (("data", data), ("grad", grads)):
        for name, record in records.items():
            parts.setdefault(name.removeprefix(root), {})[key] = _written_value(run, record)
    every = {"__all_data__": data, "__all_grads__": grads}
    return parts | {key: _digest_of_all(run, records.values()) for key, records in every.items() if records}


def _written_optimizers(run: Run, by_kind: dict[Kind, list[Record]]) -> list[dict[str, Any]]:
    """The report of each optimizer: its groups with the step's hyper-parameters, and its state by position.

    Empty where the run has no settings of optimizers, or the step no state and no hyper-parameter.
    """
    settings = run.settings.get("optimizers")
    if not isinstance(settings, list) or not (by_kind[Kind.OPTIMIZER_STATE] or by_kind[Kind.HYPERPARAMETER]):
        return []
    states = defaultdict[str, list[Record]](list)
    for record in by_kind[Kind.OPTIMIZER_STATE]:
        if record.site.phase is Phase.OPTIMIZER:
            states[record.site.fqn].append(record)
    rates = {(r.site.fqn, r.site.path): yaml_value(r.summary.text) for r in by_kind[Kind.HYPERPARAMETER]}
    reports = []
    for optimizer in settings:
        if not isinstance(optimizer, dict) or not isinstance(optimizer.get("groups"), list):
            continue
        groups: list[dict[str, Any]] = []
        names: list[Any] = []
        for number, group in enumerate(optimizer["groups"]):
            now = {
                key: rates.get((str(optimizer.get("name")), f"[{number}][{key!r}]"), value)
                for key, value in group.items()
                if key != "params"
            }
            members = group.get("params", [])
            groups.append({**now, "params": list(range(len(names), len(names) + len(members)))})
            names += members
        held = {index: states[str(name)] for index, name in enumerate(names) if str(name) in states}
        reports.append(
            {
                "__type__": optimizer.get("class"),
                "param_groups": groups,
                "__all_param_groups__": _md5(repr(groups).encode()),
                "state": {index: _written_nested(run, records) for index, records in held.items()},
                "__all_state__": _digest_of_all(run, chain(*held.values())),
            }
        )
    return reports


def _written_nested(run: Run, records: Iterable[Record]) -> Any:
    """Records of one batch or state as nested data, by their paths."""
    return nested([(record.site.path, _written_value(run, record)) for record in records])


def _random_states(by_kind: dict[Kind, list[Record]]) -> dict[str, Any]:
    """Checksums of random states, 16 hex digits, by generator; of all CUDA devices the MD5 of theirs.

    Of numpy and python they are in a dict, as `state`.
    """
    digests: dict[str, Any] = {}
    for record in by_kind[Kind.RNG]:
        digest = f"{record.summary.checksum:016x}"
        name = record.site.fqn
        if name.startswith("cuda"):
            digests.setdefault("torch.cuda", []).append(digest)
        else:
            digests[name] = {"state": digest} if name in ("numpy", "python") else digest
    if "torch.cuda" in digests:
        digests["torch.cuda"] = _md5("".join(digests["torch.cuda"]).encode())
    return digests


def _written_batch(run: Run, by_kind: dict[Kind, list[Record]], step: int) -> dict[str, Any]:
    """The step, its batch as nested data (a list of them where there were several), and the MD5 of all digests.

    {} where no batch was recorded.
    """
    records = [record for record in by_kind[Kind.BATCH] if record.site.phase is Phase.DATA]
    if not records:
        return {}
    calls = defaultdict[tuple[str, int], list[Record]](list)
    for record in records:
        calls[record.site.fqn, record.site.call].append(record)
    batches = [_written_nested(run, call) for call in calls.values()]
    return {
        "__batch_idx__": step,
        "__batch__": batches[0] if len(batches) == 1 else batches,
        "__all_batch__": _digest_of_all(run, records),
    }


# --- reading


def find_reports(directory: Path) -> list[tuple[int, int, Path]]:
    """(step, rank, file) of every report below a directory, by step and then rank; links are passed over.

    A stage named `TrainerFn.*` counts steps that have ended: its numbers are lowered by one, though not below 0.

    Raises:
        StoreError: two stages have a report of the same step.
    """
    paths: dict[tuple[int, int], Path] = {}
    for path in sorted(directory.glob("**/step=*/rank*.yaml")):
        match = _FILE.fullmatch(path.as_posix())
        if match is None or path.is_symlink():
            continue
        # Lightning's own stages are those of a callback that names a report by the count of steps that have ended.
        key = max(int(match[1]) - path.parent.parent.name.startswith("TrainerFn."), 0), int(match[2])
        if key in paths:
            raise StoreError(f"{paths[key]} and {path} are of the same step: name the directory of one stage")
        paths[key] = path
    return [(step, rank, path) for (step, rank), path in sorted(paths.items())]


def read_settings(directory: Path) -> dict[str, Any]:
    """Environment variables and packages by document; {} where there are none.

    Each is read from the first file found: beside the reports, in `introspection/`, or one level up.
    """
    places = directory, directory / "introspection", directory.parent
    there = ((name, [place / file for place in places if (place / file).is_file()]) for name, file in _SETTINGS.items())
    return {name: load(paths[0]) for name, paths in there if paths}


def read_reports(directory: Path, root: str) -> Iterator[Incoming]:
    """Read every report below a directory as records, one step of one rank after the other.

    Args:
        directory: where to look.
        root: what is put, with a dot, before the names of parameters and buffers.

    Raises:
        StoreError: a file is no report, or two stages have the same step.
    """
    for step, rank, path in find_reports(directory):
        document = load(path)
        if not isinstance(document, dict):
            raise StoreError(f"{path} is not an introspection report: it holds no keys at its top")
        yield Incoming(step, rank, tuple(_read_rows(document, root)))


def _read_rows(document: dict[Any, Any], root: str) -> Iterator[Row]:
    """The records of a report: batch, random states, parameters (gradient, then data), buffers, then optimizers.

    A random state is a plain value: its digest, of which the text holds 200 characters. Digests over all (`__all_*`)
    are left out.
    """
    parameters, buffers = (
        {name: value for name, value in _dict_or_empty(document.get(part)).items() if str(name)[:6] != "__all_"}
        for part in ("parameters", "buffers")
    )
    yield from _batch_rows(document.get("batch"))
    for name, state in _dict_or_empty(document.get("rngs")).items():
        fqn = "cuda" if name == "torch.cuda" else str(name)
        text = str(state.get("state")) if isinstance(state, dict) and set(state) == {"state"} else str(state)
        summary = Summary(Status.VALUE, Layout((), "rng"), checksum_of(text), text=text[:200])
        yield Site(Phase.START, Kind.RNG, fqn), SiteInfo(), summary
    for name, entry in parameters.items():
        for key, kind in (("grad", Kind.GRAD), ("data", Kind.PARAM)):
            if key in _dict_or_empty(entry):
                yield Site(Phase.OPTIMIZER, kind, f"{root}.{name}"), SiteInfo(), _read_summary(entry[key])
    for name, tensor in buffers.items():
        yield Site(Phase.OPTIMIZER, Kind.BUFFER, f"{root}.{name}"), SiteInfo(), _read_summary(tensor)
    yield from _optimizer_rows(document.get("optimizers"), [f"{root}.{name}" for name in parameters])


def _dict_or_empty(document: object) -> dict[Any, Any]:
    return document if isinstance(document, dict) else {}


def _read_summary(leaf: Any) -> Summary:
    """The summary of a value in a report: of a tensor's line, a number, or any other plain value.

    The checksum of a tensor is a hash of the digest in its line, or of the whole line where that has none.
    """
    if isinstance(leaf, str):
        tensor = read_tensor(leaf)
        if tensor is not None:
            layout, stats, digest = tensor
            return Summary(Status.PARTIAL, layout, checksum_of(digest or leaf), stats)
    if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
        return scalar_summary(leaf, "float32" if isinstance(leaf, float) else "int64")
    return plain_summary(leaf)


def _batch_rows(batch: object) -> Iterator[Row]:
    """The records of a report's batch."""
    for path, leaf in flattened(_dict_or_empty(batch).get("__batch__")) if batch else ():
        yield Site(Phase.DATA, Kind.BATCH, "DataLoader", 0, path), SiteInfo("DataLoader"), _read_summary(leaf)


def _optimizer_rows(entries: object, names: list[str]) -> Iterator[Row]:
    """The records of a report's optimizers: settings of each group except `params`, then state by parameter.

    Args:
        entries: the report's optimizers; a second one of a class is named `Adam#2`.
        names: the model's parameters in order, by which the states of the first optimizer are named; those of others
            are named by optimizer and position.
    """
    seen: dict[str, int] = {}
    for entry in entries if isinstance(entries, list) else []:
        optimizer = _dict_or_empty(entry)
        kind = str(optimizer.get("__type__", "Optimizer"))
        seen[kind] = seen.get(kind, 0) + 1
        name = kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"
        groups = optimizer.get("param_groups")
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            for key, setting in _dict_or_empty(group).items():
                if key != "params":
                    site = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, f"[{number}][{key!r}]")
                    yield site, SiteInfo(kind), plain_summary(setting)
        for index, state in _dict_or_empty(optimizer.get("state")).items():
            # The position counts over all parameters of the optimizer, which of most is all of the model's.
            is_named = isinstance(index, int) and seen == {kind: 1} and index < len(names)
            fqn = names[index] if is_named else f"{name}.{index}"
            for path, leaf in flattened(state):
                yield Site(Phase.OPTIMIZER, Kind.OPTIMIZER_STATE, fqn, 0, path), SiteInfo(), _read_summary(leaf)
