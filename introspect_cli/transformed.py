"""Compare a model with what a transformation made of it, in one process.

People who write graph passes, decompositions, fusions, quantisers or exporters want to know whether the result still
computes the same, and if not, where it first does not. Both are run on the same inputs from the same state, forward and
backward, each into a run of its own in a temporary directory, and the runs are compared as `introspect diff` does.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.records import Site

_SHOWN = 6
_LEVELS = ("module", "op")


def compare_transformed(
    model: Any,
    transformed: Any,
    *inputs: Any,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    backward: bool = True,
    level: str = "module",
    rtol: float = 0.0,
    atol: float = 0.0,
    limit: int | None = 12,
) -> DiffResult:
    """Run a model and its transformed self on the same inputs and find where they first diverge.

    Both get copies of the inputs, the same random state and, where they share them, the same buffers; gradients,
    buffers and random states are left as they were. Modules are compared by FQN, the transformed model's root bearing
    the original's name; what only one of the two has is left out, and a note says so. A transformation that leaves no
    modules is compared at its boundary, unless
    `introspect_cli.capture.regions.attach.attach` was called on the model before it was transformed. A model compiled
    by `torch.compile` that has not run yet is tapped inside; the taps stay in what is compiled and do nothing after.

    Args:
        model: the reference, a module.
        transformed: a module or callable that takes the same inputs.
        inputs: positional inputs of both.
        kwargs: keyword inputs of both.
        loss: makes a scalar of what a model gives; the sum over all floating point outputs where None.
        backward: whether gradients are compared, too.
        level: `module`, or `op` for every operator's results as well.
        rtol: tolerated root-mean-square difference relative to the values, as `introspect diff --rtol`.
        atol: tolerated root-mean-square difference in the values' own unit.
        limit: divergences to list; None for all.

    Returns:
        what `introspect_cli.diff` gives for two runs: `verdict`, `sentence`, `first`, `divergences`, ...

    Raises:
        UsageError: the level is unknown, or nothing can be called.
        Exception: whatever either model raises.
    """
    if level not in _LEVELS:
        raise UsageError(f'no level is called "{level}": give one of {", ".join(_LEVELS)}')
    for what in (model, transformed):
        if not callable(what):
            raise UsageError(f"a {type(what).__name__} cannot be called: give a module or a function")
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.run_once import run_once
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.records import Kind, Status
    from introspect_cli.store.reader import open_run

    record = CaptureOptions().record

    def run(what: Any, path: Path, only: frozenset[Site] | None = None) -> frozenset[Site]:
        options = CaptureOptions(
            output=path,
            record=record | {Kind.OP_OUTPUT} if level == "op" else record,
            level=level,
            compile="keep",
            eval=True,
            env=False,
            packages=False,
            source=False,
            quiet=True,
        )
        run_once(what, name, inputs, kwargs or {}, options, loss, backward=backward, only=only)
        with open_run(path) as run:
            records = list(run.rank(0).records(0)) if 0 in run.rank(0) else []
        return frozenset(record.site for record in records if record.summary.status is not Status.NOT_OBSERVED)

    name = str(getattr(model, "original_name", None) or type(model).__name__)
    with tempfile.TemporaryDirectory(prefix="introspect-") as place:
        one, two = Path(place) / "model", Path(place) / "transformed"
        all_sites = run(model, one)
        sites = run(transformed, two, all_sites)
        lost = all_sites - sites
        if lost:
            # What the first run could not know: which sites the other has. Both again, with those alone.
            one, two = Path(place) / "model again", Path(place) / "transformed again"
            run(model, one, sites)
            run(transformed, two, sites)
        with open_run(one) as a, open_run(two) as b:
            result = compare_runs(a, b, DiffOptions(rtol=rtol, atol=atol, limit=limit))
    return replace(result, a="model", b="transformed", notes=(*result.notes, *_lost(lost)))


def _lost(lost: frozenset[Site]) -> tuple[str, ...]:
    """A sentence on what the transformation left nothing of that could be watched."""
    if not lost:
        return ()
    names = sorted({site.fqn for site in lost})
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (f"Not compared, since the transformed model does not show them: {len(lost)} values of {shown}.",)
