"""The step clock, which all probes drive together.

A step ends when an outermost optimizer step returns (or a gradient scaler skips one). A script that never builds an
optimizer has no such moment; there a step ends where a loader is asked for the next batch, or where the next outermost
forward begins, unless that is a module without parameters after one that has some: a loss module belongs to the step
of the model.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.naming.contents import parameters_in
from introspect_cli.capture.steps.evaluation import Evaluation, Trained
from introspect_cli.capture.steps.labels import StepLabels
from introspect_cli.records import Phase
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.naming.names import Names
    from introspect_cli.capture.ranks.flat import FlatParts
    from introspect_cli.capture.recording.recorder import Recorder
    from introspect_cli.capture.recording.sites import Row

MAX_SPANS = 1000
_MARK = "introspect: made before anything was trained"


class _Mark:
    """Lives as long as the autograd node that has it among its metadata."""

    __slots__ = ("__weakref__",)


def _call_all(listeners: list[Callable[[], None]]) -> None:
    """Call every listener, then raise the first exception that any raised.

    One that Ctrl-C stopped is called a second time at once.
    """
    raised: list[BaseException] = []
    for listener in listeners:
        try:
            listener()
        except KeyboardInterrupt as error:  # noqa: PERF203 - a call of another function would cost more
            raised.append(error)
            listener()  # which it stopped
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised.pop(0)


class Moments:
    """Lists of listeners for events of a step.

    Attributes:
        on_forward: told of an outermost module that is about to be called in training, recorded or not.
        on_root: told of outermost modules that are about to run and will be recorded.
        on_made: told of a module that no other one holds, when it is named in the forward that calls it.
        on_root_left: told of such a module when its forward pass of training has returned.
        on_begin: told when anything of a step that is recorded is about to happen.
        on_after_optimizer: told when an optimizer has stepped and its parameters are on record.
        on_tick: told when a step has ended.
        on_restart: told when steps start from 0 again, and which step becomes step 0, None where none does.
        on_evaluation: told of rows that turned out to be an evaluation's, and were taken back.
        on_look: told where the script saves what it has, or is over: what models hold then is what came of it all.
    """

    def __init__(self) -> None:
        """Start without listeners."""
        self.on_forward: list[Callable[[nn.Module], None]] = []
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_made: list[Callable[[nn.Module], None]] = []
        self.on_root_left: list[Callable[[nn.Module], None]] = []
        self.on_begin: list[Callable[[], None]] = []
        self.on_after_optimizer: list[Callable[[], None]] = []
        self.on_tick: list[Callable[[], None]] = []
        self.on_restart: list[Callable[[int | None], None]] = []
        self.on_evaluation: list[Callable[[list[Row]], None]] = []
        self.on_look: list[Callable[[], None]] = []

    @staticmethod
    def tell(listeners: list[Callable[..., None]], *given: object) -> None:
        """Call the listeners of a moment in order with what is given; an exception is raised at once."""
        for listener in listeners:
            listener(*given)


class StepClock(Moments):
    """Clock that decides when a step begins and ends, and calls listeners.

    Attributes:
        evaluation: tells evaluation from training.
        trained: the optimizers, and what they train.
        labels: what the script's framework calls the step.
        ticks: steps that have ended.
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
        super().__init__()
        self._recorder = recorder
        self._names = names
        self._parts = parts
        self.evaluation = Evaluation(recorder, wanted=wants_eval)
        self.trained = Trained()
        self.labels = StepLabels(guard)
        recorder.labels = self.labels.take
        self.ticks = 0
        self.has_optimizer = self.stepped = self.unseen_steps = self.left_out = False
        self.passed_over: list[list[int]] = []
        self._manual = self._model_ran = False
        self._begun = -1
        self._rows_at_begin = self._forwards = self._backwards = 0
        self._graphs: list[tuple[int, weakref.ref[_Mark] | None]] = []
        self._ran_with_gradients: list[weakref.ref[nn.Module]] = []

    def tell_root(self, module: nn.Module) -> None:
        """Call the `on_root` listeners before an outermost call that will be recorded."""
        self._names.any_module = True  # it may have its name from before
        self.tell(self.on_root, module)

    def begin(self) -> None:
        """Begin the step, if it has not begun: call the `on_begin` listeners, unless the step is not recorded.

        Rows that they record are not counted as activity of the step by `finish`.
        """
        if self._begun != self._recorder.step:
            self._begun, before = self._recorder.step, self._recorder.rows
            if self._recorder.wanted:
                self.tell(self.on_begin)
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
        trained = self.trained
        is_trained = trained.is_trained(module)
        phase = evaluation.phase(module, is_trained=is_trained, is_new=trained.is_new, first_step=not self.ticks)
        if phase is Phase.EVAL:
            if not evaluation.wanted and len(self.passed_over) < MAX_SPANS:
                self._note_passed_over(self._recorder.step)
            taken, began = evaluation.take_back()
            if began:
                self._begun = -1
            if taken:
                self.tell(self.on_evaluation, taken)
            return phase
        if evaluation.give_back():
            self._begun = self._recorder.step
        if not self.has_optimizer:
            self._step_without_optimizer(module)
        else:
            self.end_unseen_step()
        self.tell(self.on_forward, module)
        self.begin()
        if self._recorder.wanted:
            self.labels.read()
        return phase

    def _note_passed_over(self, step: int) -> None:
        """Add a step to `passed_over`, extending its last span where the step follows it."""
        spans = self.passed_over
        if spans and spans[-1][1] >= step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])

    def _step_without_optimizer(self, module: nn.Module) -> None:
        """Before an outermost call of a script without optimizer, end the step if it has computed something.

        That is, a backward pass has run, or in a script that trains nothing a forward; and the module has parameters,
        or none that has any was called in the step. The call is counted for the step that runs then.
        """
        is_model = next(parameters_in(module), None) is not None
        ended = self._backwards if self.evaluation.has_training else self._forwards
        if ended and (is_model or not self._model_ran):
            self.auto_tick()
        self._forwards += 1
        self._model_ran |= is_model
        if is_model and torch.is_grad_enabled():
            self._ran_with_gradients.append(weakref.ref(module))

    def mark_graph(self, result: object) -> None:
        """Put a mark in the autograd graph of an outermost call's result, to see later whether the graph is alive.

        A result without tensors counts as a graph that stays alive, one whose tensors have no graph as none. Nothing
        without gradients, or once an optimizer or a backward pass was seen: then it is known that something is trained.
        """
        if not torch.is_grad_enabled() or self.has_optimizer or self.evaluation.has_training:
            return
        self._graphs = [(step, mark) for step, mark in self._graphs if mark is None or mark() is not None]
        tensors = [leaf for _, leaf in flatten(result) if isinstance(leaf, torch.Tensor)]
        for node in [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None] if tensors else [None]:
            mark = _Mark()
            if node is not None:
                kept: Any = node.metadata  # torch says that it is a function
                kept[_MARK] = mark
            self._graphs.append((self._recorder.step, None if node is None else weakref.ref(mark)))

    def end_step_before_batch(self) -> None:
        """Before a batch is drawn in a script without optimizer, end the step if it has computed something.

        That is, a backward pass has run, or in a script that trains nothing a forward. Nothing once the script ends its
        steps itself.
        """
        if not self.has_optimizer and (self._backwards if self.evaluation.has_training else self._forwards):
            self.auto_tick()

    def end_unseen_step(self) -> None:
        """End the step if any optimizer's first parameter was written to, though none was ever seen to step.

        That is, written to since the last such look; `unseen_steps` is set then. A compiled optimizer step runs no
        hooks; without this, the whole run would be one step.
        """
        if not self.stepped and self.trained.is_any_written():
            self.unseen_steps = True
            self.auto_tick()

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
            for reference in self._ran_with_gradients:
                module = reference()
                if module is not None:
                    self.trained.add_by_hand(module)
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
        graphs = [step for step, mark in self._graphs if mark is None or mark() is not None]
        self._graphs.clear()
        in_graphs = any(step != kept for step in graphs) and (keep or not self._recorder.step)
        if not earlier or self._manual or in_graphs:
            return
        self._recorder.restart(keep=keep)
        self.passed_over = [[0, 0]] if self.passed_over and keep else []
        self._begun = 0 if keep and self._begun == kept else -1
        self.ticks = 0
        self._names.renumber(kept)
        self.tell(self.on_restart, kept)
        if not keep:
            self._forwards, self._model_ran = 0, False
            self.evaluation.drop_batches()
            self.tell(self.on_tick)
        self.left_out = True

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer that was just built; from now on optimizers' steps end steps."""
        self.expect_optimizers()
        self.trained.add(optimizer)

    def note_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps: its parameters may have changed. One that was not seen being built is added."""
        if not self.trained.has(optimizer):
            self.add_optimizer(optimizer)
        self.trained.note_step(optimizer, self._names.parameters.changes)

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
        just_ticked = not self._manual and self.ticks > 0 and self._recorder.rows == 0
        self._manual = True
        if not just_ticked:
            self.tick()

    def tick(self) -> None:
        """End the step and begin the next, then call all `on_tick` listeners.

        Ctrl-C in between stops none of this, and is raised at the end.
        """
        try:
            self.ticks += 1
            self._forwards = self._backwards = 0
            self._model_ran = False
            self._ran_with_gradients.clear()
            self.evaluation.end_step()
            self._parts.clear()
        finally:  # also where an interrupt comes for the second time: the next step begins
            step = self._recorder.step
            try:
                self._recorder.tick()
            except KeyboardInterrupt:
                if self._recorder.step == step:  # it came before the step could end
                    self._recorder.tick()
                raise
            finally:
                _call_all(self.on_tick)
