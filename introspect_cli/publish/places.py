"""Where a run can be published to, as people write it: a logger, or a URL that fsspec opens.

A URL gets the run itself, which every verb reads. Loggers are written to by their own packages, which are imported
when they are asked for.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.publish.send import Sender
from introspect_cli.store.remote import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Place(Protocol):
    """A destination for a run's numbers, or for the run: a logger or a URL."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Publish the numbers of a step."""

    def close(self) -> str:
        """Finish publishing; returns in words where it can be looked at."""


class Remote:
    """A run uploaded to object storage while it is written."""

    def __init__(self, url: str, run: str, name: str, rank: int | None = None, *, sources: bool = False) -> None:
        """Open the storage; nothing is sent yet.

        Args:
            url: such as `s3://bucket/runs`.
            run: its directory.
            name: of the run.
            rank: which rank of a launch; None for all.
            sources: whether the text of source files goes with it.

        Raises:
            StoreError: it cannot be reached, or `run` is no directory.
        """
        if not Path(run).is_dir():
            raise StoreError(f"{run} is not a directory of a run: name one that `introspect capture -o` made")
        self._url, self._run = url, run
        self._sender = Sender(Path(run), f"{url.rstrip('/')}/{name}", rank, sources=sources)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Do nothing: the run itself has them."""

    def send_if_due(self) -> None:
        """Upload what is new, if the interval is over; what a failed upload did not send goes with the next."""
        with suppress(StoreError):
            if time.monotonic() >= self._sender.due:
                self._sender.send()

    def close(self) -> str:
        """Upload the rest, and wait for it; returns the URL.

        Raises:
            StoreError: not all was sent.
        """
        try:
            self._sender.send()
        except StoreError as error:
            again = f"`introspect publish {self._run} {self._url}` sends the rest"
            raise StoreError(f"not all of {self._run} was sent: {error}; {again}") from None
        return self._sender.storage.url


_MLFLOW_NAMES = str.maketrans(dict.fromkeys("[]'\"#(),@", "_"))
_MAX_METRICS = 1000
"""Metrics of MLflow in one request."""


class TensorBoard:
    """A TensorBoard event file; in the directory of another logger's events it is shown as part of that run."""

    def __init__(self, directory: str, name: str) -> None:
        """Create an event file in `directory` now; in `runs/NAME` where that is "".

        Raises:
            ImportError: TensorBoard, whose own messages are written, is not installed.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory = Path(directory or f"runs/{name}")
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time())}.introspect.{os.getpid()}.0"
        self._event, self._file = Event, RecordWriter((self._directory / stem).open("wb"))
        self._write(file_version="brain.Event:2")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the numbers of a step, as `introspect/NAME`."""
        with np.errstate(over="ignore"):
            plain = {name: float(np.float32(value)) for name, value in numbers.items()}
        values = [{"tag": f"introspect/{name}", "simple_value": value} for name, value in plain.items()]
        self._write(step=step, summary={"value": values})

    def _write(self, **fields: Any) -> None:
        """Append an event with these fields of its message and flush."""
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def close(self) -> str:
        """Close the event file; returns the command that shows it."""
        self._file.close()
        return f"`tensorboard --logdir {self._directory}`"


class MLflow:
    """A run of MLflow, begun here or by a logger; where it is tracked is up to `MLFLOW_TRACKING_URI`, as everywhere."""

    def __init__(self, run: str, name: str) -> None:
        """Begin a run now, or join one.

        Args:
            run: id of the run to join; "" to begin one in the experiment that `MLFLOW_EXPERIMENT_NAME` names, or
                `introspect`.
            name: of a run that is begun.
        """
        from mlflow import MlflowClient

        self._run, self._client, self._begun = run, MlflowClient(), not run
        if self._begun:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "introspect"
            existing = self._client.get_experiment_by_name(experiment)
            number = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
            self._run = self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, as `introspect/NAME`; characters that MLflow refuses become `_`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(f"introspect/{name}".translate(_MLFLOW_NAMES), value, now, step) for name, value in numbers.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MAX_METRICS])

    def close(self) -> str:
        """End the run if it was begun here; returns its id in words."""
        if self._begun:
            self._client.set_terminated(self._run)
        return f"MLflow run {self._run}"


class WeightsAndBiases:
    """A run of Weights & Biases beside the script's own; online or offline as `WANDB_MODE` says."""

    def __init__(self, project: str, name: str) -> None:
        """Begin a run now.

        Args:
            project: of the run; "" for `WANDB_PROJECT`, else `introspect`.
            name: of the run.
        """
        import wandb

        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or "introspect",
            name=name,
            job_type="introspect",
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step, as `introspect/NAME`."""
        self._run.log({f"introspect/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> str:
        """Finish the run, which waits until it is uploaded; returns in words its URL, or offline its directory."""
        place = self._run.url or self._run.dir
        self._run.finish()
        return f"Weights & Biases: {place}"


LOGGERS: dict[str, Callable[[str, str], Place]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}
"""Loggers by name, each opened with what follows the colon and the run's name. Anything else is a URL."""


def open_place(text: str, run: str, name: str, rank: int | None = None, *, sources: bool = False) -> Place:
    """Open the place to publish to that `text` names; what is not there is made.

    Args:
        text: `mlflow`, `mlflow:RUN_ID`, `tensorboard:DIR`, `wandb:PROJECT`, or a URL.
        run: the run's directory.
        name: of the run, for loggers that name theirs.
        rank: which rank of a launch is sent to a URL; None for all.
        sources: whether the text of source files may go to a URL.

    Raises:
        UsageError: its package is not installed, or it is neither a logger nor a URL.
        StoreError: the URL cannot be reached.
        Exception: whatever the package of a logger raises.
    """
    word, _, rest = text.partition(":")
    if word not in LOGGERS and not is_remote(text):
        raise UsageError(f"cannot publish to {text!r}: choose from {', '.join(LOGGERS)}, or give a URL")
    try:
        return LOGGERS[word](rest, name) if word in LOGGERS else Remote(text, run, name, rank, sources=sources)
    except ImportError:
        raise UsageError(f"publishing to {word} needs {word}: `pip install {word}`") from None
