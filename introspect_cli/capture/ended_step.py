"""What a step has recorded once it has ended, and how a tensor of it is stored whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from introspect_cli.capture.samples import StepSamples
    from introspect_cli.capture.sheet import Sheet
    from introspect_cli.labels import Labels
    from introspect_cli.records import Given, Kind
    from introspect_cli.store.writer import StoreWriter
    from introspect_cli.tensors.columns import Handover


@dataclass(frozen=True)
class SavedTensor:
    """A copy, in host memory, of a value to be stored whole once its checksum is known.

    Attributes:
        slot: the summarizer's.
        value: the copy.
        always: whether it is stored whatever happens; else the black box holds it.
    """

    slot: int
    value: torch.Tensor
    always: bool = True


class EndedStep(NamedTuple):
    """What a step has recorded, until it is written.

    Attributes:
        step: its number.
        rows: the site of each record.
        slots: the summarizer's slot of each record.
        kinds: the kind of each record, where what is kept hangs on values.
        saved: values to be stored whole.
        samples: what is kept of the samples of batches and activations.
        given: what operators were given, by record.
        summaries: the summaries, of which devices may still compute some; or the sheet that has them.
        labels: what the script's framework calls it.
    """

    step: int
    rows: list[int]
    slots: list[int]
    kinds: list[Kind]
    saved: list[SavedTensor]
    samples: StepSamples
    given: dict[int, Given]
    summaries: Handover | Sheet
    labels: Labels


def save_whole(store: StoreWriter, checksum: int, value: torch.Tensor) -> None:
    """Store a host tensor of any dtype whole, named by its checksum."""
    dtype = str(value.dtype).removeprefix("torch.")
    data = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
    store.save_tensor(checksum, data.numpy().data, dtype, tuple(value.shape))
