"""Start what publishes a run, in a process of its own, and hear at the end what came of it.

A logger's client imports hundreds of modules, draws from python's random generator, talks to servers that hang. A
thread that did so would share all that with training. `introspect publish` reads the run as it is written, from
outside; here it is started so that the script sees nothing: it is no child of the script's process (which may wait for
its children), has one descriptor to answer by, and stays when the script is interrupted.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.labels import TRAINERS, running
from introspect_cli.store.files import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


PATIENCE = 30.0
"""Seconds to wait at the end of a script for what is not published yet."""

LOGGER = "logger"
"""Stands for whatever Lightning or transformers' Trainer log to."""

_SHELL = "/bin/sh"
_FOLLOWED = "INTROSPECT_FOLLOW"
_BEGIN = "import sys; sys.path[:] = [own for own in sys.path if own]; from introspect_cli.cli import main; main()"
"""As `python -m introspect_cli` does, but that no file beside the script is taken for a module of a logger's client."""


class Publishing:
    """A process that publishes a run."""

    def __init__(self, path: Path, places: Sequence[str]) -> None:
        """Start it.

        Args:
            path: the run, which is being written.
            places: where to.

        Raises:
            OSError: it cannot be started.
        """
        self.places = tuple(places)
        receive, answer = os.pipe()
        self._answer = Handle(receive, "what publishes")
        command = [sys.executable, "-c", _BEGIN, "publish", str(path), *places]
        environment = {name: value for name, value in os.environ.items() if name != _FOLLOWED}
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, answer, 1),
            (os.POSIX_SPAWN_DUP2, answer, 2),
        ]
        try:
            # The shell ends at once, and what it has started in the background is nobody's child any more.
            shell = [_SHELL, "-c", 'trap "" INT HUP; "$@" &', _SHELL, *command]
            pid = os.posix_spawn(_SHELL, shell, environment, file_actions=actions, setpgroup=0)
            os.waitpid(pid, 0)
        finally:
            os.close(answer)

    def finish(self, patience: float = PATIENCE) -> list[str]:
        """Wait for its end, for a while; what came of it, in sentences."""
        said, until = b"", time.monotonic() + patience
        descriptor = self._answer.fd
        try:
            while True:
                ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
                if not ready:
                    return [f"still publishing to {', '.join(self.places)}, in the background"]
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    break
                said = (said + piece)[-(1 << 16) :]
        except OSError:  # the script closed what was not its own
            return []
        finally:
            with suppress(OSError):
                self._answer.close()
        lines = [line.removeprefix("introspect: ") for line in said.decode("utf-8", "replace").splitlines()]
        told = [line for line in lines if line.startswith("published ") or " not published " in line]
        return told or [f"nothing was published: {lines[-1]}" if lines else "nothing was published"]

    def abandon(self) -> None:
        """Forget it, in a forked child."""
        self._answer.close()


def logger_places() -> list[str]:
    """Where the trainer of a script logs to, as places to publish to; none where no trainer runs, or none is known.

    What is published joins the run that the framework's own logger has begun: another event file in TensorBoard's
    directory, more metrics in MLflow's run. A run of Weights & Biases is written by one process, so there it is a run
    beside, in the same project and grouped with the other.
    """
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
