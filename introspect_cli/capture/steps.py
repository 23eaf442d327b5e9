"""When a step begins and ends, what it is for, and what the script's framework calls it."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture.frames import outward
from introspect_cli.capture.naming import ById, modules_in, parameters_in, parameters_of
from introspect_cli.capture.ranks import flat
from introspect_cli.records import Phase
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.naming import Names
    from introspect_cli.capture.ranks.flat import FlatParts
    from introspect_cli.capture.recording.recorder import Recorder
    from introspect_cli.capture.recording.rows import Row
    from introspect_cli.labels import Label


# ---
# What the framework that trains calls the current step: Lightning, transformers, accelerate.
#
# A script is run as its author wrote it, so it has no callback of introspect, and importing a framework before the
# script does could change what the script does. So nothing is imported and nothing is replaced: where the script has
# imported a framework, the frames below a forward pass hold its trainer, whose attributes are read. Only a frame
# without tensors is looked into: Python before 3.13 keeps what was looked at alive as long as the frame.
#
# When a step ends, a framework may have counted it already, or not yet. While the model runs, its numbers are those
# that the script itself would print there. So they are read at each forward pass of training, and a step of several
# batches has the first and the last of them.

Facts = dict[str, "Label"]


def lightning(trainer: Any) -> Facts:
    """Labels from a Lightning Trainer: its stage and, in training, global step, epoch and batch."""
    stage = getattr(trainer.state, "stage", None)
    name = str(getattr(stage, "value", stage))
    labels: Facts = {"framework": "lightning", "stage": name}
    if name == "train":
        labels |= {"global_step": int(trainer.global_step), "epoch": int(trainer.current_epoch)}
        labels["batch"] = int(trainer.fit_loop.batch_idx)
    return labels


def transformers(trainer: Any) -> Facts:
    """Labels from a transformers Trainer: global step, epoch, and `accumulation` above 1.

    With a loader of known length also `batch`, a number or (first, last).
    """
    state, parts = trainer.state, int(trainer.args.gradient_accumulation_steps)
    labels: Facts = {"framework": "transformers", "global_step": int(state.global_step)}
    if parts > 1:
        labels["accumulation"] = parts
    if state.epoch is not None:
        labels["epoch"] = epoch = int(state.epoch + 1e-9)
        with suppress(TypeError, NotImplementedError):  # no loader, or one without a length
            length = len(trainer.callback_handler.train_dataloader)
            first = round((state.epoch - epoch) * length)
            last = min(first + parts, length) - 1
            labels["batch"] = (first, last) if last > first else first
    return labels


def accelerate(state: Any) -> Facts:
    """Labels from accelerate's `GradientState`: epoch of the loader in use, and steps accumulated, if above 1.

    {} where it has neither.
    """
    epoch, parts = getattr(state.active_dataloader, "iteration", None), state.num_steps
    labels: Facts = {"epoch": epoch} if type(epoch) is int else {}
    if parts > 1:
        labels["accumulation"] = parts
    return {"framework": "accelerate", **labels} if labels else labels


TRAINERS: dict[tuple[str, str], Callable[[Any], Facts]] = {
    ("lightning.pytorch.trainer.trainer", "_run_stage"): lightning,
    ("pytorch_lightning.trainer.trainer", "_run_stage"): lightning,
    ("transformers.trainer", "train"): transformers,
}
"""What reads the labels of a trainer, by the module and method that all of a training runs in."""


def current_labels() -> Facts:
    """Labels that the running framework has for the step now; {} where no known framework trains.

    A trainer of Lightning or transformers counts before accelerate.
    """
    if any(module in sys.modules for module, _ in TRAINERS):
        for frame in outward(sys._getframe(1)):  # noqa: SLF001 - the frames are what is asked for
            read = TRAINERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
            if read is not None:
                return read(frame.f_locals["self"])
    state: Any = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    # accelerate's state is asked once it is there; asking makes it
    return accelerate(state()) if getattr(state, "_shared_state", None) else {}


class StepLabels:
    """Labels of the step that runs."""

    def __init__(self, guard: Guard) -> None:
        """Start without labels; `guard` catches failures of reading them."""
        self._guarded = guard.around("labels", "the framework's own step numbers are")
        self._guarded.on = True
        self._read: list[Facts] = []

    def read(self) -> None:
        """Ask the framework for the labels now, before a forward or backward pass of training.

        Nothing after a failure, or where the framework has none.
        """
        if self._guarded.on:
            with self._guarded:
                self._read += filter(None, [current_labels()])

    def take(self) -> Facts:
        """Labels of the ended step, those read first; forgets them.

        `batch` is (first, last) where several passes of one epoch had different batches.
        """
        read, self._read = self._read or [{}], []
        labels, last = dict(read[0]), read[-1]
        one, two = labels.get("batch"), last.get("batch")
        if one != two and labels.get("epoch") == last.get("epoch") and isinstance(one, int) and isinstance(two, int):
            labels["batch"] = (one, two)
        return labels


# ---
# What a script trains, and whether what runs belongs to that or to an evaluation.
#
# Trained are the modules whose parameters an optimizer holds, or that the script trains by hand. One loss module, one
# loader class and one step clock serve training and evaluation, so an evaluation in the middle would shift the
# numbers of training's calls, and the same training with and without it would look different. No single sign tells
# them apart: a teacher runs without gradients inside training, an averaged copy of the model is in no optimizer, and
# a loader yields its batch before anything shows what it is for. After an agent that acts without gradients, in
# training mode and on what no loader gave, come the target networks of its loss. So the signs are put together:
# whether gradients are on, whether an optimizer holds any of the module's parameters, whether the module is in train
# mode, which loader gave the last batch, and what the call before was. What a loader gave is taken back when its
# batch turns out to be for evaluation.


class Trained:
    """Optimizers seen so far, and which modules they train."""

    def __init__(self) -> None:
        """Start with no optimizer."""
        self._optimizers: ById[bool] = ById()
        self.optimizers: Callable[[], list[torch.optim.Optimizer]] = self._optimizers.objects
        """Gives the live optimizers, in the order in which they were added."""
        self._parameters: set[int] | None = None
        self._roots: ById[bool] = ById()
        self.by_hand: ById[bool] = ById()
        """Modules that count as trained although no optimizer holds their parameters."""
        self._versions: ById[tuple[int, int]] = ById()
        self.threads: ById[int] = ById()
        """By optimizer that has stepped, the thread of its last step."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer, which is referred to weakly, or what it holds now; drops cached answers of `is_trained`."""
        self._optimizers.set(optimizer, True)
        self._parameters = None
        self._roots.clear()

    def of_this_thread(self) -> list[torch.optim.Optimizer]:
        """Live optimizers whose last step was this thread's.

        A backward pass of another thread may be writing the gradients of its own, and torch does not guard `.grad`.
        """
        return [each for each in self.optimizers() if self.threads.get(each) == threading.get_ident()]

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer holds any parameter, of a module or below it, that requires a gradient.

        True also for a module in `by_hand`. Cached, but for a module whose held parameters are all
        frozen.
        """
        if (is_trained := self._roots.get(module) or self.by_hand.get(module)) is None:
            held = [one for one in parameters_in(module) if id(one) in self._held_ids() or flat.is_stepped(one)]
            is_trained = any(parameter.requires_grad for parameter in held)
            if is_trained or not held:  # what is frozen may be set free later
                self._roots.set(module, is_trained)
        return is_trained

    def is_new(self, module: nn.Module) -> bool:
        """Whether an optimizer of which no step was noted holds any of a module's parameters."""
        new = [optimizer for optimizer in self.optimizers() if self.threads.get(optimizer) is None]
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


