"""Record a training of transformers' Trainer: `Trainer(..., callbacks=[Introspect("runA")])`.

Modules are named from the model's class on, steps are those of the optimizer. Every rank records, into one run. Trainer
does not tell callbacks of errors: a training that dies is recorded up to its last step, and the run is closed with the
process and the exception that ended it. Scripts that can be run by `introspect capture train.py` need none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.integrations.window import Window

if TYPE_CHECKING:
    from pathlib import Path

try:
    from transformers import TrainerCallback
except ImportError:
    raise UsageError("this callback needs transformers: `pip install transformers`") from None


class Introspect(TrainerCallback):  # type: ignore[misc] # the base is untyped where transformers is not installed
    """A callback that records from the beginning of a training to its end."""

    def __init__(self, path: str | Path, **options: Any) -> None:
        """Say where to record; nothing starts before the training.

        `options` are those of `introspect capture`, as in `introspect_cli.api.capture`.
        """
        self._window = Window(path, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - Trainer's signature
        """Start to record; UsageError where another capture is running."""
        self._window.begin(kwargs.get("model"), args.process_index, args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - Trainer's signature
        """Stop recording."""
        self._window.end()
