"""A device that computes wrongly.

A device that now and then gives a wrong product (silent data corruption) shows as runs of the same training on the
same device that diverge at another place each time, at a matrix product with equal inputs, by more than rounding. One
pair of runs has one place and cannot show that. So three runs are asked for, and each pair must be such a case by its
records: inputs and parameters recorded and equal, no setting different, and the device's own identifier in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.compare.reasons.module import attribute_changes
from introspect_cli.compare.settings.settings import SAYS_NOTHING
from introspect_cli.compare.terms.evidence import RANDOM, Known, those
from introspect_cli.compare.terms.findings import Suspect
from introspect_cli.compare.terms.result import Role
from introspect_cli.compare.terms.words import what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.terms.result import DiffResult
    from introspect_cli.store.read.run import Run

_PRODUCTS: Final = re.compile(r"^aten\.(mm|bmm|addmm|baddbmm|linear|matmul)\b")
_DEVICE: Final = re.compile(r"^cuda:(\d+)$")


def suspect(scene: Scene) -> Suspect | None:
    """The device whose matrix product the runs diverge at, where nothing on record explains it."""
    first, cause = scene.first, scene.cause
    if cause.role is not Role.ORIGIN or first.a is None or first.b is None or scene.rounding:
        return None
    is_product = cause.reason == "module" and first.module_class == "Linear"
    is_product |= cause.reason == "op" and first.site.kind is Kind.OP_OUTPUT and bool(_PRODUCTS.match(first.site.path))
    evidence = [fact for fact in cause.evidence if fact.thing not in RANDOM]
    if not is_product or not evidence or len(those(evidence, Known.EQUAL)) < len(evidence):
        return None
    if first.a.layout != first.b.layout or attribute_changes(scene):
        return None
    kept = all("runtime" in run.settings for run in scene.runs)
    if not kept or any(change.weight > SAYS_NOTHING for change in scene.settings):
        return None
    match = _DEVICE.match(first.a.layout.device)
    devices = [_gpu(run, int(match[1])) for run in scene.runs] if match else []
    if not devices or devices[0] != devices[1] or not devices[0]:
        return None
    return Suspect(devices[0], f"step {first.step}", what(first.site, first.module_class))


def _gpu(run: Run, number: int) -> str:
    """A device's name and identifier; "" where the run does not have the latter."""
    gpus = run.settings.document("hardware").get("gpus")
    gpu: Any = gpus[number] if isinstance(gpus, list) and number < len(gpus) else None
    if not isinstance(gpu, Mapping):
        return ""
    return f"{gpu.get('name', 'GPU')} {gpu['uuid']}" if gpu.get("uuid") else ""


def on_one_device(runs: Sequence[Run]) -> bool:
    """Whether all runs tell of GPUs by their identifiers, and of the same ones: only then is a fault worth a look."""
    devices = [tuple(_gpu(run, number) for number in range(16)) for run in runs]
    return len(set(devices)) == 1 and any(devices[0])


def fault_sentence(results: Sequence[DiffResult]) -> str:
    """What several comparisons with one run say of the device together; "" where they do not accuse it."""
    suspects = [result.suspect for result in results]
    accused = [one for one in suspects if one is not None]
    places = dict.fromkeys((one.step, one.place) for one in accused)
    if len(accused) < len(results) or len(places) < 2 or len({one.device for one in accused}) > 1:
        return ""
    listed = "; ".join(f"{step}, {place}" for step, place in list(places)[:3])
    return (
        f"This looks like a fault of the hardware (silent data corruption) on {accused[0].device}: of runs with the "
        f"same recorded settings, {len(accused)} diverge from run a at different places ({listed}), each at a matrix "
        "product, by more than rounding, with all that went into it recorded and equal. Test the device (dcgmi diag), "
        "or run on another one."
    )
