"""What ranks of a launch have of each kind of value: one table, by which digests, totals and putting together go."""

from __future__ import annotations

from typing import NamedTuple

from introspect_cli.records import KIND_CODES, Kind


class Spread(NamedTuple):
    """How the values of a kind are spread over several ranks.

    Attributes:
        copied: ranks hold equal copies, or parts or summands of one value.
        state: what training leaves (parameters, optimizer state); a missing part is missing in the model.
        first: where copies differ, the first rank's counts: DDP broadcasts its buffers before each forward pass.
        own: each rank may have its own value: samples, and what is computed of them.
        flows: activations and their gradients, of which data-parallel ranks have their own samples.
        by_call: one value per call, so per microbatch.
        left_out: ignored where layouts are compared.
    """

    copied: bool = False
    state: bool = False
    first: bool = False
    own: bool = False
    flows: bool = False
    by_call: bool = False
    left_out: bool = False


_FLOWS = Spread(own=True, flows=True, by_call=True)
_COPIED = Spread(copied=True, state=True)

SPREADS: dict[Kind, Spread] = {
    Kind.HYPERPARAMETER: Spread(first=True, left_out=True),
    Kind.COLLECTIVE: Spread(left_out=True),
    Kind.PARAM: _COPIED,
    Kind.GRAD: _COPIED,
    Kind.OPTIMIZER_STATE: _COPIED,
    Kind.BUFFER: Spread(state=True, first=True),
    Kind.BATCH: Spread(own=True, by_call=True),
    Kind.LOSS: Spread(own=True, by_call=True),
    Kind.RNG: Spread(own=True),
    Kind.VALUE: Spread(by_call=True),
    Kind.INPUT: _FLOWS,
    Kind.OUTPUT: _FLOWS,
    Kind.GRAD_INPUT: _FLOWS,
    Kind.GRAD_OUTPUT: _FLOWS,
    Kind.OP_OUTPUT: Spread(flows=True),
}


def kinds_that(are: str) -> frozenset[Kind]:
    """The kinds whose `Spread` has the field named `are` set, such as `flows`."""
    return frozenset(kind for kind, spread in SPREADS.items() if getattr(spread, are))


def codes_that(are: str) -> list[int]:
    """Codes of the kinds whose `Spread` has the field named `are` set, sorted."""
    return sorted(KIND_CODES[kind] for kind in kinds_that(are))
