"""What a run says of itself: its manifest, those of its ranks, its settings; and which of several directories it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from introspect_cli.store import documents
from introspect_cli.store.closed import rank_folder
from introspect_cli.store.files import (
    CHILDREN,
    FORMAT,
    LIMIT_DOCUMENT,
    MANIFEST,
    SETTINGS,
    DamageError,
    Folder,
    is_locked,
)
from introspect_cli.store.index import newer_format
from introspect_cli.store.launch import ATTEMPT_NAME, launch_of

SETTINGS_NAME = re.compile(r"([a-z0-9_]{1,64})\.yaml")
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,32}")
_TYPES = {
    **dict.fromkeys(("argv", "children", "failures", "not_observed", "notes", "observed"), list),
    **dict.fromkeys(("alone", "narrowing", "options", "tool"), dict),
}
"""What readers of a manifest take for granted; what is of another type was written by no capture, and is left out."""


class Settings(Mapping[str, Any]):
    """The settings documents of a run by name, each read when first asked for."""

    def __init__(self, folder: Folder | None, run_id: object) -> None:
        self._folder = folder
        self._run_id = run_id
        matches = (SETTINGS_NAME.fullmatch(name) for name in folder.names()) if folder is not None else ()
        self._names = [match[1] for match in matches if match]
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """A document's plain data.

        Raises:
            KeyError: there is no such document.
            StoreError: it is damaged.
        """
        if name not in self._read:
            if self._folder is None or name not in self._names:
                raise KeyError(name)
            path = f"{self._folder.path}/{name}.yaml"
            try:
                data = self._folder.read_file(f"{name}.yaml", LIMIT_DOCUMENT)
            except FileNotFoundError:
                raise KeyError(name) from None
            documents.check(data, f"{SETTINGS}/{name}.yaml", self._run_id, path)
            self._read[name] = documents.harmless(documents.load(data, path))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_rank_manifests(run: Folder, ranks: Iterable[int], run_id: object) -> tuple[dict[int, dict[str, Any]], bool]:
    """The manifests that ranks of a launch wrote, by number, and whether any of them is being written."""
    manifests, locked = {}, False
    for rank in ranks:
        with rank_folder(run, rank) as folder:
            locked |= is_locked(folder)
            if MANIFEST in folder:  # a rank that was killed at its very start has none
                manifests[rank] = read_manifest(folder)
                if manifests[rank].get("id") != run_id:
                    raise DamageError(folder.path, "it belongs to another run than the manifest")
    return manifests, locked


def last_attempt(folder: Folder) -> Folder:
    """The directory of the last attempt of a launch that was restarted; the run's own where it was not."""
    attempts = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, folder.names()) if match]
    for number in sorted(attempts, reverse=True):
        attempt = folder.folder(f"attempt{number}")
        if MANIFEST in attempt:
            folder.close()
            return attempt
        attempt.close()
    return folder


def only_launch(folder: Folder) -> Folder | None:
    """The one child of a run that is a launch; None where there is none, or more than one."""
    if CHILDREN not in folder:
        return None
    children = folder.folder(CHILDREN)
    launches = []
    try:
        for name in children.names():
            child = children.folder(name)
            if MANIFEST in child and launch_of(read_manifest(child)) is not None:
                launches.append(child)
            else:
                child.close()
    finally:
        children.close()
    if len(launches) == 1:
        return launches[0]
    for child in launches:
        child.close()
    return None


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of the run in `folder`."""
    path = f"{folder.path}/{MANIFEST}"
    try:
        data = folder.read_file(MANIFEST, LIMIT_DOCUMENT)
    except FileNotFoundError:
        raise DamageError(path, "it is missing") from None
    manifest = documents.load(data, path)
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int or number < FORMAT:
        raise DamageError(path, "it does not say which format the run has")
    if number > FORMAT:
        tool = manifest.get("tool")
        version = tool.get("version") if isinstance(tool, dict) else None
        is_version = isinstance(version, str) and _VERSION.fullmatch(version)
        raise newer_format(number, version if is_version else None, folder.path)
    documents.check(data, MANIFEST, manifest.get("id"), path)
    plain = documents.harmless(manifest)
    return {key: value for key, value in plain.items() if isinstance(value, _TYPES.get(key, object))}
