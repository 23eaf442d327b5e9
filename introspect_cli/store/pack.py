"""A run as one file, and such a file as a run.

A directory of a thousand files is no thing to mail. `pack` writes a zip of it; every reader takes the zip where it
takes a directory, by unpacking it once into a cache that is named by its content. A zip from a stranger may hold any
name and claim any size: only names that a store has are unpacked, nothing larger than it claims, and no more in all
than a store of that size could hold.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files import LOCK, MANIFEST, reason

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDING = ".introspect.zip"

_NAME = re.compile(
    r"(attempt\d{1,6}/)?(rank\d{1,6}/)?"
    r"(manifest\.yaml|label|[a-z_]{1,32}\.(arrow|bin|jsonl)|records-\d{1,9}\.arrow|settings/[a-z0-9_]{1,64}\.yaml|tensors/[0-9a-f]{16}\.safetensors)"
)
_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_FILES = 1_000_000
_MOST_TIMES = 200  # that a store may be larger than its pack; records compress three to tenfold
_SPARE = 1 << 26
_PIECE = 1 << 20
_KEPT = 16


def pack(run: Path, out: Path) -> int:
    """Write the run in a directory into a file; bytes written.

    Args:
        run: the directory of a run that nobody writes.
        out: the file, which must not exist.

    Raises:
        StoreError: the file exists or cannot be written, or the run cannot be read.
    """
    if not out.name:
        raise StoreError(f"{out} is no name of a file: name one that is not there yet")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=6, strict_timestamps=False) as made:
            for name, path in files_of(run):
                # What differs between two packs of one run is nothing: names sorted, no times.
                about = zipfile.ZipInfo(name)
                about.compress_type = zipfile.ZIP_DEFLATED
                about.external_attr = 0o644 << 16
                with path.open("rb") as source, made.open(about, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _PIECE)
        os.link(temporary, out)
    except FileExistsError:
        raise StoreError(f"{out} exists: choose another name with -o") from None
    except OSError as error:
        raise StoreError(f"cannot write {out}: {reason(error)}; choose another place with -o") from None
    finally:
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def files_of(run: Path) -> Iterator[tuple[str, Path]]:
    """The files of a store by name, the manifest first; locks and links are left out."""
    found = {}
    for folder, _, names in os.walk(run):
        for name in names:
            path = Path(folder) / name
            own = path.relative_to(run).as_posix()
            if name != LOCK and not path.is_symlink() and _NAME.fullmatch(own):
                found[own] = path
    yield from sorted(found.items(), key=lambda item: (item[0] != MANIFEST, item[0]))


def is_pack(path: str | Path) -> bool:
    """Whether a packed run may be at `path`: a file that begins as a zip does."""
    try:
        if not os.path.isfile(path):  # noqa: PTH113 - the path may be text; opening a pipe would wait for a writer
            return False
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read(4) == b"PK\x03\x04"
    except (OSError, ValueError):
        return False


def cache() -> Path:
    """Where packs are unpacked; it may be removed at any time that no verb runs.

    Raises:
        StoreError: there is no such place.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # a relative one is to be ignored, says the standard that made the variable
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise StoreError(
                "packs are unpacked below the home directory, and there is none: set XDG_CACHE_HOME"
            ) from None
    return base / "introspect"


def unpacked(path: str | Path) -> Path:
    """The directory that holds what a packed run holds, unpacked once.

    Raises:
        StoreError: it is no packed run, or is damaged, or there is no room.
    """
    try:
        with zipfile.ZipFile(path) as found:
            members = found.infolist()
            _check(path, members)
            name = hashlib.blake2b(
                repr([(own.filename, own.CRC, own.file_size) for own in members]).encode(), digest_size=16
            ).hexdigest()
            place = cache() / name
            if not place.is_dir():
                _unpack(found, members, place)
        os.utime(place)
        _forget_old(place)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise StoreError(f"{path} is a damaged pack: {str(error).lower()}; pack the run again") from None
    except OSError as error:
        raise StoreError(f"cannot unpack {path} into {cache()}: {reason(error)}; set XDG_CACHE_HOME") from None
    return place


def _check(path: str | Path, members: list[zipfile.ZipInfo]) -> None:
    """That a pack holds a run and nothing else, and is not larger inside than a run can be."""
    if len(members) > _MOST_FILES:
        raise StoreError(f"{path} is not a packed run: it holds {len(members):,} files")
    strange = next((own.filename for own in members if not _NAME.fullmatch(own.filename)), None)
    if strange is not None or all(own.filename != MANIFEST for own in members):
        why = f"it has no {MANIFEST}" if strange is None else "it holds a file that no run has"
        raise StoreError(f"{path} is not a packed run: {why}; `introspect pack` makes one of a run")
    if sum(own.file_size for own in members) > _MOST_TIMES * Path(path).stat().st_size + _SPARE:
        raise StoreError(f"{path} is not unpacked: it claims to hold far more than a run of its size can")


def _unpack(found: zipfile.ZipFile, members: list[zipfile.ZipInfo], place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        for own in members:
            target = fresh / own.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with found.open(own) as source, target.open("xb") as file:
                left = own.file_size
                while piece := source.read(min(_PIECE, left + 1)):
                    left -= len(piece)
                    if left < 0:
                        raise zipfile.BadZipFile("a file is larger than it claims")
                    file.write(piece)
        try:
            fresh.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was quicker
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _forget_old(used: Path) -> None:
    """Keep the packs that were used last."""
    packs = sorted((own for own in cache().iterdir() if _KEY.fullmatch(own.name)), key=lambda own: own.stat().st_mtime)
    for own in packs[:-_KEPT]:
        if own != used:
            shutil.rmtree(own, ignore_errors=True)
