"""Tensors that one checkpoint lacks by name and has in another form: tied, transposed, put together, a constant.

Checksums find equal bits under other names; extrema and moments, which neither order nor cutting changes, find what may
be transposed or a part. Where the elements can be read once more, they decide; where not, it is said that they did not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.match.flow import values_of
from introspect_cli.compare.match.parameters import Merge, parameters, same_numbers
from introspect_cli.compare.moment import MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.match.names import Rename
    from introspect_cli.compare.match.parameters import Value
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import Divergence
    from introspect_cli.store.reader import Run

_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""


@dataclass(frozen=True)
class Form:
    """A tensor of a that is in b in another form.

    Attributes:
        a: its name, or those of several that are one in b, in their order.
        b: its name in b, or those of several.
        form: `tied` (equal bits under another name), `transposed`, `merged`, or `constant` (the same number all over).
        proven: whether the elements are the same; None where they could not be compared.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    form: str
    proven: bool | None


class Forms:
    """Tensors that one side lacks by name, looked for on the other in another form."""

    def __init__(self, runs: tuple[Run, Run], only: Sequence[Sequence[Divergence]], outcome: RankOutcome) -> None:
        rename: Rename = outcome.match.rename or str
        self.runs, self.matched = runs, list[Form]()
        changes: tuple[Rename, Rename] = (rename, str)  # to b's names, as divergences have them
        self.every = tuple(map(_model, runs, changes))
        self._in_a = {rename(name): name for name in runs[0].rank(0).sites.fqn}
        self.settled: tuple[set[str], set[str]] = set(), set()
        self.left = tuple(
            {name: values[name] for value in side if (name := value.site.fqn) in values}
            for side, values in zip(only, self.every, strict=True)
        )

    def look(self, only: Sequence[Sequence[Divergence]], shapes: Sequence[Divergence]) -> list[Divergence]:
        """Look for all of them; of tensors that have another shape, those that are left."""
        for side in (0, 1):
            every, left = self.every[1 - side], self.left[1 - side]
            self._tied(side, {value.checksum: name for name, value in every.items() if name not in left})
        matched = parameters(list(self.left[0].values()), list(self.left[1].values()))
        for one, two in matched.pairs:
            a, b, equal = one.site.fqn, two.site.fqn, one.checksum == two.checksum
            self._add((a,), (b,), "tied" if equal else "transposed", proven=equal or self._is_turned(a, b))
        for merge in matched.merges:
            self._merge(merge)
        for side in (0, 1):  # of tied tensors one is paired, and the others are that one, too
            self._tied(side, {pair[side].checksum: pair[1 - side].site.fqn for pair in matched.pairs})
        self._constants(only)
        return [shape for shape in shapes if not self._turned_in_place(shape.site.fqn)]

    def _add(self, a: tuple[str, ...], b: tuple[str, ...], form: str, *, proven: bool | None) -> None:
        self.matched.append(Form(tuple(self._in_a.get(name, name) for name in a), b, form, proven))
        self.settled[0].update(a)
        self.settled[1].update(b)
        for side, names in zip(self.left, (a, b), strict=True):
            for name in names:
                side.pop(name, None)

    def _tied(self, side: int, others: Mapping[int, str]) -> None:
        for name, value in list(self.left[side].items()):
            if value.checksum in others:
                other = others[value.checksum]
                a, b = (name, other) if side == 0 else (other, name)
                self._add((a,), (b,), "tied", proven=True)

    def _constants(self, only: Sequence[Sequence[Divergence]]) -> None:
        """Tensors that hold one number all over are equal to as many others that do, whichever is which."""
        alike: list[dict[int, list[str]]] = [{}, {}]
        for side, members in enumerate(only):
            for member in members:
                summary = member.a if side == 0 else member.b
                if member.site.kind in MODEL and member.site.fqn not in self.settled[side] and summary is not None:
                    alike[side].setdefault(summary.checksum, []).append(member.site.fqn)
        for checksum, names in alike[0].items():
            for a, b in zip(names, alike[1].get(checksum, []), strict=False):
                self._add((a,), (b,), "constant", proven=True)

    def _tensor(self, side: int, name: str) -> Any:
        return self.runs[side].tensor(self.every[side][name].checksum)

    def _is_turned(self, a: str, b: str) -> bool | None:
        """Whether two tensors hold the same elements, one transposed or in another shape; None where nobody knows."""
        one, two = self._tensor(0, a), self._tensor(1, b)
        if one is None or two is None:
            return None
        forms = [one.T, one.reshape(two.shape)] if one.size == two.size else []
        return any(form.shape == two.shape and np.array_equal(form, two) for form in forms)

    def _turned_in_place(self, name: str) -> bool:
        """Whether a tensor that has another shape under its name holds the same numbers."""
        one, two = (side.get(name) for side in self.every)
        if one is None or two is None or not same_numbers(one.moments, two.moments):
            return False
        self._add((name,), (name,), "transposed", proven=self._is_turned(name, name))
        return True

    def _merge(self, merge: Merge) -> None:
        """Tensors of one that are one in the other, put together and compared."""
        whole, parts = (1, 0) if merge.side == "b" else (0, 1)
        members, result = merge.parts, merge.whole
        one, pieces = self._tensor(whole, result), [self._tensor(parts, name) for name in members]
        order: Sequence[int] | None = None
        readable = one is not None and all(piece is not None for piece in pieces)
        if readable:
            every = permutations(range(len(pieces))) if len(pieces) <= _PERMUTED else [tuple(range(len(pieces)))]
            order = next((chosen for chosen in every if _are_joined(one, [pieces[at] for at in chosen])), None)
        together = tuple(members[at] for at in order or range(len(members)))
        a, b = (together, (result,)) if parts == 0 else ((result,), together)
        self._add(a, b, "merged", proven=order is not None if readable else None)


def _model(run: Run, rename: Rename) -> dict[str, Value]:
    """The telling tensors of a model by their names in b."""
    values = [value for value in values_of(run.rank(0), 0) if value.site.kind in MODEL]
    named = [replace(value, site=replace(value.site, fqn=rename(value.site.fqn))) for value in values]
    return {value.site.fqn: value for value in named}


def _are_joined(whole: Any, pieces: Sequence[Any]) -> bool:
    """Whether tensors, or their transposes, put together along one dimension are another one."""
    for forms in (pieces, [piece.T for piece in pieces]):
        for axis in range(whole.ndim):
            shapes = {(*form.shape[:axis], *form.shape[axis + 1 :]) for form in forms if form.ndim == whole.ndim}
            rest = (*whole.shape[:axis], *whole.shape[axis + 1 :])
            if all(form.ndim == whole.ndim for form in forms) and shapes == {rest}:
                joined = np.concatenate(forms, axis)
                if joined.shape == whole.shape and np.array_equal(joined, whole):
                    return True
    return False
