"""States of the random generators, at the start of every step; `draws` sees to those within.

A generator that nobody seeded starts from the operating system's entropy, so its state differs between any two
processes without anything depending on it. As long as nothing has been drawn from it, it is recorded as untouched.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.draws import UNTOUCHED, script_generators, state_word
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.start import PYTHON, numpy_state, python_state
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context


class RngProbe(GuardedProbe):
    """Records generator states as a step begins; patches nothing."""

    name = "rng"
    lost = "states of random generators are"
    kind = Kind.RNG

    def __init__(self, context: Context, began: dict[str, bytes | None]) -> None:
        """Look at no generator before a step begins.

        Args:
            context: shared by all probes.
            began: bytes of the states of python's and numpy's generators when the process began, by library.
        """
        super().__init__(context, then=self.remove)
        self._began = began
        self._python: tuple[tuple[int | None, object], bytes] = (None, None), b""
        """What tells python's state when it was last asked for, and the state."""
        self._made: dict[str, Any] | None = None
        self._site = functools.cache(self._new_site)
        self._backends = _backends()

    def remove(self) -> None:
        """Stop listening; draws within steps are not looked for either."""
        super().remove()
        self._context.draws.stop()

    def on_begin(self) -> None:
        """Record each generator's state as a step begins: defaults, accelerators' and the script's own.

        Of the script's own, those that exist at the first call. A default one of python or numpy whose state is that in
        `began` is recorded as untouched. Those of numpy and of accelerators that are not in use are skipped.
        """
        draws, devices = self._context.draws, [pair for pairs in self._backends for pair in pairs()]
        draws.begin(devices)
        for name, state in (("python", self._python_state()), ("numpy", numpy_state())):
            if state is None:  # the library is not loaded
                continue
            if state == self._began.get(name):
                draws.untouched.add(name)
                self._recorder.emit(self._site(name), UNTOUCHED)
            else:
                self._recorder.emit(self._site(name), torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self._recorder.emit(self._site("torch"), torch.default_generator.get_state())
        for device, generator in devices:
            self._recorder.emit(self._site(device), generator.get_state())
        if self._made is None:  # what the script makes later is not looked for: that would take long in each step
            self._made = script_generators()
        for name, generator in self._made.items():
            self._recorder.emit(self._site(name), state_word(generator))

    def _python_state(self) -> bytes:
        """State of python's generator, which takes long to ask for; the last answer where nothing has changed."""
        draws = self._context.draws
        mark = draws.state("python"), getattr(PYTHON, "gauss_next", None)
        if mark[0] is None or mark != self._python[0]:
            state = python_state()
            # else another thread draws, and nobody knows before or after
            self._python = (mark if not draws.moved() else (None, None)), state
        return self._python[1]

    def _new_site(self, name: str) -> int:
        """Number of the site of a generator's state at the start of a step; `_site` caches it."""
        return self._recorder.site(Site(Phase.START, Kind.RNG, name))


def _backends() -> list[Callable[[], list[tuple[str, torch.Generator]]]]:
    """For each kind of accelerator that torch is built for, a function that lists its generators.

    Neither the list nor the functions initialise a device.
    """
    there = {"cuda": torch.backends.cuda.is_built(), "xpu": hasattr(torch, "xpu"), "mps": torch.backends.mps.is_built()}
    return [functools.partial(_generators_of, name) for name, is_built in there.items() if is_built]


def _generators_of(name: str) -> list[tuple[str, torch.Generator]]:
    """Name and generator of each device of a backend, such as `cuda:0`; [] until the backend is initialised.

    Of `mps` the one generator, named `mps`, wherever it is available.
    """
    if name == "mps":  # there is no public way to its generator
        return [("mps", torch.mps._get_default_mps_generator())] if torch.backends.mps.is_available() else []  # noqa: SLF001 - see above
    backend: Any = getattr(torch, name)
    generators = backend.default_generators if backend.is_initialized() else ()
    return [(f"{name}:{number}", generator) for number, generator in enumerate(generators)]
