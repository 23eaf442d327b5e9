"""Where a run can be published to, as people write it: a logger, a directory, or a URL that fsspec opens.

A directory gets the numbers as JSON lines, the page and the packed run.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from introspect_cli.errors import UsageError
from introspect_cli.publish.loggers import MLflow, TensorBoard, WeightsAndBiases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_URL = re.compile(r"[a-z][a-z0-9+]{1,15}://")


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
        """Begin a run's directory.

        Args:
            path: the directory.
            name: of the run.
        """
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
    """The same somewhere else; what is new is sent when the run pauses or ends, since objects cannot be appended to."""

    def __init__(self, url: str, name: str) -> None:
        """Begin a run's place.

        Args:
            url: such as `s3://bucket/runs`.
            name: of the run.
        """
        import fsspec

        self._url = f"{url.rstrip('/')}/{name}"
        self._system, self._root = fsspec.core.url_to_fs(self._url)
        self._system.makedirs(self._root, exist_ok=True)
        self._local = tempfile.TemporaryDirectory(prefix="introspect-publish-")
        self._directory = Directory(self._local.name, name)
        self._lines = self._sent = 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step, and send them all each time there are half as many again."""
        self._directory.log(step, numbers)
        self._lines += 1
        if self._lines > 1.5 * self._sent:
            self._sent = self._lines
            self.keep(self._directory.path / NUMBERS)

    def keep(self, file: Path) -> None:
        """Send a file."""
        self._system.put_file(str(file), f"{self._root}/{file.name}")

    def close(self) -> str:
        """Send what is left."""
        self._directory.close()
        self.keep(self._directory.path / NUMBERS)
        self._local.cleanup()
        return self._url


LOGGERS: dict[str, Callable[[str, str], Place]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
"""Loggers by name, each opened with what follows the colon and the run's name. Anything else is a directory or URL."""


def open_place(text: str, name: str) -> Place:
    """The place that a text means.

    Args:
        text: `mlflow`, `mlflow:RUN_ID`, `tensorboard:DIR`, `wandb:PROJECT`, a directory, or a URL.
        name: of the run, for loggers that name theirs.

    Raises:
        UsageError: its package is not installed.
    """
    word, _, rest = text.partition(":")
    needs = word
    try:
        if word in LOGGERS:
            return LOGGERS[word](rest, name)
        needs = "fsspec"
        return Remote(text, name) if _URL.match(text) else Directory(text, name)
    except ImportError:
        raise UsageError(f"publishing to {word} needs {needs}: `pip install {needs}`") from None