class Draw(NamedTuple):
    """A batch drawn with gradients on, for a purpose not known yet.

    Attributes:
        loader: number of its loader.
        start: row of the step at which what it caused begins.
        began: whether the step began with it.
    """

    loader: int
    start: int
    began: bool


class Evaluation:
    """Decides the phase of outermost calls, and moves batches of evaluations out of training."""

    def __init__(self, recorder: Recorder, trained: Trained, *, wanted: bool) -> None:
        """Start with nothing trained and no loader; `wanted` says whether evaluation is recorded."""
        self._recorder, self._trained = recorder, trained
        self.wanted = wanted
        self.feeding: set[int] = set()
        """Numbers of the loaders that are known to feed training."""
        self._fed: set[int] = set()
        self._feeder = self._doubted = -1
        self._under_way = self._loss_is_due = self._acts = False
        self._draws: list[Draw] = []
        self._aside: tuple[int, list[Row], bool] | None = None  # what was taken back last, and of which loader
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
        self._draws.append(Draw(loader, start, began))
        self._aside = None

    def note_training(self) -> None:
        """Note a backward pass or an optimizer step, which ends an evaluation under way.

        Loaders that gave a batch with gradients on since the last such note, and were dropped neither by `drop_batches`
        nor by `take_back`, feed training from now on. So does the loader on whose batch the last call with gradients
        was taken for an evaluation.
        """
        self.has_training = True
        self.feeding |= self._fed | ({self._doubted} - {-1})  # what was taken for an evaluation is trained on
        self._fed.clear()
        self._under_way = self._loss_is_due = False
        self._doubted = -1

    def drop_batches(self) -> None:
        """Forget all batches drawn so far, since what ran was an evaluation, which is over; their rows stay.

        Their loaders do not feed training at the next `note_training`.
        """
        self._fed.clear()
        self.end_step()
        self._under_way = False

    def end_step(self) -> None:
        """Forget the batches drawn in the step that has ended: their rows stay in it.

        Their loaders still come to feed training at the next `note_training`.
        """
        self._draws.clear()
        self._aside = None
        self._loss_is_due = False

    def phase(self, module: nn.Module, *, first_step: bool) -> Phase:
        """FORWARD or EVAL for an outermost call outside of backward passes; the answer is remembered for later calls.

        FORWARD as long as nothing is trained, neither this module nor another. With gradients on, a call is EVAL only
        on a batch of a loader that feeds no training, while another does: of a trained module in eval mode whose
        optimizers have all stepped, or of any other module as a late copy or after a call that was EVAL. With gradients
        off, a trained module is EVAL, unless it is a target of the loss in train mode, or is run again inside an
        `autograd.Function`; any other is EVAL after a call that was, on such a batch in eval mode, or as a late copy.

        Args:
            module: what is called.
            first_step: whether no step has ended yet.
        """
        is_trained = self._trained.is_trained(module)
        is_copy = self._is_late_copy(module, is_trained=is_trained, first_step=first_step)
        if not self.has_training and not is_trained:
            return Phase.FORWARD
        elsewhere = bool(self.feeding) and self._feeder >= 0 and self._feeder not in self.feeding
        in_train_mode, with_gradients = _is_in_train_mode(module), torch.is_grad_enabled()
        if with_gradients and is_trained:
            evaluates = elsewhere and not in_train_mode and not self._trained.is_new(module)
        elif with_gradients:
            evaluates = elsewhere and (self._under_way or is_copy)
        elif is_trained:  # a target of the loss, where the script has begun to compute one
            evaluates = not (self._loss_is_due and in_train_mode)
            evaluates &= elsewhere or not (_is_in_function() and all(map(_is_in_train_mode, modules_in(module))))
        else:
            # an acting model is in training mode and has parameters, unlike a loss module
            acts = self._acts and in_train_mode and next(parameters_in(module), None) is not None
            late = elsewhere and not in_train_mode and not self.feeding & self._fed
            evaluates = is_copy or late or (self._under_way and not acts)
        if with_gradients:
            self._doubted = self._feeder if evaluates else -1
        self._loss_is_due |= is_trained and with_gradients and not evaluates
        self._acts = evaluates and not elsewhere and is_trained and in_train_mode
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
        self._fed.discard(self._feeder)
        drawn = list(takewhile(lambda draw: draw.loader == self._feeder, reversed(self._draws)))
        if not drawn:
            return [], False
        del self._draws[-len(drawn) :]
        rows, began = self._recorder.take_back(drawn[-1].start), any(draw.began for draw in drawn)
        self._aside = self._feeder, rows, began
        return rows, began

    def give_back(self) -> bool:
        """Put batches that `take_back` took out back into the step, at its end, before a call that trains.

        Not where another batch has been drawn since. From then on no batch so far is taken back any more; the loaders
        of those put back feed training at the next `note_training`.

        Returns:
            whether the step began with one of those put back; False where none is.
        """
        aside, self._aside = self._aside, None
        if aside is None or self._draws:  # another batch is the one in use
            self._draws.clear()
            return False
        loader, rows, began = aside
        self._recorder.put(rows)
        self._fed.add(loader)
        return began


