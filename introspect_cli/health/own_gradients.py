"""Whether the gradient that an optimizer takes on a rank is that rank's own: nobody added the others' to it.

What a rank's own backward pass gives is not on record beside what the optimizer takes. Of a bias that is added to a
module's output, and of an embedding's rows, the sum of the gradient's elements is known all the same: it is the sum of
the elements of the output's gradient, to rounding. Where ranks' sums differ, that tells whose gradient it is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.whole import WholeReader

_ROUNDING, _APART = 1e-5, 1e-3
_BIAS = re.compile(r"(Linear|(Layer|Group|Batch|Instance|SyncBatch)Norm\w*|Conv\d?d|ConvTranspose\d?d)$")


def added_up(module_class: str, name: str) -> bool:
    """Whether the elements of a parameter's gradient add up to those of the gradient of its module's output."""
    return (name == "bias" and _BIAS.match(module_class) is not None) or (
        name == "weight" and module_class == "Embedding"
    )


def unreduced(
    whole: WholeReader,
    batches: Sequence[StepBatch],
    rows: Mapping[int, Mapping[int, int]],
    outputs: Sequence[int],
    gradient: Mapping[int, int],
) -> list[int]:
    """Positions of the ranks whose gradient is their own, where the ranks' own differ; none where that is not known.

    Args:
        whole: the ranks' readers.
        batches: a step of each.
        rows: of each site, each rank's row.
        outputs: sites of the gradients of the outputs of the parameter's module.
        gradient: each rank's row of what the optimizer takes.
    """
    if len(gradient) < 2 or not outputs:
        return []
    own, size, taken = {}, {}, {}
    for at, row in gradient.items():
        held = [rows[number][at] for number in outputs if at in rows[number]]
        sums = [_sums(whole, batches, at, one) for one in held]
        total = _sums(whole, batches, at, row)
        if not sums or total is None or any(one is None for one in sums):
            return []
        own[at], size[at] = (sum(one[which] for one in sums if one is not None) for which in (0, 1))
        taken[at] = total[0]
    middle, scale = float(np.mean(list(own.values()))), max(size.values())
    return [
        at
        for at, value in own.items()
        if abs(value - middle) > _APART * scale and abs(taken[at] - value) <= _ROUNDING * scale
    ]


def _sums(whole: WholeReader, batches: Sequence[StepBatch], at: int, row: int) -> tuple[float, float] | None:
    """The sum of a record's elements, and of their absolute values; None where it is a part, or not all finite."""
    batch, layout = batches[at], whole.readers[at].layouts[int(batches[at].layout[row])]
    if layout.part is not None or not {"mean", "amean"} <= batch.floats.keys():
        return None
    mean, size = (float(batch.floats[name][row]) * layout.numel for name in ("mean", "amean"))
    odd = any(int(batch.counts[name][row]) != 0 for name in ("nans", "posinfs", "neginfs") if name in batch.counts)
    return None if odd or not np.isfinite([mean, size]).all() else (mean, size)


def outputs_of(names: Sequence[tuple[str, str, str, str]], classes: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Of parameters of which it can be known, the sites of the gradients of their module's outputs.

    Args:
        names: kind, phase, FQN and path of each site.
        classes: of each module.
    """
    found: dict[str, list[int]] = {}
    for number, (kind, phase, fqn, path) in enumerate(names):
        if kind == Kind.GRAD_OUTPUT and phase == Phase.BACKWARD and not path:
            found.setdefault(fqn, []).append(number)
    return {
        fqn: tuple(found[owner])
        for kind, _, fqn, _ in names
        if kind == Kind.GRAD
        and (owner := fqn.rpartition(".")[0]) in found
        and added_up(classes.get(owner, ""), fqn.rpartition(".")[2])
    }
