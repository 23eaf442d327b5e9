"""Which of the things that are done to gradients can have made one differ, as far as the records show.

Clipping by a norm, unscaling and averaging over accumulated batches multiply all gradients of an optimizer by one
factor. So where a gradient differs by no factor, or where another one that is not zero is equal, they were not what
changed. A missing zero_grad adds the gradient of the step before, which the sketches show. Several ranks or several
backward passes in a step are left out of this: what clips a part of a gradient before it is added up leaves no factor
in the sum.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.reasons.step_view import losses_of
from introspect_cli.compare.table import EQUAL
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene

_REST = 1e-5
"""What is left of a gradient beside the best multiple of the other, where that is no rounding of a factor."""

_MEASURED, _OF_THE_REST = 1e-4, 0.3


class Handling(Enum):
    """What a script or its framework does to gradients between the backward pass and the update, in words."""

    CLIPPING = "clipping"
    UNSCALING = "unscaling"
    ACCUMULATION = "accumulation"
    ZERO_GRAD = "zero_grad"
    BY_HAND = "a change of the gradient by hand"


TOGETHER = frozenset({Handling.CLIPPING, Handling.UNSCALING, Handling.ACCUMULATION})
"""What multiplies all gradients by one factor, where a step has one backward pass."""


def excluded(scene: Scene) -> frozenset[Handling]:
    """What the records show not to have made the gradient differ."""
    if max(scene.run_a.world_size, scene.run_b.world_size) > 1 or losses_of(scene.table, "a") != 1 or scene.site.call:
        return frozenset()
    if losses_of(scene.table, "b") != 1:
        return frozenset()
    some_equal = max(map(len, scene.optimizers)) < 2 and others_equal(scene)
    found = TOGETHER if some_equal or _no_factor(scene) else frozenset()
    return found | {Handling.ZERO_GRAD} if some_equal or _not_of_before(scene) else found


def others_equal(scene: Scene) -> bool:
    """Whether a gradient of the same optimizer step that is not zero is equal in both runs."""
    table, phases = scene.table, frozenset({scene.site.phase})
    rows = table.rows_of("a")
    largest = table.a.floats.get("amean")
    if largest is None:
        return False
    unions = (int(union) for union in scene.step.of(Kind.GRAD, phases))
    return any(scene.step.state[union] == EQUAL and float(largest[rows[union]]) > 0 for union in unions)


def _not_of_before(scene: Scene) -> bool:
    """Whether what a gradient differs by is not made of it and that of the step before, as it is without zero_grad."""
    before = scene.step.before
    old = None if before is None else before.sketch(scene.union, "a")
    a, b = scene.table.sketch(scene.union, "a"), scene.table.sketch(scene.union, "b")
    if a is None or b is None or old is None or not all(np.isfinite(own).all() for own in (a, b, old)):
        return False
    apart, basis = float(np.linalg.norm(b - a)), np.stack([a, old], axis=1)
    if apart < _MEASURED * float(np.linalg.norm(a)):
        return False  # of so small a difference, sketches have no direction
    rest = b - basis @ np.linalg.lstsq(basis, b, rcond=None)[0]
    return float(np.linalg.norm(rest)) > _OF_THE_REST * apart


def _no_factor(scene: Scene) -> bool:
    """Whether no factor makes one run's gradient the other's, by far more than it rounds."""
    first = scene.first
    if first.a is None or first.b is None or first.scale is not None or first.a.layout.numel <= 16:
        return False
    if max(ROUNDING.get(own.layout.dtype, 1.0) for own in (first.a, first.b)) > ROUNDING["float32"]:
        return False
    a, b = scene.table.sketch(scene.union, "a"), scene.table.sketch(scene.union, "b")
    if a is None or b is None or not (np.isfinite(a).all() and np.isfinite(b).all()) or not a.any() or not b.any():
        return False
    rest = float(np.linalg.norm(b - float(a @ b) / float(a @ a) * a))
    return rest > _REST * float(np.linalg.norm(b))


def excluded_words(gone: frozenset[Handling]) -> str:
    """What follows `2 of 6 gradients differ in this step`."""
    return ", by no common factor: nothing clipped, unscaled or averaged them together" if gone >= TOGETHER else ""
