"""Room for a run, and the part of it that a process writes: nothing is lost that is no run, or is being written.

A run is a directory with a small manifest that never changes, and a directory for each rank. A rank writes inside
`rankK/` alone: its log, which has its documents and is its lock, whole tensors and texts of sources. Nobody waits for
anybody, and readers put the ranks together, see `run`.

Several processes may write one run, a rank each. Ranks start, end and die when they like, on machines that share a disk
or do not, and training may wait for none of them because of a capture. Each rank computes the same id from what its
launcher told it. Whoever comes first makes the directory and a manifest that names the launch; a file appears whole or
not at all, so it does not matter who that is. A launcher that restarts its processes begins another attempt, a run of
its own in `attemptN/`.

A capture must never overwrite what somebody may still need, share its directory with another capture, or be confused by
a script that changes its directory. The directory is made here and nowhere else, its log is locked while the process
lives, and everything is opened relative to the rank's descriptor.
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
    HEADS,
    LIMIT_DOCUMENT,
    LOG,
    MANIFEST,
    RANK_NAME,
    RUNS,
    SOURCES,
    TENSORS,
    Closing,
    Folder,
    any_lock_held,
    reason,
    take_lock,
)
from introspect_cli.store.frames import LogWriter
from introspect_cli.store.sources import encode
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.store.rank_writer import RankWriter


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
    if rank.is_dir() and any(rank.iterdir()):
        refuse_or_remove(rank, force=force)
    return rank


@contextmanager
def new_run(path: Path, launch: Launch, *, force: bool) -> Iterator[Path]:
    """Make the directory of a run of one process, locked for the block, at whose end it gets its manifest.

    Gives the path of the rank's directory, which is not made.

    Args:
        path: the run's directory.
        launch: the process.
        force: whether another run that is there is deleted.

    Raises:
        StoreError: another run is there (without `force`), or is being written or made.
    """
    refuse_or_remove(path, force=force)
    path.mkdir(parents=True, exist_ok=True)
    with Folder.at(str(path)) as folder:
        refuse_unless(take_lock(folder.fd) and not _entries(folder) and not is_moved(folder, path), path)
        yield path / f"rank{launch.rank}"
        _announce(folder, launch)


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
            with Folder.at(str(path)) as folder:
                _announce(folder, launch)
        else:
            refuse_or_remove(path, force=force, unless=lambda folder: is_ours(_launch_in(folder)))
    raise StoreError(f"{path} is being written by another launch; choose another directory")


def _launch_at(path: Path) -> tuple[str, ...] | None:
    """(id, job) of the launch at a path; () for any other run, directory or file, and for a manifest that is damaged.

    None for nothing, for an empty directory, and for one that another rank is removing.
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
    """Names in a run's directory, without the files that a killed process had not finished."""
    return [name for name in folder.names() if not name.startswith(f".{MANIFEST}.")]


def _launch_in(folder: Folder) -> tuple[str, ...]:
    """(id, job) of the launch whose directory this is; () where it is none, or its manifest is damaged."""
    try:
        manifest = documents.load(folder.read_file(MANIFEST, 1 << 16), f"{folder.path}/{MANIFEST}")
    except (FileNotFoundError, StoreError):
        return ()
    launch = manifest.get("launch") if isinstance(manifest, dict) else None
    return (str(manifest["id"]), str(launch.get("job"))) if isinstance(launch, dict) and "id" in manifest else ()


def _announce(folder: Folder, launch: Launch) -> None:
    """Write the manifest of a run, unless another rank has; that of one process names no launch."""
    tool = {"name": "introspect-cli", "version": __version__}
    manifest: dict[str, Any] = {"format": FORMAT, "id": launch.id, "tool": tool}
    if launch.job:
        manifest["launch"] = {"world_size": launch.world_size, "attempt": launch.attempt, "job": launch.job}
    with suppress(FileExistsError):
        folder.replace(MANIFEST, [documents.sealed(manifest)], new=True)


_RUN_FILES = re.compile(
    r"manifest\.json|sources|tensors|children|rank\d{1,6}|attempt\d{1,4}|\.manifest\.json\.\d+"
    r"|(log|heads)\.bin|divergence\.jsonl|collectives\.txt|\.(log|heads)\.bin\.\d+"
)


