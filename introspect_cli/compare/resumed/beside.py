"""Both runs at the step where one goes on, as every part of the list looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.join.at import At, Tensor
from introspect_cli.compare.join.sites import kind_code, phase_code
from introspect_cli.compare.watched import observed_kinds
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.resumed.goes_on import Goes

_LOOKED_AT = 200
"""Steps from there on of which learning rates, batches and random states are held against each other."""


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
        every = {kind.value for kind in Kind}
        one, two = (observed_kinds(manifest) or every for manifest in self.comparison.manifests)
        return frozenset(one & two)

    @property
    def tolerant(self) -> bool:
        """Whether some difference may pass: here, every bit counts."""
        return self.comparison.options.tolerant or bool(self.comparison.floors)

    # --- steps

    @property
    def first(self) -> tuple[At, At]:
        """The first step of the later run, and the step of the whole run that it is compared with."""
        return self.goes.begins, self.goes.there

    def steps(self) -> Iterator[tuple[At, At]]:
        """The steps of both from there on, as far as they are looked at."""
        late, whole = self.first
        for after in range(_LOOKED_AT):
            sides = late.to(late.step + after), whole.to(whole.step + after)
            if sides[0].recorded and sides[1].recorded:
                yield sides

    def since(self, late: At, whole: At) -> str:
        """From which step on, as a clause; "" for the first. Steps are those of a."""
        step = whole.step if self.goes.late == "b" else late.step
        return "" if late.step == self.goes.first else f"from step {step} on"

    def whole_steps(self) -> Iterator[At]:
        """The whole run's steps, as far as they are looked at."""
        there = self.goes.there
        return map(there.to, there.reader.entries["step"][:_LOOKED_AT].tolist())

    # --- what either had when that step began

    @cached_property
    def began(self) -> dict[Tensor, int]:
        """Checksums of the tensors that the later run begins with."""
        return self.goes.begins.tensors(Phase.START)

    @cached_property
    def there(self) -> dict[Tensor, int] | None:
        """Those of the whole run when that step began; None where they are not on record."""
        there = self.goes.there
        before, sites = there.to(there.step - 1), there.sites
        if not before.recorded:
            return there.tensors(Phase.START) or None
        again = (sites.phase == phase_code(Phase.START)) & (sites.call > 0)
        start = {} if again.any() else At.first(there.reader, sites).tensors(Phase.START)
        frozen = {tensor: value for tensor, value in start.items() if tensor[0] != kind_code(Kind.OPTIMIZER_STATE)}
        return frozen | before.tensors(Phase.OPTIMIZER)

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


def key_of(path: str) -> str:
    """The last key of a path: `exp_avg` of `['exp_avg']`."""
    return path.rpartition("[")[2].strip("]'")
