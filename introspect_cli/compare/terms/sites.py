"""Site tables of two ranks under one numbering.

Each run numbers its sites in order of appearance. Both are mapped once onto the *union*: a's numbers, then the sites of
b alone. Steps are then matched with integer arrays; names are looked up only for what is shown or reasoned about.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.terms.names import strip_wrappers, with_ancestors
from introspect_cli.errors import StoreError
from introspect_cli.records import EVALUATED, KIND_CODES, SETTING_KINDS, Kind, Phase, Site
from introspect_cli.selection import selects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from introspect_cli.store.read.name_tables import SiteTable

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

FLOWING_BACK = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
MODULE_VALUES = (Kind.INPUT, Kind.OUTPUT, *FLOWING_BACK)
MODULE_KINDS = (*MODULE_VALUES, Kind.OP_OUTPUT)
ACTIVATIONS = (Kind.BATCH, *MODULE_KINDS)
"""What flows back through modules, what they are given and give, with operators, with batches."""

KINDS = tuple(Kind)
PHASES = tuple(Phase)
_PHASE_CODE = {phase.value: code for code, phase in enumerate(PHASES)}


def kind_code(kind: Kind) -> int:
    """Integer code of a kind in arrays."""
    return KIND_CODES[kind.value]


def phase_code(phase: Phase) -> int:
    """Integer code of a phase in arrays."""
    return _PHASE_CODE[phase.value]


def of_kinds(codes: npt.NDArray[np.uint8], kinds: Iterable[Kind]) -> Mask:
    """Mask of `codes` (kind codes, any length) that are of any of `kinds`."""
    return np.isin(codes, [kind_code(kind) for kind in kinds])


@dataclass(frozen=True)
class Columns:
    """Sites as columns, a site in each row, under the names that are compared.

    Attributes:
        keys: hash of each site's phase, kind, FQN, call and path; equal keys are taken for equal sites.
        phase: phase codes.
        kind: kind codes.
    """

    keys: npt.NDArray[np.uint64]
    phase: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    fqn: list[str]
    call: npt.NDArray[np.int64]
    path: list[str]
    module_class: list[str]

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def text(self) -> str:
        """All FQNs joined by newlines, for a fast search."""
        return "\n".join(self.fqn)


def columns(table: SiteTable, rename: Callable[[str], str] | None = None) -> Columns:
    """Columns of a store's site table under the names that are compared.

    Args:
        table: the sites of a rank.
        rename: changes FQNs; None to strip wrappers alone. Keys of changed names are computed again.

    Raises:
        StoreError: a phase or kind is unknown.
    """
    phases, kinds = table.phase, table.kind
    keys = np.asarray(table.key, dtype=np.uint64)
    names = table.fqn
    calls = np.asarray(table.call, dtype=np.int64)
    paths = table.path
    renamed = {}
    if rename is not None or "._" in "\n".join(names):
        renamed = {name: new for name in set(names) if (new := (rename or strip_wrappers)(name)) != name}
    if renamed:
        keys = keys.copy()
        fresh = []
        for index, name in enumerate(names):
            new = renamed.get(name, name)
            fresh.append(new)
            if new is not name:
                site = Site(Phase(phases[index]), Kind(kinds[index]), new, int(calls[index]), paths[index])
                keys[index] = site.key()
        names = fresh
    try:
        phase = np.frombuffer(bytes(map(_PHASE_CODE.__getitem__, phases)), np.uint8)
        kind = np.frombuffer(bytes(map(KIND_CODES.__getitem__, kinds)), np.uint8)
    except KeyError:
        raise StoreError(f"{table.path_of_file} is damaged: a site has a phase or a kind that is not one") from None
    return Columns(
        keys=keys,
        phase=phase,
        kind=kind,
        fqn=names,
        call=calls,
        path=paths,
        module_class=table.module_class,
    )


@dataclass(frozen=True)
class Alignment(Columns):
    """Both runs' sites under one numbering: those of a, then those that only b has.

    Attributes:
        a: sites of run a; their union numbers are their own.
        b: sites of run b.
        b_ids: b's site number to union number.
        extra: b's site numbers of those that only b has; union number len(a) + position.
    """

    a: Columns
    b: Columns
    b_ids: Ids
    extra: Ids

    @property
    def size(self) -> int:
        """Number of sites in the union."""
        return len(self)

    @cached_property
    def ids(self) -> tuple[Ids, Ids]:
        """Arrays that map site numbers to union numbers: that of a (each its own), that of b."""
        return np.arange(len(self.a), dtype=np.int64), self.b_ids

    @cached_property
    def evaluating(self) -> Mask:
        """Mask of sites of evaluation, by the function `evaluating`."""
        return evaluating(self.phase, self.fqn)

    @cached_property
    def in_both(self) -> Mask:
        """Mask of sites that both runs have, each in any step."""
        shared = np.zeros(self.size, dtype=np.bool_)
        shared[self.b_ids[self.b_ids < len(self.a)]] = True
        return shared

    @cached_property
    def by_fqn(self) -> dict[str, list[int]]:
        """Union numbers of the sites of each FQN; computed once."""
        by_name: dict[str, list[int]] = {}
        for index, name in enumerate(self.fqn):
            by_name.setdefault(name, []).append(index)
        return by_name

    @cached_property
    def _by_call(self) -> dict[str, dict[tuple[int, int, int], list[int]]]:
        """Cache of `of_call`: per FQN, union numbers by (phase code, kind code, call)."""
        return {}

    def of_call(self, phase: Phase, kind: Kind, fqn: str, call: int) -> list[int]:
        """Union numbers of the sites with this phase, kind, FQN and call, whatever their path; [] for none.

        The first question about an FQN builds its cache.
        """
        calls = self._by_call.get(fqn)
        if calls is None:
            calls = self._by_call[fqn] = {}
            for union in self.by_fqn.get(fqn, []):
                key = int(self.phase[union]), int(self.kind[union]), int(self.call[union])
                calls.setdefault(key, []).append(union)
        return calls.get((phase_code(phase), kind_code(kind), call), [])

    @cached_property
    def names_a(self) -> frozenset[str]:
        """All FQNs that run a has, at any step."""
        return frozenset(self.a.fqn)

    @cached_property
    def names_b(self) -> frozenset[str]:
        """All FQNs that run b has, at any step."""
        return frozenset(self.b.fqn)

    @cached_property
    def around(self) -> tuple[set[str], set[str]]:
        """(FQNs of a with all their ancestors, the same of b), at any step."""
        return with_ancestors(self.names_a), with_ancestors(self.names_b)

    def site(self, union: int) -> Site:
        """The site with a union number."""
        return Site(
            PHASES[self.phase[union]],
            KINDS[self.kind[union]],
            self.fqn[union],
            int(self.call[union]),
            self.path[union],
        )

    def mask(self, kinds: frozenset[Kind], modules: tuple[str, ...]) -> Mask:
        """Mask of sites that `selected` selects by kind and name, without settings."""
        counted = selected(self.kind, self.fqn, kinds, modules)
        return counted & ~of_kinds(self.kind, SETTING_KINDS)


def selected(kind: npt.NDArray[np.uint8], fqn: list[str], kinds: frozenset[Kind], modules: tuple[str, ...]) -> Mask:
    """Mask of sites that are of any of `kinds` and whose name matches any glob in `modules`; an empty one selects all.

    Args:
        kind: kind code of each site.
        fqn: name of each site.
        kinds: wanted kinds.
        modules: wanted names, as globs.
    """
    mask = np.full(len(fqn), True)
    if kinds:
        mask &= of_kinds(kind, kinds)
    if modules:
        chosen = {name: selects(name, modules) for name in set(fqn)}
        mask &= np.fromiter((chosen[name] for name in fqn), dtype=np.bool_, count=len(fqn))
    return mask


def evaluating(phase: npt.NDArray[np.uint8], fqn: list[str]) -> Mask:
    """Mask of sites that are in the phase `eval`, or whose root is an evaluation copy of a model (`EVALUATED`).

    Args:
        phase: phase code of each site.
        fqn: name of each site.
    """
    mask = phase == phase_code(Phase.EVAL)
    copies = {name for name in set(fqn) if EVALUATED in name.partition(".")[0]}
    if copies:
        mask = mask | np.fromiter((name in copies for name in fqn), dtype=np.bool_, count=len(fqn))
    return np.asarray(mask)


def align(a: Columns, b: Columns) -> Alignment:
    """Put the sites of a and b under one numbering: a's numbers, then b's other sites; equal keys are one site.

    Of a site of both, the columns have what a has.
    """
    ids, extra = _union_numbers(a, b)
    columns: dict[str, Any] = {field.name: getattr(a, field.name) for field in fields(Columns)}
    for name, column in columns.items() if len(extra) else ():
        of_b = getattr(b, name)
        more = [of_b[i] for i in extra.tolist()] if isinstance(column, list) else of_b[extra]
        columns[name] = column + more if isinstance(column, list) else np.concatenate([column, more])
    return Alignment(**columns, a=a, b=b, b_ids=ids, extra=extra)


def _union_numbers(a: Columns, b: Columns) -> tuple[Ids, Ids]:
    """(union number of each site of b, numbers in b of the sites that a lacks)."""
    count, every = len(a), np.arange(len(b), dtype=np.int64)
    if not count:
        return every, every
    if count == len(b) and np.array_equal(a.keys, b.keys):
        return every, every[:0]
    order = np.argsort(a.keys, kind="stable")
    ranked = a.keys[order]
    place = np.minimum(np.searchsorted(ranked, b.keys), count - 1)
    shared = ranked[place] == b.keys
    extra = np.flatnonzero(~shared).astype(np.int64)
    ids = np.where(shared, order[place], -1).astype(np.int64)
    ids[extra] = count + np.arange(len(extra))
    return ids, extra
