"""What every probe is and shares: install and remove, a guard around its code, what it replaces and hears of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from introspect_cli.capture.guard import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context

Listener = TypeVar("Listener")


class Probe(Protocol):
    """Watches one thing.

    It never raises into the script, draws no random number, keeps no tensor or graph alive, changes no mode and touches
    no value.
    """

    name: str
    """As the manifest and messages call it."""

    def install(self) -> None:
        """Begin to watch."""

    def remove(self) -> None:
        """Stop watching, and put back what was replaced; also after a failed `install`."""


class GuardedProbe:
    """What nearly all probes share: a guard around their code, what they replace, and the moments they hear of.

    Attributes:
        name: as the manifest and messages call it.
        lost: what is no longer seen once it has failed, as in "batches are".
    """

    name: str
    lost: str

    def __init__(self, context: Context, *, then: Callable[[], None] | None = None) -> None:
        """Watch nothing yet; `then` is called once the probe has failed."""
        self._context = context
        self._recorder = context.recorder
        self._guarded = context.guard.around(self.name, self.lost, then)
        self._patches = Patches()
        self._heard: list[tuple[list[Any], Any]] = []

    def hear(self, listeners: list[Listener], listener: Listener, *, first: bool = False) -> None:
        """Have a listener told of a moment, before all others or after them, until the probe is removed."""
        listeners.insert(0 if first else len(listeners), listener)
        self._heard.append((listeners, listener))

    def install(self) -> None:
        """Begin to watch: called last by what replaces or hears of something first."""
        self._guarded.on = True

    def remove(self) -> None:
        """Put back what was replaced, and hear of nothing any more."""
        self._guarded.on = False
        self._patches.remove()
        while self._heard:
            listeners, listener = self._heard.pop()
            if listener in listeners:
                listeners.remove(listener)
