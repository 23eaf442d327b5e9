"""Where the trainer of a script logs to, as places to publish to: `--publish logger`.

What is published joins the run that the framework's own logger has begun: another event file in TensorBoard's
directory, more metrics in MLflow's run. A run of Weights & Biases is written by one process, so there it is a run
beside, in the same project and grouped with the other.
"""

from __future__ import annotations

import sys
from typing import Any

from introspect_cli.capture.labels.frameworks import TRAINERS, running


def places() -> list[str]:
    """Places for `introspect publish`; none where no trainer runs, or it logs to nothing that is known."""
    found: list[str] = []
    for modules, function, _ in TRAINERS:
        trainer = running(modules, function)
        if trainer is not None:
            handler = getattr(trainer, "callback_handler", None)
            for logger in getattr(trainer, "loggers", None) or getattr(handler, "callbacks", None) or ():
                place = _place(logger)
                if place and place not in found:
                    found.append(place)
    return found


def _place(logger: Any) -> str:
    """The place that a logger of Lightning's, or a callback of the Trainer's, logs to; "" for any other."""
    names = {cls.__name__ for cls in type(logger).__mro__}
    if "TensorBoardLogger" in names:
        return f"tensorboard:{logger.log_dir}"
    if "TensorBoardCallback" in names and getattr(logger, "tb_writer", None) is not None:
        return f"tensorboard:{logger.tb_writer.log_dir}"
    if "MLFlowLogger" in names and logger.run_id:
        return f"mlflow:{logger.run_id}@{getattr(logger, '_tracking_uri', None) or ''}"
    if "MLflowCallback" in names:
        mlflow = sys.modules.get("mlflow")
        run = mlflow.active_run() if mlflow is not None else None
        return f"mlflow:{run.info.run_id}@{mlflow.get_tracking_uri()}" if mlflow is not None and run is not None else ""
    if "WandbLogger" in names or "WandbCallback" in names:
        run = getattr(sys.modules.get("wandb"), "run", None)
        return f"wandb:{run.project}@{run.id}" if run is not None else "wandb"
    return ""
