"""What every probe is and shares: install and remove, a guard around its code, what it replaces and hears of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.capture.guard import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.records import Kind


class GuardedProbe:
    """Watches one thing: a guard around its code, what it replaces, and the moments it hears of.

    It never raises into the script, draws no random number, keeps no tensor or graph alive, changes no mode and touches
    no value.

    A method that is called like a list of `Moments` (`on_root`, `on_tick`) hears of that moment while the probe is
    installed and has not failed; of the ends of steps also after it has, so that it lets go of what it held.

    Attributes:
        name: as the manifest and messages call it.
        lost: what is no longer observed once it has failed, as the beginning of a sentence.
        kind: what it records; it hears of nothing where that is not recorded. None where it is heard in any case.
        first: whether it hears before all others.
    """

    name: str
    lost: str
    kind: Kind | None = None
    first = False

    def __init__(self, context: Context, *, then: Callable[[], None] | None = None) -> None:
        """Watch nothing yet; `then` is called once the probe has failed."""
        self._context = context
        self._recorder = context.recorder
        self._guarded = context.guard.around(self.name, self.lost, then)
        self._patches = Patches()
        self._heard: list[tuple[list[Any], Any]] = []

    def hear(self, listeners: list[Any], listener: Callable[..., None]) -> None:
        """Add a listener to a moment's list until the probe is removed."""
        listeners.insert(0 if self.first else len(listeners), listener)
        self._heard.append((listeners, listener))

    def install(self) -> None:
        """Start to watch and to listen; subclasses call it last, after replacing functions."""
        if self.kind is None or self.kind in self._context.kinds:
            for moment, listeners in vars(self._context.clock).items():
                if moment.startswith("on_") and hasattr(self, moment):
                    self.hear(listeners, self._guard(getattr(self, moment), always=moment == "on_tick"))
        self._guarded.on = True

    def _guard(self, listener: Callable[..., None], *, always: bool) -> Callable[..., None]:
        """The listener inside the probe's guard; after a failure it is called only if `always`."""
        guarded = self._guarded

        def heard(*given: Any) -> None:
            if guarded.on or always:
                with guarded:
                    listener(*given)

        return heard

    def remove(self) -> None:
        """Restore what was replaced, and stop listening."""
        self._guarded.on = False
        self._patches.remove()
        while self._heard:
            listeners, listener = self._heard.pop()
            if listener in listeners:
                listeners.remove(listener)
