"""An operator's result differs, though nothing recorded before it does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Evidence, although, known_of, random_state
from introspect_cli.compare.reasons.memory_format import memory_formats
from introspect_cli.compare.reasons.module import WEIGHTS
from introspect_cli.compare.reasons.words import apart, scaled, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.compare.result import Divergence


_LISTED: Final = re.compile(
    r"^aten\.(index_add_?|index_copy_?|_?index_put(_impl)?_?|put_?|histc|bincount|kthvalue|median|nanmedian"
    r"|scatter_?|scatter_add_?|scatter_reduce_?|cumsum_?|nll_loss2d_(forward|backward)|_?ctc_loss_backward"
    r"|max_unpool[23]d|fractional_max_pool[23]d_backward|_adaptive_avg_pool[23]d_backward"
    r"|adaptive_max_pool[23]d_backward|avg_pool3d_backward|max_pool3d_with_indices_backward"
    r"|upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)_backward|reflection_pad[123]d_backward"
    r"|replication_pad[123]d_backward|grid_sampler_[23]d_backward|_embedding_bag_backward"
    r"|_embedding_bag_dense_backward|(cudnn_)?convolution(_backward)?)\b"
)
"""What `torch.use_deterministic_algorithms` lists."""
_GPU: Final = re.compile(r"^cuda\b")
"""ROCm devices are called so as well."""


class Operator(Reason):
    """The result of one operator."""

    word = "op"
    place = "this operator"
    kinds = frozenset({Kind.OP_OUTPUT})
    weights: ClassVar = WEIGHTS

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from everything before it in the step."""
        order = float(facts.items.order[position])
        if facts.anything_before(order) or facts.rng_differs():
            return None
        earlier = np.flatnonzero(facts.state * (facts.order < order))
        known = known_of(facts, earlier)
        return self.cause(Evidence("everything recorded before it", known, plural=False), random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """Where in the user's code it ran."""
        first = scene.first
        line = f", run at {first.source}," if first.source else ""
        text = f"{what(first.site)}{line} differs{apart(first)}{although(scene.cause.evidence[:1])}{scaled(first)}."
        text += nondeterministic(first)
        if first.site.phase is Phase.BACKWARD:
            return (
                f"{text} This gradient is computed in a different way, or its forward operator has different options."
            )
        formats = memory_formats(scene)
        told = f"; {' and '.join(formats[:2])}, which may choose another kernel" if formats else ""
        return f"{text} The operator has different options or a different kernel{told}.{scene.rounding_words()}"


def nondeterministic(divergence: Divergence) -> str:
    """A sentence if the diverging operator is listed and ran on a GPU in both runs; "" otherwise.

    Listed are operators that add up with atomics, whose order is nobody's choice, or let a library choose among
    kernels. Reading a run needs no torch, so its list is kept here by operator names.
    """
    a, b = divergence.a, divergence.b
    if a is None or b is None or not (_GPU.match(a.layout.device) and _GPU.match(b.layout.device)):
        return ""
    if not _LISTED.match(divergence.site.path):
        return ""
    return " On a GPU its result may differ each time: torch.use_deterministic_algorithms lists this operator."


REASONS = (Operator(),)
