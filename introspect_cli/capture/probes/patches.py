"""Replace an attribute of torch's for as long as a capture lasts, and put the original back.

Where torch offers a hook, probes use the hook. Where it does not, or where the hook changes what runs (global module
hooks switch torch.compile to another path and print a warning), a function is replaced on its class or module.
"""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patch:
    """One replaced attribute."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        """Say what is to be replaced; nothing happens before `install`."""
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._own: Any = _MISSING

    def install(self) -> None:
        """Put the replacement in place."""
        self._own = vars(self._owner).get(self._name, _MISSING)
        setattr(self._owner, self._name, self._replacement)

    def remove(self) -> None:
        """Put the original back.

        If the script has replaced the attribute since, its replacement stays: it may call ours, and ours passes
        everything through once its probe is off.
        """
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
