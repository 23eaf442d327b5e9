"""A divergence looked at element by element, with what went into it.

Whole tensors say what their summaries cannot, but not what their dimensions mean. What else a run holds tells that: as
many as the batch has are samples, a module that says `n_head = 8` has eight heads, and a batch that was stored whole
shows which positions are padding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.distance import Tensors
from introspect_cli.compare.pattern import About, Difference, difference
from introspect_cli.compare.reasons.words import what
from introspect_cli.records import Kind, Phase, Record, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from introspect_cli.compare.result import DiffResult, Divergence
    from introspect_cli.store.reader import Run

_HEADS = re.compile(r"(?:n|num)_(?:attention_)?heads?|heads|nhead|num_attention_heads")
_ACTIVATIONS = frozenset(
    {Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT, Kind.LOSS}
)
_MASK = re.compile(r"mask", re.IGNORECASE)


@dataclass(frozen=True)
class Given:
    """Something that went into an operator.

    Attributes:
        text: what it is, in words.
        state: `equal`, `differs` or `not recorded`.
    """

    text: str
    state: str


@dataclass(frozen=True)
class Closeup:
    """A divergence, element by element.

    Attributes:
        divergence: the divergence.
        difference: how the whole tensors differ; None where they are not both stored, or cannot be compared.
        missing: why there is no difference; "" where there is one.
        given: what went into the operator; empty for what is none, or where that is not known.
    """

    divergence: Divergence
    difference: Difference | None
    missing: str
    given: tuple[Given, ...] = ()


def comparable(divergence: Divergence) -> bool:
    """Whether both runs have a tensor there, of one shape."""
    a, b = divergence.a, divergence.b
    if a is None or b is None or divergence.site.kind is Kind.RNG:
        return False
    return a.layout.shape == b.layout.shape and Status.VALUE not in (a.status, b.status)


def worth_a_look(result: DiffResult, also: Divergence | None = None) -> tuple[Divergence, ...]:
    """The first divergence; the first that both runs have, of one shape; and one that is asked for, where it is there.

    An operator that only one run has is where they part, and has nothing to compare: what it changed is the next.

    Args:
        result: a comparison that lists the divergences of its first diverging step.
        also: a divergence of another comparison whose site is wanted as well.
    """
    if result.first is None:
        return ()
    listed = [own for own in result.divergences if comparable(own)]
    found = [result.first, *listed[:1]]
    if also is not None:
        found += [own for own in listed if (own.step, own.rank, own.site) == (also.step, also.rank, also.site)]
    chosen: dict[tuple[int, ...], Divergence] = {}
    for own in found:
        sides = tuple(side.checksum if side is not None else 0 for side in (own.a, own.b))
        chosen.setdefault(sides if all(sides) else (*sides, own.site.key()), own)
    return tuple(chosen.values())


def closeup(a: Run, b: Run, divergence: Divergence) -> Closeup:
    """Look at a divergence of two opened runs.

    Raises:
        StoreError: a stored tensor is damaged.
    """
    one, two = divergence.a, divergence.b
    if one is None or two is None:
        return Closeup(divergence, None, f"only run {'b' if one is None else 'a'} has it")
    given = _given(a, b, divergence)
    if Status.VALUE in (one.status, two.status):
        return Closeup(divergence, None, f"it is a plain value: {one.text} in a, {two.text} in b", given)
    if one.layout.shape != two.layout.shape:
        shapes = (list(own.layout.shape) for own in (one, two))
        return Closeup(divergence, None, "its shape is {} in a and {} in b".format(*shapes), given)
    stored = Tensors(a, b).both(one.checksum, two.checksum, one.layout.shape)
    if stored is None:
        lacking = [
            name
            for run, own, name in ((a, one, "a"), (b, two, "b"))
            if not own.checksum or run.tensor(own.checksum) is None
        ]
        which = "neither run" if len(lacking) == 2 else f"run {lacking[0]}" if lacking else "one of the runs"
        verb = "stored it whole" if len(lacking) == 2 else "has not stored it whole"
        return Closeup(divergence, None, f"{which} {verb}", given)
    found = difference(*stored, (one.layout.dtype, two.layout.dtype), _about(a, divergence))
    if found is None:
        return Closeup(divergence, None, "it holds no numbers that can be compared", given)
    return Closeup(divergence, found, "", given)


def _about(run: Run, divergence: Divergence) -> About:
    """What run a tells of the dimensions of a tensor."""
    assert divergence.a is not None, "only what both have is looked at"
    reader = run.rank(divergence.rank)
    shape = divergence.a.layout.shape
    kind = divergence.site.kind
    if kind not in _ACTIVATIONS:
        return About(heads=_heads(run, divergence))
    batches = fed(reader.records(divergence.step))
    is_batch = len(shape) > 1 and shape[0] == batch_size(batches)
    return About(is_batch, _heads(run, divergence), _padding(run, batches))


def fed(records: Iterable[Record]) -> list[Record]:
    """The batches of a step; where no loader gave any, what the outermost modules were given."""
    found = [own for own in records if own.site.kind is Kind.BATCH or is_outermost(own.site.kind, own.site.fqn)]
    return [own for own in found if own.site.kind is Kind.BATCH] or found


def is_outermost(kind: str, fqn: str) -> bool:
    """Whether a site is the input of an outermost module."""
    return kind == Kind.INPUT and "." not in fqn


def batch_size(records: Iterable[Record]) -> int:
    """How many samples the batches of a step have; 0 where they do not agree, or have one alone."""
    sizes = {own.summary.layout.shape[0] for own in records if own.site.kind is Kind.BATCH and own.summary.layout.shape}
    return max(sizes) if len(sizes) == 1 and max(sizes) > 1 else 0


def _heads(run: Run, divergence: Divergence) -> int:
    """Number of heads that the nearest module says it has; 0 where none does."""
    own = {module.fqn: module for module in run.rank(divergence.rank).modules}
    name = divergence.site.fqn
    while name:
        for attribute, value in own[name].attributes if name in own else ():
            if _HEADS.fullmatch(attribute) and value.isdecimal() and len(value) < 5:
                return int(value)
        name = name.rpartition(".")[0]
    return 0


def _padding(run: Run, batches: Iterable[Record]) -> NDArray[np.bool_] | None:
    """Which positions of a stored batch are padding: where a mask is 0, or where rows end in one same number."""
    found: NDArray[np.bool_] | None = None
    for record in batches:
        values = run.tensor(record.summary.checksum) if len(record.summary.layout.shape) == 2 else None
        if values is None or values.dtype.kind not in "biuf":
            continue
        if _MASK.search(record.site.path) and np.isin(values, [0, 1]).all():
            return np.asarray(values == 0)
        if found is None and values.dtype.kind in "iu":
            found = _trailing(values)
    return found


def _trailing(values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Runs of one same number at the ends of rows; None where less than two rows end so, or a row is nothing else."""
    ends, times = np.unique(values[:, -1], return_counts=True) if values.size else (np.zeros(0), np.zeros(0))
    for own in ends[np.argsort(-times)][:1]:
        padded = np.logical_and.accumulate((values == own)[:, ::-1], axis=1)[:, ::-1]
        lengths = padded.sum(axis=1)
        inside = ((values == own) & ~padded).any()
        if (lengths > 1).any() and (lengths > 0).sum() > 1 and not inside and (lengths < values.shape[1]).all():
            return np.asarray(padded)
    return None


