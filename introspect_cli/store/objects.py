"""Object storage, and anything else that a URL names and fsspec opens: listing, reading ranges, putting objects.

The clients below fsspec retry what is worth a retry (a cut connection, an answer of 500). What they give up on, each
says in words of its own: here it becomes one sentence that names the URL and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence
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
    """The path of what has a name in a place; either may be ""."""
    return f"{place}/{name}".strip("/")


class Storage:
    """What lies below a URL.

    Attributes:
        url: without a slash at its end.
        system: of fsspec.
        root: the path in it.
    """

    def __init__(self, url: str) -> None:
        """Find what opens a URL.

        Raises:
            StoreError: nothing does.
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
        """The path of what has a name below the URL."""
        return f"{self.root}/{name}" if name else str(self.root)

    def entries(self, folder: str = "") -> dict[str, int] | None:
        """Sizes of what is in a folder by name, -1 of folders; None where the URL is that of one object.

        Raises:
            NothingThereError: there is no such folder.
            StoreError: it cannot be listed.
        """
        path, where = self.path(folder), f"{self.url}/{folder}".rstrip("/")
        try:
            self.system.invalidate_cache()  # a run grows while it is looked at
            listed: list[dict[str, Any]] = self.system.ls(path, detail=True)
        except Exception as error:
            raise failure("list", where, error) from None
        found = {str(entry["name"]).strip("/"): entry for entry in listed}
        only = found.get(path.strip("/"))
        if only is not None and only["type"] == "file" and len(found) == 1:
            return None
        sizes = {name: -1 if entry["type"] == "directory" else entry.get("size") or 0 for name, entry in found.items()}
        return {name.rpartition("/")[2]: size for name, size in sizes.items() if name != path.strip("/")}

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | StoreError]:
        """Ranges of objects (name, first byte, byte after the last), at once where its client can; what failed, why."""
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
        """Write an object.

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

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects.

        Raises:
            StoreError: they cannot be removed.
        """
        try:
            self.system.rm([self.path(name) for name in names])
        except Exception as error:
            raise failure("clear", self.url, error) from None


def failure(doing: str, url: str, error: BaseException) -> StoreError:
    """What a client raised, as a sentence."""
    text = " ".join((str(error) or type(error).__name__).split())[:_LONGEST]
    if isinstance(error, ImportError):
        why = f'a package is missing ({text}): `pip install "introspect-cli[remote]"` has what s3:// needs'
        return RefusedError(f"cannot {doing} {url}: {why}")
    if type(error).__name__ in _NO_CREDENTIALS or "credentials" in text.lower():
        why = (
            "there are no credentials: set those that its client looks for (of s3:// AWS_PROFILE, or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY)"
        )
        return RefusedError(f"cannot {doing} {url}: {why}")
    if isinstance(error, PermissionError):
        return RefusedError(
            f"cannot {doing} {url}: access is denied ({text}): check the credentials and what they allow"
        )
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, OSError):
        return StoreError(f"cannot reach {url}: {error.__cause__}")  # that is how fsspec says that nobody listens there
    if isinstance(error, FileNotFoundError) and "bucket does not exist" in text.lower():
        return RefusedError(f"cannot {doing} {url}: there is no such bucket: check its name")
    if isinstance(error, FileNotFoundError):
        return NothingThereError(f"there is nothing at {url}: check the URL")
    return StoreError(f"cannot {doing} {url}: {text}")
