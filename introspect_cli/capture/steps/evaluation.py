"""What a script trains, and whether what runs belongs to that or to an evaluation.

Trained are the modules whose parameters an optimizer holds, or that the script trains by hand. One loss module, one
loader class and one step clock serve training and evaluation, so an evaluation in the middle would shift the numbers of
training's calls, and the same training with and without it would look different. No single sign tells them apart: a
teacher runs without gradients inside training, an averaged copy of the model is in no optimizer, and a loader yields
its batch before anything shows what it is for. After an agent that acts without gradients, in training mode and on what
no loader gave, come the target networks of its loss. So the signs are put together: whether gradients are on, whether
an optimizer holds any of the module's parameters, whether the module is in train mode, which loader gave the last
batch, and what the call before was. What a loader gave is taken back when its batch turns out to be for evaluation.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from introspect_cli.capture.frames import outward
from introspect_cli.capture.naming.contents import modules_in, parameters_in, parameters_of
from introspect_cli.capture.naming.identity import ById
from introspect_cli.capture.ranks import zero
from introspect_cli.records import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.recording.recorder import Recorder
    from introspect_cli.capture.recording.sites import Row


class Trained:
    """Optimizers seen so far, and which modules they train."""

    def __init__(self) -> None:
        """Start with no optimizer."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped_with: ById[tuple[int, list[int], list[bool]]] = ById()
        self._parameters: set[int] | None = None
        self._roots: ById[bool] = ById()
        self._by_hand: ById[bool] = ById()
        self._versions: ById[tuple[int, int]] = ById()
        self._threads: ById[int] = ById()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer, which is referred to weakly, and drop the cached answers of `is_trained`."""
        self._optimizers = [reference for reference in self._optimizers if reference() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self.forget_answers()

    def forget_answers(self) -> None:
        """Drop the cached answers of `is_trained`, since an optimizer may hold other parameters."""
        self._parameters = None
        self._roots.clear()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `add` was called with an optimizer."""
        return any(reference() is optimizer for reference in self._optimizers)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Live optimizers, in the order in which they were added."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def of_this_thread(self) -> list[torch.optim.Optimizer]:
        """Live optimizers whose last step was this thread's.

        A backward pass of another thread may be writing the gradients of its own, and torch does not guard `.grad`.
        """
        return [each for each in self.optimizers() if self._threads.get(each) == threading.get_ident()]

    def add_by_hand(self, module: nn.Module) -> None:
        """Count a module as trained from now on although no optimizer holds its parameters."""
        self._by_hand.set(module, True)

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer holds any parameter, of a module or below it, that requires a gradient.

        True also for a module that was given to `add_by_hand`. Cached, but for a module whose held parameters are all
        frozen.
        """
        is_trained = self._roots.get(module) or self._by_hand.get(module)
        if is_trained is None:
            held = [
                parameter
                for parameter in parameters_in(module)
                if id(parameter) in self._held_ids() or (zero.is_loaded() and zero.is_stepped(parameter))
            ]
            is_trained = any(parameter.requires_grad for parameter in held)
            if is_trained or not held:  # what is frozen may be set free later
                self._roots.set(module, is_trained)
        return is_trained

    def note_step(self, optimizer: torch.optim.Optimizer, named: int) -> None:
        """Note which thread steps an optimizer; drop cached answers if parameters, `requires_grad` or names changed.

        With ZeRO they are dropped at each step.

        Args:
            optimizer: what steps.
            named: how often names of parameters were given or taken back so far.
        """
        self._threads.set(optimizer, threading.get_ident())
        held = parameters_of(optimizer)
        now = named, list(map(id, held)), [parameter.requires_grad for parameter in held]
        if zero.is_loaded() or now != self._stepped_with.get(optimizer):
            self._stepped_with.set(optimizer, now)
            self.forget_answers()

    def is_new(self, module: nn.Module) -> bool:
        """Whether an optimizer of which no step was noted holds any of a module's parameters."""
        new = [optimizer for optimizer in self.optimizers() if self._stepped_with.get(optimizer) is None]
        held = {id(parameter) for optimizer in new for parameter in parameters_of(optimizer)}
        return any(id(parameter) in held for parameter in parameters_in(module))

    def _held_ids(self) -> set[int]:
        """`id` of every parameter that a live optimizer holds; cached."""
        if self._parameters is None:
            self._parameters = {id(parameter) for one in self.optimizers() for parameter in parameters_of(one)}
        return self._parameters

    def is_any_written(self) -> bool:
        """Whether the first parameter of any optimizer was written to in place since the last call; False at the first.

        A parameter that is another tensor now does not count.
        """
        written = False
        for optimizer in self.optimizers():
            if not optimizer.param_groups or not optimizer.param_groups[0]["params"]:
                continue
            parameter = optimizer.param_groups[0]["params"][0]
            before, now = self._versions.get(optimizer), (id(parameter), parameter._version)  # noqa: SLF001 - counts in-place writes
            self._versions.set(optimizer, now)
            written |= before is not None and before[0] == now[0] and before != now
        return written


