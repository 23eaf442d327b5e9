"""A divergence compared element by element, with the inputs of its operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.compare.elements import TensorDifference, difference
from introspect_cli.compare.ledger import At
from introspect_cli.compare.say import what
from introspect_cli.compare.table import KINDS, columns
from introspect_cli.records import Kind, Phase, Site, Status

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult, Divergence
    from introspect_cli.store.reader import RankReader
    from introspect_cli.store.run import Run


class Given(NamedTuple):
    """One input of an operator.

    Attributes:
        text: what it is, in words.
        state: `equal`, `differs` or `not recorded`.
    """

    text: str
    state: str


class Closeup(NamedTuple):
    """Element-wise comparison of a divergence.

    Attributes:
        difference: how the whole tensors differ; None where they are not both stored, or cannot be compared.
        missing: why there is no difference; "" where there is one.
        given: what went into the operator; empty for what is none, or where that is not known.
    """

    divergence: Divergence
    difference: TensorDifference | None
    missing: str
    given: tuple[Given, ...] = ()


def is_comparable(divergence: Divergence) -> bool:
    """Whether both runs have a tensor of the same shape at the divergence; False for random states and plain values."""
    a, b = divergence.a, divergence.b
    if a is None or b is None or divergence.site.kind is Kind.RNG:
        return False
    return a.layout.shape == b.layout.shape and Status.VALUE not in (a.status, b.status)


def worth_a_look(result: DiffResult, also: Divergence | None = None) -> tuple[Divergence, ...]:
    """Divergences to compare element by element: the first, the first listed comparable one, and `also` if comparable.

    The first is among them whether it is comparable or not. Of divergences with the same pair of checksums only the
    first is. Empty where nothing diverges.

    Args:
        result: the answer of a comparison.
        also: another divergence, looked up in `result` by step, rank and site; None for none.
    """
    if result.first is None:
        return ()
    listed = [each for each in result.divergences if is_comparable(each)]
    wanted = [result.first, *listed[:1]]
    if also is not None:
        wanted += [each for each in listed if (each.step, each.rank, each.site) == (also.step, also.rank, also.site)]
    chosen: dict[tuple[int, ...], Divergence] = {}
    for each in wanted:
        sides = tuple(side.checksum if side is not None else 0 for side in (each.a, each.b))
        chosen.setdefault(sides if all(sides) else (*sides, each.site.key()), each)
    return tuple(chosen.values())


def closeup(a: Run, b: Run, divergence: Divergence) -> Closeup:
    """Compare a divergence's tensors element by element, reading them from both stores.

    Where they cannot be compared, `missing` says why.

    Raises:
        StoreError: a stored tensor is damaged.
    """
    one, two = divergence.a, divergence.b
    if one is None or two is None:
        return Closeup(divergence, None, f"only run {'b' if one is None else 'a'} has it")
    differs, missing = None, ""
    if Status.VALUE in (one.status, two.status):
        missing = f"it is a plain value: {one.text} in a, {two.text} in b"
    elif one.layout.shape != two.layout.shape:
        missing = f"its shape is {list(one.layout.shape)} in a and {list(two.layout.shape)} in b"
    else:
        stored = [run.tensor(side.checksum) if side.checksum else None for run, side in ((a, one), (b, two))]
        if stored[0] is None or stored[1] is None:
            lacking = [f"run {side}" for side, tensor in zip("ab", stored, strict=True) if tensor is None]
            missing = f"it was not stored whole by {' and '.join(lacking)}"
        else:
            differs = difference(stored[0], stored[1], (one.layout.dtype, two.layout.dtype))
            missing = "" if differs is not None else "it holds no numbers that can be compared"
    return Closeup(divergence, differs, missing, _operator_inputs(a, b, divergence))


def is_outermost(kind: str, fqn: str) -> bool:
    """Whether a site of this kind and FQN is an input of a root module, whose name has no dot."""
    return kind == Kind.INPUT and "." not in fqn


def _operator_inputs(a: Run, b: Run, divergence: Divergence) -> tuple[Given, ...]:
    """Inputs of an operator, each `equal`, `differs` or `not recorded`; reads the divergence's step of both runs.

    Empty for what is no operator, or where run a's record does not list them. Parameters without a record in the step
    are compared as the previous step left them.
    """
    if divergence.site.kind is not Kind.OP_OUTPUT:
        return ()
    reader = a.rank(divergence.rank)
    record = next((one for one in reader.records(divergence.step) if one.site == divergence.site), None)
    if record is None or record.given is None:
        return ()
    runs = (reader, divergence.step), (b.rank(divergence.rank), divergence.step_b)
    values, inputs = [_values_at(*each) for each in runs], []
    for number in record.given.inputs:
        if number < 0:
            inputs.append(Given("a tensor that no recorded operator wrote", "not recorded"))
            continue
        site = reader.sites[number][0]
        one, two = (of_run.get(site, 0) for of_run in values)
        inputs.append(Given(what(site), "not recorded" if not (one and two) else "equal" if one == two else "differs"))
    return tuple(inputs)


def _values_at(reader: RankReader, step: int) -> dict[Site, int]:
    """Checksums of a step by site; of tensors without a start value, what the step before left stands for it."""
    left = At(reader, columns(reader.sites), step - 1).tensors(Phase.OPTIMIZER)
    begun = {Site(Phase.START, KINDS[kind], fqn, 0, path): value for (kind, fqn, path), value in left.items()}
    return begun | {record.site: record.summary.checksum for record in reader.records(step)}