# ---
# The step clock, which all probes drive together.
#
# A step ends when an outermost optimizer step returns (or a gradient scaler skips one). A script that never builds an
# optimizer has no such moment; there a step ends where a loader is asked for the next batch, or where the next
# outermost forward begins, unless that is a module without parameters after one that has some: a loss module belongs
# to the step of the model.

MAX_SPANS = 1000
_MARK = "introspect: made before anything was trained"


class _Mark:
    """Lives as long as the autograd node that has it among its metadata."""


MOMENTS = (
    *("on_forward", "on_root", "on_made", "on_root_left", "on_begin", "on_after_optimizer"),
    *("on_ending", "on_tick", "on_restart", "on_evaluation", "on_look"),
)
"""Moments of a step, of which listeners are told:
- on_forward: an outermost module is about to be called in training, recorded or not.
- on_root: outermost modules are about to run and will be recorded.
- on_made: a module that no other one holds was named in the forward that calls it.
- on_root_left: such a module's forward pass of training has returned.
- on_begin: anything of a step that is recorded is about to happen.
- on_after_optimizer: an optimizer has stepped and its parameters are on record.
- on_ending: a step is about to end: what is written now is read by whoever sees the step.
- on_tick: a step has ended.
- on_restart: steps start from 0 again; told is which step becomes step 0, None where none does.
- on_evaluation: rows turned out to be an evaluation's, and were taken back.
- on_look: the script saves what it has, or is over: what models hold then is what came of it all."""


