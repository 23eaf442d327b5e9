"""A divergence compared element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.elements import TensorDifference, difference
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult, Divergence
    from introspect_cli.store.run import Run


class Closeup(NamedTuple):
    """Element-wise comparison of a divergence.

    Attributes:
        difference: how the whole tensors differ; None where they are not both stored, or cannot be compared.
        missing: why there is no difference; "" where there is one.
    """

    divergence: Divergence
    difference: TensorDifference | None
    missing: str


def why_not_comparable(divergence: Divergence) -> str:
    """Why the runs have no two tensors of one shape there, whatever was stored, as a clause; "" where they do."""
    a, b = divergence.a, divergence.b
    if a is None or b is None:
        return f"only run {divergence.only} has it"
    if Status.VALUE in (a.status, b.status):
        return f"it is a plain value: {a.text} in a, {b.text} in b"
    if a.layout.shape != b.layout.shape:
        return f"its shape is {list(a.layout.shape)} in a and {list(b.layout.shape)} in b"
    return "it is a random state" if divergence.site.kind is Kind.RNG else ""


def worth_a_look(result: DiffResult, also: Divergence | None = None) -> tuple[Divergence, ...]:
    """Divergences to compare element by element: the first, the first listed comparable one, and `also` if comparable.

    The first is among them whether it is comparable or not; each is once. Empty where nothing diverges.

    Args:
        result: the answer of a comparison.
        also: another divergence, looked up in `result` by step, rank and site; None for none.
    """
    if result.first is None:
        return ()
    listed = [each for each in result.divergences if not why_not_comparable(each)]
    wanted = [result.first, *listed[:1]]
    if also is not None:
        wanted += [each for each in listed if (each.step, each.rank, each.site) == (also.step, also.rank, also.site)]
    return tuple({(each.step, each.rank, each.site): each for each in wanted}.values())


def closeup(a: Run, b: Run, divergence: Divergence) -> Closeup:
    """Compare a divergence's tensors element by element, reading them from both stores.

    Where they cannot be compared, `missing` says why.

    Raises:
        StoreError: a stored tensor is damaged.
    """
    one, two, missing = divergence.a, divergence.b, why_not_comparable(divergence)
    if missing or one is None or two is None:
        return Closeup(divergence, None, missing)
    stored = [run.tensor(side.checksum) if side.checksum else None for run, side in ((a, one), (b, two))]
    if stored[0] is None or stored[1] is None:
        lacking = [f"run {side}" for side, tensor in zip("ab", stored, strict=True) if tensor is None]
        return Closeup(divergence, None, f"it was not stored whole by {' and '.join(lacking)}")
    differs = difference(stored[0], stored[1], (one.layout.dtype, two.layout.dtype))
    return Closeup(divergence, differs, "" if differs is not None else "it holds no numbers that can be compared")
