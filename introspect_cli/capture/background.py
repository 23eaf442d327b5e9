"""Processes of introspect beside the script's: one that only answers, and those that publish the run.

The script sees nothing of them. Such a process is no child of the script's (which may wait for its children), has one
descriptor to answer by, and stays when the script is interrupted. What it does costs training a processor at most:
nothing waits for it before the end.

A logger's client imports hundreds of modules, draws from python's random generator, talks to servers that hang. A
thread that did so would share all that with training. So `introspect publish` reads the run as it is written, from
outside, in such a process.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.processes import VARIABLE
from introspect_cli.capture.steps.labels import TRAINERS, running_self
from introspect_cli.store.files.handles import Handle
from introspect_cli.store.remote.objects import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from introspect_cli.capture.guard import Guard


MAX_OUTPUT = 1 << 16
_SHELL = "/bin/sh"
_BEGIN = "import sys; sys.path[:] = [path for path in sys.path if path]; from {} import main; main()"
"""Runs a module's `main`; no file in the current directory is imported in a library's place."""


class BackgroundProcess:
    """A process of introspect beside the script, not its child, that reads the run's directory.

    Attributes:
        patience: seconds to wait for it at the end of a script.
    """

    patience = 30.0

    def __init__(self, module: str, words: Sequence[str], name: str, *, errors: bool = True) -> None:
        """Start the process; nothing waits for it, and it outlives an interrupt of the script.

        Its stdin is empty, its stdout is read by `read` and `rest`, and it is not captured itself.

        Args:
            module: of introspect, whose `main` it runs.
            words: its command line.
            name: what messages call it.
            errors: True if what it writes to stderr is read as its answer, too; False if that goes to the script's
                stderr.

        Raises:
            OSError: it cannot be started.
        """
        receive, answer = os.pipe()
        self._answer = Handle(receive, name)
        os.set_blocking(self._answer.fd, False)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, answer, 1)]
        actions += [(os.POSIX_SPAWN_DUP2, answer, 2)] if errors else []
        try:
            # The shell ends at once, and what it has started in the background is nobody's child any more.
            command = [sys.executable, "-c", _BEGIN.format(module), *words]
            shell = [_SHELL, "-c", 'trap "" INT HUP; "$@" &', _SHELL, *command]
            pid = os.posix_spawn(_SHELL, shell, environment, file_actions=actions, setpgroup=0)
            os.waitpid(pid, 0)
        finally:
            os.close(answer)

    def read(self) -> bytes:
        """At most 64 KiB of the output that has not been read yet, without waiting.

        Empty where there is none, and where the script has closed the descriptor.
        """
        if not self._answer.is_ours():
            return b""
        with suppress(OSError):  # BlockingIOError: it has nothing to say
            return os.read(self._answer.fd, MAX_OUTPUT)
        return b""

    def rest(self, patience: float) -> tuple[bytes, bool]:
        """Wait at most `patience` seconds for the process to end, then close its descriptor.

        Returns:
            the last 64 KiB of the output not read yet; and whether the process has ended, or reading failed. Empty and
            False where the script had closed the descriptor before.
        """
        said, until, ended = b"", time.monotonic() + patience, False
        try:
            while self._answer.is_ours() and not ended:
                waits = select.poll()  # select() takes no descriptor above 1023, and a script may have opened as many
                waits.register(self._answer.fd, select.POLLIN)
                if not waits.poll(max(until - time.monotonic(), 0) * 1000):
                    break
                piece = os.read(self._answer.fd, MAX_OUTPUT)
                said, ended = (said + piece)[-MAX_OUTPUT:], not piece
        except OSError:  # the script closed what was not its own
            ended = True
        finally:
            self.abandon()
        return said, ended

    def abandon(self) -> None:
        """Close the descriptor that it answers by; the process itself goes on."""
        with suppress(OSError):
            self._answer.close()


UNPUBLISHED = " was not published to "
"""Words in the sentence on a place that failed."""

LOGGER = "logger"
"""Place that means the loggers of Lightning's or transformers' Trainer."""


class Publishers:
    """Processes that publish one run: to named places, and to the loggers of the script's framework."""

    def __init__(self, path: Path, places: Sequence[str], guard: Guard, rank: int | None = None) -> None:
        """Start to publish to all places but `logger`, which has to wait for the first step (`publish_to_loggers`).

        Args:
            path: the run's directory.
            places: as given to `--publish`.
            guard: catches failures.
            rank: this process's; above 0 only remote storage is published to. None for a run of one process.
        """
        self._path = path
        self._rank = rank
        if rank:
            places = [place for place in places if is_remote(place)]
        self._guard = guard
        self._waits_for_logger = LOGGER in places
        self._running: list[tuple[list[str], BackgroundProcess]] = []
        self._start([place for place in places if place != LOGGER])

    def _start(self, places: list[str]) -> None:
        """Start one process that publishes to all `places`; nothing where there are none. A failure is only noted."""
        if places:
            of_rank = () if self._rank is None else ("--rank", str(self._rank))
            with self._guard.around("publishing", "the run is"):
                words = ["publish", str(self._path), *places, *of_rank]
                self._running.append((places, BackgroundProcess("introspect_cli.cli", words, "what publishes")))

    def publish_to_loggers(self, say: Callable[[str], None]) -> None:
        """Start publishing to the framework's loggers, if `--publish logger` was given; call after the first step.

        Where no logger is found, `say` is given a sentence on that.
        """
        if not self._waits_for_logger:
            return
        with self._guard.around("publishing", "the run is"):
            places = logger_places()
            self._start(places)
            if not places:
                say("--publish logger: neither Lightning nor transformers' Trainer logs to anything known")

    def finish(self) -> list[str]:
        """Wait at most 30 seconds for each process in turn; returns sentences on what was published and what not."""
        said: list[str] = []
        with self._guard.around("publishing", "the end of the run is"):
            for places, process in self._running:
                said += _outcome_sentences(places, *process.rest(process.patience))
        return said

    def abandon(self) -> None:
        """Close the descriptors of all processes, in a forked child."""
        for _, process in self._running:
            process.abandon()


