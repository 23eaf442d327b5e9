"""Sites and rows of a step, and the step as one block of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from introspect_cli.capture.environment.redact import is_secret_path
from introspect_cli.records import Kind, Site, SiteInfo
from introspect_cli.selection import selects
from introspect_cli.store.batch import given_line, text_line
from introspect_cli.tensors.columns import Columns

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from introspect_cli.labels import Labels
    from introspect_cli.records import Given
    from introspect_cli.store.columns import Message
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.store.run_writer import StoreWriter
    from introspect_cli.tensors.columns import EndedRows
    from introspect_cli.tensors.summarizer import Summarizer


# ---
# The rows of the current step: which sites have been recorded, in which order, with which summaries.
#
# A record names its site by number, and most sites come again in every step. Most rows stay as they were noted. Some
# are taken out again and come back elsewhere, or later: a batch turns out to be for an evaluation.

NO_INFO = SiteInfo()


PASSING = frozenset({Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT})
"""Kinds of values that pass through the model."""


class Sites:
    """Gives each site its number, once.

    Attributes:
        of: the sites by number.
        whole: numbers of those whose tensors are stored whole.
        secret: numbers of those with a secret name in their path, whose values are redacted.
        passing: numbers of those whose values pass through the model, which a lean step sums up more cheaply.
    """

    def __init__(self, rank: RankWriter, lock: threading.RLock, save_tensors: tuple[str, ...]) -> None:
        """Start with none.

        Args:
            rank: the writer that knows them, too.
            lock: the recorder's.
            save_tensors: globs over FQNs of values that are stored whole.
        """
        self.of: dict[int, Site] = {}
        self.whole: set[int] = set()
        self.secret: set[int] = set()
        self.passing: set[int] = set()
        self._rank = rank
        self._lock = lock
        self._save_tensors = save_tensors
        self._numbers: dict[Site, int] = {}
        self._infos: dict[int, SiteInfo] = {}

    def number(self, site: Site, info: SiteInfo = NO_INFO) -> int:
        """Number of a site, the same for the whole run; at its first call it is written to the store, with `info`.

        That call also adds it to `of`, and to `whole` or `secret` where it belongs there. A later call ignores `info`.
        """
        if (known := self._numbers.get(site)) is not None:
            return known
        with self._lock:
            number = self._rank.site(site, info)
            self.of[number] = site
            self._infos[number] = info
            if self._save_tensors and selects(site.fqn, self._save_tensors):
                self.whole.add(number)
            if site.kind in PASSING:
                self.passing.add(number)
            self._numbers[site] = number  # the last: whatever ends this early, no number has another's name
            if site.path and is_secret_path(site.path):
                self.secret.add(number)
            return number

    def changed_site(self, number: int, **changes: Any) -> int:
        """Number of the site that differs from the site `number` in some fields; a new one is registered.

        Args:
            number: of the site.
            changes: fields of `Site` by name, with their new values.
        """
        return self.number(replace(self.of[number], **changes), self._infos[number])


class Row(NamedTuple):
    """A row that was taken out of its step: numbers of its site and slot, and what its operator was given."""

    site: int
    slot: int
    given: Given | None


# ---
# The records of one step as one block of columns: the store's message, from the hooks to the file.
#
# Nearly all steps of a training have the records of the step before, at the same sites, of the same layouts. Each
# step costs the script what is done again for it. So the block of a step that was written serves for the next with as
# many records, and only what differs is put into it.

_NOT_SUMMARISED = ("site", "sequence")


class SavedTensor(NamedTuple):
    """Host copy of a value that is stored whole once its checksum is known.

    Attributes:
        slot: the summarizer's.
        value: the copy.
        always: whether it is stored whatever happens; else the black box holds it.
    """

    slot: int
    value: torch.Tensor
    always: bool = True


class EndedStep(NamedTuple):
    """What there is of a step beside its rows.

    Attributes:
        step: its number.
        saved: values to be stored whole.
        given: what operators were given, by record.
        labels: what the script's framework calls it.
    """

    step: int
    saved: list[SavedTensor]
    given: dict[int, Given]
    labels: Labels


class StepBlock:
    """Columns of one step's records, reused for a later step with as many.

    Attributes:
        message: the store's message of them.
        columns: what the summarizer fills, the message's arrays.
        ended: the step that it has.
        sites: of its records; the same object while they stay the same.
        rows: its summaries, of which devices may still compute some.
    """

    ended: EndedStep
    rows: EndedRows

    def __init__(self, message: Message) -> None:
        """Wrap an empty message of the store; `begin` gives it a step."""
        self.message = message
        self.columns = Columns({name: array for name, array in message.columns.items() if name not in _NOT_SUMMARISED})
        message.put("sequence", np.arange(message.rows, dtype=np.uint32))
        message.lines = [b"", b""]  # texts, and inputs of operators
        self.sites: Any = ()
        self._slots: Any = ()
        self._made_of: dict[str, object] = {}
        """What the message's columns were last made of; without those that an interrupt may have left half done."""

    def begin(self, ended: EndedStep, sites: Any, slots: Any, summarizer: Summarizer) -> None:
        """Take an ended step, and have the summarizer fill the columns: at once, or in `rows.finish` for device rows.

        This ends the summarizer's step.

        Args:
            ended: the step.
            sites: numbers of its records' sites; copied where they are not those of the step before.
            slots: numbers of the summarizer's slots of each, likewise.
            summarizer: has their summaries.
        """
        self.ended = ended
        self.sites = self.sites if sites == self.sites else sites.copy()
        self._slots = self._slots if slots == self._slots else slots.copy()
        self.rows = summarizer.end_step((self.columns, self._slots))

    def of_records(self, name: str) -> Any:
        """What a column has of each record; call it once the summaries are there."""
        return self.columns.arrays[name][self.columns.arrays["value"]]

    def saved(self, *, always: bool) -> dict[int, torch.Tensor]:
        """Copies by checksum: those for `--save-tensors` if `always`, else the black box's.

        Without those of tensors that are not strided, were not observed, or have no record. Call it once the summaries
        are there.
        """
        kept = [saved for saved in self.ended.saved if saved.always is always and saved.value.layout is torch.strided]
        at = {slot: at for at, slot in enumerate(self._slots)} if kept else {}
        checksums = self.of_records("checksum")
        pairs = ((int(checksums[at[saved.slot]]), saved.value) for saved in kept if saved.slot in at)
        return {checksum: value for checksum, value in pairs if checksum}

    def complete(self) -> Message:
        """Put sites, texts and operators' inputs in the message where they differ from the last step's.

        Returns it.
        """
        message, texts, given = self.message, self.columns.texts, self.ended.given
        message.values = self.columns.rows
        self._renew("site", self.sites, lambda: message.put("site", np.array(self.sites, np.uint32)))
        self._renew("text", texts, lambda: message.lines.__setitem__(0, text_line(texts)))
        self._renew("given", given, lambda: message.lines.__setitem__(1, given_line(given)))
        return message

    def _renew(self, name: str, content: object, put: Callable[[], object]) -> None:
        """Put something in the message by `put`, unless it was made of the same content last.

        Args:
            name: of what it is.
            content: what it is made of: a dict, or an object that is another where it changes.
            put: puts it there.
        """
        last = self._made_of.pop(name, self)
        if last is not content and (type(last) is not dict or last != content):
            put()
        self._made_of[name] = content


def save_tensor(store: StoreWriter, checksum: int, value: torch.Tensor) -> None:
    """Store all elements of a strided CPU tensor of any dtype, row-major, in a file named by the checksum."""
    dtype = str(value.dtype).removeprefix("torch.")
    data = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
    store.save_tensor(checksum, data.numpy().data, dtype, tuple(value.shape))
