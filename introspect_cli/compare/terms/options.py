"""Options that can change the answer of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

from introspect_cli.selection import Selection


@dataclass(frozen=True)
class DiffOptions(Selection):
    """Options of a comparison, beside what of the runs counts (steps in a's numbering, FQNs as b has them).

    Attributes:
        rename: pairs (pattern, replacement), regular expressions put to the FQNs of run a in turn.
        offset: step k of b is compared with step k + offset of a; None to detect it.
        rtol: tolerated root-mean-square difference, relative to the larger root-mean-square value.
        rtol_fine: the same, of what was computed before anything in bfloat16 or float16 was; 0 for no difference.
        atol: tolerated root-mean-square difference, in the values' own unit.
        noise_factor: how many times the noise a divergence must exceed.
        limit: divergences to list; None for all.
        whole_step: list all divergences of the first diverging step, whatever the limit.
        want_map: whether to compute the divergence map.
        later: records of steps after the first divergence that are opened to be counted, at most, unless a map or all
            divergences are wanted.
        least: as how many records a step counts there at least, since opening one takes its time.
        strict: whether structure and random states that changed no number count as divergences.
        by_value: whether modules under other names are recognised by what they hold.
        evaluation: True where only evaluation counts, False where only training does, None for both.
    """

    rename: tuple[tuple[str, str], ...] = ()
    offset: int | None = None
    rtol: float = 0.0
    rtol_fine: float = 0.0
    atol: float = 0.0
    noise_factor: float = 4.0
    limit: int | None = 12
    whole_step: bool = False
    want_map: bool = False
    later: int = 20_000_000
    least: int = 0
    strict: bool = False
    by_value: bool = True
    evaluation: bool | None = None

    def between_layouts(self, *, coarse: bool, throughout: bool = False) -> DiffOptions:
        """These options with a default tolerance for runs split differently over ranks.

        Unchanged if a tolerance is set.

        rtol is 1e-4, or 3e-2 with `coarse` or `throughout`; atol 1e-8. With `coarse` alone, rtol_fine is 1e-4.

        Args:
            coarse: whether both runs hold values in bfloat16 or float16.
            throughout: whether both compute in such a precision from the beginning.
        """
        if self.tolerant:
            return self
        fine = 1e-4 if coarse and not throughout else 0.0
        return replace(self, rtol=3e-2 if coarse or throughout else 1e-4, rtol_fine=fine, atol=1e-8)

    @property
    def tolerant(self) -> bool:
        """Whether rtol or atol is above 0."""
        return self.rtol > 0 or self.atol > 0
