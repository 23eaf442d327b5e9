"""Room for a run, and the part of it that a process writes: nothing is lost that is no run, or is being written.

Several processes may write one run, a rank each. Ranks start, end and die when they like, on machines that share a disk
or do not, and training may wait for none of them because of a capture. Each rank computes the same id from what its
launcher told it. Whoever comes first makes the directory and a manifest that names the launch; a file appears whole or
not at all, so it does not matter who that is. From then on a rank writes inside `rankK/` alone: its log, which has its
documents and is its lock, and whole tensors. Nobody waits for anybody, and readers put the ranks together, see `run`.

A launcher that restarts its processes begins another attempt, a run of its own in `attemptN/`.

`StoreWriter` is the directory, its lock, its documents and tensors, and a writer for each rank. A capture must never
overwrite what somebody may still need, share its directory with another capture, or be confused by a script that
changes its directory. The directory is made here and nowhere else, a lock is held on it while the process lives, and
everything is opened relative to its descriptor.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import DocumentTooLargeError, StoreError
from introspect_cli.store import documents
from introspect_cli.store.files import (
    FORMAT,
    LABEL,
    LIMIT_DOCUMENT,
    LOCK,
    LOG,
    MANIFEST,
    RUNS,
    SETTINGS,
    SOURCES,
    TENSORS,
    Closing,
    Folder,
    Handle,
    any_lock_held,
    is_locked,
    reason,
    take_lock,
)
from introspect_cli.store.sources import encode
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.store.rank_writer import LogWriter, RankWriter


_ATTEMPTS = 50

IN_FLIGHT = "collectives.txt"
"""A rank's file of the collectives that began in the step under way; gone once the rank has ended."""


@dataclass(frozen=True)
class Launch:
    """Identity of this process among those that write one run.

    Attributes:
        id: 32 hex digits, the same on every rank and of no other launch or attempt.
        job: the same for all attempts of a launch.
        rank: number of this process.
        world_size: number of ranks.
        attempt: number of restarts by the launcher.
        local_rank: number of this process on its machine; None where the launcher does not say.
    """

    id: str
    job: str
    rank: int
    world_size: int
    attempt: int = 0
    local_rank: int | None = None


def join_launch(path: Path, launch: Launch, *, force: bool) -> Path:
    """Make or find the directory of a launch, and return the path of this rank's directory in it, which is not made.

    A further attempt has a directory `attemptN` in that of the first.

    Args:
        path: the run's directory.
        launch: this process's part.
        force: whether another run that is there, or what this rank has written there, is deleted.

    Raises:
        StoreError: another run is there, or this rank has been written already.
    """
    if launch.attempt:
        _join(path, launch, force=force, first_attempt=True)
        path = path / f"attempt{launch.attempt}"
        path.mkdir(exist_ok=True)
    _join(path, launch, force=force)
    rank = path / f"rank{launch.rank}"
    if rank.is_dir() and any(name != LOCK for name in os.listdir(rank)):  # noqa: PTH208 -- names alone
        refuse_or_remove(rank, force=force)
    return rank


def _join(path: Path, launch: Launch, *, force: bool, first_attempt: bool = False) -> None:
    """Make `path` the directory of this launch, or find that it is.

    Args:
        path: the directory.
        launch: this process's part.
        force: whether another run that is there is removed.
        first_attempt: whether it is that of the launch's first attempt, which has the same job and another id.

    Raises:
        StoreError: another run is there (without `force`), or is being written.
    """

    def is_ours(ids: tuple[str, ...]) -> bool:
        """Whether that is this launch, by its id and job."""
        return launch.job in ids and (first_attempt or launch.id in ids)

    for _ in range(_ATTEMPTS):
        ids = _launch_at(path)
        if ids is not None and is_ours(ids):
            return
        if ids is None:
            path.mkdir(parents=True, exist_ok=True)
            _announce(path, launch)
        else:
            refuse_or_remove(path, force=force, unless=lambda folder: is_ours(_launch_in(folder)))
    raise StoreError(f"{path} is being written by another launch; choose another directory")


def _launch_at(path: Path) -> tuple[str, ...] | None:
    """(id, job) of the launch at a path; () for any other run, directory or file, and for a manifest that is damaged.

    None for nothing, for a directory that is empty but for a lock file, and for one that another rank is removing.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return ()
    with folder:
        return _launch_in(folder) or (None if not _entries(folder) or is_moved(folder, path) else ())


def _entries(folder: Folder) -> list[str]:
    """Names in a run's directory, without what is there before anything is recorded: the lock, and unfinished files."""
    return [name for name in folder.names() if name != LOCK and not name.startswith(f".{MANIFEST}.")]


def _launch_in(folder: Folder) -> tuple[str, ...]:
    """(id, job) of the launch whose directory this is; () where it is none, or its manifest is damaged."""
    try:
        manifest = documents.load(folder.read_file(MANIFEST, 1 << 16), f"{folder.path}/{MANIFEST}")
    except (FileNotFoundError, StoreError):
        return ()
    launch = manifest.get("launch") if isinstance(manifest, dict) else None
    return (str(manifest["id"]), str(launch.get("job"))) if isinstance(launch, dict) and "id" in manifest else ()


