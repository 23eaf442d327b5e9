"""What one capture is: what was asked for, where it writes, and which part of a launch it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.errors import StoreError
    from introspect_cli.script.target import Target
    from introspect_cli.store.run_writer import Launch, StoreWriter


@dataclass(frozen=True, eq=False)
class Capture:
    """One capture.

    Attributes:
        options: what to record.
        target: what runs; None where the caller runs it (the Python API).
        launch: this process's part in a distributed run; None for a run of one process.
        path: the run's directory.
        store: this process's part of it.
        guard: around all code that runs inside the script's.
        say: prints a sentence, or keeps it for the end once the script is over.
        store_lost: to be called with the error when the store can no longer be written.
        began: bytes of the states of python's and numpy's generators when the process began, by library.
        facts: by name, what gives each document of settings that has changed since it was last written; whoever writes
            a document takes it out.
    """

    options: CaptureOptions
    target: Target | None
    launch: Launch | None
    path: Path
    store: StoreWriter
    guard: Guard
    say: Callable[[str], None]
    store_lost: Callable[[StoreError], None]
    began: dict[str, bytes | None]
    facts: dict[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This process's rank; 0 for a run of one process."""
        return 0 if self.launch is None else self.launch.rank
