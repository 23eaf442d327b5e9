"""Record a fit of Lightning's: `Trainer(callbacks=[Introspect("runA")])`.

Modules are named from the LightningModule's class on, steps are those of the optimizers. Every rank records, into one
run. Scripts that can be run by `introspect capture train.py` need none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.integrations.window import Window

if TYPE_CHECKING:
    from pathlib import Path

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:
        raise UsageError("this callback needs Lightning: `pip install lightning`") from None


class Introspect(Callback):  # type: ignore[misc] # the base is untyped where Lightning is not installed
    """A callback that records from the beginning of a fit to its end, or to the error that ended it."""

    def __init__(self, path: str | Path, **options: Any) -> None:
        """Say where to record; nothing starts before the fit.

        `options` are those of `introspect capture`, as in `introspect_cli.api.capture`.
        """
        super().__init__()
        self._window = Window(path, options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to record; UsageError where another capture is running."""
        self._window.begin(pl_module, trainer.global_rank, trainer.world_size)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Stop recording."""
        self._window.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002 - as above
        """Stop recording, with the exception as what ended the run in its manifest."""
        self._window.end(exception)
