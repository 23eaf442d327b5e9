"""What the probes of one capture share, and the step clock that they drive together.

A step ends when an outermost optimizer step returns (or a gradient scaler skips one). A script that never builds an
optimizer has no such moment; there a step ends where a loader is asked for the next batch, or where the next outermost
forward begins, unless that is a module without parameters after one that has some: a loss module belongs to the step
of the model.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.draws import Draws
from introspect_cli.capture.evaluation import Evaluation
from introspect_cli.capture.identity import ById
from introspect_cli.capture.inside import parameters_in
from introspect_cli.capture.labels.steps import StepLabels
from introspect_cli.capture.ranks import zero
from introspect_cli.capture.ranks.data_parallel import DataParallel
from introspect_cli.capture.ranks.flat import FlatParts
from introspect_cli.capture.ranks.pipelines import Pipelines
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.named import Named
    from introspect_cli.capture.names import Names
    from introspect_cli.capture.probes.base import Guard
    from introspect_cli.capture.recorder import Recorder


_info = functools.lru_cache(maxsize=1024)(SiteInfo)  # one object for all sites of a class


@functools.lru_cache(maxsize=1024)
def _key(key: tuple[Phase, Kind, str, int]) -> tuple[Phase, Kind, str, int]:
    """One tuple for what thousands of modules have: each is work for the garbage collector."""
    return key


_MARK = "introspect: made before anything was trained"


class _Mark:
    """Lives as long as the autograd node that has it among its metadata."""

    __slots__ = ("__weakref__",)


class Running(threading.local):
    """Optimizers (by `id`) inside whose step this thread is, outermost first."""

    def __init__(self) -> None:
        """Start outside every optimizer."""
        self.optimizers: list[int] = []


def _call_all(listeners: list[Callable[[], None]]) -> None:
    """Call each, whatever another raises; then raise the first of that."""
    raised: list[BaseException] = []
    for listener in listeners:
        try:
            listener()
        except KeyboardInterrupt as error:  # noqa: PERF203 - a call of a function of ours would cost more
            raised.append(error)
            listener()  # which it stopped
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised.pop(0)


class Context:
    """The recorder, the names, the guard, and the moments at which probes call on each other."""

    def __init__(
        self, recorder: Recorder, names: Names, guard: Guard, kinds: frozenset[Kind], *, wants_eval: bool
    ) -> None:
        """Start at step 0; probes register for moments with `on_*`."""
        self.recorder = recorder
        self.names = names
        self.guard = guard
        self.kinds = kinds
        self.wants_eval = wants_eval
        self.on_begin: list[Callable[[], None]] = []
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_after_optimizer: list[Callable[[], None]] = []
        self.on_tick: list[Callable[[], None]] = []
        self.on_restart: list[Callable[[int | None], None]] = []
        self.has_optimizer = False
        self.ticks = 0
        self.manual = False
        self.running = Running()
        self.draws = Draws(recorder)
        self.leaf_names: dict[int, str] = {}
        """What the script calls the tensors that its last backward pass led to, by identity, where it runs no module;
        good as long as somebody holds them."""
        self.evaluation = Evaluation(recorder)
        self.labels = StepLabels(guard)
        recorder.labels = self.labels.take
        self.parts = FlatParts(names, guard.note)
        self.data_parallel = DataParallel()
        self.pipelines = Pipelines(names)
        self.on_evaluation: list[Callable[[list[tuple[int, int]]], None]] = []
        self._trained: set[int] | None = None
        self._trained_roots: ById[bool] = ById()
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._versions: ById[tuple[int, int]] = ById()
        self.stepped = False
        self.left_out = False
        """Whether what came before training was taken for an evaluation and out of the records."""
        self.passed_over = False
        """Whether an evaluation ran that was not to be recorded."""
        self.unseen_steps = False
        self._begun = -1
        self._rows_at_begin = 0
        self._forwards = 0
        self._model_ran = False
        self._backwards = 0
        self._graphs: list[tuple[int, weakref.ref[_Mark] | None]] = []
        self._ran_with_gradients: list[weakref.ref[nn.Module]] = []
        self._by_hand: ById[bool] = ById()

    def begin(self) -> None:
        """Something of the step is about to happen; the first such moment records how the step starts."""
        if self._begun != self.recorder.step:
            self._begun, before = self.recorder.step, self.recorder.rows
            if self.recorder.undecided:
                self.recorder.decide()
            if self.recorder.wanted:
                for listener in self.on_begin:
                    listener()
            self._rows_at_begin = self.recorder.rows - before

    @property
    def begun(self) -> bool:
        """Whether anything of the step has happened."""
        return self._begun == self.recorder.step

    def outermost_forward(self, module: nn.Module) -> Phase:
        """An outermost module is about to be called, outside any backward pass; the phase it belongs to."""
        evaluation = self.evaluation
        phase = evaluation.phase(module, is_trained=self.is_trained(module), first_step=not self.ticks)
        if phase is Phase.EVAL:
            self.passed_over |= not self.wants_eval
            taken, began = evaluation.take_back()
            if began:
                self._begun = -1
            if taken:
                for listener in self.on_evaluation:
                    listener(taken)
            return phase
        if evaluation.give_back():
            self._begun = self.recorder.step
        if not self.has_optimizer:
            self._step_without_optimizer(module)
        else:
            self.look_for_unseen_step()
        self.begin()
        if self.recorder.wanted:
            self.labels.see()
        return phase

    def _step_without_optimizer(self, module: nn.Module) -> None:
        """An outermost module of training is called where no optimizer is: it may begin a step."""
        is_model = next(parameters_in(module), None) is not None
        ended = self._backwards if self.evaluation.has_training else self._forwards
        if ended and (is_model or not self._model_ran):
            self.auto_tick()
        self._forwards += 1
        self._model_ran |= is_model
        if is_model and torch.is_grad_enabled():
            self._ran_with_gradients.append(weakref.ref(module))

    @property
    def awaits_training(self) -> bool:
        """Whether nothing has shown yet that anything is trained, so that a forward pass may be for nothing."""
        return not (self.has_optimizer or self.evaluation.has_training)

    def forward_left(self, result: object) -> None:
        """Hear what an outermost forward gave while nothing is trained: its graph gets a mark that goes with it."""
        if not torch.is_grad_enabled():
            return
        self._graphs = [(step, mark) for step, mark in self._graphs if mark is None or mark() is not None]
        tensors = [leaf for _, leaf in flatten(result) if isinstance(leaf, torch.Tensor)]
        for node in [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None] if tensors else [None]:
            mark = _Mark()
            if node is not None:
                kept: Any = node.metadata  # torch says that it is a function
                kept[_MARK] = mark
            self._graphs.append((self.recorder.step, None if node is None else weakref.ref(mark)))

    def batch_asked(self) -> None:
        """A loader is asked for a batch: without an optimizer, it is that of the next step where this one is over."""
        if not self.has_optimizer and (self._backwards if self.evaluation.has_training else self._forwards):
            self.auto_tick()

    def look_for_unseen_step(self) -> None:
        """End the step if parameters were written to, though no optimizer was seen to step.

        A compiled optimizer step runs no hooks; without this, the whole run would be one step.
        """
        if not self.stepped and self._written():
            self.unseen_steps = True
            self.auto_tick()

    def _written(self) -> bool:
        """Whether the first parameter of any optimizer was written to since this was last asked."""
        written = False
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is None or not optimizer.param_groups or not optimizer.param_groups[0]["params"]:
                continue
            parameter = optimizer.param_groups[0]["params"][0]
            before, now = self._versions.get(optimizer), (id(parameter), parameter._version)  # noqa: SLF001 - counts in-place writes
            self._versions.set(optimizer, now)
            written |= before is not None and before[0] == now[0] and before != now
        return written

    def backward_begins(self) -> None:
        """Hear that the script starts a backward pass: something is trained, by an optimizer or by hand."""
        if not self.evaluation.has_training:
            self._leave_out_evaluation(keep=True)
        self.evaluation.trained()
        if not self.has_optimizer:
            for reference in self._ran_with_gradients:
                module = reference()
                if module is not None:
                    self._by_hand.set(module, True)
            self._ran_with_gradients.clear()
            if self._backwards and not self._forwards:
                self.auto_tick()  # no module runs: a step is from one backward pass to the next
            self._backwards += 1
        self.look_for_unseen_step()
        self.begin()
        if self.recorder.wanted:
            self.labels.see()

    def expect_optimizers(self) -> None:
        """Hear of an optimizer: from now on their steps end steps."""
        if not self.has_optimizer:
            self.has_optimizer = True
            if not self.evaluation.has_training:
                self._leave_out_evaluation(keep=False)
            self.evaluation.has_training = True

    def _leave_out_evaluation(self, *, keep: bool) -> None:
        """Take out what a model computed before anything showed that one would be trained, without gradients or idly.

        Only then is it known to have been an evaluation, and not what the script is for. Its records were steps. What
        it computed with gradients is for nothing once the graph is gone: no backward pass can begin there.

        Args:
            keep: whether the current step belongs to training.
        """
        earlier = self.recorder.step > 0 or (not keep and self._forwards > 0)
        kept = self.recorder.step if keep else None
        graphs = [step for step, mark in self._graphs if mark is None or mark() is not None]
        self._graphs.clear()
        if not earlier or self.manual or any(step != kept for step in graphs):
            return
        self.recorder.restart(keep=keep)
        self._begun = 0 if keep and self._begun == kept else -1
        self.ticks = 0
        self.names.renumber(kept)
        for listener in self.on_restart:
            listener(kept)
        if not keep:
            self._forwards, self._model_ran = 0, False
            self.evaluation.left_out()
            for tick in self.on_tick:
                tick()
        self.left_out = True

    def built(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of an optimizer that has been made."""
        self.expect_optimizers()
        self._optimizers = [reference for reference in self._optimizers if reference() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self._trained = None
        self._trained_roots.clear()

    def lost_optimizers(self) -> None:
        """Optimizers are no longer watched: forward passes are not to be taken for steps because of it."""
        self.has_optimizer = self.evaluation.has_training = True

    def finish(self) -> None:
        """Write what came after the last step, unless it is but how a step begins: a loader asked once too often."""
        if self._begun != self.recorder.step or self.recorder.rows > self._rows_at_begin:
            self.recorder.flush()
        else:
            self.recorder.settle()

    def root_called(self, module: nn.Module) -> None:
        """An outermost module is about to run and will be recorded."""
        self.names.was_called()
        self.data_parallel.look(module)
        for listener in self.on_root:
            listener(module)

    def copies(self) -> list[int]:
        """Ranks that hold the same parts of everything as this one, which is among them; empty where nothing says so.

        With ZeroRedundancyOptimizer each rank has the state of some parameters alone.
        """
        own = (reference() for reference in self._optimizers)
        is_cut = any(type(optimizer).__name__ == "ZeroRedundancyOptimizer" for optimizer in own)
        return [] if is_cut else self.data_parallel.copies

    def auto_tick(self) -> None:
        """End the step, unless the script ends its steps itself."""
        if not self.manual:
            self.tick()

    def manual_tick(self) -> None:
        """End the step because the script says so; from now on nothing else ends steps."""
        just_ticked = not self.manual and self.ticks > 0 and self.recorder.rows == 0
        self.manual = True
        if not just_ticked:
            self.tick()

    def tick(self) -> None:
        """End the step."""
        try:
            self.ticks += 1
            self._forwards = self._backwards = 0
            self._model_ran = False
            self._ran_with_gradients.clear()
            self.evaluation.ticked()
            self.parts.clear()
        finally:  # also where an interrupt comes for the second time: the next step begins
            step = self.recorder.step
            try:
                self.recorder.tick()
            except KeyboardInterrupt:
                if self.recorder.step == step:  # it came before the step could end
                    self.recorder.tick()
                raise
            finally:
                _call_all(self.on_tick)

    def trains(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of the parameters of an optimizer."""
        if not any(reference() is optimizer for reference in self._optimizers):
            self.built(optimizer)
        self._trained = None
        self._trained_roots.clear()

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer holds any of a module's parameters, or the script trains it by hand.

        It tells a forward pass without gradients that evaluates the model in training from one that is part of
        training (a teacher, a frozen encoder).
        """
        known = self._trained_roots.get(module) or self._by_hand.get(module)
        if known is None:
            known = any(
                id(parameter) in self._trained_parameters() or (zero.is_loaded() and zero.is_stepped(parameter))
                for parameter in parameters_in(module)
            )
            self._trained_roots.set(module, known)
        return known

    def _trained_parameters(self) -> set[int]:
        """`id` of all parameters that live optimizers hold, and so keep alive."""
        if self._trained is None:
            optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            self._trained = {id(parameter) for group in groups for parameter in group["params"]}
        return self._trained

    def site(self, of: Named, phase: Phase, kind: Kind, path: str = "", call: int = 0) -> int:
        """The site of something about a module or a parameter, looked up once.

        Args:
            of: the module's state or the parameter's name.
            phase: where in the step.
            kind: what of it: an input, a gradient, something the optimizer keeps for it.
            path: which part of that.
            call: the module's call in this phase; how often the parameter was recorded in it before.
        """
        key = (phase, kind, path, call)
        site = of.sites.get(key)
        if site is None:
            site = self.recorder.site(Site(phase, kind, of.fqn, call, path), _info(of.module_class))
            of.sites[_key(key)] = site
        return site
