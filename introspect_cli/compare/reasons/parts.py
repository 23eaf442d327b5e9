"""The parts that ranks hold of a tensor are not the whole: some of it is missing, or two ranks have the same of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.words import what
from introspect_cli.records import Kind
from introspect_cli.store.together import NOT_WHOLE

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class NotWhole(Reason):
    """A tensor of which a run's ranks, all of them, have not each element once."""

    word = "parts"
    place = "how it is cut over the ranks"
    kinds = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
    priority = 5

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """The layouts alone say so; nothing that went into it matters."""
        rows = int(facts.items.row_a[position]), int(facts.items.row_b[position])
        batches = facts.pair.a, facts.pair.b
        found = [row >= 0 and batch.text[row].startswith(NOT_WHOLE) for batch, row in zip(batches, rows, strict=True)]
        return self.cause() if any(found) else None

    def sentence(self, scene: Scene) -> str:
        """In which run, and what of it there is."""
        first = scene.first
        told = [
            f"in {name} {summary.text.removeprefix(f'{NOT_WHOLE}: ')}"
            for summary, name in ((first.a, "a"), (first.b, "b"))
            if summary is not None and summary.text.startswith(NOT_WHOLE)
        ]
        return f"the parts of {what(first.site)} are not the whole: {', and '.join(told)}. The cause is {self.place}."


REASONS = (NotWhole(),)