def _given(a: Run, b: Run, divergence: Divergence) -> tuple[Given, ...]:
    """What went into an operator, and whether it is equal in both runs."""
    if divergence.site.kind is not Kind.OP_OUTPUT:
        return ()
    reader, step = a.rank(divergence.rank), divergence.step
    records = {record.site: record for record in reader.records(step)}
    others = {record.site: record for record in b.rank(divergence.rank).records(divergence.step_b)}
    own = records.get(divergence.site)
    if own is None or own.given is None:
        return ()
    found = []
    for number in own.given.inputs:
        if number < 0:
            found.append(Given("a tensor that no recorded operator wrote", "not recorded"))
            continue
        site = reader.sites[number][0]
        one, two = records.get(site), others.get(site)
        known = one is not None and two is not None and one.summary.checksum and two.summary.checksum
        state = "not recorded"
        if known and one is not None and two is not None:
            state = "equal" if one.summary.checksum == two.summary.checksum else "differs"
        elif site.kind is Kind.PARAM and site.phase is Phase.START and one is two:
            state = _parameter(a, b, divergence, site.fqn)
        found.append(Given(what(site), state))
    return tuple(found)


def _parameter(a: Run, b: Run, divergence: Divergence, fqn: str) -> str:
    """Whether a parameter that was last recorded after the step before is equal in both runs."""
    sides = []
    for run, step in ((a, divergence.step - 1), (b, divergence.step_b - 1)):
        reader = run.rank(divergence.rank)
        if step not in reader:
            return "not recorded"
        held = [
            record.summary.checksum
            for record in reader.records(step)
            if record.site.fqn == fqn and record.site.kind is Kind.PARAM and record.site.phase is Phase.OPTIMIZER
        ]
        sides.append(held[-1] if held else 0)
    if not all(sides):
        return "not recorded"
    return "equal" if sides[0] == sides[1] else "differs"
