"""What a step's records are written from where the kernels put them straight into the store's message.

Nearly all steps of a training have the records of the step before, at the same sites, of the same layouts. Each step
costs the script what is done anew for it. So the form of the last step is kept, and only what differs is put into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.store.batch import given_columns, sample_lists, short_texts
from introspect_cli.store.columns import Lists, sparse_texts
from introspect_cli.store.format import SAMPLES
from introspect_cli.tensors.kernels import numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.records import Given
    from introspect_cli.store.arrow import Message
    from introspect_cli.store.batch import Array
    from introspect_cli.tensors.columns import Target


class Sheet:
    """A step's records, until they are written; then those of a later step that has as many.

    Attributes:
        form: the store's message of them.
        target: what the summarizer fills.
    """

    def __init__(self, form: Message, target: Target) -> None:
        """Take over a form, and a target over its columns."""
        self.form = form
        self.target = target
        self._has_samples, self._has_given = SAMPLES.name in form, "given" in form
        form.put("sequence", np.arange(form.rows, dtype=np.uint32))
        # What stands in the form.
        self._sites: list[int] = []
        self._layout_index: Array | None = None
        self._texts: dict[int, str] | None = None
        self._summed: _Summed | None = None

    def complete(
        self, sites: list[int], sums: dict[int, int], given: Mapping[int, Given], layouts: Callable[[], Array]
    ) -> Message:
        """Put the rest of a step into its form.

        Args:
            sites: of each record.
            sums: of slots whose samples were looked at, their checksums added up.
            given: what operators were given, by record.
            layouts: gives the store's numbers of layouts, by the summarizer's.
        """
        form, target = self.form, self.target
        if sites != self._sites:
            self._sites = []
            form.put("site", numbers(sites))
            self._sites = sites
        if target.layout_index is not self._layout_index:
            self._layout_index = None
            form.put("layout", layouts()[target.layout_index])
            self._layout_index = target.layout_index
        if target.texts != self._texts:
            self._texts = None
            form.put("text", short_texts(sparse_texts(form.rows, target.texts), form.rows))
            self._texts = target.texts
        if self._has_given:
            columns = given_columns(given, form.rows)
            form.put("given", columns.inputs)
            form.put("forward", columns.forward)
            form.put("node", short_texts(columns.node, form.rows))
        if self._has_samples:
            self._put_sums(sums)
        return form

    def _put_sums(self, sums: dict[int, int]) -> None:
        slots, known = self.target.slots, self._summed
        if known is None or known.slots is not slots or known.of != sums.keys():
            self._summed = None
            each = [(record, slot) for record, slot in enumerate(slots) if slot in sums] if sums else []
            column = sample_lists({record: sums[slot] for record, slot in each}, self.form.rows)
            self.form.put("samples", column)
            self._summed = _Summed(slots, sums.keys(), each, column)
        elif known.each:
            values = np.array([sums[slot] for _, slot in known.each], np.uint64)
            self.form.put("samples", Lists(known.column.offsets, values.view(np.int64)))


class _Summed(NamedTuple):
    """Where sums of samples stand.

    Attributes:
        slots: of all records.
        of: those that have a sum.
        each: the records of these, with their slots.
        column: their column, of one step.
    """

    slots: list[int]
    of: AbstractSet[int]
    each: list[tuple[int, int]]
    column: Lists[int]
