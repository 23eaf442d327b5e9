"""Packed runs that lie elsewhere (`https://`, `s3://`, `gs://`, ...), fetched through fsspec into the cache."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.store.pack import cache

if TYPE_CHECKING:
    from pathlib import Path

_DIRECTORY = "fetched"
_MARKS = ("ETag", "etag", "mtime", "LastModified", "updated")  # what tells two files of one name apart


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def _system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise StoreError(f'reading {url} needs fsspec: `pip install "introspect-cli[remote]"`') from None
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except Exception as error:  # each system raises its own
        raise StoreError(f"cannot reach {url}: {error or type(error).__name__}") from None
    return found


def fetched(url: str) -> Path:
    """The file behind a URL, fetched once; its size is told on stderr before.

    Raises:
        StoreError: fsspec is missing, or the file cannot be reached.
    """
    system, path = _system(url)
    try:
        about = system.info(path)
        size = about.get("size") or 0
        mark = next((str(about[key]) for key in _MARKS if key in about), "")
        name = hashlib.blake2b(f"{url} {size} {mark}".encode(), digest_size=16).hexdigest()
        place = cache() / _DIRECTORY / f"{name}.zip"
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            sys.stderr.write(f"introspect: fetching {url} ({size / 1e6:,.1f} MB)\n")
            temporary = place.with_name(f".{name}.{os.getpid()}")
            system.get_file(path, str(temporary))
            temporary.replace(place)
    except FileNotFoundError:
        raise StoreError(f"there is no run at {url}") from None
    except Exception as error:
        raise StoreError(f"cannot fetch {url}: {error or type(error).__name__}") from None
    return place


def sent(file: Path, url: str) -> None:
    """Send a file to a URL; its size is told on stderr before.

    Raises:
        StoreError: fsspec is missing, or the place does not take it.
    """
    system, path = _system(url)
    sys.stderr.write(f"introspect: sending {file.stat().st_size / 1e6:,.1f} MB to {url}\n")
    try:
        system.put_file(str(file), path)
    except Exception as error:
        raise StoreError(f"cannot send to {url}: {error or type(error).__name__}") from None
