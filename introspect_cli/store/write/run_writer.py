"""A store open for writing: the directory, its lock, its documents and tensors, and a writer for each rank.

A capture must never overwrite what somebody may still need, share its directory with another capture, or be confused by
a script that changes its directory. The directory is made here and nowhere else, a lock is held on it while the process
lives, and everything is opened relative to its descriptor.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import DocumentTooLargeError, StoreError
from introspect_cli.store.files.folders import (
    FORMAT,
    LIMIT_DOCUMENT,
    LOCK,
    MANIFEST,
    RUNS,
    SETTINGS,
    SOURCES,
    TENSORS,
    Folder,
    reason,
)
from introspect_cli.store.files.handles import Closing, Handle, take_lock
from introspect_cli.store.format import documents
from introspect_cli.store.format.sources import encode
from introspect_cli.store.write.launch import join_launch, lock_file, refuse_unless, set_aside
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.store.write.launch import Launch
    from introspect_cli.store.write.log_writer import LogWriter
    from introspect_cli.store.write.rank_writer import RankWriter

_NAME = re.compile(r"[a-z0-9_]{1,64}")
_PRIVATE_FILE, _PRIVATE_DIRECTORY = 0o600, 0o700


class StoreWriter(Closing):
    """A run's directory, locked for writing until closed.

    Where several processes write one run, it is that of a rank, whose log holds its documents and is what is locked.

    Attributes:
        path: the directory, absolute.
        id: 32 hex digits that every log of the run repeats, so that files of two runs cannot be mixed up.
        tensor_bytes: bytes of whole tensors.
    """

    def __init__(
        self, path: Path, folder: Folder, lock: Handle | LogWriter, run_id: str, *, durable: bool = False
    ) -> None:
        """Keep what `create` has opened; use that to make a writer.

        Args:
            path: the directory, absolute.
            folder: the same, opened.
            lock: the lock file, held; of a rank of several its log.
            run_id: 32 hex digits.
            durable: as `create` takes it.
        """
        self.path = path
        self.id = run_id
        self._folder = folder
        self._lock = lock
        self._durable = durable
        self._ranks: list[tuple[RankWriter, LogWriter]] = []
        self._tensors: Folder | None = None
        self._stored: set[int] = set()
        self.tensor_bytes = 0

    @classmethod
    def create(
        cls, path: Path, *, force: bool = False, durable: bool = False, launch: Launch | None = None
    ) -> StoreWriter:
        """Make the directory of a new run and lock it.

        Args:
            path: where; parents are made. An empty directory that is there is used.
            force: replace the run that is there.
            durable: force each step to disk before the next begins, so that a power cut loses none.
            launch: this process's part of the run, where several processes write one.

        Raises:
            StoreError: a run is there (without `force`), is being written, or something else is there; or the
                directory cannot be made.
        """
        path = Path(os.path.abspath(path))  # noqa: PTH100 -- `resolve` would follow the link it is about to replace
        try:
            if path.parent.name == RUNS:
                path.parent.mkdir(parents=True, exist_ok=True)
                add_gitignore(path.parent)
            if launch is None:
                return cls._create(path, os.urandom(16).hex(), force=force, durable=durable)
            place = join_launch(path, launch, force=force)
            return cls._create(place, launch.id, force=force, durable=durable, rank=launch.rank)
        except OSError as error:
            raise StoreError(f"cannot make a run at {path}: {reason(error)}; choose another directory") from None

    @classmethod
    def _create(cls, path: Path, run_id: str, *, force: bool, durable: bool, rank: int | None = None) -> StoreWriter:
        """Make and lock a directory, write a manifest of status `running`, then delete the run that was there.

        Args:
            path: the run's directory, or that of `rank`.
            run_id: 32 hex digits.
            force: as `create` takes it.
            durable: as `create` takes it.
            rank: number of this process, whose log is the lock; None for a run of one process.

        Raises:
            StoreError: a run is there (without `force`), is being written, or something else is there.
            OSError: it cannot be made.
        """
        if path.is_symlink():
            path = path.resolve()
        old = set_aside(path, force=force)
        path.mkdir(parents=True, exist_ok=True)
        folder = Folder.at(str(path))
        lock: Handle | LogWriter | None = None
        try:
            if rank is not None:
                from introspect_cli.store.write.log_writer import LogWriter

                try:
                    again = Folder(os.dup(folder.fd), folder.path)
                    lock = LogWriter(again, rank, bytes.fromhex(run_id), durable=durable)
                except FileExistsError:
                    refuse_unless(False, path)
            else:
                lock = lock_file(folder)
                refuse_unless(take_lock(lock.fd) and folder.names() == [LOCK], path)
            assert lock is not None
            writer = cls(path, folder, lock, run_id, durable=durable)
            writer.write_manifest({"tool": {"name": "introspect", "version": __version__}, "status": "running"})
        except BaseException:
            folder.close()
            if lock is not None:
                lock.close()
            raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return writer

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest, all at once; `format` and `id` come first, and are the run's whatever `manifest` says.

        With the status `complete` the ranks are closed first: a manifest never says so of a run that could still be
        cut off.
        """
        if manifest.get("status") == "complete":
            self._close_ranks()
        always = {"format": FORMAT, "id": self.id}
        self._write_document(MANIFEST, {**always, **manifest, **always})

    def write_settings(self, name: str, value: object) -> None:
        """Write (or replace) the settings document `name`, readable by its owner only.

        Raises:
            ValueError: `name` is not lower-case letters, digits and underscores.
            StoreError: it cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a settings document")
        self._write_document(f"{SETTINGS}/{name}.yaml", value)

    def save_source(self, digest: str, data: bytes) -> None:
        """Keep the text of a source file, unless it is kept already, readable by its owner only.

        Args:
            digest: of what the file held.
            data: its text, without secrets.

        Raises:
            StoreError: it cannot be written.
        """
        name = f"{digest}.gz"
        with (
            self._writing("the sources of {}"),
            self._locked().make_folder(SOURCES, _PRIVATE_DIRECTORY) as folder,
        ):
            if name not in folder:
                folder.replace(name, [encode(data)], _PRIVATE_FILE, durable=self._durable)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn an OSError into StoreError `cannot write <what>`; `{}` in `what` stands for the run's path."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot write {what.format(self.path)}: {reason(error)}") from None

    def _locked(self) -> Folder:
        """The run's directory; first opened and locked again where the script closed its descriptor or the lock's."""
        folder = self._folder.reopen_if_closed()
        if isinstance(self._lock, Handle) and not self._lock.is_ours():
            self._lock.open_again(os.O_RDWR)
            take_lock(self._lock.fd)
        return folder

    def _write_document(self, name: str, value: object) -> None:
        """Write a document as the file `name` in the run, or into the log where several processes write the run.

        Raises:
            DocumentTooLargeError: it has over LIMIT_DOCUMENT bytes.
            StoreError: it cannot be written.
        """
        data = documents.dump(value, name, self.id)
        if len(data) > LIMIT_DOCUMENT:
            raise DocumentTooLargeError(f"cannot write {self.path}/{name}: it would be larger than a store allows")
        parent, _, file_name = name.rpartition("/")
        with self._writing(f"{{}}/{name}"):
            run = self._locked()
            if not isinstance(self._lock, Handle):
                self._lock.document(file_name.removesuffix(".yaml"), data)
                return
            with ExitStack() as stack:
                folder = stack.enter_context(run.make_folder(parent, _PRIVATE_DIRECTORY)) if parent else run
                folder.replace(file_name, [data], _PRIVATE_FILE, durable=self._durable)

    def save_tensor(self, checksum: int, array: memoryview, dtype: str, shape: tuple[int, ...]) -> int:
        """Store a tensor's data under its checksum, once; returns bytes written, 0 where it was stored already.

        Bytes written are added to `tensor_bytes`. One that could not be written is not tried again, and counts as
        stored: 0.

        Args:
            checksum: the tensor's.
            array: its elements, row-major.
            dtype: torch's name without the prefix.
            shape: its sizes.

        Raises:
            StoreError: it cannot be written.
        """
        if checksum in self._stored:
            return 0
        self._stored.add(checksum)
        name = f"{checksum:016x}.safetensors"
        with self._writing("a tensor to {}"):
            if self._tensors is None:
                self._tensors = self._locked().make_folder(TENSORS)
            if name in self._tensors.reopen_if_closed():
                return 0
            data = memoryview(array).cast("B")
            from introspect_cli.store.format import tensorfile

            head = tensorfile.encode(data, checksum, dtype, shape)
            written = self._tensors.replace(name, [head, data], 0o666, durable=self._durable)
        self.tensor_bytes += written
        return written

    def drop_tensors(self, checksums: Iterable[int]) -> None:
        """Delete tensors that this writer stored, by checksum, and lower `tensor_bytes`; they may be stored again.

        Tensors that it did not store, and those that cannot be deleted, stay.
        """
        for checksum in checksums:
            name = f"{checksum:016x}.safetensors"
            with suppress(OSError):
                if self._tensors is not None and checksum in self._stored:
                    size = os.stat(name, dir_fd=self._tensors.reopen_if_closed().fd).st_size
                    os.unlink(name, dir_fd=self._tensors.fd)
                    self._stored.remove(checksum)
                    self.tensor_bytes -= size

    def rank(self, rank: int, **kept: Any) -> RankWriter:
        """Make the log of a rank (one of several processes has it already) and open its writer, closed with the run.

        Args:
            rank: its number.
            kept: which columns it has, see `schemas.record_columns`.

        Raises:
            StoreError: the log cannot be written.
        """
        from introspect_cli.store.format.schemas import record_columns
        from introspect_cli.store.write.log_writer import LogWriter
        from introspect_cli.store.write.rank_writer import RankWriter

        schema, log = record_columns(**kept), self._lock
        with self._writing("to {}"):
            run = self._locked()
            if isinstance(log, Handle):
                log = LogWriter(run.make_folder(f"rank{rank}"), rank, bytes.fromhex(self.id), durable=self._durable)
        writer = RankWriter(log, schema, totals=log is self._lock)
        self._ranks.append((writer, log))
        return writer

    def abandon(self) -> None:
        """Close every descriptor without writing, as a forked child must."""
        ranks, self._ranks = self._ranks, []
        for _, log in ranks:
            log.abandon()
        self._release(abandoned=True)

    def close(self) -> None:
        """Close the ranks, each with an END frame, and release the lock; a second call does nothing.

        Raises:
            StoreError: an END frame could not be written; everything is closed all the same.
        """
        try:
            self._close_ranks()
        finally:
            self._release()

    def _close_ranks(self) -> None:
        """Close all rank writers, each with its END frame; errors are raised once all are closed."""
        ranks, self._ranks = self._ranks, []
        with ExitStack() as stack:
            for rank, log in ranks:
                if log is not self._lock:
                    stack.callback(log.close)
                stack.callback(rank.close)

    def _release(self, *, abandoned: bool = False) -> None:
        """Close tensors, directory and lock; a log that is the lock gets its file of heads, unless `abandoned`."""
        if self._tensors is not None:
            self._tensors.close()
        self._folder.close()
        if abandoned and not isinstance(self._lock, Handle):
            self._lock.abandon()
        else:
            self._lock.close()


def add_gitignore(runs: Path) -> None:
    """Put a `.gitignore` of `*` into the default directory of runs, where there is none and one can be written."""
    with suppress(OSError), (runs / ".gitignore").open("x", encoding="utf-8") as file:
        file.write("# made by introspect\n*\n")
