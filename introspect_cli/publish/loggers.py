"""Loggers that a run is published to, by their own clients, which are imported when they are asked for.

TensorBoard has no client but files, which are written in the form that `introspect export` writes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.exchange.tensorboard import event, first_event, framed, scalar

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES = str.maketrans(dict.fromkeys("[]'\"#(),@", "_"))
_MOST = 1000  # metrics of MLflow in one request


class TensorBoard:
    """An event file that grows; beside those of a logger it joins that logger's run."""

    def __init__(self, directory: str, name: str) -> None:
        """Begin a file in a directory; in `runs/NAME` where it is empty."""
        self._directory = Path(directory or f"runs/{name}")
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time())}.introspect.{os.getpid()}.0"
        self._file = (self._directory / stem).open("wb")
        self._write(first_event(time.time()))

    def _write(self, data: bytes) -> None:
        self._file.write(framed(data))
        self._file.flush()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the numbers of a step."""
        self._write(event(step, [scalar(f"introspect/{name}", value) for name, value in numbers.items()], time.time()))

    def keep(self, file: Path) -> None:
        """TensorBoard shows no files."""

    def close(self) -> str:
        """Close the file."""
        self._file.close()
        return f"`tensorboard --logdir {self._directory}`"


class MLflow:
    """A run of MLflow, begun here or by a logger; where it is tracked is up to `MLFLOW_TRACKING_URI`, as everywhere."""

    def __init__(self, run: str, name: str) -> None:
        """Begin a run, or join one.

        Args:
            run: id of the run to join, perhaps with its tracking URI behind an `@`; "" to begin one in the experiment
                that `MLFLOW_EXPERIMENT_NAME` names, or `introspect`.
            name: of a run that is begun.
        """
        from mlflow import MlflowClient

        self._run, _, uri = run.partition("@")
        self._client = MlflowClient(tracking_uri=uri or None)
        self._begun = not self._run
        if self._begun:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "introspect"
            existing = self._client.get_experiment_by_name(experiment)
            number = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
            self._run = self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(f"introspect/{name}".translate(_NAMES), value, now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MOST])

    def keep(self, file: Path) -> None:
        """Log a file as an artifact."""
        self._client.log_artifact(self._run, str(file), "introspect")

    def close(self) -> str:
        """End a run that was begun here."""
        if self._begun:
            self._client.set_terminated(self._run)
        return f"MLflow run {self._run}"


class WeightsAndBiases:
    """A run beside the script's, which no other process can write; online or offline as `WANDB_MODE` says."""

    def __init__(self, project: str, name: str) -> None:
        """Begin a run.

        Args:
            project: of the run, perhaps with the group behind an `@`; "" for `WANDB_PROJECT`, or `introspect`.
            name: of the run.
        """
        import wandb

        project, _, group = project.partition("@")
        self._artifact, self._name = wandb.Artifact, name
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or "introspect",
            name=name,
            group=group or None,
            job_type="introspect",
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._run.log({f"introspect/{name}": value for name, value in numbers.items()}, step=step)

    def keep(self, file: Path) -> None:
        """Log a file as an artifact."""
        artifact = self._artifact(f"{self._name}-{file.name}".replace("/", "-"), type="introspect")
        artifact.add_file(str(file), name=file.name)
        self._run.log_artifact(artifact)

    def close(self) -> str:
        """Finish the run."""
        place = self._run.url or self._run.dir
        self._run.finish()
        return f"Weights & Biases: {place}"
