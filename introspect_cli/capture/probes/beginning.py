"""What seeds random generators and what draws from them before the first step: initialisation, mostly.

A run whose initialisation was changed differs from the first number on, and the random state when the first step begins
says no more than that. So until then each seeding is noted with its value and line; each of torch's initialisers and
methods of tensors that draws, with its arguments, the parameter it fills, its line, and the generator's state before
it; each module that draws when it is called, as in an evaluation, with its mode and the line of the outermost call;
and, at the moments between (a parameter is registered, a generator is seeded, a module is called, the first step
begins), that something else has drawn since the last of them. Nothing is replaced any more when the first step begins.

The files that `torch.load` reads until then are noted too: they tell a run that goes on from a checkpoint.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture import private_api
from introspect_cli.capture.draws import generator_words, script_generators, state_of
from introspect_cli.capture.environment.sources import is_users, relative
from introspect_cli.capture.events import DRAWS, Patches
from introspect_cli.capture.frames import Places
from introspect_cli.capture.guard import uncounted
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.early_draws import (
    Event,
    Events,
    ModuleKey,
    arguments_word,
    seed_word,
    tensor_key,
)
from introspect_cli.records import Kind
from introspect_cli.tensors.generators import Generators
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.probes.modules import Called, ModuleProbe

MAX_FILES = 100
"""Files that are kept by name: a sharded checkpoint has many."""


class BeginningProbe(GuardedProbe):
    """Records seedings, and draws from generators, before the first step."""

    name = "beginning"
    lost = "draws before the first step are"

    def __init__(self, context: Context, modules: ModuleProbe) -> None:
        """Watch nothing before `install`; calls of `modules` are watched, too."""
        super().__init__(context, then=self.remove)
        self._modules = modules
        self._calls = _EarlyCalls()
        self._methods = Patches()
        self._places = Places()
        self._generators: Generators | None = None
        self._is_watching = self._watches_on = False
        self._events = Events()
        self._files: dict[str, None] = {}
        self._generators_made: list[str] = []

    def install(self) -> None:
        """Watch `torch.load`, and, if random states are recorded, what draws from generators."""
        if Kind.RNG in self._context.kinds:
            self._generators = Generators()
            self._generators.watch(())
            self._watch_draws()
        super().install()

    def _watch_draws(self) -> None:
        """Watch initialisers, tensor methods that draw, new generators, registrations and calls of modules."""
        self._put("early draws")
        self._methods.put("early methods", self, self._guarded)
        self._is_watching = True
        self._modules.surround(self._with_looks)

    def remove(self) -> None:
        """Stop, and put back what was replaced."""
        super().remove()
        self._put_back()

    def _put_back(self) -> None:
        """Put back what was replaced, and watch calls of modules no more; the guard stays as it is."""
        self._methods.remove()
        self._patches.remove()
        if self._is_watching:
            self._is_watching = False
            self._modules.surround(None)

    def document(self) -> dict[str, object]:
        """The document `settings/beginning`: events as lines of words, files read, and the script's own generators.

        Names are looked up now, so call it once the model has names.
        """
        if self._generators is None:  # nobody looked for draws
            return {"read": list(self._files)}
        return {
            **self._events.lines(self._context.names),
            "read": list(self._files),
            "generators": self._generators_made,
        }

    def on_begin(self) -> None:
        """Stop watching draws as a step begins.

        Note a last draw, the script's generators, and have the document written.
        """
        self._put_back()
        self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it
        made = script_generators() if self._generators is not None else {}
        self._generators_made = [generator_words(name, generator) for name, generator in made.items()]
        if self._generators is not None or self._files:
            self._context.facts["beginning"] = self.document

    def on_tick(self) -> None:
        """Switch off as a step ends, unless `on_restart` has switched on since the last step ended."""
        if not self._watches_on:
            self._guarded.on = False
            self._put_back()
        self._watches_on = False

    def on_restart(self, first: int | None) -> None:
        """Watch draws again if all that ran so far was an evaluation.

        Args:
            first: the step that becomes step 0, and then nothing is done; None where no step is kept.
        """
        if first is None and self._generators is not None:
            self._guarded.on = self._watches_on = True  # the clock says next that the steps so far are over
            with self._guarded:
                self._put_back()
                self._watch_draws()
                self._note_draws(sys._getframe(1), whole=True)  # noqa: SLF001 - as python documents it

    def _with_looks(self, original: Called) -> Called:
        """A call of a module with a look at the generators before it and after it, as long as draws are watched."""
        calls = self._calls

        @uncounted
        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Call the module between two looks at the generators."""
            if not self._guarded.on or not self._is_watching or private_api.tracing_state() is not None:
                return original(module, args, kwargs)
            depth = len(calls.modules)
            with self._guarded:
                self._methods.remove()  # a compiler that begins now finds torch's
                frame = sys._getframe(1)  # noqa: SLF001 - as python documents it
                calls.line = calls.line if depth else self._places.line(frame)
                self._note_draws(frame)
            try:
                calls.modules.append(module)
                result = original(module, args, kwargs)
                if self._is_watching:
                    with self._guarded:
                        self._note_draws(None)
                return result
            finally:
                del calls.modules[depth:]

        return called

    def _note_registration(self, _module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note a draw that nothing else has noted, as a parameter is registered."""
        generators = self._generators
        if generators is not None and DRAWS not in self._guarded.inside and generators.moved():
            self._note_draws(sys._getframe(1))  # noqa: SLF001 - as python documents it

    def _note_read_file(self, call: Call) -> None:
        """Note the file that `torch.load` reads; the first 100 alone."""
        if len(self._files) < MAX_FILES:
            self._files[_file_name(call.first)] = None

    def note_draws_before_seeding(self, frame: FrameType) -> bool:
        """Note draws so far, before a generator is seeded or set; returns whether this is before training.

        Not before training, nothing is noted.
        """
        if self._guarded.on and self._is_watching:
            self._note_draws(frame)
            return True
        return False

    def note_seeding(self, event: Event) -> None:
        """Note a seeding once it is done; the move of the generator that it made counts as no draw."""
        self._take_moved()
        self._events.note(event)

    def _watch_new_generator(self, call: Call) -> Callable[[object], None]:
        """Called before a generator is seeded in its constructor.

        Returns what notes seed and line, if the user's code made it.
        """
        frame: FrameType | None = call.frame
        is_pythons = isinstance(call.args[0] if call.args else None, random.Random)
        if is_pythons and call.frame.f_code is random.Random.__init__.__code__:
            frame = call.frame.f_back

        def made(_: object) -> None:
            """Note the seed and the line, if code of the user's has made the generator."""
            if frame is not None and is_users(frame.f_code.co_filename):
                by = "random.Random" if is_pythons else "numpy.random.default_rng"
                seed = next(iter((*call.args[is_pythons:], *call.kwargs.values())), None)
                line = f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}"
                self._events.note(Event("seed", by, seed_word(seed), 0, None, line))

        return made

    def _watch_fill(self, call: Call) -> Callable[[object], None]:
        """Called before a function that fills a tensor: notes draws so far.

        Returns what notes the function's own draws.
        """
        self._note_draws(call.frame)
        before = state_of(call.kwargs.get("generator"))

        def filled(_: object) -> None:
            """Note each generator that the call drew from."""
            drawn = self._take_moved() + ([("own", before)] if before else [])
            if drawn:
                tensor = tensor_key(call.first)
                line, by = self._places.line(call.frame), call.name + arguments_word(call.args, call.kwargs)
                for generator, state in drawn:
                    self._events.note(Event("draw", by, generator, state, tensor, line))

        return filled

    def _note_draws(self, frame: FrameType | None, *, whole: bool = False) -> None:
        """Note draws since the last look, under the innermost module under way, else under the line.

        Args:
            frame: where they were noticed; its line is noted outside of modules.
            whole: True to compare the generators' states in full.
        """
        drawn = self._take_moved(whole=whole)
        if drawn:
            by, subject, line = "", None, ""
            if self._calls.modules:
                module = self._calls.modules[-1]
                subject, line = ModuleKey(weakref.ref(module), type(module).__name__), self._calls.line
                by = "train" if getattr(module, "training", False) else "eval"
            else:
                line = self._places.line(frame)
            for generator, state in drawn:
                self._events.note(Event("draw", by, generator, state, subject, line))

    def _take_moved(self, *, whole: bool = False) -> list[tuple[str, int]]:
        """Name, and state before the draw, of each generator that has moved since the last look; the look is taken now.

        Args:
            whole: True to compare all states in full, not only those that seem to have moved.
        """
        generators = self._generators
        if generators is None or not (whole or generators.moved()):
            return []
        return generators.take_moved(whole=whole)


class _EarlyCalls(threading.local):
    """Stack of module calls in one thread, and the line of the outermost."""

    def __init__(self) -> None:
        """Start outside every module, in each thread anew."""
        self.modules: list[nn.Module] = []
        self.line = ""


def _file_name(source: object) -> str:
    """A checkpoint's file with the directory it is in: `checkpoint-4/optimizer.pt`.

    The class of a source without a name.
    """
    if isinstance(source, (str, os.PathLike)):
        return clean("/".join(Path(os.fsdecode(source)).parts[-2:]), 200)
    named = getattr(source, "name", None)
    return _file_name(named) if isinstance(named, str) else type(source).__name__
