"""What the steps so far have shown, and later steps are compared by: passed in and returned, and never overwritten."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Learned(NamedTuple):
    """What a walk over the steps has learned.

    Attributes:
        coarse: the first step that may begin with what was rounded to bfloat16 or float16; None while none may.
        unsettled: parameters whose gradient was seen to be nothing but rounding, each with the step since when, and
            whether that was so of some elements only.
        let_pass: those of which something beyond the tolerance was let pass.
        factor: how many times smaller than those of a the gradients inside the backward pass of b are (negative: how
            many times larger), where ranks or microbatches are put together; None while that was not seen.
        flows_back: whether gradients that were chosen are compared by that factor.
        exact: values that ranks share out and whose samples are all equal, by step and site.
    """

    coarse: int | None = None
    unsettled: Mapping[str, tuple[int, bool]] = MappingProxyType({})
    let_pass: frozenset[str] = frozenset()
    factor: int | None = None
    flows_back: bool = False
    exact: frozenset[tuple[int, int]] = frozenset()

    @property
    def smaller(self) -> float:
        """By what the gradients of b are smaller, as far as that was seen."""
        return 1.0 if self.factor is None else self.factor if self.factor > 0 else -1.0 / self.factor

    @property
    def times(self) -> float | None:
        """How many times those of a these gradients of b are; None where that was not seen."""
        return None if self.factor is None else 1 / self.smaller
