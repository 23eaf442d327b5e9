"""What every probe is and shares: a guard around its code, its rows of the table of events, the moments it hears of."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture.events import Patches
from introspect_cli.capture.recording.rows import NO_INFO
from introspect_cli.records import Site
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.capture.context import Context
    from introspect_cli.records import Kind, Phase, SiteInfo

    Values = Sequence[tuple[str, Any]]
    """Values, each after its path."""

Args = tuple[Any, ...]
"""Arguments of a call by position."""

Kwargs = dict[str, Any]
"""Arguments of a call by name."""


def has_closure(args: Args, kwargs: Kwargs) -> bool:
    """Whether an optimizer's step, with the optimizer first among its arguments, was given a closure."""
    return kwargs.get("closure") is not None or callable(next(iter(args[1:]), None))


class GuardedProbe:
    """Watches one thing, by methods that stand in the table of events (`events`), or are called like a moment.

    It never raises into the script, draws no random number, keeps no tensor or graph alive, changes no mode and touches
    no value.

    The rows of the table whose section is the probe's name are in place while it is installed. A method that is called
    like a list of `Moments` (`on_root`, `on_tick`) hears of that moment while the probe is installed and has not
    failed; `on_tick` and `on_restart` are called also after a failure, so that the probe lets go of what it held.

    Attributes:
        name: as the manifest and messages call it.
        lost: what is no longer observed once it has failed, as the beginning of a sentence.
        kind: what it records; where that is not recorded, nothing is put in place and it hears of nothing. None where
            it is needed in any case.
    """

    name: str
    lost: str
    kind: Kind | None = None

    def __init__(self, context: Context, *, then: Callable[[], None] | None = None) -> None:
        """Watch nothing before `install`; `then()` is called when the probe has failed."""
        self._context = context
        self._recorder = context.recorder
        self._guarded = context.guard.around(self.name, self.lost, then)
        self._patches = Patches()

    def install(self) -> None:
        """Put the probe's rows of the table in place, listen to its moments, and switch its guard on.

        Where its kind is not recorded, only the guard is switched on.
        """
        if self.kind is None or self.kind in self._context.kinds:
            self._put(self.name)
            for moment, listeners in self._context.clock.listeners.items():
                if hasattr(self, moment):
                    listener = self._listener(getattr(self, moment), always=moment in {"on_tick", "on_restart"})
                    listeners.append(listener)
                    self._patches.undo_by(functools.partial(_discard, listeners, listener))
        self._guarded.on = True

    def _put(self, section: str) -> None:
        """Put a section of the table `EVENTS` in place until the probe is removed."""
        self._patches.put(section, self, self._guarded)

    def _listener(self, method: Callable[..., None], *, always: bool) -> Callable[..., None]:
        """The method inside the probe's guard; while the guard is off it is called only if `always`."""
        guarded = self._guarded

        def heard(*given: Any) -> None:
            """Call the method inside the guard; nothing while the guard is off, unless `always`."""
            if guarded.on or always:
                with guarded:
                    method(*given)

        return heard

    def _emit(
        self, phase: Phase, kind: Kind, fqn: str, values: Values, call: int = 0, info: SiteInfo = NO_INFO
    ) -> None:
        """Record values, each at its path below one name and call."""
        sites = [self._recorder.site(Site(phase, kind, fqn, call, path), info) for path, _ in values]
        self._recorder.emit_many(sites, [value for _, value in values])

    def remove(self) -> None:
        """Switch the guard off, stop listening, and take out all that was put in place (`Patches.undo_by`)."""
        self._guarded.on = False
        self._patches.remove()


def _discard(listeners: list[Any], listener: Any) -> None:
    if listener in listeners:
        listeners.remove(listener)


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Path and tensor of each tensor in a nested value."""
    return [(path, leaf) for path, leaf in flatten(value) if isinstance(leaf, torch.Tensor)]
