"""Both runs at the step where one goes on, as every part of the list looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.join.carried import Tensor, values_of
from introspect_cli.compare.join.resume import Goes, began_with, scalar
from introspect_cli.compare.join.sites import Columns, kind_code, phase_code, picked
from introspect_cli.compare.watched import observed_kinds
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.store.whole import Reader

_LOOKED_AT = 200
"""Steps from there on of which learning rates, batches and random states are held against each other."""

Side = tuple["Reader", int, "Columns"]
"""A run, a step of it, and its sites."""


@dataclass(frozen=True)
class Beside:
    """The later run beside the whole one.

    Attributes:
        comparison: both runs.
        goes: which goes on, and where.
    """

    comparison: Comparison
    goes: Goes

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds that both captures watched for; all where a run does not say."""
        sides, every = self.comparison.sides, {kind.value for kind in Kind}
        one, two = (observed_kinds(manifest) or every for manifest in (sides.manifest_a, sides.manifest_b))
        return frozenset(one & two)

    @property
    def tolerant(self) -> bool:
        """Whether some difference may pass: here, every bit counts."""
        return self.comparison.options.tolerant or bool(self.comparison.floors)

    # --- steps

    @property
    def first(self) -> tuple[Side, Side]:
        """The first step of the later run, and the step of the whole run that it is compared with."""
        runs = self.goes.runs
        return (runs.late, self.goes.first, runs.sites), (runs.whole, self.goes.at, runs.sites_whole)

    def steps(self) -> Iterator[tuple[Side, Side]]:
        """The steps of both from there on, as far as they are looked at."""
        runs = self.goes.runs
        for step in range(self.goes.first, self.goes.first + _LOOKED_AT):
            at = step - self.goes.first + self.goes.at
            if step in runs.late and at in runs.whole:
                yield (runs.late, step, runs.sites), (runs.whole, at, runs.sites_whole)

    def since(self, late: Side, whole: Side) -> str:
        """From which step on, as a clause; "" for the first. Steps are those of a."""
        step = whole[1] if self.goes.late == "b" else late[1]
        return "" if late[1] == self.goes.first else f"from step {step} on"

    def whole_steps(self) -> Iterator[Side]:
        """The whole run's steps, as far as they are looked at."""
        runs = self.goes.runs
        for row in range(min(len(runs.whole), _LOOKED_AT)):
            yield runs.whole, int(runs.whole.entries["step"][row]), runs.sites_whole

    # --- what either had when that step began

    @cached_property
    def began(self) -> dict[Tensor, int]:
        """Checksums of the tensors that the later run begins with."""
        return began_with(self.goes.runs.late, self.goes.runs.sites)

    @cached_property
    def there(self) -> dict[Tensor, int] | None:
        """Those of the whole run when that step began; None where they are not on record."""
        runs, at = self.goes.runs, self.goes.at
        if at - 1 not in runs.whole:
            begun = values_of(runs.whole, at, runs.sites_whole, Phase.START) if at in runs.whole else {}
            return begun or None
        again = (runs.sites_whole.phase == phase_code(Phase.START)) & (runs.sites_whole.call > 0)
        start = {} if again.any() else began_with(runs.whole, runs.sites_whole)
        frozen = {tensor: value for tensor, value in start.items() if tensor[0] != kind_code(Kind.OPTIMIZER_STATE)}
        return frozen | values_of(runs.whole, at - 1, runs.sites_whole, Phase.OPTIMIZER)

    @property
    def not_there(self) -> str:
        """That the step before is not on record."""
        return f"step {self.goes.at - 1} of {self.goes.whole} is not on record"

    # --- words

    def ab(self, late: str, whole: str) -> tuple[str, str]:
        """Two values as those of a and of b."""
        return (whole, late) if self.goes.late == "b" else (late, whole)

    def change(self, late: str, whole: str) -> str:
        """The values of a and b: `5 -> 1`."""
        return " -> ".join(self.ab(late, whole))


def numbers_of(side: Side, kind: Kind) -> Iterator[tuple[tuple[str, str], float | None]]:
    """The records of a kind that an optimizer step leaves: name and path, and the value of a scalar."""
    reader, step, sites = side
    if step not in reader:
        return
    batch = reader.read(step)
    for row, number in picked(batch, sites, kind, Phase.OPTIMIZER):
        yield (sites.fqn[number], sites.path[number]), scalar(batch, row)


def key_of(path: str) -> str:
    """The last key of a path: `exp_avg` of `['exp_avg']`."""
    return path.rpartition("[")[2].strip("]'")