_AVERAGE = "torch.optim.swa_utils.AveragedModel"


def _is_in_train_mode(module: nn.Module) -> bool:
    """Whether a module's `training` is True; False for one without it."""
    return bool(getattr(module, "training", False))


def _is_in_function() -> bool:
    """Whether any of the 100 innermost frames runs the forward of an `autograd.Function`.

    Known by the code of its frame: since torch 2.15 `apply` is not written in Python and leaves no frame.
    """
    kinds, codes = [torch.autograd.Function], set()
    while kinds:
        kind = kinds.pop()
        codes.add(getattr(kind.forward, "__code__", None))
        kinds += kind.__subclasses__()
    return any(frame.f_code in codes for frame, _ in zip(outward(sys._getframe(1)), range(MAX_FRAMES), strict=False))  # noqa: SLF001 - the documented way to a frame


MAX_FRAMES = 100


@dataclass
class Draw:
    """A batch drawn with gradients on, for a purpose not known yet.

    Attributes:
        loader: number of its loader.
        start: row of the step at which what it caused begins.
        began: whether the step began with it.
        rows: those that were taken back; None while they stand in the step.
    """

    loader: int
    start: int
    began: bool
    rows: list[Row] | None = None


class Evaluation:
    """Decides the phase of outermost calls, and moves batches of evaluations out of training."""

    def __init__(self, recorder: Recorder, *, wanted: bool) -> None:
        """Start with nothing trained and no loader; `wanted` says whether evaluation is recorded."""
        self._recorder = recorder
        self.wanted = wanted
        self.feeding: set[int] = set()
        """Numbers of the loaders that are known to feed training."""
        self._fed: set[int] = set()
        self._feeder = self._doubted = -1
        self._under_way = self._loss_is_due = self._acts = False
        self._draws: list[Draw] = []
        self._trained_classes: set[str] = set()
        self._early: ById[str] = ById()
        self.has_training = False
        """Whether anything has been trained or can be; a script that only runs a model evaluates nothing apart."""

    def note_batch(self, loader: int, *, start: int, began: bool) -> None:
        """Note a batch that was drawn, and its loader as the last one.

        One that is drawn without gradients is not kept for `take_back`; in a script that trains it begins an
        evaluation. One with gradients is kept, ends an evaluation if its loader feeds training, and drops those batches
        that `take_back` has taken out: they are not put back any more.

        Args:
            loader: number of its loader, -1 for an unknown one.
            start: how many rows the step had before it.
            began: whether the step began with it.
        """
        self._feeder = loader
        if not torch.is_grad_enabled():
            self._under_way = self.has_training
            return
        self._fed.add(loader)
        if loader in self.feeding:
            self._under_way = False
        self._draws = [draw for draw in self._draws if draw.rows is None]
        self._draws.append(Draw(loader, start, began))

    def note_training(self) -> None:
        """Note a backward pass or an optimizer step, which ends an evaluation under way.

        Loaders that gave a batch with gradients on since the last such note, and were dropped neither by `drop_batches`
        nor by `take_back`, feed training from now on. So does the loader on whose batch the last call with gradients
        was taken for an evaluation.
        """
        self.has_training = True
        self.feeding |= self._fed
        self.feeding |= {self._doubted} - {-1}  # what was taken for an evaluation is trained on
        self._fed.clear()
        self._under_way = self._loss_is_due = False
        self._doubted = -1

    def drop_batches(self) -> None:
        """Forget all batches drawn so far, since what ran was an evaluation, which is over; their rows stay.

        Their loaders do not feed training at the next `note_training`.
        """
        self._fed.clear()
        self._draws.clear()
        self._under_way = self._loss_is_due = False

    def end_step(self) -> None:
        """Forget the batches drawn in the step that has ended: their rows stay in it.

        Their loaders still come to feed training at the next `note_training`.
        """
        self._draws.clear()
        self._loss_is_due = False

    def phase(
        self, module: nn.Module, *, is_trained: bool, is_new: Callable[[nn.Module], bool], first_step: bool
    ) -> Phase:
        """FORWARD or EVAL for an outermost call outside of backward passes; the answer is remembered for later calls.

        FORWARD as long as nothing is trained, neither this module nor another. With gradients on, a call is EVAL only
        on a batch of a loader that feeds no training, while another does: of a trained module in eval mode whose
        optimizers have all stepped, or of any other module after a call that was EVAL. With gradients off, a trained
        module is EVAL, unless it is a target of the loss in train mode, or is run again inside an `autograd.Function`;
        any other is EVAL after a call that was, on such a batch in eval mode, or as a late copy.

        Args:
            module: what is called.
            is_trained: whether an optimizer holds any of its parameters.
            is_new: says of a module whether an optimizer that has not stepped yet holds any of its parameters.
            first_step: whether no step has ended yet.
        """
        is_copy = self._is_late_copy(module, is_trained=is_trained, first_step=first_step)
        if not self.has_training and not is_trained:
            return Phase.FORWARD
        elsewhere = bool(self.feeding) and self._feeder >= 0 and self._feeder not in self.feeding
        if torch.is_grad_enabled():
            evaluates = elsewhere and (
                (not _is_in_train_mode(module) and not is_new(module)) if is_trained else self._under_way
            )
            self._doubted = self._feeder if evaluates else -1
        elif is_trained:  # a target of the loss, where the script has begun to compute one
            evaluates = not (self._loss_is_due and _is_in_train_mode(module))
            evaluates &= elsewhere or not (_is_in_function() and all(map(_is_in_train_mode, modules_in(module))))
        else:
            # an acting model is in training mode and has parameters, unlike a loss module
            under_way = self._under_way and not (
                self._acts and _is_in_train_mode(module) and next(parameters_in(module), None) is not None
            )
            evaluates = under_way or (elsewhere and not _is_in_train_mode(module) and not self.feeding & self._fed)
            evaluates |= is_copy
        self._loss_is_due |= is_trained and torch.is_grad_enabled() and not evaluates
        self._acts = evaluates and not elsewhere and is_trained and _is_in_train_mode(module)
        self._under_way = evaluates
        return Phase.EVAL if evaluates else Phase.FORWARD

    def _is_late_copy(self, module: nn.Module, *, is_trained: bool, first_step: bool) -> bool:
        """Whether a module is an averaged copy: of a trained class, in eval mode, and not called in the first step.

        A teacher of the same class runs in the first step already. `AveragedModel` always is one. Remembers trained
        classes and what ran in the first step.
        """
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if is_trained:
            self._trained_classes.add(kind)
            return False
        if kind == _AVERAGE:
            return True
        if first_step and kind in self._trained_classes:
            self._early.set(module, kind)
        return kind in self._trained_classes and not _is_in_train_mode(module) and self._early.get(module) is None

    def take_back(self) -> tuple[list[Row], bool]:
        """Take the last loader's newest batches, with all rows after them, out of the step, before an evaluation.

        Back to the newest batch of another loader. What the last loader has given so far does not make it one that
        feeds training.

        Returns:
            the rows taken out now, in their order; and whether the step had begun with one of the batches.
        """
        began = False
        taken: list[Row] = []
        self._fed.discard(self._feeder)
        for draw in reversed(self._draws):
            if draw.loader != self._feeder:
                break
            if draw.rows is None:
                draw.rows = self._recorder.take_back(draw.start)
                taken = draw.rows + taken
                began |= draw.began
        return taken, began

    def give_back(self) -> bool:
        """Put batches that `take_back` took out back into the step, at its end, before a call that trains.

        Not where another batch has been drawn since. From then on no batch so far is taken back any more; the loaders
        of those put back feed training at the next `note_training`.

        Returns:
            whether the step began with one of those put back; False where none is.
        """
        began = False
        if all(draw.rows is not None for draw in self._draws):  # else another batch is the one in use
            for draw in self._draws:
                self._recorder.put(draw.rows or [])
                self._fed.add(draw.loader)
                began |= draw.began
        self._draws.clear()
        return began