def refuse_or_remove(path: Path, *, force: bool, unless: Callable[[Folder], bool] = lambda _folder: False) -> None:
    """Delete the run at `path`, where there is one; what cannot be deleted stays under a temporary name.

    Nothing is done for a directory that is empty but for unfinished files, nor for a run that another process has just
    moved. The directory is locked meanwhile, so that of two captures started at once one is refused.

    Args:
        path: the run's directory.
        force: whether one that is there may go.
        unless: given the run's folder; where it returns True, nothing is done.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not path.exists():
            return  # something above it is a file, and making it will say so
        raise StoreError(f"{path} is a file; choose another directory") from None
    with folder:
        names = _entries(folder)
        if not names or is_moved(folder, path) or unless(folder):
            return  # another rank of this launch was quicker
        wrong = [f"holds {name!r}" for name in folder.names() if not _RUN_FILES.fullmatch(name)]
        if not ({MANIFEST, LOG}.intersection(names) or any(map(RANK_NAME.fullmatch, names))):
            wrong.append("has no manifest")
        if wrong:
            raise StoreError(f"{path} is not (only) a run: it {wrong[0]}; choose another directory")
        is_alone = take_lock(folder.fd)
        if is_moved(folder, path) or unless(folder):
            return  # as above
        refuse_unless(is_alone and not any_lock_held(folder), path)
        if not force:
            remedy = "choose another directory, or replace it (--force, force=True)"
            raise StoreError(f"{path} holds a run already; {remedy}")
        aside = path.with_name(f".{path.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def is_moved(folder: Folder, path: Path) -> bool:
    """Whether `path` is no longer the directory opened as `folder`, or no longer there."""
    try:
        return not os.path.samestat(os.fstat(folder.fd), path.stat())
    except FileNotFoundError:
        return True


def refuse_unless(unlocked: bool, path: Path) -> None:
    """Raise StoreError ("is being written by another capture") unless `unlocked`."""
    if not unlocked:
        raise StoreError(f"{path} is being written by another capture; choose another directory")


# --- run writer


_NAME = re.compile(r"[a-z0-9_]{1,64}")
_MANIFEST = MANIFEST.removesuffix(".json")


class StoreWriter(Closing):
    """A rank's directory of a run, locked for writing until closed: its log has what the process says of the run.

    Attributes:
        path: the directory, absolute.
        id: 32 hex digits that every log of the run repeats, so that files of two runs cannot be mixed up.
    """

    def __init__(self, path: Path, log: LogWriter, launch: Launch, *, durable: bool) -> None:
        """Keep what `create` has opened; use that to make a writer.

        Args:
            path: the rank's directory, absolute.
            log: its log.
            launch: this process's part of the run.
            durable: as `create` takes it.
        """
        self.path = path
        self.id = launch.id
        self._launch = launch
        self._durable = durable
        self._logs = [log]
        self._ranks: list[RankWriter] = []
        self._tensors: Folder | None = None
        self._stored: set[int] = set()

    @classmethod
    def create(
        cls, path: Path, *, force: bool = False, durable: bool = False, launch: Launch | None = None, rank: int = 0
    ) -> StoreWriter:
        """Make the directory of a new run, or of a rank of one, and lock it.

        Args:
            path: of the run; parents are made. An empty directory that is there is used.
            force: replace the run that is there.
            durable: force each step to disk before the next begins, so that a power cut loses none.
            launch: this process's part of the run, where several processes write one.
            rank: the lowest of the run, where one process writes it.

        Raises:
            StoreError: a run is there (without `force`), is being written, or something else is there; or the
                directory cannot be made.
        """
        path = Path(os.path.abspath(path))  # noqa: PTH100 -- `resolve` would follow the link it is about to replace
        if path.is_symlink():
            path = path.resolve()
        try:
            if path.parent.name == RUNS:
                path.parent.mkdir(parents=True, exist_ok=True)
                add_gitignore(path.parent)
            with ExitStack() as stack:
                if launch is None:
                    launch = Launch(os.urandom(16).hex(), "", rank, 1)
                    place = stack.enter_context(new_run(path, launch, force=force))
                else:
                    place = join_launch(path, launch, force=force)
                writer = cls(place, _new_log(place, launch.rank, launch.id, durable=durable), launch, durable=durable)
                try:
                    writer.write_manifest({"tool": {"name": "introspect", "version": __version__}, "status": "running"})
                except BaseException:
                    writer.abandon()
                    raise
        except OSError as error:
            raise StoreError(f"cannot make a run at {path}: {reason(error)}; choose another directory") from None
        return writer

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace what the process says of the run; `format` and `id` are the run's whatever `manifest` says.

        With the status `complete` the ranks are closed first: a manifest never says so of a run that could still be
        cut off.
        """
        if manifest.get("status") == "complete":
            self._close_ranks()
        always = {"format": FORMAT, "id": self.id}
        self._write_document(_MANIFEST, {**always, **manifest, **always})

    def write_settings(self, name: str, value: object) -> None:
        """Write (or replace) the settings document `name`.

        Raises:
            ValueError: `name` is not lower-case letters, digits and underscores.
            StoreError: it cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a settings document")
        self._write_document(name, value)

    def save_source(self, digest: str, data: bytes) -> None:
        """Keep the text of a source file, unless it is kept already.

        Args:
            digest: of what the file held.
            data: its text, without secrets.

        Raises:
            StoreError: it cannot be written.
        """
        name = f"{digest}.gz"
        with self._writing("the sources of {}"), self._folder().make_folder(SOURCES) as folder:
            if name not in folder:
                folder.replace(name, [encode(data)], durable=self._durable)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn an error into StoreError `cannot write <what>`; `{}` in `what` stands for the directory's path."""
        try:
            yield
        except (OSError, StoreError) as error:
            raise StoreError(f"cannot write {what.format(self.path)}: {reason(error)}") from None

    def _folder(self) -> Folder:
        """The rank's directory, first opened again where the script closed its descriptor."""
        return self._logs[0].folder.reopen_if_closed()

    def _write_document(self, name: str, value: object) -> None:
        """Write a document into the log.

        Raises:
            DocumentTooLargeError: it has over LIMIT_DOCUMENT bytes.
            StoreError: it cannot be written.
        """
        data = documents.dump(value)
        if len(data) > LIMIT_DOCUMENT:
            raise DocumentTooLargeError(f"cannot write {name} of {self.path}: it would be larger than a store allows")
        with self._writing(f"{name} of {{}}"):
            self._logs[0].document(name, data)

    def save_tensor(self, checksum: int, array: memoryview, dtype: str, shape: tuple[int, ...]) -> int:
        """Store a tensor's data under its checksum, once; returns bytes written, 0 where it was stored already.

        One that could not be written is not tried again, and counts as stored: 0.

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
        from introspect_cli.store import tensorfile

        name, data = f"{checksum:016x}.safetensors", memoryview(array).cast("B")
        with self._writing("a tensor to {}"):
            if self._tensors is None:
                self._tensors = self._folder().make_folder(TENSORS)
            if name in self._tensors.reopen_if_closed():
                return 0
            head = tensorfile.encode(data, checksum, dtype, shape)
            return self._tensors.replace(name, [head, data], durable=self._durable)

    def drop_tensors(self, checksums: Iterable[int]) -> None:
        """Delete tensors that this writer stored, by checksum; they may be stored again.

        Tensors that it did not store, and those that cannot be deleted, stay.
        """
        if self._tensors is None:
            return
        for checksum in self._stored.intersection(checksums):
            with suppress(OSError):
                os.unlink(f"{checksum:016x}.safetensors", dir_fd=self._tensors.reopen_if_closed().fd)
                self._stored.remove(checksum)

    def rank(self, rank: int, **kept: Any) -> RankWriter:
        """Open the writer of a rank's records, closed with the run; an import makes logs of further ranks so.

        Args:
            rank: its number.
            kept: which columns it has, see `columns.record_columns`.

        Raises:
            StoreError: the log cannot be written.
        """
        from introspect_cli.store.columns import record_columns
        from introspect_cli.store.rank_writer import RankWriter

        with self._writing("to {}"):
            if rank != self._launch.rank:
                place = self.path.with_name(f"rank{rank}")
                self._logs.append(_new_log(place, rank, self.id, durable=self._durable))
        log = next(log for log in self._logs if log.rank == rank)
        writer = RankWriter(log, record_columns(**kept))
        self._ranks.append(writer)
        return writer

    def abandon(self) -> None:
        """Close every descriptor without writing, as a forked child must."""
        self._ranks = []
        for log in self._logs:
            log.close()
        if self._tensors is not None:
            self._tensors.close()

    def close(self) -> None:
        """Close the ranks, each with an END frame, and release the lock; a second call does nothing.

        Raises:
            StoreError: an END frame could not be written; everything is closed all the same.
        """
        try:
            self._close_ranks()
        finally:
            for log in self._logs:
                _write_heads(log, durable=self._durable)
            self.abandon()

    def _close_ranks(self) -> None:
        """Close all rank writers, each with its END frame; errors are raised once all are closed."""
        ranks, self._ranks = self._ranks, []
        with ExitStack() as stack:
            for rank in ranks:
                stack.callback(rank.close)


_LEAST_CACHED = 256
"""Frames of a log whose heads are gone through in no time."""


def _write_heads(log: LogWriter, *, durable: bool) -> None:
    """Write the file of heads of a log with an END frame and `_LEAST_CACHED` frames or more, if it can be written."""
    if log.ended and log.written.frames >= _LEAST_CACHED:
        from introspect_cli.store.log import Frames

        with suppress(OSError, StoreError), log.folder.reopen_if_closed().file(LOG) as file:
            log.folder.replace(HEADS, [Frames(file, log.rank, file.path).encoded()], durable=durable)


def _new_log(place: Path, rank: int, run_id: str, *, durable: bool) -> LogWriter:
    """Make the log of a rank in the directory `place`, which is made, and lock it; StoreError where there is one."""
    place.mkdir(exist_ok=True)
    folder = Folder.at(str(place))
    try:
        return LogWriter(folder, rank, bytes.fromhex(run_id), durable=durable)
    except BaseException as error:
        folder.close()
        refuse_unless(not isinstance(error, FileExistsError), place.parent)
        raise


def add_gitignore(runs: Path) -> None:
    """Put a `.gitignore` of `*` into the default directory of runs, where there is none and one can be written."""
    with suppress(OSError), (runs / ".gitignore").open("x", encoding="utf-8") as file:
        file.write("# made by introspect\n*\n")
