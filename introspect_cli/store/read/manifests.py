"""What a run says of itself: its manifest, those of its ranks, its settings; and which of several directories it is.

Of a run that several processes wrote, each rank says how it ended and what it saw, and the run is what all of them say.
It is complete where every rank is, and a rank that was started and left nothing is told of, since silence would pass
for agreement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from introspect_cli.store.files.folders import (
    ATTEMPT_NAME,
    CHILDREN,
    FORMAT,
    LIMIT_DOCUMENT,
    MANIFEST,
    SETTINGS,
    DamageError,
    Directory,
)
from introspect_cli.store.format import documents
from introspect_cli.store.format.log import newer_format
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from introspect_cli.store.read.rank_reader import RankReader

_NAME_OF_MANIFEST = MANIFEST.removesuffix(".yaml")
SETTINGS_NAME = re.compile(r"([a-z0-9_]{1,64})\.yaml")
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,32}")
_TYPES = {
    **dict.fromkeys(("argv", "children", "failures", "not_observed", "notes", "observed"), list),
    **dict.fromkeys(("alone", "narrowing", "options", "tool"), dict),
}
"""What readers of a manifest take for granted; what is of another type was written by no capture, and is left out."""


class Settings(Mapping[str, Any]):
    """The settings documents of a run by name, each read when first asked for."""

    def __init__(self, path: str, names: Iterable[str], read: Callable[[str], bytes], run_id: object) -> None:
        """Name the documents; none is read yet.

        Args:
            path: their directory, for messages.
            names: of the documents, without `.yaml`.
            read: gives the bytes of one; raises FileNotFoundError where it is gone.
            run_id: of the run.
        """
        self._path, self._names, self._bytes, self._run_id = path, sorted(names), read, run_id
        self._read: dict[str, Any] = {}

    @classmethod
    def in_folder(cls, folder: Directory, run_id: object) -> Settings:
        """The settings documents in `folder`, files named `<name>.yaml`.

        It must stay open, since each is read when asked for.
        """
        matches = [match[1] for match in map(SETTINGS_NAME.fullmatch, folder.names()) if match]
        return cls(folder.path, matches, lambda name: folder.read_file(f"{name}.yaml", LIMIT_DOCUMENT), run_id)

    def __getitem__(self, name: str) -> Any:
        """A document's plain data.

        Raises:
            KeyError: there is no such document.
            StoreError: it is damaged.
        """
        if name not in self._read:
            if name not in self._names:
                raise KeyError(name)
            path = f"{self._path}/{name}.yaml"
            try:
                data = self._bytes(name)
            except FileNotFoundError:
                raise KeyError(name) from None
            documents.check(data, f"{SETTINGS}/{name}.yaml", self._run_id, path)
            self._read[name] = documents.sanitized(documents.load(data, path))
        return self._read[name]

    def document(self, name: str) -> dict[str, Any]:
        """The document `name` where it is a mapping; {} where it is missing or anything else.

        StoreError where it is damaged.
        """
        found = self.get(name)
        return found if isinstance(found, dict) else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_rank_manifests(readers: Iterable[RankReader], run_id: object) -> dict[int, dict[str, Any]]:
    """The manifest of each rank in its log, by rank; a rank killed before it wrote one is left out.

    Raises:
        StoreError: one is damaged, belongs to another run, or a newer version wrote it.
    """
    manifests = {}
    for reader in readers:
        if _NAME_OF_MANIFEST in reader.documents():
            path = f"{reader.path}/{MANIFEST}"
            manifests[reader.rank] = checked_manifest(reader.document(_NAME_OF_MANIFEST), path, reader.path)
            if manifests[reader.rank].get("id") != run_id:
                raise DamageError(reader.path, "it belongs to another run than the manifest")
    return manifests


def rank_settings(reader: RankReader, run_id: object) -> Settings:
    """The settings documents in a rank's log, each read when asked for."""
    names = [name for name in reader.documents() if name != _NAME_OF_MANIFEST]
    return Settings(f"{reader.path}/{SETTINGS}", names, reader.document, run_id)


def last_attempt(folder: Directory) -> Directory:
    """The directory of the last `attemptN` that has a manifest, `folder` being closed.

    `folder` itself where there is none.
    """
    attempts = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, folder.names()) if match]
    for number in sorted(attempts, reverse=True):
        attempt = folder.folder(f"attempt{number}")
        if MANIFEST in attempt:
            folder.close()
            return attempt
        attempt.close()
    return folder


