"""MLflow, by its own client: a run of ours, or the run that a logger has begun."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mlflow import MlflowClient
from mlflow.entities import Metric

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAMES = str.maketrans(dict.fromkeys("[]'\"#(),@", "_"))
_MOST = 1000  # metrics in one request


class Experiment:
    """A run of MLflow; where it is tracked is up to `MLFLOW_TRACKING_URI`, as everywhere."""

    def __init__(self, run: str, name: str) -> None:
        """Begin a run, or join one.

        Args:
            run: id of the run to join, perhaps with its tracking URI behind an `@`; "" to begin one in the experiment
                that `MLFLOW_EXPERIMENT_NAME` names, or `introspect`.
            name: of a run that is begun.
        """
        self._run, _, uri = run.partition("@")
        self._client = MlflowClient(tracking_uri=uri or None)
        self._own = not self._run
        if self._own:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "introspect"
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self._run = self._client.create_run(number, run_name=name).info.run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        now = int(time.time() * 1000)
        metrics = [Metric(f"introspect/{name}".translate(_NAMES), own, now, step) for name, own in numbers.items()]
        for begin in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _MOST])

    def keep(self, file: Path) -> None:
        """Log a file as an artifact."""
        self._client.log_artifact(self._run, str(file), "introspect")

    def close(self) -> str:
        """End a run that was begun here."""
        if self._own:
            self._client.set_terminated(self._run)
        return f"MLflow run {self._run}"
