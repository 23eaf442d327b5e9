"""A run in object storage: what its objects are, and how they are listed, read and put.

Objects cannot be appended to. So what a file has grown by is put in an object of its own, which never changes again:
`log.bin.000000000064` has the bytes of `log.bin` from byte 64 on. One small object, the *catalogue*, is put after them
and says how long they are. Whatever a catalogue names is there; what came later does not exist. It also holds what
every reader needs first: the heads of logs, with the bodies of their small frames, and the manifest. So opening a rank
is one request, and a step is a range of an object.

A process that is killed sends no more, and says nothing of it. So a catalogue says whether it is the last one, when it
was put, and within how many seconds another was to follow.

A URL may name whatever fsspec opens. The clients below it retry what is worth a retry (a cut connection, an answer of
500). What they give up on, each says in words of its own: here it becomes one sentence that names the URL and what to
do.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import FORMAT, NAMES, DamageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError"}
)
_LONGEST = 200


class NothingThereError(StoreError):
    """Storage has no such object."""


class RefusedError(StoreError):
    """Storage will answer no better if it is asked again."""


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def below(place: str, name: str) -> str:
    """`place/name` without slashes at either end; either may be ""."""
    return f"{place}/{name}".strip("/")


class Storage:
    """The objects below a URL.

    Attributes:
        url: without a slash at its end.
        system: of fsspec.
        root: the path in it.
    """

    def __init__(self, url: str) -> None:
        """Find the fsspec file system for a URL.

        Raises:
            StoreError: fsspec is not installed, or no file system opens the URL.
        """
        self.url = url.rstrip("/")
        try:
            import fsspec
        except ImportError:
            raise StoreError(f'{url} needs fsspec: `pip install "introspect-cli[remote]"`') from None
        try:
            self.system, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as error:  # each system raises its own
            raise failure("reach", url, error) from None

    def path(self, name: str) -> str:
        """The file system's path of the object `name` below the URL."""
        return f"{self.root}/{name}" if name else str(self.root)

    def entries(self, folder: str = "", *, deep: bool = False) -> dict[str, int] | None:
        """Size by name of a folder's entries, -1 for folders; None where the URL is a single object. Not cached.

        With `deep`, of all objects below it, by their paths.

        Raises:
            NothingThereError: there is no such folder.
            StoreError: it cannot be listed.
        """
        path, where = self.path(folder), f"{self.url}/{folder}".rstrip("/")
        try:
            self.system.invalidate_cache()  # a run grows while it is looked at
            find = self.system.find if deep else self.system.ls
            listed: Any = find(path, detail=True)
        except Exception as error:
            raise failure("list", where, error) from None
        own, sizes = path.strip("/"), dict[str, int]()
        for entry in listed.values() if deep else listed:
            sizes[str(entry["name"]).strip("/")] = -1 if entry["type"] == "directory" else entry.get("size") or 0
        if [*sizes] == [own] and sizes[own] >= 0:
            return None
        return {name.removeprefix(own).strip("/"): size for name, size in sizes.items() if name != own}

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | StoreError]:
        """Read ranges (name, first byte, byte after the last), concurrently where possible.

        Returns:
            for each range its bytes, or the error (not raised) where it could not be read.
        """
        names, begins, ends = [name for name, _, _ in wanted], [at for _, at, _ in wanted], [at for _, _, at in wanted]
        try:
            got = self.system.cat_ranges([self.path(name) for name in names], begins, ends, on_error="return")
        except Exception as error:
            got = [error] * len(names)
        return [
            bytes(data) if isinstance(data, (bytes, bytearray)) else failure("read", f"{self.url}/{name}", data)
            for name, data in zip(names, got, strict=True)
        ]

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one that is there; folders are made where the file system has them.

        Raises:
            StoreError: it cannot be written.
        """
        from fsspec.asyn import AsyncFileSystem

        path = self.path(name)
        try:
            if not isinstance(self.system, AsyncFileSystem):  # those have directories, and the others none
                self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.system.pipe_file(path, data)
        except Exception as error:
            raise failure("write", f"{self.url}/{name}", error) from None


def failure(doing: str, url: str, error: BaseException) -> StoreError:
    """The StoreError for a client's exception.

    NothingThereError for a missing object, RefusedError where a retry is useless.

    Args:
        doing: what could not be done, after `cannot`: `read`, `send to`.
        url: of the object.
        error: the exception.
    """
    text = " ".join((str(error) or type(error).__name__).split())[:_LONGEST]
    refused = ""
    if isinstance(error, ImportError):
        refused = f'a package is missing ({text}): `pip install "introspect-cli[remote]"` has what s3:// needs'
    elif type(error).__name__ in _NO_CREDENTIALS or "credentials" in text.lower():
        refused = (
            "there are no credentials: set those that its client looks for (of s3:// AWS_PROFILE, or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY)"
        )
    elif isinstance(error, PermissionError):
        refused = f"access is denied ({text}): check the credentials and what they allow"
    elif isinstance(error, FileNotFoundError):
        if isinstance(error.__cause__, OSError):  # that is how fsspec says that nobody listens there
            return StoreError(f"cannot reach {url}: {error.__cause__}")
        if "bucket does not exist" not in text.lower():
            return NothingThereError(f"there is nothing at {url}: check the URL")
        refused = "there is no such bucket: check its name"
    return RefusedError(f"cannot {doing} {url}: {refused}") if refused else StoreError(f"cannot {doing} {url}: {text}")


CATALOGUE: Final = "catalogue"
LIMIT: Final = 320 << 20
"""Bytes of a catalogue: the heads of the longest log, and room beside them."""

_HEADER = struct.Struct("<8sIII")
"""Magic, format, CRC-32 of what follows, bytes of the JSON; then both parts, compressed as one."""

_MAGIC = b"INTROSPC"
_ID = re.compile(r"[0-9a-f]{0,32}")
_MOST = 1 << 62
_LATEST = 1e11


@dataclass
class Catalogue:
    """What there is of an uploaded directory: a file's bytes are those that are inline, then those of its objects.

    Attributes:
        run_id: of the run; hexadecimal.
        over: whether nothing will follow.
        sent: when it was put, in seconds since 1970.
        every: within how many seconds the next one was to follow.
        inline: bytes that are in the catalogue, by the name of a file.
        objects: bytes of each object of a file, in order, by its name.
    """

    run_id: str = ""
    over: bool = False
    sent: float = 0.0
    every: float = 0.0
    inline: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, list[int]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The bytes of the catalogue object: header, then compressed JSON and inline bytes."""
        sizes = {name: len(data) for name, data in self.inline.items()}
        text = json.dumps(vars(self) | {"inline": sizes}, separators=(",", ":")).encode()
        body = zlib.compress(text + b"".join(self.inline.values()), 1)
        return _HEADER.pack(_MAGIC, FORMAT, zlib.crc32(body), len(text)) + body

    def objects_of(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Name, first byte and length of each object of a file, in order."""
        at = len(self.inline.get(name, b""))
        for length in self.objects.get(name, ()):
            yield f"{name}.{at:012d}", at, length
            at += length

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        return len(self.inline.get(name, b"")) + sum(self.objects.get(name, ()))

    @property
    def names(self) -> set[str]:
        """Names of all files."""
        return {*self.inline, *self.objects}


def decode_catalogue(data: bytes, path: str) -> Catalogue:
    """Decode a catalogue and check all its numbers and names.

    Args:
        data: the object.
        path: its URL.

    Raises:
        DamageError: it was altered, or no version writes such a thing.
    """
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamageError(path, "it is no catalogue of a run")
    _, number, crc, length = _HEADER.unpack_from(data)
    if zlib.crc32(data[_HEADER.size :]) != crc:
        raise DamageError(path, "its bytes are not those that were sent")
    if number > FORMAT:
        raise DamageError(path, f"it has format {number}, which a newer introspect-cli reads")
    try:
        body = zlib.decompressobj().decompress(data[_HEADER.size :], LIMIT)
        fields, at, inline = json.loads(body[:length]), length, {}
        for name, size in fields["inline"].items():
            inline[name] = body[at : at + _number(size)]
            at += size
        objects = {name: [_number(size) for size in sizes] for name, sizes in fields["objects"].items()}
        sent, every = float(fields["sent"]), float(fields["every"])
        times = 0 <= sent < _LATEST and 0 <= every < _LATEST
        if at != len(body) or not times or not _ID.fullmatch(fields["run_id"]):
            raise ValueError  # noqa: TRY301 - told as all damage is
        catalogue = Catalogue(fields["run_id"], fields["over"] is True, sent, every, inline, objects)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
        raise DamageError(path, "what it says cannot be read") from None
    if not all(map(NAMES.fullmatch, catalogue.names)):
        raise DamageError(path, "it names a file that no run has")
    return catalogue


def _number(value: Any) -> int:
    """`value` where it is an integer from 0 to below `_MOST`; ValueError otherwise."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value
