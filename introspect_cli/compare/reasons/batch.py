"""The batch differs, and the random states before it do not: the data pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.evidence import Known, answer
from introspect_cli.compare.join.distance import shapes_differ
from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.words import apart, same_values, what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step import Step


class Batch(Reason):
    """What a data loader gives."""

    word = "batch"
    meaning = "The data loader gave another batch."
    place = "the data pipeline"
    kinds = frozenset({Kind.BATCH})
    weights: ClassVar = {"command": 0.9, "seeds": 0.95}
    names = re.compile(r"seed|worker|batch|shuffle|data|block|seq|sampler|augment", re.IGNORECASE)

    def is_fed(self, step: Step, position: int) -> bool:
        """A batch comes from the loader, the batches before it and the random states."""
        site = step.sites[position]
        return step.rng_differs() or (site.phase, site.fqn) in step.carried.loaders or bool(step.carried.rng)

    def sentence(self, scene: Scene) -> str:
        """Whether the values are the same in another order, and whether batches before it are equal."""
        text = f"{what(scene.site)} differs{apart(scene.first)}."
        a, b = scene.first.a, scene.first.b
        if a is not None and b is not None and shapes_differ(a, b):
            return f"{text} Its shape is different: batch size, sequence length, cropping or padding."
        if a is not None and b is not None and a.layout.dtype != b.layout.dtype:
            return f"{text} Its dtype is different: the data is converted differently."
        text += _hash_seed(scene)
        if same_values(scene.first):
            return f"{text} It is shuffled or shifted differently."
        return f"{text} {_before(scene)}"


def _before(scene: Scene) -> str:
    """What is known of the rest of this batch and of those before it, and where to look."""
    step, site = scene.step, scene.site
    own = step.of(Kind.BATCH, frozenset({site.phase}), site.fqn)
    calls = step.alignment.call[own]
    known = step.known(own[calls < site.call])
    if known is Known.UNSEEN and step.state_before is not None:
        known = answer(step.state_before[own])
    if known in {Known.EQUAL, Known.WITHIN}:
        return f"The batch before it is {known.value}: look at the data pipeline (order, workers, augmentation, files)."
    told = "The data differs from the first recorded batch on"
    if scene.steps_before:
        told = "No batch of this loader was recorded just before it"
    rest = own[calls == site.call]
    if step.known(rest[rest != scene.union]) is Known.EQUAL:
        told += ", and the rest of the batch is equal"
    return f"{told}: order, seed, files or augmentation."


def _hash_seed(scene: Scene) -> str:
    """That nothing pins the order of sets, where the data differs though the random states do not."""
    known = [found.known for found in scene.cause.evidence]
    environments = [run.settings.get("environment") for run in (scene.run_a, scene.run_b)]
    if Known.EQUAL not in known or not all(isinstance(found, Mapping) and found for found in environments):
        return ""
    seeds = {str(found.get("PYTHONHASHSEED", "random")) for found in environments if isinstance(found, Mapping)}
    if seeds != {"random"} or any(change.explains and change.weight >= 0.8 for change in scene.settings):
        return ""
    return " PYTHONHASHSEED is not set, so what depends on the order of a set of strings differs in every process."


REASONS = (Batch(),)