def only_launch(folder: Directory) -> Directory | None:
    """The one child of a run that is a launch, opened; None where there is none, or more than one."""
    if CHILDREN not in folder:
        return None
    launches: list[Directory] = []
    with folder.folder(CHILDREN) as children:
        for name in children.names():
            child = children.folder(name)
            is_launch = MANIFEST in child and launch_of(read_manifest(child)) is not None
            (launches.append if is_launch else Directory.close)(child)
    if len(launches) == 1:
        return launches[0]
    for child in launches:
        child.close()
    return None


def read_manifest(folder: Directory) -> dict[str, Any]:
    """The manifest of the run in `folder`, checked and cleaned.

    Raises:
        DamageError: it is missing or was altered.
        StoreError: a newer version wrote it.
    """
    path = f"{folder.path}/{MANIFEST}"
    try:
        data = folder.read_file(MANIFEST, LIMIT_DOCUMENT)
    except FileNotFoundError:
        raise DamageError(path, "it is missing") from None
    return checked_manifest(data, path, folder.path)


def checked_manifest(data: bytes, path: str, run: str) -> dict[str, Any]:
    """The plain data of a manifest, cleaned, without keys of unexpected types; `run` is the run's path, for messages.

    Raises:
        DamageError: it was altered, or names no format or an older one.
        StoreError: a newer version wrote it.
    """
    manifest = documents.load(data, path)
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int or number < FORMAT:
        raise DamageError(path, "it does not say which format the run has")
    if number > FORMAT:
        tool = manifest.get("tool")
        version = tool.get("version") if isinstance(tool, dict) else None
        is_version = isinstance(version, str) and _VERSION.fullmatch(version)
        raise newer_format(number, version if is_version else None, run)
    documents.check(data, MANIFEST, manifest.get("id"), path)
    plain = documents.sanitized(manifest)
    return {key: value for key, value in plain.items() if isinstance(value, _TYPES.get(key, object))}


# --- the stages of a pipeline


@dataclass(frozen=True)
class Stages:
    """The pipeline stages that a rank ran, and the names of their modules in the whole model.

    The stages of one process are modules of one class, so all but the first have a number in their names: `GPT#2`. They
    are pieces of one model, whose layers have the names that they have in it.

    Attributes:
        last: number of one of them, which counts where a root is not known.
        of: how many the pipeline has.
        roots: numbers by the names of the stages' modules.
    """

    last: int
    of: int
    roots: tuple[tuple[str, int], ...] = ()

    @cached_property
    def _by_root(self) -> dict[str, int]:
        return dict(self.roots)

    def stage(self, root: str) -> int:
        """The stage number of a root module; `last` for an unknown one."""
        return self._by_root.get(root, self.last)

    def name(self, fqn: str, distinct: frozenset[str] = frozenset()) -> str:
        """The name in the whole model of a rank's module, parameter or buffer: `GPT#2.h.0` is `GPT.h.0`.

        A name whose root is not among `roots` is left as it is.

        Args:
            fqn: its name in the rank.
            distinct: roots whose stages have different things under equal names; they keep theirs: `GPT[stage 1].h.0`.
        """
        root, dot, rest = fqn.partition(".")
        base, roots = root.partition("#")[0], self._by_root
        if root not in roots or (base != root and base not in roots):
            return fqn
        stage = f"[stage {roots[root]}]" if base in distinct and roots[root] else ""
        return f"{base}{stage}{dot}{rest}"


def stages_in(manifests: Mapping[int, Mapping[str, Any]]) -> dict[int, Stages]:
    """The pipeline stages of each rank whose manifest names some, by rank."""
    return {rank: stages for rank, manifest in manifests.items() if (stages := stages_of(manifest)) is not None}


def stages_of(manifest: Mapping[str, Any]) -> Stages | None:
    """The pipeline stages that a rank's manifest names; None where there are none, or they are malformed."""
    pipeline = manifest.get("pipeline")
    if not isinstance(pipeline, dict):
        return None
    stage, of, roots = pipeline.get("stage"), pipeline.get("stages"), pipeline.get("roots", {})
    if type(stage) is not int or type(of) is not int or not 0 <= stage < of or not isinstance(roots, dict):
        return None
    if not all(isinstance(root, str) and type(number) is int and 0 <= number < of for root, number in roots.items()):
        return None
    return Stages(stage, of, tuple(sorted(roots.items())))