def _outcome_sentences(places: list[str], said: bytes, ended: bool) -> list[str]:
    """Sentences on what one process has published, or one that it still runs.

    Args:
        places: where to.
        said: its output; lines on what was or was not published count, else its last line.
        ended: whether it has.
    """
    if not ended:
        return [f"still publishing to {', '.join(places)}, in the background"]
    lines = [line.removeprefix("introspect: ") for line in said.decode("utf-8", "replace").splitlines()]
    results = [line for line in lines if line.startswith("published ") or UNPUBLISHED in line]
    return results or [f"nothing was published: {lines[-1]}" if lines else "nothing was published"]


def logger_places() -> list[str]:
    """Places that the running Lightning or transformers trainer logs to, as `tensorboard:DIR`, `wandb:PROJECT@RUN`.

    Each once; [] without a trainer or a logger of TensorBoard, MLflow or Weights & Biases. What is published joins the
    run that the framework's own logger has begun: another event file in TensorBoard's directory, more metrics in
    MLflow's run. A run of Weights & Biases is written by one process, so there it is another run in the same project,
    grouped with the first.
    """
    places: list[str] = []
    for modules, function, _ in TRAINERS:
        trainer = running_self(modules, function)
        if trainer is not None:
            handler = getattr(trainer, "callback_handler", None)
            for logger in getattr(trainer, "loggers", None) or getattr(handler, "callbacks", None) or ():
                place = _place_of(logger)
                if place and place not in places:
                    places.append(place)
    return places


def _place_of(logger: Any) -> str:
    """The place that a logger of Lightning's, or a callback of the Trainer's, logs to.

    "" for any other, and for one of TensorBoard or MLflow that has no run yet; `wandb` for Weights & Biases without a
    run.
    """
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
