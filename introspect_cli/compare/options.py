"""What may change the answer of a comparison; what changes only its look is the renderer's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from introspect_cli.records import Kind


@dataclass(frozen=True)
class DiffOptions:
    """Options of a comparison.

    Attributes:
        rename: pairs (pattern, replacement), regular expressions put to the FQNs of run a in turn.
        offset: step k of b is compared with step k + offset of a; None to detect it.
        rtol: tolerated root-mean-square difference, relative to the larger root-mean-square value.
        atol: tolerated root-mean-square difference, in the values' own unit.
        noise_factor: how many times the noise a divergence must exceed.
        steps: half-open ranges (start, stop, stride) of a's steps that count; empty for all.
        kinds: kinds that count; empty for all.
        modules: globs of FQNs that count (a name also selects what is inside it); empty for all.
        ranks: ranks that count; empty for all.
        limit: divergences to list; None for all.
        want_map: whether to compute the divergence map.
    """

    rename: tuple[tuple[str, str], ...] = ()
    offset: int | None = None
    rtol: float = 0.0
    atol: float = 0.0
    noise_factor: float = 4.0
    steps: tuple[tuple[int, int | None, int], ...] = ()
    kinds: frozenset[Kind] = field(default_factory=frozenset)
    modules: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    limit: int | None = 12
    want_map: bool = False

    @property
    def tolerant(self) -> bool:
        """Whether differing checksums may still count as agreeing."""
        return self.rtol > 0 or self.atol > 0

    @property
    def narrowed(self) -> bool:
        """Whether only a part of the records counts."""
        return bool(self.steps or self.kinds or self.modules or self.ranks)

    def wants_step(self, step: int) -> bool:
        """Whether a step counts."""
        if not self.steps:
            return True
        return any(
            step >= start and (stop is None or step < stop) and (step - start) % stride == 0
            for start, stop, stride in self.steps
        )
