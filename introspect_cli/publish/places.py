"""Where a run can be published to, as people write it: a logger, a directory, or a URL that fsspec opens.

A directory gets the numbers as JSON lines, the page and the packed run; a URL the run itself, which every verb reads.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.publish.loggers import MLflow, TensorBoard, WeightsAndBiases
from introspect_cli.publish.send import Sender
from introspect_cli.store.objects import RefusedError, is_remote
from introspect_cli.store.pack import ENDING
from introspect_cli.texts import human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between tries, once the run is over."""


class Place(Protocol):
    """Takes what is published."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def keep(self, file: Path) -> None:
        """Take a file: the page, the packed run."""

    def close(self) -> str:
        """Let everything reach its place; where it can be looked at, in words."""


NUMBERS = "metrics.jsonl"


class Directory:
    """A directory below which each run has one of its own."""

    def __init__(self, path: str, name: str) -> None:
        """Begin a directory of the run's name below another."""
        self.path = Path(path) / name
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = (self.path / NUMBERS).open("w", encoding="utf-8")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append a line with the numbers of a step; those that are not finite are left out of JSON as text."""
        plain = {name: value if abs(value) < float("inf") else str(value) for name, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **plain}) + "\n")
        self._file.flush()

    def keep(self, file: Path) -> None:
        """Copy a file, all at once."""
        fresh = self.path / f".{file.name}"
        shutil.copyfile(file, fresh)
        fresh.replace(self.path / file.name)

    def close(self) -> str:
        """Close the numbers."""
        self._file.close()
        return str(self.path)


class Remote:
    """The run itself in object storage, with its numbers and page beside it."""

    def __init__(self, url: str, run: str, name: str, rank: int | None = None, *, sources: bool = False) -> None:
        """Find the place.

        Args:
            url: such as `s3://bucket/runs`.
            run: its directory.
            name: of the run.
            rank: which rank of a launch; all, where it is None.
            sources: whether the text of source files goes with it.

        Raises:
            StoreError: it cannot be reached.
        """
        if not Path(run).is_dir():
            raise StoreError(f"{run} is no directory of a run: name one that `introspect capture -o` made")
        self._text, self._run = url, run
        self._sender = Sender(Path(run), f"{url.rstrip('/')}/{name}", rank, sources=sources)
        self._local = tempfile.TemporaryDirectory(prefix="introspect-publish-")
        self._directory = Directory(self._local.name, name) if not rank else None
        self._numbers = ""
        self._files: dict[str, bytes] = {}
        self._began = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step for the next round."""
        if self._directory is not None:
            self._directory.log(step, numbers)

    def keep(self, file: Path) -> None:
        """Have the page sent with the last round; the run itself needs no pack."""
        if not file.name.endswith(ENDING):
            self._files[file.name] = file.read_bytes()

    def look(self) -> None:
        """Send what is new, if it is time. What fails is sent in a later round.

        Raises:
            RefusedError: storage will not have it.
        """
        if self._sender.is_due():
            try:
                self._send()
                self._began = True
            except RefusedError:
                if not self._began:
                    raise
            except StoreError:
                pass  # it is tried again

    def _send(self) -> None:
        self._sender.send()
        if self._directory is not None:
            self._files[NUMBERS] = (self._directory.path / NUMBERS).read_bytes()
        for name, data in self._files.items():
            self._sender.storage.put(name, data)

    def close(self) -> str:
        """Send what is left, trying again for a while.

        Raises:
            StoreError: not all was sent.
        """
        try:
            for pause in (0.0, *PAUSES):
                time.sleep(pause)
                try:
                    self._send()
                except StoreError as error:
                    failed = error
                    if isinstance(error, RefusedError):
                        break
                else:
                    return self._sender.storage.url
            much = f"{human_size(left)} of" if (left := self._sender.waiting) else "not all of"
            again = f"`introspect publish {self._run} {self._text}` sends the rest"
            raise StoreError(f"{much} {self._run} {'were not' if left else 'was'} sent: {failed}; {again}")
        finally:
            if self._directory is not None:
                self._directory.close()
            self._local.cleanup()


LOGGERS: dict[str, Callable[[str, str], Place]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
"""Loggers by name, each opened with what follows the colon and the run's name. Anything else is a directory or URL."""


def open_place(text: str, run: str, name: str, rank: int | None = None, *, sources: bool = False) -> Place:
    """The place that a text means.

    Args:
        text: `mlflow`, `mlflow:RUN_ID`, `tensorboard:DIR`, `wandb:PROJECT`, a directory, or a URL.
        run: the run's directory.
        name: of the run, for loggers that name theirs.
        rank: of a launch, which process's run this is; None for all.
        sources: whether the text of source files may go to a URL.

    Raises:
        UsageError: its package is not installed.
    """
    word, _, rest = text.partition(":")
    try:
        if word in LOGGERS:
            return LOGGERS[word](rest, name)
        return Remote(text, run, name, rank, sources=sources) if is_remote(text) else Directory(text, name)
    except ImportError:
        raise UsageError(f"publishing to {word} needs {word}: `pip install {word}`") from None
