"""A script's own hand in a capture: ending steps, recording values, naming phases.

A reinforcement-learning loop has advantages, samplers and rollouts that no module and no optimizer tells of. The calls
here may stay in a script for good: without a capture each of them looks at an empty list and returns, and nothing is
imported, torch neither.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


_listeners: list[Any] = []
"""Captures under way, with methods `end_step()`, `record_value(name, value)` and `enter_phase(name)`, "" for none."""
_phases: list[str] = [""]


def step() -> None:
    """End the current step of the capture under way; nothing without a capture.

    From the first call on, optimizer steps no longer end steps.
    """
    for listener in tuple(_listeners):
        listener.end_step()


def record(name: str, value: Any) -> None:
    """Record a value of the script's own: `record("advantages", advantages)`; nothing without a capture.

    Args:
        name: what it is, the same in every step; values with the same name in a step are numbered.
        value: a tensor, an array, a number or a string, or these nested in lists, tuples and dicts.
    """
    for listener in tuple(_listeners):
        listener.record_value(name, value)


def phase(name: str) -> AbstractContextManager[object]:
    """Begin a phase of the script's own, such as "rollout", now: until the next `phase`, or the end of a `with` block.

    Values recorded in it are named by it (`rollout/advantages`), and forward passes in it are recorded although they
    run without gradients. Nothing without a capture.

    Args:
        name: of the phase; "" for none.

    Returns:
        For a `with` block, whose end goes back to the phase before.
    """
    if not _listeners:
        return nullcontext()
    back = ExitStack()
    back.callback(_set_phase, _phases[0])
    _set_phase(name)
    return back


def _set_phase(name: str) -> None:
    """Set the phase and call all listeners' `enter_phase`; nothing where there are no listeners and no phase."""
    if _listeners or _phases[0]:
        _phases[0] = name
        for listener in tuple(_listeners):
            listener.enter_phase(name)


def listen(listener: Any) -> None:
    """Register a listener, whose methods are called by all functions here until `unlisten`."""
    _listeners.append(listener)


def unlisten(listener: Any) -> None:
    """Unregister a listener; nothing for one that is not registered. After the last one the script is in no phase."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _phases[0] = ""
