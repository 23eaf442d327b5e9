"""Generators that a script makes itself, as they are made: by what, from which seed, at which line.

A script may take `default_rng` from numpy, or make a generator, before it imports torch. So this watches from the
script's first line to its first step, and needs no torch.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from introspect_cli.capture.environment.sources import is_users, relative
from introspect_cli.capture.guard import Patches

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_MOST = 200


class Made(NamedTuple):
    """A generator was seeded: by what, with what, at which line."""

    by: str
    seed: object
    line: str


class _MadeGenerators:
    """Watches `random.Random` and numpy's `default_rng`, which a script may keep under a name of its own."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._numpy: object = None
        self._early: list[Made] = []
        self._on = False
        self.listener: Callable[[Made], None] | None = None
        """Is told of each; what comes before there is one is kept for it."""

    def install(self) -> None:
        """Begin to watch; also once numpy has been imported."""
        if not self._on:
            self._on = True
            self._patches.replace(random.Random, "seed", self._making(random.Random.seed, 1))
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None and self._numpy is not numpy_random:
            self._numpy = numpy_random
            self._patches.replace(numpy_random, "default_rng", self._making(numpy_random.default_rng, 0))

    def remove(self) -> None:
        """Put back what was replaced, and tell nobody any more: what a script keeps passes everything through."""
        self._on, self._numpy, self.listener = False, None, None
        self._early.clear()
        self._patches.remove()

    def hear(self, listener: Callable[[Made], None]) -> None:
        """Have a listener told of each generator, those first that were made until now."""
        early, self._early = self._early, []
        for made in early:
            listener(made)
        self.listener = listener

    def _making(self, original: Callable[..., Any], place: int) -> Callable[..., Any]:
        """What seeds a generator, with the place of the seed among its arguments."""

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if self._on:
                with contextlib.suppress(Exception):
                    self._note(sys._getframe(1), place, next(iter((*args[place:], *kwargs.values())), None))  # noqa: SLF001 - as python documents it
            return made

        return make

    def _note(self, frame: FrameType | None, place: int, seed: object) -> None:
        if place and frame is not None and frame.f_code is random.Random.__init__.__code__:
            frame = frame.f_back
        if frame is None or not is_users(frame.f_code.co_filename):
            return
        by = "random.Random" if place else "numpy.random.default_rng"
        made = Made(by, seed, f"{relative(frame.f_code.co_filename)}:{frame.f_lineno}")
        if self.listener is not None:
            self.listener(made)
        elif len(self._early) < _MOST:
            self._early.append(made)


MADE: Final = _MadeGenerators()
"""Of this process: its generators are one another's, whoever captures."""
