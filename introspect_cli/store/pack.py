"""Where a run lies: a directory, a file it was packed into, or either of these elsewhere (`https://`, `s3://`, ...).

A directory of a thousand files is no thing to mail. `pack` writes a zip of it; every reader takes the zip where it
takes a directory, by unpacking it for as long as that is open. A zip from a stranger may hold any
name and claim any size: only names that a store has are unpacked, nothing larger than it claims, and no more in all
than a store of that size could hold. A pack
elsewhere is fetched through fsspec; a run in object storage is read where it lies (`remote`).
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files import GOLDEN_RUN, MANIFEST, NAMES, SOURCES, Directory, Folder, outside_cause, reason
from introspect_cli.store.remote import RemoteFolder, Storage, failure, fetch_files, is_remote, open_remote

if TYPE_CHECKING:
    import tempfile
    import zipfile
    from collections.abc import Iterator


ENDING = ".introspect.zip"

_PACKED = re.compile(r"\.zip$|^https?://")
"""URLs of single files; a web server lists no directories."""

_MOST_FILES = 1_000_000
_MOST_TIMES = 200  # that a store may be larger than its pack; records compress three to tenfold
_SPARE = 1 << 26
_PIECE = 1 << 20


def open_store(path: str | Path) -> Directory:
    """Open a run's directory, wherever it lies: on disk, in object storage, or packed.

    Of a directory with a pack named GOLDEN_RUN in it, that pack. A pack at a URL is fetched first (`fetch_pack`).

    Raises:
        StoreError: there is nothing, or something that is not a directory with a manifest.
    """
    if is_remote(path):
        return (fetch_pack if _PACKED.search(str(path)) else open_remote)(str(path))
    for file in (path, os.path.join(path, GOLDEN_RUN)):  # noqa: PTH118 - as text
        if is_pack(file):
            return unpack(file)
    named = "name a directory that `introspect capture -o` made (`introspect runs` lists them)"
    try:
        folder = Folder.at(str(path))
        is_run = MANIFEST in folder.names()
    except FileNotFoundError:
        raise StoreError(f"there is no run at {path}; {named}") from None
    except (OSError, ValueError) as error:
        if cause := outside_cause(error):
            raise StoreError(f"cannot read {path}: {cause}") from None
        raise StoreError(f"{path} is not a run: {reason(error)}; {named}") from None
    if not is_run:
        raise StoreError(f"{path} is not a run: it has no {MANIFEST}; {named}")
    return folder


@contextmanager
def local_copy(path: str | Path) -> Iterator[Path]:
    """A directory on disk with the run's files; of a pack the one that it was unpacked into.

    A run in object storage is fetched into a temporary one for the block.
    """
    with open_store(path) as folder:
        if not isinstance(folder, RemoteFolder):
            yield Path(folder.path)
            return
        import tempfile

        with tempfile.TemporaryDirectory(prefix="introspect-fetched-") as place:
            fetch_files(folder, Path(place))
            yield Path(place)


def pack(run: Path, out: Path, *, sources: bool = True) -> int:
    """Write the run directory `run` as a zip file, the same bytes for the same files; returns its size in bytes.

    Args:
        run: the directory.
        out: the file to make, which must not exist.
        sources: whether the text of source files goes with it.

    Raises:
        StoreError: `out` exists.
        OSError: it cannot be written.
    """
    import shutil
    import zipfile  # most runs are directories, and this brings three ways of compressing

    temporary = out.parent / f".{out.name}.{os.getpid()}"
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, compresslevel=6, strict_timestamps=False) as made:
            for name, path in files_of(run, sources=sources):
                # What differs between two packs of one run is nothing: names sorted, no times.
                about = zipfile.ZipInfo(name)
                about.compress_type = zipfile.ZIP_DEFLATED
                about.external_attr = 0o644 << 16
                with path.open("rb") as source, made.open(about, "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, _PIECE)
        os.link(temporary, out)
    except FileExistsError:
        raise StoreError(f"{out} exists: choose another name with -o") from None
    finally:
        temporary.unlink(missing_ok=True)
    return out.stat().st_size


def files_of(run: Path, *, sources: bool = True) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file of a run, the manifest first, then by name; without links and foreign files."""
    files = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    for name in sorted(filter(NAMES.fullmatch, files), key=lambda name: (name != MANIFEST, name)):
        if not files[name].is_symlink() and (sources or files[name].parent.name != SOURCES):
            yield name, files[name]


def is_pack(path: str | Path) -> bool:
    r"""Whether `path` is a regular file that begins with zip's `PK\x03\x04`."""
    try:
        if not os.path.isfile(path):  # noqa: PTH113 - the path may be text; opening a pipe would wait for a writer
            return False
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read(4) == b"PK\x03\x04"
    except (OSError, ValueError):
        return False


class Unpacked(Folder):
    """The files of a pack in a temporary directory, which goes when this is closed."""

    held: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Close the directory and remove it; a second call does nothing."""
        super().close()
        if self.held is not None:
            self.held.cleanup()


def unpack(path: str | Path, source: str = "") -> Unpacked:
    """A directory with the contents of a pack.

    Args:
        path: the pack.
        source: where the pack came from, for messages; by default `path`.

    Raises:
        StoreError: it is damaged, no packed run, claims too much, or cannot be unpacked.
    """
    import tempfile
    import zipfile

    source = source or str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(path, members, source)
            held = tempfile.TemporaryDirectory(prefix="introspect-unpacked-")
            archive.extractall(held.name, members)
            folder = Unpacked.at(held.name)
            folder.held = held
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise StoreError(f"{source} is a damaged pack: {str(error).lower()}; pack the run again") from None
    except OSError as error:
        raise StoreError(f"cannot unpack {source}: {reason(error)}; set TMPDIR to where there is room") from None
    return folder


def _check_members(path: str | Path, members: list[zipfile.ZipInfo], source: str) -> None:
    """Raise StoreError unless a pack has a manifest, only a run's files, and a plausible unpacked size."""
    names = [member.filename for member in members]
    if len(names) > _MOST_FILES or MANIFEST not in names or not all(map(NAMES.fullmatch, names)):
        raise StoreError(f"{source} is not a packed run; name a directory that `introspect capture -o` made")
    if sum(member.file_size for member in members) > _MOST_TIMES * Path(path).stat().st_size + _SPARE:
        raise StoreError(f"{source} is not unpacked: it claims to hold far more than a run of its size can")


# --- elsewhere


def from_anywhere(path: str | Path) -> str:
    """An address for other processes: the URL itself, or the absolute path; links are not resolved."""
    return str(path) if is_remote(path) else str(Path(path).absolute())


def fetch_pack(url: str) -> Unpacked:
    """A directory with the contents of the pack at a URL, which is fetched with a line on stderr.

    Raises:
        StoreError: there is none, or it cannot be fetched or unpacked.
    """
    import tempfile

    storage = Storage(url)
    with tempfile.TemporaryDirectory(prefix="introspect-fetched-") as folder:
        sys.stderr.write(f"introspect: fetching {url}\n")
        try:
            storage.system.get_file(storage.root, f"{folder}/run.zip")
        except Exception as error:
            raise failure("fetch", url, error) from None
        return unpack(f"{folder}/run.zip", url)
