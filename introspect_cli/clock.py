"""A script's own hand on the step clock.

`introspect_cli.step()` ends the current step of the capture under way, if there is one; without a capture it does
nothing, so a script may keep the call. From the first call on, optimizer steps no longer end steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def step() -> None:
    """End the current step of the capture under way."""
    for listener in tuple(_listeners):
        listener()


def listen(listener: Callable[[], None]) -> None:
    """Have `step` call the listener, until `unlisten`."""
    _listeners.append(listener)


def unlisten(listener: Callable[[], None]) -> None:
    """Stop calling the listener."""
    if listener in _listeners:
        _listeners.remove(listener)