# --- what the ranks say together

_LISTS = ("not_observed", "notes", "failures", "children")
_MAX_WORLD = 65536


def launch_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `launch` mapping of a manifest; None for a run of one process."""
    launch = manifest.get("launch")
    return launch if isinstance(launch, Mapping) else None


def world_size(manifest: Mapping[str, Any]) -> int:
    """How many ranks were started; 0 where the manifest does not say, or says over `_MAX_WORLD`."""
    launch = launch_of(manifest)
    size = launch.get("world_size") if launch is not None else None
    return size if type(size) is int and 0 < size <= _MAX_WORLD else 0


def merge_manifests(launch_manifest: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest for a run of several ranks: the lowest rank's, with the lists of all ranks joined.

    What the launch's manifest says takes the place of what the rank's does; `rank`, `local_rank` and `host` are left
    out. Exit code, exception, `how` and `raised_at` are those of the rank that failed first, by its end; without a
    failure, the lowest rank's. `steps` is the smallest number. The status is the first other than `complete` that a
    rank has; `interrupted` where a rank is missing, `running` without any; else `complete`.

    Args:
        launch_manifest: the run's own, which names the launch.
        ranks: each rank's, by number.
    """
    if not ranks:
        return {**launch_manifest, "status": "running"}
    first = ranks[min(ranks)]
    every = list(ranks.values())
    out = {**first, **launch_manifest, "world_size": world_size(launch_manifest)}
    for name in ("rank", "local_rank", "host"):
        out.pop(name, None)
    unfinished = [str(manifest.get("status")) for manifest in every if manifest.get("status") != "complete"]
    missing = ["interrupted"] if len(ranks) < out["world_size"] else []
    out["status"] = next(iter((*unfinished, *missing)), "complete")
    for name in _LISTS:
        if any(name in manifest for manifest in every):
            out[name] = _listed(name, ranks)
    steps = [manifest["steps"] for manifest in every if type(manifest.get("steps")) is int]
    if steps:
        out["steps"] = min(steps)
    failing = [number for number, manifest in ranks.items() if manifest.get("exit_code") not in (None, 0)]
    if failing:  # where one ends, the others lose their connection to it
        failed = min(failing, key=lambda number: (str(ranks[number].get("ended") or "~"), number))
        out |= {name: ranks[failed].get(name) for name in ("exit_code", "how", "exception", "raised_at")}
    return out


def _listed(name: str, ranks: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Entries listed by ranks under `name`, each once; a text listed only by some ends with `(ranks 0, 1)`."""
    sayers: dict[str, list[int]] = {}
    entries: dict[str, Any] = {}
    for number, manifest in sorted(ranks.items()):
        listed = manifest.get(name)
        for entry in listed if isinstance(listed, list) else ():
            sayers.setdefault(repr(entry), []).append(number)
            entries[repr(entry)] = entry
    return [
        f"{entry} ({rank_list(sayers[key])})" if isinstance(entry, str) and len(sayers[key]) < len(ranks) else entry
        for key, entry in entries.items()
    ]


def endings(
    size: int, last: Mapping[int, int | None], ended: Mapping[int, bool], left_out: Collection[int] = ()
) -> dict[str, int]:
    """Sentences on ranks without a log, without a step, cut off at any step, or closed before the last step of others.

    In that order, each with the first of the ranks that it is about.

    Args:
        size: how many ranks there are.
        last: the last step of each rank that is there; None where it has no step.
        ended: for each rank that is there, whether its writer closed its log.
        left_out: those that were to record nothing.
    """
    out: dict[str, int] = {}

    def say(ranks: list[int], what: str) -> None:
        if ranks:
            out[f"{rank_list(ranks)} of {size} {what}".replace("rank", "Rank", 1)] = ranks[0]

    say([rank for rank in range(size) if rank not in last and rank not in left_out], "left nothing")
    say([rank for rank, step in last.items() if step is None], "left no step")
    latest = max((step for step in last.values() if step is not None), default=-1)
    for step in sorted({step for step in last.values() if step is not None}):
        ranks = [rank for rank, at in last.items() if at == step]
        cut = [rank for rank in ranks if not ended[rank]]
        say(cut, f"{'was' if len(cut) == 1 else 'were'} cut off after step {step}")
        if step < latest:
            others = f"{count(latest - step, 'step')} before the others"
            say([rank for rank in ranks if ended[rank]], f"ended with step {step}, {others}")
    return out