def _announce(path: Path, launch: Launch) -> None:
    """Write the launch's manifest, unless another rank has."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "id": launch.id,
        "tool": {"name": "introspect-cli", "version": __version__},
        "launch": {"world_size": launch.world_size, "attempt": launch.attempt, "job": launch.job},
    }
    with Folder.at(str(path)) as folder, suppress(FileExistsError):
        folder.replace(MANIFEST, [documents.dump(manifest, MANIFEST, launch.id)], 0o600, new=True)


_RUN_FILES = re.compile(
    r"manifest\.yaml|settings|sources|tensors|children|label|\.lock|rank\d{1,6}|attempt\d{1,4}|\.manifest\.yaml\.\d+"
    r"|(log|heads)\.bin|divergence\.jsonl|collectives\.txt|\.(log|heads)\.bin\.\d+"
)


def remove_run(path: Path) -> None:
    """Delete a run, nothing where there is none; StoreError where it is being written or cannot be removed."""
    try:
        refuse_or_remove(path, force=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def write_label(path: str | Path, text: str) -> None:
    """Write the user's label of the run at `path`; "" removes it.

    Raises:
        StoreError: it is in object storage, no run, or cannot be written.
    """
    from introspect_cli.store.pack import open_store  # which a capture does without
    from introspect_cli.store.remote import is_remote

    if is_remote(path):
        raise StoreError(f"cannot label {path}: label the run where it was recorded, and publish it again")
    open_store(path).close()
    with Folder.at(str(path)) as folder:
        try:
            if text:
                folder.replace(LABEL, [text.encode()], 0o644)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(LABEL, dir_fd=folder.fd)
        except OSError as error:
            raise StoreError(f"cannot label {path}: {reason(error)}") from None


def refuse_or_remove(path: Path, *, force: bool, unless: Callable[[Folder], bool] = lambda _folder: False) -> None:
    """Delete the run at `path`, where there is one; what cannot be deleted stays under a temporary name.

    Args:
        path: the run's directory.
        force: whether one that is there may go.
        unless: given the run's folder; where it returns True, nothing is done.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    old = set_aside(path, force=force, unless=unless)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path, *, force: bool, unless: Callable[[Folder], bool] = lambda _folder: False) -> Path | None:
    """Move the run at `path` to a temporary name, which is returned; None where nothing is there, or it is to stay.

    Nothing is also a directory that is empty but for a lock file, and a run that another process has just moved. Its
    lock is held meanwhile, so that of two captures started at once one is refused.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if not path.exists():
            return None  # something above it is a file, and making it will say so
        raise StoreError(f"{path} is a file; choose another directory") from None
    with folder:
        names = folder.names()
        if not _entries(folder):  # the lock is what a capture killed at its very start leaves
            return None
        if is_moved(folder, path) or unless(folder):
            return None  # another rank of this launch was quicker
        unexpected = next((name for name in names if not _RUN_FILES.fullmatch(name)), None)
        if unexpected is not None or not {MANIFEST, LOCK, LOG}.intersection(names):
            what = f"holds {unexpected!r}" if unexpected is not None else "has no manifest"
            raise StoreError(f"{path} is not (only) a run: it {what}; choose another directory")
        try:
            lock = lock_file(folder)
        except FileNotFoundError:
            return None  # the directory is gone
        with lock:
            is_alone = take_lock(lock.fd)
            if is_moved(folder, path) or unless(folder):
                return None  # as above
            refuse_unless(is_alone and not is_locked(folder, LOG) and not any_lock_held(folder), path)
            if not force:
                raise StoreError(
                    f"{path} holds a run already; choose another directory, or replace it (--force, force=True)"
                )
            aside = path.with_name(f".{path.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
            path.rename(aside)
            return aside


def is_moved(folder: Folder, path: Path) -> bool:
    """Whether `path` is no longer the directory opened as `folder`, or no longer there."""
    try:
        return not os.path.samestat(os.fstat(folder.fd), path.stat())
    except FileNotFoundError:
        return True


def lock_file(folder: Folder) -> Handle:
    """Open the run's lock file, not locked yet; create it where there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return Handle(os.open(LOCK, flags, 0o666, dir_fd=folder.fd), f"{folder.path}/{LOCK}")


def refuse_unless(unlocked: bool, path: Path) -> None:
    """Raise StoreError ("is being written by another capture") unless `unlocked`."""
    if not unlocked:
        raise StoreError(f"{path} is being written by another capture; choose another directory")


# --- run writer


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
                from introspect_cli.store.rank_writer import LogWriter

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
            from introspect_cli.store import tensorfile

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
            kept: which columns it has, see `columns.record_columns`.

        Raises:
            StoreError: the log cannot be written.
        """
        from introspect_cli.store.columns import record_columns
        from introspect_cli.store.rank_writer import LogWriter, RankWriter

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
