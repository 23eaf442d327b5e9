"""Which back end computed scaled dot-product attention, by the names of the operators that were recorded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from introspect_cli.compare.join.sites import KINDS
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.base import Scene

_BACK_ENDS: Final = {
    r"aten\._scaled_dot_product_flash_attention": "flash attention",
    r"aten\._scaled_dot_product_efficient_attention": "memory-efficient attention",
    r"aten\._scaled_dot_product_cudnn_attention": "cuDNN",
    r"aten\._scaled_dot_product_fused_attention_overrideable": "a back end of the device's own",
    r"aten\._safe_softmax\b": "plain operators (math)",
}


def attention_back_ends(scene: Scene) -> str:
    """A sentence where the diverging operator's module uses other back ends in a than in b; "" otherwise."""
    one, two = (_used(scene, side) for side in ("a", "b"))
    if not one or not two or one == two:
        return ""
    return f" Scaled dot-product attention there is computed by {' and '.join(one)} in a, by {' and '.join(two)} in b."


def _used(scene: Scene, side: str) -> list[str]:
    alignment, own = scene.step.alignment, scene.site
    paths = [
        alignment.path[union]
        for union in scene.step.unions(side)
        if KINDS[alignment.kind[union]] is Kind.OP_OUTPUT
        and alignment.fqn[union] == own.fqn
        and alignment.site(union).phase is own.phase
    ]
    return [name for pattern, name in _BACK_ENDS.items() if any(re.match(pattern, path) for path in paths)]
