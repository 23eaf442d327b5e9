"""YAML introspection reports read into records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.exchange.incoming import Incoming, Row, checksum_of, read_bytes, scalar, value
from introspect_cli.exchange.symbols import read_tensor
from introspect_cli.inspect.nested import flattened
from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo, Status, Summary
from introspect_cli.store import documents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE = re.compile(r"rank(\d{1,6})\.yaml")
_STEP = re.compile(r"step=(\d{1,18})")


def find_reports(directory: Path) -> list[tuple[int, int, Path]]:
    """(step, rank, file) of every report below a directory, of one stage.

    Raises:
        StoreError: two stages have a report of the same step.
    """
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(directory.glob("**/step=*/rank*.yaml")):
        step, rank = _STEP.fullmatch(path.parent.name), _FILE.fullmatch(path.name)
        if step is None or rank is None or path.is_symlink():
            continue
        # Lightning's own stages are those of a callback that names a report by the count of steps that have ended.
        key = max(int(step[1]) - path.parent.parent.name.startswith("TrainerFn."), 0), int(rank[1])
        if key in found:
            raise StoreError(
                f"{found[key]} and {path} are of the same step: name the directory of one stage (introspection/<stage>)"
            )
        found[key] = path
    return [(step, rank, path) for (step, rank), path in sorted(found.items())]


def read_settings(directory: Path) -> dict[str, Any]:
    """Environment variables and packages, where they lie beside the reports or one level up."""
    found: dict[str, Any] = {}
    for name, file in (("environment", "env_vars.yaml"), ("packages", "pip_freeze.yaml")):
        for place in (directory, directory / "introspection", directory.parent):
            path = place / file
            if path.is_file():
                found[name] = documents.load(read_bytes(path), str(path))
                break
    return found


def read_reports(directory: Path, root: str) -> Iterator[Incoming]:
    """Every report as records; names of parameters get `root` in front.

    Raises:
        StoreError: a report cannot be read.
    """
    for step, rank, path in find_reports(directory):
        document = documents.load(read_bytes(path), str(path))
        if not isinstance(document, dict):
            raise StoreError(f"{path} is not an introspection report: it holds no keys at its top")
        yield Incoming(step, rank, tuple(_rows(document, root)))


def _rows(document: dict[Any, Any], root: str) -> Iterator[Row]:
    names = [name for name in _map(document.get("parameters")) if not str(name).startswith("__all_")]
    yield from _batches(document.get("batch"))
    for name, state in _map(document.get("rngs")).items():
        fqn = "cuda" if name == "torch.cuda" else str(name)
        text = str(state.get("state")) if isinstance(state, dict) and set(state) == {"state"} else str(state)
        summary = Summary(Status.VALUE, Layout((), "rng"), checksum_of(text), text=text[:200])
        yield Site(Phase.START, Kind.RNG, fqn), SiteInfo(), summary
    for name in names:
        entry = _map(_map(document.get("parameters"))[name])
        for key, kind in (("grad", Kind.GRAD), ("data", Kind.PARAM)):
            if key in entry:
                yield Site(Phase.OPTIMIZER, kind, f"{root}.{name}"), SiteInfo(), _summary(entry[key])
    for name, tensor in _map(document.get("buffers")).items():
        if not str(name).startswith("__all_"):
            yield Site(Phase.OPTIMIZER, Kind.BUFFER, f"{root}.{name}"), SiteInfo(), _summary(tensor)
    yield from _optimizers(document.get("optimizers"), [f"{root}.{name}" for name in names])


def _map(found: object) -> dict[Any, Any]:
    return found if isinstance(found, dict) else {}


def _summary(found: Any) -> Summary:
    if isinstance(found, str):
        tensor = read_tensor(found)
        if tensor is not None:
            layout, stats, digest = tensor
            return Summary(Status.PARTIAL, layout, checksum_of(digest or found), stats)
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return scalar(found, "float32" if isinstance(found, float) else "int64")
    return value(found)


def _batches(batch: object) -> Iterator[Row]:
    for path, leaf in flattened(_map(batch).get("__batch__")) if batch else ():
        yield Site(Phase.DATA, Kind.BATCH, "DataLoader", 0, path), SiteInfo("DataLoader"), _summary(leaf)


def _optimizers(found: object, names: list[str]) -> Iterator[Row]:
    seen: dict[str, int] = {}
    for entry in found if isinstance(found, list) else []:
        own = _map(entry)
        kind = str(own.get("__type__", "Optimizer"))
        seen[kind] = seen.get(kind, 0) + 1
        name = kind if seen[kind] == 1 else f"{kind}#{seen[kind]}"
        groups = own.get("param_groups")
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            for key, setting in _map(group).items():
                if key != "params":
                    site = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, f"[{number}][{key!r}]")
                    yield site, SiteInfo(kind), value(setting)
        for index, state in _map(own.get("state")).items():
            # The position counts over all parameters of the optimizer, which of most is all of the model's.
            known = isinstance(index, int) and len(seen) == 1 and index < len(names)
            fqn = names[index] if known else f"{name}.{index}"
            for path, leaf in flattened(state):
                yield Site(Phase.OPTIMIZER, Kind.OPTIMIZER_STATE, fqn, 0, path), SiteInfo(), _summary(leaf)
