"""Batches, as data loaders yield them to the script."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.naming import ById, FreeNames
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.objects import BuiltProbe
from introspect_cli.records import Kind, Phase, SiteInfo
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.recording.rows import Row


@dataclass(eq=False)
class _Source:
    """Identity of a loader while it or an iterator of it lives; `zip(DataLoader(...), ...)` drops the loader."""

    number: int
    class_name: str
    settings: dict[str, Any]


class DataProbe(GuardedProbe):
    """Records batches of `DataLoader`s."""

    name = "data"
    lost = "batches are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._built = context.probe(BuiltProbe)
        self._names = {Phase.DATA: FreeNames(), Phase.EVAL: FreeNames()}
        self._source_of: ById[_Source] = ById()
        """Of loaders and their iterators."""
        self._numbers = count()
        self._drawn: ById[bool] = ById()
        self._last: weakref.ref[_Source] | None = None

    def install(self) -> None:
        """Watch `DataLoader.__iter__`, and, if batches are recorded, `__next__` of the iterators that it gives."""
        if Kind.BATCH in self._context.kinds:
            if private_api.LOADER_ITERATOR is None:
                self._context.guard.note("batches are not observed: this torch has no known loader iterator")
            else:
                self._put("batches")
        super().install()

    def _watch_next(self, call: Call) -> Callable[[Any], None]:
        """Called before a batch is drawn; returns what records the batch.

        It may end a step, and begins one, if none has begun, where gradients are on.
        """
        with unobserved():
            clock = self._context.clock
            clock.end_step_before_batch()
            start, began = self._recorder.rows, torch.is_grad_enabled() and not clock.begun
            if began:
                clock.begin()

        def drew(batch: object) -> None:
            """Record the batch that was drawn, with what was counted before the draw."""
            with unobserved():
                self._record_drawn(call.first, batch, start, began=began)

        return drew

    def on_tick(self) -> None:
        """As a step ends, forget which loaders gave its batches."""
        self._drawn.clear()

    def _note_iterator(self, call: Call, iterator: object) -> None:
        """Number a loader at its first iterator, and tie an iterator to the loader that has made it.

        Where batches are not recorded, name the loader and note its settings, as is else done at the first batch.
        """
        loader = call.first
        if (source := self._source_of.get(loader)) is None:
            source = _Source(next(self._numbers), type(loader).__name__, self._built.describe(loader))
            self._source_of.set(loader, source)
        # Persistent workers hand out one iterator again and again.
        self._source_of.set(iterator, source)
        if Kind.BATCH not in self._context.kinds:  # nothing will tell what its batches are for
            self._next_call(source, Phase.DATA if torch.is_grad_enabled() else Phase.EVAL)

    def _record_drawn(self, iterator: object, batch: object, start: int, *, began: bool) -> None:
        """Record draws so far, and each leaf of a batch in phase `data`.

        If gradients are off and something was trained, in phase `eval`, if that is wanted. In any case, note it
        for the evaluation's decision and its loader for `on_restart`.

        Args:
            iterator: what gave it.
            batch: any nested value.
            start: how many rows the step had before.
            began: whether the step began with this batch.
        """
        source = self._source_of.get(iterator)
        evaluation = self._context.clock.evaluation
        evaluation.note_batch(-1 if source is None else source.number, start=start, began=began)
        self._last = None if source is None else weakref.ref(source)
        if source is not None:
            self._drawn.set(source, True)
        trains = torch.is_grad_enabled() or not evaluation.has_training
        phase = Phase.DATA if trains else Phase.EVAL
        if self._recorder.wanted and (phase is Phase.DATA or evaluation.wanted):
            name, call = self._next_call(source, phase)
            if self._context.draws.moved():
                self._context.draws.note(phase, name, call, before=True)
            info = SiteInfo(name.partition("#")[0], source=line_of(sys._getframe(1)))  # noqa: SLF001 - the documented way to a frame
            leaves = [(path, _recordable(leaf)) for path, leaf in flatten(batch)]
            self._emit(phase, Kind.BATCH, name, leaves, call, info)

    def _next_call(self, source: _Source | None, phase: Phase) -> tuple[str, int]:
        """Name of a loader, and how many batches it gave before in this step and phase; counts one more.

        At the first batch in a phase, the loader gets its name there, and its settings are noted. Without a source the
        name is `DataLoader`.
        """
        name = "DataLoader" if source is None else self._names[phase].name(source, source.class_name)
        if source is not None:
            self._built.add_loader(phase, name, source.settings)
        return name, self._context.count(self, name, phase)

    def on_restart(self, kept: int | None) -> None:
        """Give training's loaders new names as steps start from 0 again, in the records of the kept step as well.

        Loaders that fed an evaluation before training began take no name from those of training.

        Args:
            kept: the step that becomes step 0; None where none does.
        """
        if Kind.BATCH not in self._context.kinds:
            return
        self._built.forget_training()
        before, self._names[Phase.DATA] = self._names[Phase.DATA], FreeNames()
        changes: dict[str, dict[str, str]] = {}
        counts, rows = self._context.counts, self._recorder
        mine = {what: counts.pop(what) for what in list(counts) if what[0] is self}
        for source in self._drawn.objects() if kept is not None else ():
            if (old := before.find(source)) is not None:
                new = self._names[Phase.DATA].name(source, source.class_name)
                self._built.add_loader(Phase.DATA, new, source.settings)
                counts[self, new, Phase.DATA] = mine.get((self, old, Phase.DATA), 0)
                changes[old] = {"fqn": new}
        rows.put(rows.take_back(0), lambda site: changes.get(site.fqn, {}) if site.kind is Kind.BATCH else {})

    def on_evaluation(self, taken: list[Row]) -> None:
        """Record batches that were taken out of a step as those of an evaluation, if wanted.

        The name in training of the loader that gave the last batch is free again, unless it feeds training. Nothing
        where that loader is gone.

        Args:
            taken: the rows that were taken out.
        """
        if self._last is None or (source := self._last()) is None:
            return
        name = self._names[Phase.DATA].find(source)
        if name is not None and source.number not in self._context.clock.evaluation.feeding:
            self._context.counts.pop((self, name, Phase.DATA), None)
            self._names[Phase.DATA].release(source)
            self._built.loaders.pop((Phase.DATA, name), None)
        if self._context.clock.evaluation.wanted:
            name, call = self._next_call(source, Phase.EVAL)
            batch, rows = {"phase": Phase.EVAL, "fqn": name, "call": call}, self._recorder
            rows.put(taken, lambda site: batch if site.kind is Kind.BATCH else None)


def _recordable(leaf: object) -> object:
    """The leaf itself if it is a tensor or a value of python's, numpy's or torch's, else its class, with module."""
    cls = type(leaf)
    if issubclass(cls, torch.Tensor) or cls.__module__ in ("builtins", "numpy", "torch"):
        return leaf
    return f"{cls.__module__}.{cls.__qualname__}"