class StepClock:
    """Clock that decides when a step begins and ends, and calls listeners.

    Attributes:
        evaluation: tells evaluation from training.
        trained: the optimizers, and what they train.
        labels: what the script's framework calls the step.
        has_optimizer: whether the script has built one, so that their steps end steps.
        stepped: whether one has stepped.
        unseen_steps: whether parameters were written to, though no optimizer was seen to step.
        left_out: whether what came before training was taken for an evaluation and out of the records.
        passed_over: the steps in which an evaluation ran that was not to be recorded, first and last of each span.
    """

    def __init__(self, recorder: Recorder, names: Names, parts: FlatParts, guard: Guard, *, wants_eval: bool) -> None:
        """Start at step 0, in no step.

        Args:
            recorder: whose steps begin and end.
            names: of modules.
            parts: of flat parameters; forgotten when a step ends.
            guard: catches failures of labels.
            wants_eval: whether evaluation is recorded.
        """
        self.listeners: dict[str, list[Callable[..., None]]] = {moment: [] for moment in MOMENTS}
        """Of each moment, in the order in which they are told."""
        self._recorder = recorder
        self._names = names
        self._parts = parts
        self.trained = Trained()
        self.evaluation = Evaluation(recorder, self.trained, wanted=wants_eval)
        self.labels = StepLabels(guard)
        recorder.labels = self.labels.take
        self.has_optimizer = self.stepped = self.unseen_steps = self.left_out = False
        self.passed_over: list[list[int]] = []
        self._manual = self._model_ran = False
        self._begun = -1
        self._rows_at_begin = self._forwards = self._backwards = 0
        self._graphs: ById[int] = ById()
        """Marks in graphs that are alive, and in which step each was made."""
        self._ran_with_gradients: ById[bool] = ById()
        self.listeners["on_root_left"].append(self._pass_over_writes)

    def tell(self, moment: str, *given: object) -> None:
        """Call the listeners of a moment in order with what is given; an exception is raised at once."""
        for listener in self.listeners[moment]:
            listener(*given)

    def tell_root(self, module: nn.Module) -> None:
        """Call the `on_root` listeners before an outermost call that will be recorded."""
        self._names.any_module = True  # it may have its name from before
        self.tell("on_root", module)

    def begin(self) -> None:
        """Begin the step, if it has not begun: call the `on_begin` listeners, unless the step is not recorded.

        Rows that they record are not counted as activity of the step by `finish`.
        """
        if self._begun != self._recorder.step:
            self._begun, before = self._recorder.step, self._recorder.rows
            if self._recorder.wanted:
                self.tell("on_begin")
            self._rows_at_begin = self._recorder.rows - before

    @property
    def begun(self) -> bool:
        """Whether the current step was begun, by `begin`."""
        return self._begun == self._recorder.step

    def outermost_forward(self, module: nn.Module) -> Phase:
        """Phase of an outermost call outside of backward passes, which is about to run: FORWARD or EVAL.

        In training, batches that were taken for an evaluation's are put back; the call may end the step before, begins
        one, and `on_forward` is told. Before an evaluation, the batches that the last loader gave are taken out of the
        step, and given to `on_evaluation`; if evaluation is not recorded, the step is added to `passed_over`.
        """
        evaluation = self.evaluation
        phase = evaluation.phase(module, first_step=not self._recorder.step)
        if phase is Phase.EVAL:
            spans, step = self.passed_over, self._recorder.step
            if not evaluation.wanted and spans and spans[-1][1] >= step - 1:
                spans[-1][1] = step
            elif not evaluation.wanted and len(spans) < MAX_SPANS:
                spans.append([step, step])
            taken, began = evaluation.take_back()
            if began:
                self._begun = -1
            if taken:
                self.tell("on_evaluation", taken)
            return phase
        if evaluation.give_back():
            self._begun = self._recorder.step
        if not self.has_optimizer:
            self._step_without_optimizer(module)
        else:
            self.end_unseen_step()
        self.tell("on_forward", module)
        self.begin()
        if self._recorder.wanted:
            self.labels.read()
        return phase

    def _step_without_optimizer(self, module: nn.Module) -> None:
        """Before an outermost call of a script without optimizer, end the step if it has computed something.

        And only if the module has parameters, or none that has any was called in the step. The call is counted for the
        step that runs then.
        """
        is_model = next(parameters_in(module), None) is not None
        if self._has_computed and (is_model or not self._model_ran):
            self.auto_tick()
        self._forwards += 1
        self._model_ran |= is_model
        if is_model and torch.is_grad_enabled():
            self._ran_with_gradients.set(module, True)

    def mark_graph(self, result: object) -> None:
        """Put a mark in the autograd graph of an outermost call's result, to see later whether the graph is alive.

        A result without tensors counts as a graph that stays alive, one whose tensors have no graph as none. Nothing
        without gradients, or once an optimizer or a backward pass was seen: then it is known that something is trained.
        """
        if not torch.is_grad_enabled() or self.has_optimizer or self.evaluation.has_training:
            return
        tensors = [leaf for _, leaf in flatten(result) if isinstance(leaf, torch.Tensor)]
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        for node in nodes:
            mark = node.metadata[_MARK] = _Mark()
            self._graphs.set(mark, self._recorder.step)
        if not tensors and self._graphs.get(self) is None:
            self._graphs.set(self, self._recorder.step)  # it stays alive

    @property
    def _has_computed(self) -> bool:
        """Whether a backward pass has run in this step, or in a script that trains nothing a forward."""
        return bool(self._backwards if self.evaluation.has_training else self._forwards)

    def end_step_before_batch(self) -> None:
        """Before a batch is drawn in a script without optimizer, end the step if it has computed something.

        Nothing once the script ends its steps itself.
        """
        if not self.has_optimizer and self._has_computed:
            self.auto_tick()

    def end_unseen_step(self) -> None:
        """End the step if any optimizer's first parameter was written to, though none was ever seen to step.

        That is, written to since the last such look; `unseen_steps` is set then. A compiled optimizer step runs no
        hooks; without this, the whole run would be one step.
        """
        if not self.stepped and self.trained.is_any_written():
            self.unseen_steps = True
            self.auto_tick()

    def _pass_over_writes(self, _root: nn.Module) -> None:
        """Have what a forward pass itself has written to count as no optimizer's step."""
        if not self.stepped:
            self.trained.is_any_written()

    def note_backward(self) -> None:
        """Note that a backward pass begins, so something is trained; begins the step.

        At the first sign of training, steps so far are dropped if they were an evaluation (`_leave_out_evaluation`).
        Without an optimizer, modules that ran with gradients count as trained; where no module runs, a second backward
        pass ends the step of the first.
        """
        if not self.evaluation.has_training:
            self._leave_out_evaluation(keep=True)
        self.evaluation.note_training()
        if not self.has_optimizer:
            for module in self._ran_with_gradients.objects():
                self.trained.by_hand.set(module, True)
            self._ran_with_gradients.clear()
            if self._backwards and not self._forwards:
                self.auto_tick()  # no module runs: a step is from one backward pass to the next
            self._backwards += 1
        self.end_unseen_step()
        self.begin()
        if self._recorder.wanted:
            self.labels.read()

    def expect_optimizers(self) -> None:
        """Have optimizer steps end steps from now on, since an optimizer exists; nothing at later calls.

        Steps so far are dropped if they were an evaluation (`_leave_out_evaluation`).
        """
        if not self.has_optimizer:
            self.has_optimizer = True
            if not self.evaluation.has_training:
                self._leave_out_evaluation(keep=False)
            self.evaluation.has_training = True

    def _leave_out_evaluation(self, *, keep: bool) -> None:
        """Drop all steps so far, count from 0 again, tell `on_restart` and set `left_out`, if they were an evaluation.

        Else nothing, and nothing once the script has ended a step itself. They were if nothing in them had gradients,
        or all their autograd graphs are gone: no backward pass can begin there. Only when training begins is that
        certain. Where an optimizer is built (not `keep`), calls in step 0 count as no steps even if their graphs are
        alive: a method has called the modules of a model one after the other, to initialise it. Then the batches so far
        are forgotten, and `on_tick` is told, too.

        Args:
            keep: True if the current step belongs to training, and stays as step 0.
        """
        earlier = self._recorder.step > 0 or (not keep and self._forwards > 0)
        kept = self._recorder.step if keep else None
        graphs = [step for _, step in list(self._graphs.entries.values())]
        self._graphs.clear()
        in_graphs = any(step != kept for step in graphs) and (keep or not self._recorder.step)
        if not earlier or self._manual or in_graphs:
            return
        self._recorder.restart(keep=keep)
        self.passed_over = [[0, 0]] if self.passed_over and keep else []
        self._begun = 0 if keep and self._begun == kept else -1
        self._names.renumber(kept)
        self.tell("on_restart", kept)
        if not keep:
            self._forwards, self._model_ran = 0, False
            self.evaluation.drop_batches()
            self.tell("on_tick")
        self.left_out = True

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that was just built; from now on optimizers' steps end steps."""
        self.expect_optimizers()
        self.trained.add(optimizer)

    def note_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps, with parameters that are new: one that was not seen being built is added."""
        self.add_optimizer(optimizer)
        self.trained.threads.set(optimizer, threading.get_ident())

    def give_up_on_optimizers(self) -> None:
        """Have forward passes end no steps, although optimizers are no longer watched."""
        self.has_optimizer = self.evaluation.has_training = True

    def finish(self) -> None:
        """End the run: write all steps that wait, and the current step's rows, unless all are from its beginning."""
        is_more = self._begun != self._recorder.step or self._recorder.rows > self._rows_at_begin
        self._recorder.flush(current=is_more)

    def auto_tick(self) -> None:
        """End the step; nothing once the script ends its steps itself."""
        if not self._manual:
            self.tick()

    def manual_tick(self) -> None:
        """End the step because the script says so; from now on nothing else ends steps.

        The first call does not end it where a step has just ended and nothing was recorded since.
        """
        just_ticked = not self._manual and self._recorder.step > 0 and self._recorder.rows == 0
        self._manual = True
        if not just_ticked:
            self.tick()

    def tick(self) -> None:
        """Call the `on_ending` listeners, end the step and begin the next, then call the `on_tick` listeners."""
        self._forwards = self._backwards = 0
        self._model_ran = False
        self._ran_with_gradients.clear()
        self.evaluation.end_step()
        self._parts.look()
        self.tell("on_ending")
        self._recorder.tick()
        self.tell("on_tick")
