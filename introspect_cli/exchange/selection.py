"""Which part of a run is wanted, and where it is to be written."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.records import Kind
    from introspect_cli.store.reader import Run


@dataclass(frozen=True)
class Selection:
    """A part of a run.

    Attributes:
        steps: half-open ranges (start, stop, stride); empty for all.
        kinds: kinds; empty for all.
        modules: globs of FQNs (a name also selects what is inside it); empty for all.
    """

    steps: tuple[tuple[int, int | None, int], ...] = ()
    kinds: frozenset[Kind] = field(default_factory=frozenset)
    modules: tuple[str, ...] = ()

    def wants_step(self, step: int) -> bool:
        """Whether a step is wanted."""
        return not self.steps or any(
            step >= start and (stop is None or step < stop) and (step - start) % stride == 0
            for start, stop, stride in self.steps
        )

    def wants(self, kind: str, fqn: str) -> bool:
        """Whether a site is wanted, given its kind and FQN."""
        if self.kinds and kind not in {wanted.value for wanted in self.kinds}:
            return False
        return not self.modules or any(
            fnmatch.fnmatchcase(fqn, glob) or fnmatch.fnmatchcase(fqn, f"{glob}.*") for glob in self.modules
        )


EVERYTHING = Selection()


def wanted_steps(run: Run, selection: Selection) -> Iterator[tuple[int, int]]:
    """(step, rank) of every wanted step, by step and then rank."""
    found = [
        (int(step), rank)
        for rank in run.ranks
        for step in run.rank(rank).entries["step"]
        if selection.wants_step(int(step))
    ]
    return iter(sorted(found))


def fresh_directory(path: str | Path) -> Path:
    """Make the directory to write to.

    Raises:
        UsageError: something is there, or it cannot be made.
    """
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty: name another directory with -o")
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; name another directory with -o") from None
    return directory
