"""What the framework that trains calls the current step: Lightning, transformers, accelerate.

A script is run as its author wrote it, so it has no callback of introspect, and importing a framework before the script
does could change what the script does. So nothing is imported and nothing is replaced: where the script has imported a
framework, the frames below a forward pass hold its trainer, whose attributes are read. Only a frame without tensors is
looked into: Python before 3.13 keeps what was looked at alive as long as the frame.

When a step ends, a framework may have counted it already, or not yet. While the model runs, its numbers are those that
the script itself would print there. So they are read at each forward pass of training, and a step of several batches
has the first and the last of them.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.frames import outward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from introspect_cli.capture.guard import Guard
    from introspect_cli.labels import Label


Facts = dict[str, "Label"]


def running_self(modules: tuple[str, ...], function: str) -> Any:
    """`self` of the innermost call of a method that runs in this thread; None where none does.

    Args:
        modules: names of modules, any of which may define it (one code is in several distributions).
        function: the method's name.
    """
    if not any(name in sys.modules for name in modules):
        return None
    for frame in outward(sys._getframe(1)):  # noqa: SLF001 - the frames are what is asked for
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") in modules:
            return frame.f_locals.get("self")
    return None


def lightning(owner: Any) -> Facts:
    """Labels from a Lightning Trainer: its stage and, in training, global step, epoch and batch."""
    stage = getattr(getattr(owner, "state", None), "stage", None)
    name = str(getattr(stage, "value", stage))
    labels: Facts = {"framework": "lightning", "stage": name}
    if name == "train":
        labels |= {"global_step": int(owner.global_step), "epoch": int(owner.current_epoch)}
        labels["batch"] = int(owner.fit_loop.batch_idx)
    return labels


def transformers(owner: Any) -> Facts:
    """Labels from a transformers Trainer: global step, epoch, batch, and `accumulation` above 1.

    With a loader of known length, `epoch` is whole and `batch` a number or (first, last); else `epoch` may be a
    fraction.
    """
    state, arguments = owner.state, owner.args
    labels: Facts = {"framework": "transformers", "global_step": int(state.global_step)}
    accumulation = int(arguments.gradient_accumulation_steps)
    if state.epoch is not None:
        epoch = float(state.epoch)
        labels["epoch"] = int(epoch + 1e-9)
        length = _length(getattr(owner.callback_handler, "train_dataloader", None))
        if length:
            first = round((epoch - int(epoch + 1e-9)) * length)
            last = min(first + accumulation, length) - 1
            labels["batch"] = (first, last) if last > first else first
        elif epoch != int(epoch):
            labels["epoch"] = round(epoch, 6)
    if accumulation > 1:
        labels["accumulation"] = accumulation
    return labels


def _length(loader: Any) -> int:
    """Number of batches that a loader has in an epoch; 0 for one without a length, or None."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


def accelerate(state: Mapping[str, Any]) -> Facts:
    """Labels from accelerate's shared `GradientState`: epoch of the loader in use, and steps accumulated, if above 1.

    {} where it has neither.
    """
    labels: Facts = {}
    references = state.get("_dataloader_references_ref") or state.get("dataloader_references") or [None]
    loader = references[-1]() if isinstance(references[-1], weakref.ref) else references[-1]
    epoch = getattr(loader, "iteration", None)
    if type(epoch) is int:
        labels["epoch"] = epoch
    accumulation = (state.get("plugin_kwargs") or {}).get("num_steps", 1)
    if type(accumulation) is int and accumulation > 1:
        labels["accumulation"] = accumulation
    return {"framework": "accelerate", **labels} if labels else labels


TRAINERS: tuple[tuple[tuple[str, ...], str, Callable[[Any], Facts]], ...] = (
    (("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"), "_run_stage", lightning),
    (("transformers.trainer",), "train", transformers),
)
"""Frameworks with a trainer: the method that all of a training runs in, and what reads the labels of its object."""

_ACCELERATE = "accelerate.state"
_HOMES = (_ACCELERATE, *(name for modules, _, _ in TRAINERS for name in modules))


def current_labels() -> Facts:
    """Labels that the running framework has for the step now; {} where no known framework trains.

    A trainer of Lightning or transformers counts before accelerate.
    """
    if sys.modules.keys().isdisjoint(_HOMES):
        return {}
    for modules, function, read in TRAINERS:
        trainer = running_self(modules, function)
        if trainer is not None:
            return read(trainer)
    module = sys.modules.get(_ACCELERATE)
    shared = getattr(getattr(module, "GradientState", None), "_shared_state", None)
    return accelerate(shared) if isinstance(shared, dict) and shared else {}


class StepLabels:
    """Labels of the step that runs."""

    def __init__(self, guard: Guard) -> None:
        """Start without labels; `guard` catches failures of reading them."""
        self._guarded = guard.around("labels", "the framework's own step numbers are")
        self._guarded.on = True
        self._first: Facts = {}
        self._last: Facts = {}

    def read(self) -> None:
        """Ask the framework for the labels now, before a forward or backward pass of training.

        Nothing after a failure, or where the framework has none.
        """
        if not self._guarded.on:
            return
        with self._guarded:
            labels = current_labels()
            if labels:
                self._first = self._first or labels
                self._last = labels

    def take(self) -> Facts:
        """Labels of the ended step, those read first; forgets them.

        `batch` is (first, last) where several passes of one epoch had different batches.
        """
        first, last = self._first, self._last
        self._first = self._last = {}
        labels = dict(first)
        one, two = first.get("batch"), last.get("batch")
        if one != two and first.get("epoch") == last.get("epoch") and isinstance(one, int) and isinstance(two, int):
            labels["batch"] = (one, two)
        return labels
