"""The files of a rank that has ended: records, and one file that holds all the small ones.

A rank writes some twenty files, each alone, since it may be killed at any time; a launch of thousands would leave a
hundred thousand. So a rank that has closed its files puts the small ones into one, `closed.bin`, and those that other
ranks have alike into a directory of the launch, once. Each of these appears whole or not at all, and the files that it
stands for are removed only then: a rank that is killed on the way has both, with equal content. A file that is written
anew later counts before what is in `closed.bin`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import (
    BUNDLE_HEADER,
    BUNDLE_MAGIC,
    CLOSED,
    FORMAT,
    LARGEST,
    LIMIT_DOCUMENT,
    LOCK,
    SETTINGS,
    SHARED,
    SMALL,
    Directory,
    Folder,
    RankFolder,
    launch_of_rank,
    shared_name,
)
from introspect_cli.store.files.handles import take_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

_ONE_RANKS = re.compile(r"manifest\.yaml|.*\.(bin|jsonl)")
"""Of these, what no two ranks have alike."""

_SOME, _MANY, _LITTLE = 1, 64, 1 << 16
"""How many different files of a name ranks share at most, of little ones and of others: more stay in each rank's."""

_MODE = 0o600


def close_rank(folder: Folder) -> None:
    """Put the small files of a rank that has ended into one, and those that other ranks have alike into the launch's.

    Where that fails, the rank keeps its files.
    """
    if folder.fd < 0:
        return
    with suppress(OSError, StoreError), Folder(os.dup(folder.secure().fd), folder.path) as rank:
        with RankFolder(Folder(os.dup(rank.fd), rank.path)) as there:  # what was bundled before counts, too
            files = dict(_small(there))
        with launch_of_rank(rank) as launch, launch.make_folder(SHARED, 0o700) as shared:
            alone = take_lock(shared.fd)  # ranks end at once, and each would take itself for the first
            named = {name: _share(shared, name, data, alone=alone) for name, data in files.items()}
        _write(rank, files, named)
        for name in (*files, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=rank.fd)
        os.rmdir(SETTINGS, dir_fd=rank.fd)


def _small(rank: Directory) -> Iterator[tuple[str, bytes]]:
    every = rank.names()
    if SETTINGS in every:
        with rank.folder(SETTINGS) as settings:
            for name in settings.names():
                if SMALL.fullmatch(f"{SETTINGS}/{name}"):
                    yield f"{SETTINGS}/{name}", settings.read_file(name, LIMIT_DOCUMENT)
    for name in every:
        if SMALL.fullmatch(name):
            yield name, rank.read_file(name, LARGEST)


def _share(shared: Folder, path: str, data: bytes, *, alone: bool) -> str:
    """The name of the file with this content that ranks share; "" where each keeps its own."""
    name = path.rpartition("/")[2]
    if _ONE_RANKS.fullmatch(name):
        return ""
    named = shared_name(name, data)
    if named in shared:
        return named if shared.read_file(named, LARGEST) == data else ""
    most = _MANY if len(data) >= _LITTLE else _SOME if alone else 0
    if sum(other.startswith(f"{name}-") for other in shared.names()) >= most:
        return ""
    shared.replace(named, [data], _MODE, durable=True)
    return named


def _write(rank: Folder, files: dict[str, bytes], named: dict[str, str]) -> None:
    """Write `closed.bin`, to the disk, since what it stands for may have been there for long."""
    table: dict[str, Any] = {}
    rest, at = [], 0
    for name, data in files.items():
        table[name] = named[name] or [at, len(data)]
        if not named[name]:
            rest.append(data)
            at += len(data)
    text = json.dumps(table, separators=(",", ":")).encode()
    header = BUNDLE_HEADER.pack(BUNDLE_MAGIC, FORMAT, zlib.crc32(text), len(text))
    rank.replace(CLOSED, [header, text, *rest], _MODE, durable=True)
