"""TensorBoard: an event file that grows, in the form that `introspect export` writes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.exchange.tensorboard import event, first_event, framed, scalar

if TYPE_CHECKING:
    from collections.abc import Mapping


class Events:
    """An event file; beside those of a logger it joins that logger's run."""

    def __init__(self, directory: str, name: str) -> None:
        """Begin a file.

        Args:
            directory: where; `runs/NAME` where it is empty.
            name: of the run.
        """
        self._directory = Path(directory or f"runs/{name}")
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time())}.introspect.{os.getpid()}.0"
        self._file = (self._directory / stem).open("wb")
        self._file.write(framed(first_event(time.time())))
        self._file.flush()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the numbers of a step."""
        values = [scalar(f"introspect/{name}", value) for name, value in numbers.items()]
        self._file.write(framed(event(step, values, time.time())))
        self._file.flush()

    def keep(self, file: Path) -> None:
        """TensorBoard shows no files."""

    def close(self) -> str:
        """Close the file."""
        self._file.close()
        return f"`tensorboard --logdir {self._directory}`"
