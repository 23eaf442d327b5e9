"""Operators that may give another result each time on a GPU, by what torch says of itself.

They add up with atomics, whose order is nobody's choice, or let a library choose among kernels. The list is that of
`torch.use_deterministic_algorithms`, by operator names; reading a run needs no torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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
_GPU: Final = re.compile(r"^cuda\b")
"""ROCm devices are called so as well."""


def nondeterministic(divergence: Divergence) -> str:
    """A sentence if the diverging operator is listed and ran on a GPU in both runs; "" otherwise."""
    a, b = divergence.a, divergence.b
    if a is None or b is None or not (_GPU.match(a.layout.device) and _GPU.match(b.layout.device)):
        return ""
    if not _LISTED.match(divergence.site.path):
        return ""
    return " On a GPU it may give another result each time: torch.use_deterministic_algorithms lists this operator."
